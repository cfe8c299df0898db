import pytest

from privacy.secure_aggregation.rostersum import diagram, states
from privacy.secure_aggregation.rostersum.states import TRANSITIONS, Cause, State
from privacy.secure_aggregation.rostersum.transitions import Transition, follows


def test_every_move_of_the_table_is_drawn() -> None:
    """A line for each, in the table's order, with its states, cause and effect."""
    lines = diagram.draw(TRANSITIONS, State).splitlines()
    assert len(lines) == len(TRANSITIONS)
    for line, row in zip(lines, TRANSITIONS, strict=True):
        assert f"-- {row.cause.value}" in line
        assert line.endswith(row.effect)
    assert lines[0].startswith("any ")


def test_both_machines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m privacy.secure_aggregation.rostersum.diagram`."""
    diagram.main()
    printed = capsys.readouterr().out
    assert diagram.draw(states.TRANSITIONS, State) in printed
    assert "The coordinator" in printed


def test_the_table_says_what_may_follow() -> None:
    """Targets of all rows of the cause; the state itself where a row stays; none where the cause has no place."""
    assert follows(TRANSITIONS, State.UPLOADED, Cause.FULL) == {State.OPENED}
    assert follows(TRANSITIONS, State.READY, Cause.TRAIN) == {State.WORKING, State.READY}
    assert follows(TRANSITIONS, State.IDLE, Cause.START) == frozenset()
    row = Transition((State.IDLE,), Cause.DONE, (), "nothing")
    assert follows((row,), State.IDLE, Cause.DONE) == {State.IDLE}


def test_every_state_and_cause_has_a_place_in_the_table() -> None:
    """CLOSED is only arrived at."""
    assert {state for row in TRANSITIONS for state in row.sources} == set(State) - {State.CLOSED}
    assert {row.cause for row in TRANSITIONS} == set(Cause)
