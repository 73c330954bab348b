"""Files of checkpoints between processes, with threads in their places."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from MaxText.checkpoint import manifest
from MaxText.checkpoint.manifest import File
from MaxText.checkpoint.peers import Peers
from tests.processes.test_group import members, together


@pytest.fixture
def pair(tmp_path) -> Iterator[list[Peers]]:
    """Two processes; process 0 has a file of step 7."""
    for id in range(2):
        (tmp_path / str(id) / "7/state/leaf").mkdir(parents=True)
    (tmp_path / "0/7/state/leaf/0.0").write_bytes(b"x" * 3_000_001)
    with members(2) as made:
        peers = together([lambda one=one: Peers(one, tmp_path / str(one.id), 5.0) for one in made])
        yield peers
        for one in peers:
            one.close()


def saved(folder: Path) -> File:
    return manifest.fingerprint(folder / "0/7/state/leaf/0.0")


def test_a_copy_arrives_and_can_be_fetched_again(pair, tmp_path):
    state, path = tmp_path / "0/7/state", "leaf/0.0"
    pair[0].send(1, 7, state, {path: saved(tmp_path)})
    assert (tmp_path / "1/7/state" / path).read_bytes() == (state / path).read_bytes()
    assert pair[1].taken(7) == {path: saved(tmp_path)} and pair[1].taken(7) == {}
    (state / path).unlink()
    assert pair[0].fetch(1, 7, path, 3_000_001).tobytes() == b"x" * 3_000_001


def test_what_goes_wrong_is_an_error_with_the_reason(pair, tmp_path):
    with pytest.raises(OSError, match="No such file"):
        pair[0].fetch(1, 7, "leaf/1.0", 5)
    with pytest.raises(OSError, match="3000001 bytes, 5 were saved"):
        pair[1].fetch(0, 7, "leaf/0.0", 5)
    with pytest.raises(OSError, match="No such file"):
        pair[0].send(1, 8, tmp_path / "0/7/state", {"leaf/0.0": saved(tmp_path)})
    with pytest.raises(OSError, match="arrived"):
        pair[0].send(1, 7, tmp_path / "0/7/state", {"leaf/0.0": File(3_000_001, "00000000")})


@pytest.mark.parametrize("path", ["../../secret", "..", "leaf/..", "leaf/../../x", "/etc/passwd", "leaf"])
def test_nothing_outside_a_step_is_given_or_taken(pair, tmp_path, path):
    (tmp_path / "0/secret").write_text("secret")
    with pytest.raises(OSError, match="not a request"):
        pair[1].fetch(0, 7, path, 6)


@pytest.mark.parametrize("request_", [{"get": [7, "leaf/0.0"]}, {"key": "guessed", "get": [7, "leaf/0.0"]}, [], "?"])
def test_a_stranger_gets_nothing(pair, request_: Any):
    with socket.create_connection(tuple(pair[0]._places[0])) as sock:
        sock.sendall(json.dumps(request_).encode() + b"\n")
        assert b"error" in sock.makefile("rb").readline()


@pytest.mark.parametrize("when", ["before a request", "in a request", "before the answer"])
def test_a_process_that_is_killed_leaves_no_traceback_with_the_others(pair, when, capfd):
    """Its connections are reset, whatever they were at."""
    here, _ = pair
    with socket.create_connection(here._server.server_address[:2], timeout=5) as sock:
        asked = json.dumps({"key": here._key, "put": [3, "leaf/0"], "size": 1 << 20}).encode() + b"\n"
        sock.sendall({"before a request": b"", "in a request": asked[:20], "before the answer": asked}[when])
        time.sleep(0.1)  # until the other side has begun to read
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ends = time.monotonic() + 10
    while any("process_request_thread" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < ends
        time.sleep(0.02)
    assert capfd.readouterr().err == ""
