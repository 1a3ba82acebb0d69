"""JSON messages over a stream socket, one a line, between the client and the server of a sandbox."""

from __future__ import annotations

import json
import math
import select
import socket
from collections.abc import Iterator
from typing import Any

_CHUNK = 1 << 18


class Channel:
    """One end of a connection, which never blocks: `send` queues, `flush` writes, `pump` writes and reads.

    A message is a line of JSON in ASCII, with line feeds and lone surrogates as escapes.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.stream = stream
        self.closed = False
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def unsent(self) -> int:
        """Number of queued bytes that are not yet written."""
        return len(self._outgoing)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message."""
        self._outgoing += json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"

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
        """The complete messages that `pump` has read."""
        lines, end, rest = self._incoming.rpartition(b"\n")
        if end:
            self._incoming = rest
            yield from map(json.loads, lines.split(b"\n"))

    def wait(self, timeout: float) -> None:
        """Wait until `pump` has something to do, at most `timeout` seconds."""
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self.stream, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.poll(None if timeout == math.inf else max(0.0, timeout) * 1000)

    def close(self) -> None:
        self.closed = True
        self.stream.close()
