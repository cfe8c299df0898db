"""`parley site budget` and `parley site ledger`: what may be given away is set with its meaning, and shown as it is."""

import json
import shutil
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from client.ledger import SiteLedger
from client.policy import EXAMPLE
from client.vault import ledger_in, vault_in
from federation import audit
from federation.errors import ConfigurationError, ParleyError, StorageError
from federation.messages import Credential
from parley.command_line import app
from parley.commands.site import only_agent, sealing
from parley.homes import Connection, Home, Identity
from privacy import ledger, ledger_chain
from privacy.differential_privacy.events import Unit
from privacy.ledger import BudgetSet, Charged, Entry
from tests.consortium import Consortium
from tests.parley.commands.calls import refused, run
from tests.privacy.test_ledger import job, rounds

SET = ("site", "budget", "set", "heart", "--epsilon", 8, "--delta", 1e-5)


@dataclass(frozen=True)
class Place:
    """A site that has joined."""

    home: Path
    own: Identity

    @property
    def folder(self) -> Path:
        """Its folder."""
        return Home(self.home).site.folder

    def budget(self) -> BudgetSet | None:
        """What the ledger says that the family may give away."""
        return ledger_in(self.folder).book.budget("heart")

    def spend(self) -> None:
        """A job charges ten rounds of a hundred, and another is promised twenty."""
        first, second = (
            replace(job(name, count), family="heart") for name, count in ((b"first", 100), (b"second", 20))
        )
        with sealing(self.folder, self.own) as held:
            site = SiteLedger(held.vault, held.audit)
            site.reserve(b"first", "heart", first.lines)
            site.charge(rounds(0, 9, first.lines[0]))
            site.close(b"first")
            site.reserve(b"second", "heart", second.lines, added_delta=1e-9)

    def charge(self) -> None:
        """The second one charges a round."""
        with sealing(self.folder, self.own) as held:
            SiteLedger(held.vault, held.audit).charge(rounds(0, 0, job(b"second", 20).lines[0]), added_delta=1e-10)

    def logged(self) -> list[Entry]:
        """What the audit log says of the ledger."""
        entries = audit.entries(self.folder / audit.FILE)
        return [ledger_chain.entry_of(json.loads(each.content)) for each in entries if each.kind == ledger.AUDITED]


@pytest.fixture
def place(tmp_path: Path, consortium: Consortium) -> Place:
    """Such a site."""
    member = Home(tmp_path / "home").site
    person = consortium.member("a", keys=member.begin())
    credential = Credential(person.certificate, person.statement, consortium.hub.statement, consortium.nobody)
    where = Connection("127.0.0.1:9000", consortium.root.consortium, "hub")
    own = member.install(credential, consortium.root.public, where, name="a", now=consortium.now)
    (member.folder / "policy.toml").write_text(EXAMPLE)
    return Place(tmp_path / "home", own)


def shown(*command: object) -> dict[str, Any]:
    """What a command prints for programs."""
    found: dict[str, Any] = json.loads(run(*command, "--json").stdout)
    return found


# ------------------------------------------------------------------------------------------------------------------ set


def test_a_first_budget_is_set_once_its_meaning_was_confirmed(place: Place) -> None:
    """Refused at the question, nothing is changed; then it stands in ledger and audit log, with the order chosen."""
    error = refused(*SET, "--home", place.home, typed="n\n")
    assert isinstance(error, ParleyError)
    assert error.problem == "nothing was changed: it was not confirmed"
    assert place.budget() is None

    done = run(*SET, "--home", place.home, typed="y\n")
    assert "No data set that is registered here is of the family 'heart' (there are: -)." in done.stderr
    assert "'heart' may give away epsilon = 8 at delta = 1e-05 for one record, summed by rdp at order 4" in done.stderr
    assert "heart: epsilon = 8 at delta = 1e-05 for one record" in done.stdout
    assert place.budget() == BudgetSet("heart", 8.0, 1e-5, 4, reason="first budget")
    assert place.logged() == [place.budget()]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--rule", "gdp"), BudgetSet("heart", 8.0, 1e-5, None)),
        (("--rule", "rdp", "--order", 12), BudgetSet("heart", 8.0, 1e-5, 12)),
        (("--order", 12), BudgetSet("heart", 8.0, 1e-5, 12)),
        (("--rate", 0.01, "--steps", 1000), BudgetSet("heart", 8.0, 1e-5, 3)),
        (("--rule", "gdp", "--unit", "site"), BudgetSet("heart", 8.0, 1e-5, None, Unit.SITE)),
        (("--rule", "gdp", "--highest-rate", 0.1), BudgetSet("heart", 8.0, 1e-5, None, q_most=0.1)),
        (("--rule", "gdp", "--reason", "ethics 7/24"), BudgetSet("heart", 8.0, 1e-5, None, reason="ethics 7/24")),
    ],
)
def test_options_say_rule_unit_and_rate(place: Place, options: tuple[object, ...], expected: BudgetSet) -> None:
    """Each stands in the budget; without a reason it is the first budget."""
    run(*SET, *options, "--yes", "--home", place.home)
    assert place.budget() == replace(expected, reason=expected.reason or "first budget")


