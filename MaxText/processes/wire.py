"""One message a line: JSON over a TCP socket."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

MAGIC = "maxtext-run-1"
SEND_SECONDS = 10.0  # a peer that takes nothing for so long is not reading


class Line:
    """A connected socket that speaks in messages. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(SEND_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, **message: Any) -> None:
        """Raises OSError when the other side is gone."""
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self.sock.sendall(data)

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come; call it when the socket is readable. EOFError: the other side has closed.

        Raises ValueError for what is no message of ours.
        """
        data = self.sock.recv(1 << 20)
        if not data:
            raise EOFError
        self._buffer += data
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message")
        return messages

    def close(self) -> None:
        self.sock.close()
