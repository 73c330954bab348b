"""Files of checkpoints between processes: each serves its own folder to the others and takes in copies of theirs.

One request a line, JSON, over TCP, with the run's key: {"get": [step, path]}, answered by {"size": n} and the bytes;
{"put": [step, path], "size": n} and the bytes, answered by {"crc": checksum of what is on the disk now}. What fails is
answered by {"error": text}.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import secrets
import socket
import socketserver
import sys
import threading
from collections.abc import Mapping
from io import BufferedRWPair
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.checkpoint import manifest
from MaxText.checkpoint.manifest import File
from MaxText.processes import Group

_BLOCK = 1 << 20
_PATH = re.compile(r"(?!\.\.?/)[^/\x00]+/(?!\.\.?$)[^/\x00]+")  # a leaf's folder and a file in it


class Peers:
    """The processes of `group` as holders of files, each below its own `folder`/STEP/state/."""

    def __init__(self, group: Group, folder: Path, seconds: float) -> None:
        """Called by all at the same point. `seconds`: how long one request may stand still."""
        self._seconds = seconds
        self._taken: dict[int, dict[str, File]] = {}
        self._key = group.gather("key of the local checkpoints", secrets.token_hex(16) if group.primary else None)[0]
        family = socket.AF_INET6 if ":" in group.address else socket.AF_INET
        self._server = _server(self, folder, (group.address, 0), family)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="peers", daemon=True).start()
        self._places = group.gather("places of the local checkpoints", list(self._server.server_address[:2]))

    def send(self, to: int, step: int, state: Path, files: Mapping[str, File]) -> None:
        """Copy `files` below `state` to process `to`. OSError where it cannot take them, or has them otherwise."""
        with self._connect(to) as stream:
            for path, saved in files.items():
                _say(stream, key=self._key, put=[step, path], size=saved.size)
                with open(state / path, "rb", buffering=0) as file:
                    _copy(file, stream, saved.size)
                if (found := _hear(stream)["crc"]) != saved.crc:
                    raise OSError(errno.EIO, f"{path} arrived in process {to} as CRC {found}, saved {saved.crc}")

    def taken(self, step: int) -> dict[str, File]:
        """The files of others that have come for `step`, by path; asked once."""
        return self._taken.pop(step, {})

    def fetch(self, source: int, step: int, path: str, size: int) -> np.ndarray:
        """The bytes of a file of process `source`, uint8. OSError where it has none of this size."""
        with self._connect(source) as stream:
            _say(stream, key=self._key, get=[step, path])
            if (there := _hear(stream)["size"]) != size:
                raise OSError(errno.EIO, f"process {source} has {there} bytes, {size} were saved")
            data = np.empty(size, np.uint8)
            _read_into(stream, memoryview(data))
            return data

    def close(self) -> None:
        """Serve nobody any more."""
        self._server.shutdown()
        self._server.server_close()

    def _connect(self, to: int) -> BufferedRWPair:
        sock = socket.create_connection(tuple(self._places[to]), timeout=self._seconds)
        with sock:  # the stream keeps the connection open
            return sock.makefile("rwb", buffering=_BLOCK)  # type: ignore[return-value]

    def _answer(self, folder: Path, stream: Any, request: Any) -> None:
        if not isinstance(request, dict) or request.get("key") != self._key:
            raise PermissionError(errno.EPERM, "not a request of this run")
        step, path = request.get("get") or request["put"]
        place = folder / str(int(step)) / "state" / path
        if not _PATH.fullmatch(path):
            raise PermissionError(errno.EPERM, f"not a request of this run: {path}")
        if "get" in request:
            with open(place, "rb", buffering=0) as file:
                size = place.stat().st_size
                _say(stream, size=size)
                _copy(file, stream, size)
            return
        _take_in(stream, place, request["size"])
        saved = manifest.fingerprint(place)
        self._taken.setdefault(step, {})[path] = saved
        _say(stream, crc=saved.crc)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is told by who waits for its answer, and by the group when a process is lost."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _server(peers: Peers, folder: Path, address: tuple[str, int], family: int) -> _Server:
    class Handler(socketserver.StreamRequestHandler):
        timeout = peers._seconds
        wbufsize = _BLOCK

        def handle(self) -> None:
            while line := self.rfile.readline(1 << 16):
                try:
                    peers._answer(folder, _Both(self.rfile, self.wfile), json.loads(line))
                except (OSError, ValueError, KeyError, TypeError) as error:
                    _say(self.wfile, error=str(getattr(error, "strerror", None) or error))
                    self.wfile.flush()
                    return
                self.wfile.flush()

    kind = type("_FamilyServer", (_Server,), {"address_family": family})
    return kind(address, Handler)


class _Both:
    """A connection's two ends as one stream."""

    def __init__(self, reads: Any, writes: Any) -> None:
        self.readline, self.readinto, self.write, self.flush = (
            reads.readline,
            reads.readinto,
            writes.write,
            writes.flush,
        )


def _say(stream: Any, **message: Any) -> None:
    stream.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")


def _hear(stream: Any) -> dict[str, Any]:
    """The answer; OSError with what the other process says went wrong."""
    stream.flush()
    answer = json.loads(stream.readline() or b'{"error": "it closed the connection"}')
    if "error" in answer:
        raise OSError(errno.EIO, answer["error"])
    return answer


def _copy(source: Any, target: Any, size: int) -> None:
    block = memoryview(bytearray(min(size, _BLOCK) or 1))
    while size:
        count = source.readinto(block[: min(size, _BLOCK)])
        if not count:
            raise OSError(errno.EIO, f"the bytes ended, and {size} were still to come")
        target.write(block[:count])
        size -= count


def _take_in(stream: Any, place: Path, size: int) -> None:
    """The next `size` bytes to the file `place`. What its disk refuses is raised once they have come: only then does
    the sender listen."""
    block, refused = memoryview(bytearray(min(size, _BLOCK) or 1)), None
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(place, "wb"))
        except OSError as error:
            refused = error
        while size:
            count = stream.readinto(block[: min(size, _BLOCK)])
            if not count:
                raise OSError(errno.EIO, f"the bytes ended, and {size} were still to come")
            size -= count
            try:
                if refused is None:
                    file.write(block[:count])
            except OSError as error:
                refused = error
    if refused:
        raise refused


def _read_into(stream: Any, rest: memoryview) -> None:
    while rest:
        count = stream.readinto(rest)
        if not count:
            raise OSError(errno.EIO, f"the bytes ended, and {len(rest)} were still to come")
        rest = rest[count:]
