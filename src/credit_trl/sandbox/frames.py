"""Length-prefixed JSON frames over a stream socket, between the client and the server of a sandbox."""

from __future__ import annotations

import json
import math
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

_HEADER = struct.Struct(">I")
_CHUNK = 1 << 18


class Channel:
    """One end of a connection, which never blocks: `send` queues, `flush` writes, `pump` writes and reads.

    A frame is a 4-byte big-endian length and that many bytes of JSON in ASCII, with lone surrogates as escapes.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.stream = stream
        self.closed = False
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def unsent(self) -> int:
        """Number of queued bytes that are not yet written."""
        return len(self._outgoing)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a frame. Raises `ValueError` if it is larger than 4 GiB."""
        body = json.dumps(message, separators=(",", ":")).encode("ascii")
        if len(body) >= 1 << 32:
            raise ValueError(f"A message of {len(body)} bytes does not fit a frame of at most 4 GiB.")
        self._outgoing += _HEADER.pack(len(body))
        self._outgoing += body

    def flush(self) -> None:
        """Write as much as the socket accepts."""
        try:
            while self._outgoing:
                sent = self.stream.send(memoryview(self._outgoing)[:_CHUNK])
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def pump(self) -> None:
        """Write as much as the socket accepts and read all that it has. Sets `closed` if the other end is closed."""
        self.flush()
        try:
            while chunk := self.stream.recv(_CHUNK):
                self._incoming += chunk
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def messages(self) -> Iterator[dict[str, Any]]:
        """The complete frames that `pump` has read."""
        while len(self._incoming) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._incoming)
            end = _HEADER.size + length
            if len(self._incoming) < end:
                return
            body = bytes(memoryview(self._incoming)[_HEADER.size : end])
            del self._incoming[:end]
            yield json.loads(body)

    def close(self) -> None:
        self.closed = True
        self.stream.close()


def wait(channels: list[Channel], timeout: float) -> None:
    """Wait until one of the channels can be pumped, at most `timeout` seconds."""
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    for channel in channels:
        poll.register(channel, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
    poll.poll(None if timeout == math.inf else max(0.0, timeout) * 1000)
