import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import StorageError
from privacy.secure_aggregation.rostersum.coordinator_state import Ending, FailedPair, Seed, Standing, Step, Way

HASH = st.binary(min_size=32, max_size=32)
INDEX = st.integers(0, 2**16 - 1)
CONTENT = st.binary(max_size=40)
WAY = st.builds(
    Way,
    start=CONTENT,
    uploads=st.lists(CONTENT, max_size=3).map(tuple),
    full_signature=CONTENT,
    opens=st.lists(CONTENT, max_size=3).map(tuple),
    rescued=st.lists(st.builds(Seed, idx=INDEX, b=HASH), max_size=2).map(tuple),
    ending=st.sampled_from(Ending),
    result=CONTENT,
)
STANDING = st.builds(
    Standing,
    epoch=st.integers(0, 2**32 - 1),
    r=st.integers(0, 2**64 - 1),
    step=st.none() | st.builds(Step, plan_id=st.integers(0, 2**64 - 1), model_hash=HASH, args_hash=HASH),
    ways=st.lists(WAY, max_size=2).map(tuple),
    failed_pairs=st.lists(
        st.builds(FailedPair, lo=INDEX, hi=INDEX, epochs=st.lists(st.integers(0, 9), max_size=2).map(tuple)), max_size=2
    ).map(tuple),
    revoked=st.lists(INDEX, max_size=3).map(tuple),
    closed=st.integers(0, 1),
)


@settings(deadline=None, max_examples=50)
@given(STANDING)
def test_what_is_stored_is_read_again(standing: Standing) -> None:
    """The state survives its encoding, whatever is in it, and has one encoding."""
    content = standing.encode()

    assert Standing.decode(content) == standing
    assert Standing.decode(content).encode() == content


@settings(deadline=None, max_examples=50)
@given(STANDING, st.data())
def test_damaged_state_is_told(standing: Standing, data: st.DataObject) -> None:
    """A shortened or prolonged state is refused, with who must act and how; never read as something else."""
    content = standing.encode()
    cut = content[: data.draw(st.integers(0, len(content) - 1))]

    for damaged in (cut, content + b"\x00", b""):
        with pytest.raises(StorageError, match="restore the coordinator's database from its last backup"):
            Standing.decode(damaged)


def test_a_sites_state_is_not_a_coordinators() -> None:
    """The encoding says whose it is."""
    content = Standing().encode().replace(b"rostersum-coordinator-1", b"rostersum-somebodys-x-1")

    with pytest.raises(StorageError, match="not one of this release"):
        Standing.decode(content)


def test_seeds_and_uploads_are_not_printed() -> None:
    """What a log shows of the state holds no seed."""
    way = Way(uploads=(b"upload",), opens=(b"opening",), rescued=(Seed(1, b"s" * 32),))

    assert "ssss" not in repr(way)
    assert "opening" not in repr(way)
