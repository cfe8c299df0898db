import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import RemoteProtocolError
from tasks._preparation import NumericPreparation, Preparation

finite = st.floats(allow_nan=False, allow_infinity=False)
columns = st.builds(NumericPreparation, name=st.text(), shift=finite, scale=finite.filter(lambda x: x > 0), fill=finite)


@given(st.lists(columns, max_size=5))
@settings(max_examples=50, deadline=None)
def test_a_preparation_survives_the_way_through_its_bytes(read: list[NumericPreparation]) -> None:
    """What is read is what was written, bit for bit, and is written alike again."""
    preparation = Preparation(columns=tuple(read))
    again = Preparation.from_bytes(preparation.to_bytes())
    assert again == preparation
    assert again.to_bytes() == preparation.to_bytes()


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"no json", "its text"),
        (b"[]", "its text"),
        (b'{"format":2,"columns":[]}', "format"),
        (b'{"format":1}', "columns"),
        (b'{"format":1,"columns":[],"more":1}', "more"),
        (b'{"format":1,"columns":[{"name":"x","shift":NaN,"scale":1,"fill":0}]}', "columns.0.shift"),
        (b'{"format":1,"columns":[{"name":"x","shift":1e999,"scale":1,"fill":0}]}', "columns.0.shift"),
        (b'{"format":1,"columns":[{"name":"x","shift":"1","scale":1,"fill":0}]}', "columns.0.shift"),
        (b'{"format":1,"columns":[{"name":"x","shift":0,"scale":0,"fill":0}]}', "columns.0.scale"),
        (b'{"format":1,"columns":[{"name":"x","shift":0,"scale":1}]}', "columns.0.fill"),
    ],
)
def test_what_is_no_preparation_is_refused_with_the_place(content: bytes, where: str) -> None:
    """It arrives over the network: NaN, infinity, unknown keys and other formats name where they stand."""
    with pytest.raises(RemoteProtocolError, match=rf"a preparation cannot be read at {where}\b"):
        Preparation.from_bytes(content)
