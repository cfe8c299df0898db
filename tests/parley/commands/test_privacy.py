"""`parley privacy plan` and `verify`: the numbers are those of the accountants, and a card that lies is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from federation.errors import ConfigurationError, StorageError
from parley.command_line import app
from parley.commands import privacy
from privacy.differential_privacy.accounting import epsilon, gaussian_mu
from privacy.differential_privacy.card import section
from privacy.differential_privacy.events import Releases
from tests.parley.commands.calls import refused, run
from tests.privacy.test_ledger import LINE

WHOLE = ("privacy", "plan", "--epsilon", 3, "--delta", 1e-5, "--rate", 1, "--steps", 50)
"""Whole batches: all accountants are quick."""


def told(*command: object) -> dict[str, Any]:
    """What a command prints for programs."""
    found: dict[str, Any] = json.loads(run(*command, "--json").stdout)
    return found


# ----------------------------------------------------------------------------------------------------------------- plan


def test_a_plan_names_the_noise_of_its_epsilon() -> None:
    """And the curve up to it, the cross-check, and what other settings would take."""
    found = told(*WHOLE, "--rows", 4000)
    assert found["z"] == pytest.approx(50**0.5 / gaussian_mu(3, 1e-5), rel=1e-5)
    assert found["batch"] == 4000
    assert found["epsilon"] == pytest.approx(3, rel=1e-5)
    assert found["epsilon"] <= 3 < found["renyi"]["epsilon"]
    assert [each["steps"] for each in found["curve"]] == list(range(5, 55, 5))
    for each in found["curve"]:
        own = epsilon((Releases(1.0, found["z"], each["steps"]),), 1e-5)
        assert (each["epsilon"], each["renyi"]) == (own.value, own.renyi)
    assert [each["change"] for each in found["instead"]] == [
        "steps / 2",
        "steps x 2",
        "rate / 2",
        "epsilon / 2",
        "epsilon x 2",
    ]
    for each in found["instead"]:
        own = epsilon((Releases(each["setting"]["rate"], each["z"], each["setting"]["steps"]),), 1e-5)
        assert own.value == pytest.approx(each["setting"]["epsilon"], rel=1e-5)


def test_a_plan_is_told_to_people() -> None:
    """With what the noise means for the batch that is expected."""
    text = run(*WHOLE, "--rows", 4000).stdout
    assert "noise multiplier z = " in text
    assert "expected batch     4000 of 4000 records in each of 50 steps" in text
    assert "Rényi DP at order" in text
    assert "as asked" in text
    assert "expected batch" not in run(*WHOLE).stdout


def test_other_settings_halve_and_double_one_of_them() -> None:
    """No rate above 1, and no step less than one."""
    setting = privacy._Setting(3.0, 1e-5, 0.1, 200)
    found = dict(setting.others)
    assert list(found) == ["steps / 2", "steps x 2", "rate / 2", "rate x 2", "epsilon / 2", "epsilon x 2"]
    assert (found["rate x 2"].rate, found["steps / 2"].steps, found["epsilon x 2"].epsilon) == (0.2, 100, 6.0)
    few = dict(privacy._Setting(3.0, 1e-5, 0.6, 1).others)
    assert "rate x 2" not in few
    assert few["steps / 2"].steps == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--rows", 100_000), "delta = 1e-05 for about 100000 records"),
        (("--rate", 0), "a record rate of 0.0 is not in"),
        (("--epsilon", 0), "epsilon = 0.0 is no privacy budget"),
        (("--delta", 1), "delta = 1.0 is no probability of failure"),
    ],
)
def test_a_plan_that_is_none_is_refused(changed: tuple[object, ...], message: str) -> None:
    """In the accountants' words."""
    error = refused(*WHOLE, *changed)
    assert isinstance(error, ConfigurationError)
    assert message in error.problem


# --------------------------------------------------------------------------------------------------------------- verify


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """A model's folder with a card that promises differential privacy."""
    content = {"privacy": {"statement": "x", "differential_privacy": section((LINE,), 1e-5, c_max=1)}}
    (tmp_path / "card.json").write_text(json.dumps(content))
    return tmp_path


def test_a_card_that_holds_is_told_so(card: Path) -> None:
    """With its statement; a folder or the file itself may be named."""
    for where in (card, card / "card.json"):
        text = run("privacy", "verify", where).stdout
        assert "holds: its events come to what it says" in text
        assert "Differential privacy, level record-site, unit record" in text
    assert told("privacy", "verify", card)["holds"] is True


def test_a_card_that_does_not_hold_is_named(card: Path) -> None:
    """What it says, what its events come to, and an exit code for programs."""
    content = json.loads((card / "card.json").read_text())
    content["privacy"]["differential_privacy"]["epsilon"] = 0.1
    (card / "card.json").write_text(json.dumps(content))
    for options in ((), ("--json",)):
        result = CliRunner().invoke(app, ["privacy", "verify", str(card), *options])
        assert result.exit_code == 1
        if options:
            (different,) = json.loads(result.stdout)["differences"]
        else:
            assert "does NOT hold" in result.stdout
            different = result.stdout.split("\n")[1].strip()
        assert different.startswith("epsilon is 0.1, and its events come to ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no model's card"),
        ('{"privacy": {"statement": "No record left its site."}}', "promises no differential privacy"),
        ('{"privacy": {"differential_privacy": {}}}', "has no section of the format parley-privacy-1"),
    ],
)
def test_a_card_without_a_promise_is_refused(tmp_path: Path, content: str, message: str) -> None:
    """There is nothing to verify."""
    file = tmp_path / "card.json"
    file.write_text(content)
    error = refused("privacy", "verify", file)
    assert isinstance(error, ConfigurationError)
    assert message in error.problem


def test_a_card_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """By its name."""
    error = refused("privacy", "verify", tmp_path / "x.json")
    assert isinstance(error, StorageError)
    assert "x.json: No such file or directory" in error.problem
