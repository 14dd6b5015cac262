"""Messages between processes: JSON with an array of numbers, after their lengths; never code."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixrt import errors
from radixrt.arrays import Int32Array
from radixrt.errors import ModelError, RadixrtError

_LENGTHS = struct.Struct("<IQ")  # bytes of the JSON and of the numbers that follow it
_READ_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Message:
    """What one side tells the other.

    Attributes:
        body: JSON values.
        numbers: `[N]` int32, such as the token ids of prompts one after the other.
    """

    body: dict[str, Any]
    numbers: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))


def encode(message: Message) -> bytes:
    """A message as it is sent."""
    body, numbers = json.dumps(message.body).encode(), message.numbers.astype("<i4", copy=False).tobytes()
    return _LENGTHS.pack(len(body), len(numbers)) + body + numbers


def decode(received: bytearray) -> list[Message]:
    """Take the messages that have come whole."""
    messages: list[Message] = []
    while len(received) >= _LENGTHS.size:
        body, numbers = _LENGTHS.unpack_from(received)
        end = _LENGTHS.size + body + numbers
        if len(received) < end:
            break
        text = bytes(received[_LENGTHS.size : _LENGTHS.size + body])
        array = np.frombuffer(bytes(received[_LENGTHS.size + body : end]), "<i4").astype(np.int32, copy=False)
        del received[:end]
        messages.append(Message(json.loads(text), array))
    return messages


class Channel:
    """One end of a socket pair, in either mode: where the socket blocks, `send` waits. Several threads may send
    while one receives.

    Attributes:
        is_closed: the other end has gone; nothing will come any more.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received, self._unsent = bytearray(), bytearray()
        self._sending = threading.Lock()
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as there is room for: the rest goes with `flush`."""
        encoded = encode(message)
        with self._sending:
            self._unsent += encoded
            self._flush()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send what there is room for; nothing once the other end has gone."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        while self._unsent and not self.is_closed:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                # What it has sent before is still to be read, and its end then says that it has gone.
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def wait(self) -> None:
        """Until something can be received."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def receive(self) -> list[Message]:
        """The messages that have come whole."""
        while not self.is_closed:
            try:
                read = self._socket.recv(_READ_AT_ONCE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                read = b""
            self.is_closed = not read
            self._received += read
        return decode(self._received)


def error_as_json(error: RadixrtError) -> list[str]:
    """An error of ours by its name."""
    return [type(error).__name__, str(error)]


def error_of(value: Sequence[str]) -> RadixrtError:
    """That error."""
    kind = getattr(errors, value[0], ModelError)
    error: RadixrtError = kind(value[1])
    return error
