"""The channel between processes, with threads in their places: who is here, what they agree on, who is lost."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from MaxText import processes
from MaxText.errors import ConfigError, DataError, MaxTextError, PeerLost
from MaxText.processes import Place, Several


class Watched(Several):
    """A process that is a thread: it remembers what would have ended it."""

    def __init__(self, place: Place, values: dict[str, Any], **limits: float) -> None:
        self.lost: str | None = None
        self.ended = threading.Event()
        super().__init__(place, values, **limits)

    def _end(self, text: str) -> None:
        self.lost = text
        self.ended.set()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def place(id: int, count: int, port: int, **how: Any) -> Place:
    return Place(id, count, "127.0.0.1", port, hostname=f"host{id}", **how)


LIMITS = {"start": 10.0, "heartbeat": 5.0, "wait": 10.0}


def together(actions: list[Callable[[], Any]], limit: float = 30.0) -> list[Any]:
    """What the actions return, or the MaxTextError that they raise, all at the same time."""

    def guarded(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except MaxTextError as error:
            return error

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(limit) for future in [pool.submit(guarded, action) for action in actions]]


def group_of(count: int, values: Callable[[int], dict[str, Any]] = lambda id: {}, **limits: float) -> list[Any]:
    port = free_port()
    return together([lambda i=i: Watched(place(i, count, port), values(i), **(LIMITS | limits)) for i in range(count)])


@contextlib.contextmanager
def members(count: int, **limits: float):
    made = group_of(count, **limits)
    assert all(isinstance(one, Watched) for one in made), made
    yield made
    for one in made:
        if one.lost:
            one._member.close()
    if left := [one for one in made if not one.lost]:
        together([lambda one=one: one.leave(0) for one in left])


def ids(results: list[Any]) -> list[str]:
    return [getattr(result, "id", "none") for result in results]


# --- the place


def test_the_place_is_read_from_the_environment():
    env = {"JAX_COORDINATOR_ADDRESS": "a.b:12", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    found = processes.find(env)
    assert found and (found.id, found.count, found.host, found.port) == (3, 4, "a.b", 12)
    gpu = {"JAX_COORDINATOR_IP": "10.0.0.1", "JAX_COORDINATOR_PORT": "3389", "NNODES": "2", "NODE_RANK": "0"}
    assert (processes.find(gpu) or found).address == "10.0.0.1:3389"
    assert processes.find(env | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None
    assert processes.find({"NNODES": "1", "NODE_RANK": "0"}) is None
    six = processes.find(env | {"JAX_COORDINATOR_ADDRESS": "[::1]:9"})
    assert six and (six.host, six.port) == ("::1", 9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"JAX_PROCESS_ID": ""},
        {"JAX_PROCESS_ID": "4"},
        {"JAX_PROCESS_ID": "one"},
        {"JAX_NUM_PROCESSES": "-2"},
        {"JAX_NUM_PROCESSES": "0", "JAX_PROCESS_ID": "0"},
        {"JAX_COORDINATOR_ADDRESS": "host:port"},
        {"JAX_COORDINATOR_ADDRESS": "host:70000"},
        {"JAX_COORDINATOR_ADDRESS": "host:0"},
        {"JAX_COORDINATOR_ADDRESS": ":3001"},
    ],
)
def test_a_place_that_makes_no_sense_is_refused(wrong):
    env = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"} | wrong
    with pytest.raises(ConfigError) as caught:
        processes.find(env)
    assert caught.value.id == "processes.place"


# --- the roll call


def test_one_that_does_not_come_is_missed_by_name():
    port = free_port()
    started = time.monotonic()
    found = together([lambda i=i: Watched(place(i, 4, port), {}, **(LIMITS | {"start": 1.0})) for i in (0, 2)])
    assert ids(found) == ["processes.missing"] * 2 and time.monotonic() - started < 8
    text = str(found[1])
    assert "process 0 (host0" in text and "process 2 (host2" in text and "Missing: process 1, 3" in text
    assert found[0].exit_code == 77


def test_two_with_one_number_hear_of_each_other():
    port = free_port()
    made = [place(0, 3, port), place(1, 3, port, pid=111), place(1, 3, port, pid=222)]
    found = together([lambda p=p: Watched(p, {}, **LIMITS) for p in made])
    assert ids(found) == ["processes.twice"] * 3 and "pid 111" in str(found[0]) and "pid 222" in str(found[0])


def test_two_first_processes_on_one_host():
    port = free_port()
    with contextlib.closing(socket.create_server(("127.0.0.1", port))), pytest.raises(ConfigError) as caught:
        Watched(place(0, 2, port), {}, **LIMITS)
    assert caught.value.id == "processes.address" and str(port) in str(caught.value)


def test_numbers_of_processes_that_differ():
    port = free_port()
    found = together([lambda n=n: Watched(place(n - 2, n, port), {}, **LIMITS) for n in (2, 3)])
    assert ids(found) == ["processes.count"] * 2 and "3 processes" in str(found[0])


def test_settings_that_differ_are_named_key_by_key():
    found = group_of(3, lambda id: {"steps": 10 + (id == 2), "seed": 0, "extra": [id]})
    assert ids(found) == ["processes.config"] * 3
    text = str(found[1])
    assert "steps: 10 in process 0" in text and "11 in process 2" in text and "extra" in text and "seed" not in text


def test_nobody_listens():
    with pytest.raises(PeerLost) as caught:
        Watched(place(1, 2, free_port()), {}, **(LIMITS | {"start": 1.0}))
    assert caught.value.id == "processes.unreachable" and "127.0.0.1" in str(caught.value)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"hello": "you"}\n', None])
def test_something_else_listens(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            if answer:
                sock.sendall(answer)
            time.sleep(0.2)
            sock.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ConfigError) as caught:
            Watched(place(1, 2, server.getsockname()[1]), {}, **(LIMITS | {"start": 2.0}))
    assert caught.value.id == "processes.address"


def test_a_stranger_does_no_harm_and_one_too_many_is_told():
    port = free_port()

    def rude() -> None:
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            time.sleep(0.3)

    *made, _ = together([*(lambda i=i: Watched(place(i, 2, port), {}, **LIMITS) for i in range(2)), rude])
    with pytest.raises(ConfigError) as caught:
        Watched(place(1, 2, port, pid=7), {}, **LIMITS)
    assert caught.value.id == "processes.twice" and "process 0 (host0" in str(caught.value)
    assert together([lambda one=one: one.gather("on") for one in made]) == [[None, None]] * 2
    together([lambda one=one: one.leave(0) for one in made])


# --- the run


def test_gather_and_agree():
    with members(3) as made:
        found = together([lambda one=one: [one.gather("a", one.id), one.gather("a", -one.id)] for one in made])
        assert found == [[[0, 1, 2], [0, -1, -2]]] * 3
        assert together([lambda one=one: one.gather("b", one.id, for_all=False) for one in made]) == [[0, 1, 2], [], []]

        def ask(one: Watched) -> None:
            one.agree("files", {"sha": "x" if one.id else "y"}, lambda text: DataError(text, id="data.processes"))

        found = together([lambda one=one: ask(one) for one in made])
        assert ids(found) == ["data.processes"] * 3 and "sha: y in process 0" in str(found[2])


def test_all_stop_at_the_same_poll_whoever_was_asked():
    """Each process polls in a loop at its own speed, but none gets more than one poll ahead of another."""
    with members(3) as made:
        signalled = [None, "SIGTERM", None]

        def steps(one: Watched) -> tuple[int, str]:
            for poll in range(1, 200):
                one.gather("step")  # the collective of a step
                time.sleep(0.001 * one.id)
                if found := one.poll(signalled[one.id] if poll > 20 else None):
                    return poll, found
            raise AssertionError("nobody stopped")

        found = together([lambda one=one: steps(one) for one in made])
        assert len(set(found)) == 1 and found[0][1] == "SIGTERM" and 21 < found[0][0] < 60


def test_one_that_vanishes_is_named_to_all():
    with members(3) as made:
        made[1]._member.deafen()
        made[1]._member._line.sock.shutdown(socket.SHUT_RDWR)  # as the system does when a process is killed
        for one in (made[0], made[2]):
            assert one.ended.wait(3) and "process 1 (host1" in one.lost and "killed" in one.lost
        made[1].lost = "by itself"


def test_the_first_process_vanishes():
    with members(2) as made:
        made[0]._hub._ended = True
        assert made[1].ended.wait(3) and "process 0 (host0" in made[1].lost
        made[0].lost = made[0].lost or "by itself"


def test_silence_is_a_loss():
    with members(2, heartbeat=1.0) as made:
        made[1]._member.deafen()  # its thread ends, its connection stays: a process that hangs
        assert made[0].ended.wait(5) and "process 1 (host1" in made[0].lost and "not been heard" in made[0].lost
        made[1].lost = "by itself"


def test_a_round_that_somebody_does_not_enter_ends():
    with members(3, wait=1.0) as made:
        for one in made[:2]:
            threading.Thread(target=one.gather, args=("save",), daemon=True).start()
        for one in made:
            assert one.ended.wait(5) and one.lost == made[0].lost
        assert "process 2 (host2" in made[0].lost and '"save"' in made[0].lost


def test_a_channel_that_fails_tells_so():
    with members(2) as made:
        made[1]._member.send(round="without a limit")
        for one in made:
            assert one.ended.wait(3) and "channel of process 0 failed" in one.lost


def test_leave():
    made = group_of(3)
    assert together([lambda one=one: one.leave(75, "stopped") for one in made]) == [True, False, False]
    assert not any(one.lost for one in made)


def test_a_reason_of_one_process_ends_the_others(monkeypatch):
    monkeypatch.setattr(processes.group, "_GRACE", 0.3)
    made = group_of(3)
    assert made[2].leave(4, "the file is torn")  # after a while in which the others might say the same
    for one in made[:2]:
        assert one.ended.wait(3) and "exit code 4: the file is torn" in one.lost and "process 2 (host2" in one.lost
        one._member.close()
