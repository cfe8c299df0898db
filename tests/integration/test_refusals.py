"""A site that cannot or will not take part says what is wrong and how to mend it, and shows no record."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.alliance import SITES, Alliance, command, job_file


@contextmanager
def policy(alliance: Alliance, site: str, old: str, new: str) -> Iterator[None]:
    """A site's policy says something else for the block."""
    path = alliance.home(site) / "site" / "policy.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    try:
        yield
    finally:
        path.write_text(text)


def failed(alliance: Alliance, text: str) -> dict[str, object]:
    """The last view of a job that fails; its watcher gets exit code 4."""
    job = alliance.submit(text)
    said = command(alliance.admin, "job", "watch", job, "--json")
    assert (said.code, said.json["state"]) == (4, "failed")
    shown = command(alliance.admin, "job", "show", job)
    assert said.json["reason"] in shown.out
    return said.json  # type: ignore[no-any-return] - JSON


def test_values_outside_the_public_range_are_counted_and_never_shown(alliance: Alliance) -> None:
    """The job fails, naming column, site and remedy; no age of a patient is in any answer."""
    view = failed(alliance, job_file(age="[0, 60]"))
    reason = str(view["reason"])
    assert reason.startswith("too many sites refused the job (")
    assert "data.columns.age: " in reason
    assert "rows lie outside the public range 0 to 60 years (correct the values or their unit, or ask" in reason
    refused = [site for site in SITES if alliance.site(view, site)["trouble"].startswith("refused: ")]
    assert refused
    for site in refused:
        assert f"{site}: data.columns.age" in reason
        told = alliance.site(view, site)["trouble"] + alliance.sites[site].said + alliance.coordinator.said
        strange = {f"{age}" for age in alliance.tables[site]["age"] if age > 60 and age != int(age)}
        assert not [age for age in strange if f" {age} " in told]


def test_a_missing_column_is_named_with_what_to_do(alliance: Alliance) -> None:
    """The contract's path, the column's name, and the remedy."""
    reason = str(failed(alliance, job_file(sex="gender"))["reason"])
    assert "data.columns.gender: the data has no column 'gender' (add it" in reason


def test_a_data_set_that_a_site_does_not_have_is_named(alliance: Alliance) -> None:
    """With the command that registers it."""
    reason = str(failed(alliance, job_file(dataset="guests"))["reason"])
    assert "no data set named 'guests' is registered here" in reason
    assert "parley site dataset add guests PATH" in reason


def test_a_site_s_own_policy_has_the_last_word(alliance: Alliance) -> None:
    """Its file is read at each offer: a change holds at once, and no message can weaken it."""
    with policy(alliance, "cork", 'models = ["*"]', 'models = ["mlp"]'):
        view = failed(alliance, job_file(rounds=1))
    wanted = "model.name: this site's policy does not allow the model 'logistic_regression'"
    assert f"cork: {wanted} (its administrator may add it to models)" in str(view["reason"])
    assert alliance.site(view, "cork")["trouble"].startswith(f"refused: {wanted}")
    alliance.finished(alliance.submit(job_file(rounds=1)))


def test_a_site_whose_policy_does_not_say_so_takes_part_in_no_plain_job(alliance: Alliance) -> None:
    """What a new site's file says; the same job is done when it is summed securely, or once the file says so."""
    with policy(alliance, "cork", "allow_plain_aggregation = true", "allow_plain_aggregation = false"):
        view = failed(alliance, job_file(rounds=1))
        wanted = "privacy.secure_aggregation: this site's policy does not let the coordinator see its update"
        assert f"cork: {wanted}" in str(view["reason"])
        assert "may set allow_plain_aggregation = true" in str(view["reason"])
        alliance.finished(alliance.submit(job_file(rounds=1, privacy="")))
    alliance.finished(alliance.submit(job_file(rounds=1)))


def test_a_broken_policy_leaves_the_last_good_one_in_force(alliance: Alliance) -> None:
    """The site goes on under it, and its log says what is wrong."""
    with policy(alliance, "cork", "minimum_sites = 2", "minimum_sites = "):
        alliance.finished(alliance.submit(job_file(rounds=1)))
        alliance.sites["cork"].says("the policy cannot be read, the last good one stays in force")


def test_a_job_goes_on_with_the_sites_that_accept_it(alliance: Alliance) -> None:
    """As long as there are enough: one has missing values where the job forbids them, two take part."""
    view = alliance.finished(alliance.submit(job_file(missing="refuse", minimum=2)))
    assert {each["sites"] for each in view["history"]} == {2}
    berlin = alliance.site(view, "berlin")
    assert berlin["trouble"].startswith("refused: data.columns.pressure: ")
    assert [alliance.site(view, site)["trouble"] for site in ("athens", "cork")] == ["", ""]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (job_file(cohort='sites = ["athens", "berlin", "cork", "oslo"]'), "cohort.sites names oslo"),
        (job_file(minimum=9, cohort=""), "the job needs 9 sites (cohort.minimum_sites)"),
        (job_file(strategy='name = "fedavgg"'), 'did you mean "fedavg"?'),
    ],
)
def test_a_job_that_cannot_be_is_not_taken(alliance: Alliance, text: str, words: str) -> None:
    """Exit code 2, and no job is added."""
    before = len(alliance.admin_does("job", "list", "--json").json)
    said = command(alliance.admin, "job", "submit", alliance.write(text))
    assert said.code == 2
    assert words in said.err
    assert len(alliance.admin_does("job", "list", "--json").json) == before


def test_a_job_or_model_that_is_not_there_is_told_from_what_is(alliance: Alliance, tmp_path: Path) -> None:
    """Each names the command that lists what there is, and that you must act."""
    for arguments, code in (
        (("job", "show", "nope"), 1),
        (("job", "watch", "nope"), 1),
        (("job", "stop", "nope"), 1),
        (("model", "show", "nope"), 2),
        (("model", "get", "nope", "--to", str(tmp_path / "m")), 2),
    ):
        said = command(alliance.admin, *arguments)
        assert (said.code, said.out) == (code, "")
        assert "nope" in said.err
        assert f"to fix (you): see: parley {arguments[0]} list" in said.err
    error = command(alliance.admin, "job", "show", "nope", "--json").json["error"]
    assert error == {
        "kind": "RemoteProtocolError",
        "problem": "there is no job 'nope'",
        "who": "you",
        "fix": "see: parley job list",
    }
    assert not (tmp_path / "m").exists()
