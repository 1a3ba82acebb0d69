"""JSON messages over a stream socket, one a line, between the client and the server of a sandbox."""

from __future__ import annotations

import json
import math
import select
import socket
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
        self.unsent = bytearray()
        self._incoming = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message."""
        self.unsent += json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"

    def flush(self) -> None:
        """Write as much as the socket accepts."""
        try:
            while self.unsent:
                sent = self.stream.send(memoryview(self.unsent)[:_CHUNK])
                del self.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def pump(self) -> list[dict[str, Any]]:
        """Write as much as the socket accepts, read all that it has, and return the complete messages.

        Sets `closed` if the other end is closed.
        """
        self.flush()
        try:
            while chunk := self.stream.recv(_CHUNK):
                self._incoming += chunk
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._incoming = self._incoming.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, timeout: float) -> None:
        """Wait until `pump` has something to do, at most `timeout` seconds."""
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self.stream, select.POLLIN | (select.POLLOUT if self.unsent else 0))
        poll.poll(None if timeout == math.inf else max(0.0, timeout) * 1000)

    def close(self) -> None:
        self.closed = True
        self.stream.close()
