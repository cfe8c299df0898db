"""Whatever bytes come in the place of a message are a valid message or refused by name, and nothing else happens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from federation import codec
from federation.errors import RemoteProtocolError
from federation.messages import Refusal
from federation.refusals import told
from tests.federation.test_codec import ENVELOPES, MESSAGES, valid
from tests.fuzz import corpus
from tests.fuzz.profiles import budget
from tests.fuzz.snapshot import refusal
from tests.fuzz.wire import mutated


@dataclass(frozen=True)
class Door:
    """Where bytes from a peer are read: an envelope of several messages, or one message on its own."""

    name: str
    carried: tuple[type, ...]
    encode: Callable[[Any], bytes] = field(repr=False)
    decode: Callable[[bytes], Any] = field(repr=False)

    @property
    def whole(self) -> st.SearchStrategy[bytes]:
        """Bytes to begin with: of a valid message, or of an input that was kept."""
        fresh = st.sampled_from(self.carried).flatmap(valid).map(self.encode)
        return fresh | st.sampled_from(kept) if (kept := corpus.seeds(self.name)) else fresh

    def try_with(self, data: bytes) -> None:
        """Holds what comes of `data` to the promise."""
        read: list[Any] = []
        if refused := refusal(lambda: read.append(self.decode(data))):
            assert isinstance(refused, RemoteProtocolError)
            names = (self.name, *(cls.__name__ for cls in self.carried))
            assert any(name in refused.problem for name in names)
            assert codec.decode(Refusal, codec.encode(told(self.name, refused))).problem == refused.problem
            corpus.keep(self.name, refused.problem, data)
            return
        (message,) = read
        assert type(message) in self.carried
        again = self.decode(self.encode(message))
        assert (again, repr(again)) == (message, repr(message))
        corpus.keep(self.name, f"valid {type(message).__name__}", data)


DOORS = [Door(each.name, each.carried, each.encode, each.decode) for each in ENVELOPES] + [
    Door(cls.__name__, (cls,), codec.encode, partial(codec.decode, cls)) for cls in MESSAGES
]


def test_what_was_kept_is_a_message_or_refused() -> None:
    """Every input of the corpus meets the promise at every door, whichever it was kept for."""
    kept = [data for door in DOORS for data in corpus.seeds(door.name)]
    for door in DOORS:
        for data in kept:
            door.try_with(data)


@given(st.sampled_from(DOORS).flatmap(lambda door: st.tuples(st.just(door), mutated(door.whole))))
@budget(300)
def test_mutated_messages_are_messages_or_refused(case: tuple[Door, bytes]) -> None:
    """Valid messages with fields lost, doubled, retyped, absurd, promised longer, nested, cut: one or the other."""
    door, data = case
    door.try_with(data)


@given(door=st.sampled_from(DOORS), data=st.binary(max_size=400))
@budget(200)
def test_random_bytes_are_a_message_or_refused(door: Door, data: bytes) -> None:
    """The same of bytes that were never a message."""
    door.try_with(data)


@given(door=st.sampled_from(ENVELOPES), other=st.sampled_from(ENVELOPES), data=st.data())
@budget(50)
def test_a_message_at_another_door_is_one_of_that_door_or_refused(door: Any, other: Any, data: st.DataObject) -> None:
    """What a site would say, said to a site, and so on for each pair of doors."""
    sent = other.encode(data.draw(st.sampled_from(other.carried).flatmap(valid)))
    Door(door.name, door.carried, door.encode, door.decode).try_with(sent)