def test_a_change_needs_a_reason_and_says_what_it_follows(place: Place) -> None:
    """Raised: what is charged so far. Rule, unit and rate stay as they were, unless they are named."""
    run(*SET, "--rule", "gdp", "--highest-rate", 0.5, "--yes", "--home", place.home)
    more = ("site", "budget", "set", "heart", "--epsilon", 9, "--delta", 1e-6, "--home", place.home)
    error = refused(*more, "--yes")
    assert isinstance(error, ConfigurationError)
    assert "has a budget (epsilon = 8 at delta = 1e-05" in error.problem
    assert "--reason" in error.fix
    done = run(*more, "--reason", "a second study", "--yes")
    assert "Until now: epsilon = 8 at delta = 1e-05 for one record, summed by gdp, rates up to 0.5." in done.stderr
    assert "Charged so far" not in done.stderr
    place_budget = BudgetSet("heart", 9.0, 1e-6, None, q_most=0.5, reason="a second study")
    assert place.budget() == place_budget
    assert place.logged()[-1] == place_budget


def test_raising_and_lowering_say_what_was_spent(place: Place) -> None:
    """A raised one lets more be learnt; one lowered below what is spent stops every round."""
    run(*SET, "--rule", "gdp", "--yes", "--home", place.home)
    place.spend()
    change = ("site", "budget", "set", "heart", "--delta", 1e-5, "--reason", "r", "--yes", "--home", place.home)
    raised = run(*change, "--epsilon", 9).stderr
    assert "Charged so far: epsilon = 0.2637; with what open jobs were promised: 0.4798." in raised
    assert "Jobs will be able to learn more about the same records" in raised
    lowered = run(*change, "--epsilon", 0.1).stderr
    assert "That is more than the budget allows: no further round is charged, in any job." in lowered
    assert "nothing: no further round is charged" in run("site", "ledger", "--home", place.home).stdout
    fixed = refused(*change, "--epsilon", 8, "--unit", "person")
    assert "sums by gdp for one record, and that is fixed" in fixed.problem


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("Heart failure", "--epsilon", 8), "'Heart failure' can be no data family's name"),
        (("heart", "--epsilon", 0), "epsilon = 0.0 is no privacy budget"),
        (("heart", "--epsilon", 8, "--rule", "gdp", "--order", 4), "the rule gdp has no order"),
        (("heart", "--epsilon", 8, "--order", 300), "filter rdp with order 300"),
        (("heart", "--epsilon", 8, "--highest-rate", 2), "a highest rate of 2 is not in"),
        (("heart", "--epsilon", 0.001), "leaves nothing to spend at any Rényi order"),
    ],
)
def test_a_budget_that_is_none_is_refused(place: Place, options: tuple[object, ...], problem: str) -> None:
    """In words; nothing is written."""
    error = refused("site", "budget", "set", *options, "--delta", 1e-5, "--yes", "--home", place.home)
    assert problem in error.problem
    assert place.budget() is None


def test_a_running_agent_keeps_its_budgets(place: Place) -> None:
    """Beside it they are shown, and not changed."""
    run(*SET, "--rule", "gdp", "--yes", "--home", place.home)
    with only_agent(place.folder):
        error = refused(*SET, "--reason", "r", "--yes", "--home", place.home)
    assert isinstance(error, StorageError)
    assert "another agent of this site runs already" in error.problem
    with sealing(place.folder, place.own):
        assert "epsilon = 8" in run("site", "ledger", "--home", place.home).stdout


# ----------------------------------------------------------------------------------------------------------------- show


def test_nothing_is_shown_as_nothing(place: Place) -> None:
    """With what to do next."""
    for command in (("budget", "show"), ("ledger",)):
        assert "Next:  parley site budget set FAMILY" in run("site", *command, "--home", place.home).stdout
    assert shown("site", "budget", "show", "--home", place.home) == {"families": [], "changes": []}


def test_budgets_are_shown_with_what_is_left_and_why(place: Place) -> None:
    """Each change with its reason."""
    run(*SET, "--rule", "gdp", "--yes", "--home", place.home)
    place.spend()
    run(*SET, "--reason", "again [sic]", "--yes", "--home", place.home)
    told = run("site", "budget", "show", "--home", place.home).stdout
    assert "charged  epsilon = 0.2637, 0.2% of the budget" in told
    assert "with what open jobs were promised: 0.4798, 0.7%" in told
    assert "left     99.3%" in told
    assert "summed by gdp: first budget" in told
    assert "summed by gdp: again [sic]" in told
    found = shown("site", "budget", "show", "--home", place.home)
    assert [each["reason"] for each in found["changes"]] == ["first budget", "again [sic]"]
    assert found["families"][0]["budget"]["epsilon"] == 8.0


# --------------------------------------------------------------------------------------------------------------- ledger


