"""Messages over a socket pair."""

from __future__ import annotations

import socket

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixrt.workers.channel import Channel, Message

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
messages = st.builds(
    lambda body, numbers: Message(body, np.array(numbers, np.int32)),
    st.dictionaries(st.text(max_size=5), values, max_size=3),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20),
)


def pair() -> tuple[Channel, Channel]:
    """The first does not block."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return Channel(ours), Channel(theirs)


def same(found: list[Message], expected: list[Message]) -> bool:
    return [(each.body, each.numbers.tolist()) for each in found] == [
        (each.body, each.numbers.tolist()) for each in expected
    ]


@given(st.lists(messages, max_size=6))
def test_messages_come_whole_and_in_order(sent: list[Message]) -> None:
    ours, theirs = pair()
    for message in sent:
        ours.send(message)
        theirs.send(message)
    assert same(theirs.receive(), sent)
    assert same(ours.receive(), sent)
    assert not theirs.is_closed
    ours.close()
    assert theirs.receive() == []
    assert theirs.is_closed
    theirs.close()


def test_more_than_there_is_room_for() -> None:
    """The side that does not block goes on later; nothing is lost or mixed up."""
    ours, theirs = pair()
    sent = [Message({"n": n}, np.arange(n, n + 400_000, dtype=np.int32)) for n in range(3)]
    for message in sent:
        ours.send(message)
    assert ours.has_unsent
    found: list[Message] = []
    while ours.has_unsent or len(found) < len(sent):
        ours.flush()
        found += theirs.receive()
    assert same(found, sent)
    ours.close()
    theirs.close()


def test_half_a_message_waits() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    recorded: list[bytes] = []

    class Recorder:
        def send(self, data: bytes) -> int:
            recorded.append(bytes(data))
            return len(data)

    Channel(Recorder()).send(Message({"a": "ö"}, np.array([7], np.int32)))  # type: ignore[arg-type]
    whole = b"".join(recorded)
    for byte in whole[:-1]:
        ours.send(bytes([byte]))
        assert channel.receive() == []
    ours.send(whole[-1:])
    assert same(channel.receive(), [Message({"a": "ö"}, np.array([7], np.int32))])
    ours.close()
    theirs.close()


def test_what_was_sent_before_the_end_is_received() -> None:
    ours, theirs = pair()
    theirs.send(Message({"last": True}))
    theirs.close()
    ours.send(Message({"to": "nobody"}))
    ours.send(Message({"to": "nobody"}))
    assert same(ours.receive(), [Message({"last": True})])
    assert ours.is_closed
    assert not ours.has_unsent
    ours.close()
