from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.training import protocol
from client.training.protocol import (
    Answer,
    CheckData,
    ComputeStatistics,
    Done,
    Evaluate,
    Failed,
    Report,
    Request,
    Subject,
    Train,
    Warm,
)
from federation.errors import LocalProtocolError
from federation.findings import Finding

words = st.text(max_size=20)
subjects = st.builds(Subject, words, words, words)
finite = st.floats(allow_nan=False, allow_infinity=False)
requests = st.one_of(
    st.just(Warm()),
    st.builds(CheckData, subjects),
    st.builds(ComputeStatistics, subjects, words),
    st.builds(Train, subjects, words, st.integers(0, 2**31), words, words, words, finite, st.integers(1, 64)),
    st.builds(Evaluate, subjects, words, words, words, st.integers(1, 64)),
)
findings = st.builds(Finding, words, words, words, st.sampled_from(["refusal", "warning"]))
answers = st.one_of(
    st.builds(Failed, st.sampled_from(["data", "resources", "cancelled", "internal"]), words),
    st.builds(
        Done,
        st.integers(0, 2**40),
        finite,
        finite,
        st.lists(findings, max_size=3).map(tuple),
        st.builds(Report, words, words, words, st.integers(0, 100), st.none() | finite),
    ),
)


@given(requests)
@settings(max_examples=50, deadline=None)
def test_a_request_is_one_line_and_is_read_as_it_was_written(request: Request) -> None:
    """No text, however odd, breaks the line."""
    line = protocol.encode(request)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert protocol.decode_request(line) == request


@given(answers)
@settings(max_examples=50, deadline=None)
def test_an_answer_is_one_line_and_is_read_as_it_was_written(answer: Answer) -> None:
    """Findings and the report are values again."""
    line = protocol.encode(answer)
    assert line.count(b"\n") == 1
    assert protocol.decode_answer(line) == answer


@pytest.mark.parametrize("line", [b"", b"warm\n", b"{}\n", b'{"kind":"dance"}\n', b'{"kind":"train"}\n', b"\xff\n"])
def test_a_line_that_is_no_message_is_refused(line: bytes) -> None:
    """Either end says so instead of guessing."""
    with pytest.raises(LocalProtocolError, match="the trainer was sent a line that is no request"):
        protocol.decode_request(line)
    with pytest.raises(LocalProtocolError, match="the trainer sent a line that is no answer"):
        protocol.decode_answer(line)


def test_messages_are_frozen() -> None:
    """A request is a value; a changed one is another."""
    request = Train(Subject("", "", ""), "north", 1, "", "", "")
    assert replace(request, round_number=2) != request
    with pytest.raises(AttributeError):
        request.round_number = 3  # type: ignore[misc]  # what must not be possible