def test_what_was_spent_is_shown_by_job(place: Place) -> None:
    """With what a job may still charge, what rounds cost, and how many more could be paid."""
    run(*SET, "--rule", "gdp", "--yes", "--home", place.home)
    place.spend()
    place.charge()
    told = run("site", "ledger", "--home", place.home).stdout
    assert [b"first".hex(), "train", "10", "over"] == told[told.index(b"first".hex()) :].replace("\u2502", "").split()[
        :4
    ]
    assert "rounding and sampling have added 1e-10 to delta" in told
    tail = ledger_in(place.folder).tail
    assert f"Whole: 6 lines. To be noted elsewhere: {tail.digest.hex()}" in told
    found = shown("site", "ledger", "--home", place.home)
    assert (found["whole"], found["lines"], found["head"], found["broken"]) == (True, 6, tail.digest.hex(), None)
    (family,) = found["families"]
    assert [(each["job"], each["rounds"], each["promised"]) for each in family["jobs"]] == [
        (b"first".hex(), 10, 0),
        (b"second".hex(), 1, 19),
    ]
    assert family["used"] < family["taken"] < 1
    assert [each["entry"] for each in found["entries"]] == ["budget", "promise", "charge", "end", "promise", "charge"]
    assert found["entries"][-1]["digest"] == tail.digest.hex()


def test_a_broken_ledger_is_named_by_its_line(place: Place) -> None:
    """And the exit code tells programs; what stands before it is shown."""
    run(*SET, "--rule", "gdp", "--yes", "--home", place.home)
    place.spend()
    with sqlite3.connect(vault_in(place.folder)) as database:
        database.execute("UPDATE ledger SET line = replace(line, '\"count\":10', '\"count\":1') WHERE number = 3")
    database.close()
    for options in ((), ("--json",)):
        result = CliRunner().invoke(app, ["site", "ledger", *options, "--home", str(place.home)])
        assert result.exit_code == 1
        if options:
            assert json.loads(result.stdout)["broken"]["line"] == 3
        else:
            assert "BROKEN: line 3 is broken: expected the digest of what it holds" in result.stdout
            assert "Whole before it: 2 lines." in result.stdout


def test_a_family_that_lost_its_budget_is_shown(place: Place) -> None:
    """Charges of an older release have none until its administrator sets one."""
    with sealing(place.folder, place.own) as held:
        held.vault.post((Charged("heart", rounds(0, 9)),))
    assert "heart: no budget is set; no further job" in run("site", "ledger", "--home", place.home).stdout
    assert shown("site", "ledger", "--home", place.home)["families"] == [
        {"family": "heart", "budget": None, "rounds": 10}
    ]


def test_epsilon_is_drawn_over_time(place: Place, tmp_path: Path) -> None:
    """As an SVG picture, with nothing installed for it."""
    file = tmp_path / "spent.svg"
    error = refused("site", "ledger", "--plot", file, "--home", place.home)
    assert error.problem == "there is no budget to draw"
    run(*SET, "--rule", "gdp", "--yes", "--home", place.home)
    place.spend()
    assert f"Drawn into {file}" in run("site", "ledger", "--plot", file, "--home", place.home).stdout
    picture = ET.parse(file)  # noqa: S314 - our own
    assert "heart: epsilon spent" in "".join(picture.getroot().itertext())
    assert "ends in .svg" in refused("site", "ledger", "--plot", tmp_path / "x.png", "--home", place.home).fix
    missing = refused("site", "ledger", "--plot", tmp_path / "no" / "x.svg", "--home", place.home)
    assert "No such file or directory" in missing.problem


def test_the_privacy_officer_finds_what_to_do_about_erasure() -> None:
    """In the help of the command that shows what was spent."""
    told = " ".join(run("site", "ledger", "--help").stdout.split())
    assert "If a patient asks for erasure after training" in told
    assert "What was charged stays charged" in told


def test_a_ledger_put_back_is_refused_and_restored(place: Place, tmp_path: Path) -> None:
    """By each command, until it has from the audit log what it lacks: budgets and charges of this site's own jobs."""
    run(*SET, "--rule", "gdp", "--yes", "--home", place.home)
    shutil.copy(vault_in(place.folder), tmp_path / "backup")
    place.spend()
    run(*SET, "--epsilon", 9, "--reason", "more", "--yes", "--home", place.home)
    whole = shown("site", "ledger", "--home", place.home)["families"]
    shutil.copy(tmp_path / "backup", vault_in(place.folder))
    for command in (("site", "ledger"), ("site", "budget", "show"), (*SET, "--reason", "r", "--yes")):
        error = refused(*command, "--home", place.home)
        assert isinstance(error, StorageError)
        assert "may be an older copy: it has 1 changes where its witness has counted 6" in error.problem
    told = run("site", "restore", "--yes", "--home", place.home).stderr
    assert "1 charges to the privacy ledger that the vault lacks" in told
    assert "the privacy budget of heart: epsilon = 9 at delta = 1e-05" in told
    assert shown("site", "ledger", "--home", place.home)["families"] == whole
