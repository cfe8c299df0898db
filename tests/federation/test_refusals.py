import pytest

from federation import errors
from federation.errors import (
    ConfigurationError,
    IdentityError,
    ParleyError,
    RemoteProtocolError,
    StorageError,
    WhoActs,
)
from federation.messages import Refusal
from federation.refusals import raised, told

KINDS = [getattr(errors, name) for name in errors.__all__ if name != "WhoActs"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_raised_again_as_it_was(kind: type[ParleyError]) -> None:
    """Class, words, way out and who must act are the same on the other side."""
    error = kind("the roster is empty", fix="invite sites", who=WhoActs.AUTHOR)

    again = raised(told(kind.__name__, error))

    assert type(again) is kind
    assert str(again) == str(error) == "the roster is empty. To fix (the job's author): invite sites"


@pytest.mark.parametrize("about", ["a message", "WhoActs", "__doc__", "Enum", ""])
def test_a_refusal_about_no_error_is_a_broken_protocol(about: str) -> None:
    """What a peer writes into `about` chooses among our errors and nothing else."""
    error = raised(Refusal(about, "it cannot be", WhoActs.SITE.value, "mend it"))

    assert type(error) is RemoteProtocolError
    assert (error.problem, error.fix, error.who) == ("it cannot be", "mend it", WhoActs.SITE)


def test_an_unknown_person_is_left_to_the_developers() -> None:
    """A newer peer may name somebody whom this release does not know."""
    assert raised(Refusal("IdentityError", "no", "the moon", "")).who is WhoActs.DEVELOPERS


def test_the_coordinators_disk_is_not_the_peers_to_free() -> None:
    """A storage error names who runs the coordinator; what the asker itself must mend stays the asker's."""
    full = StorageError("cannot write to /srv/parley: No space left", fix="free disk space")

    assert told("StorageError", full).who == WhoActs.COORDINATOR.value
    assert told("IdentityError", IdentityError("no", who=WhoActs.YOU)).who == WhoActs.YOU.value


def test_long_words_are_cut_to_what_a_refusal_carries() -> None:
    """An error of any length can be told."""
    refusal = told("x" * 5000, ConfigurationError("y" * 5000, fix="z" * 5000))

    assert (len(refusal.about), len(refusal.problem), len(refusal.fix)) == (4000, 4000, 4000)
