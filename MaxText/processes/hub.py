"""The thread of process 0 that every process is connected to: the roll call, then rounds, stops and losses.

Messages from a process: hello, round, stop, polls, abort, beat. To it: welcome or refused, round, where, stop_at, lost,
beat. One thread owns all of it, so there are no locks.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from MaxText.errors import ConfigError, MaxTextError, PeerLost
from MaxText.processes.place import Place
from MaxText.processes.wire import MAGIC, Line

_TICK = 0.2  # seconds between looks at the clock
_LINGER = 3.0  # seconds in which a refusal waits for those that have yet to come
SHOWN = 20  # differences, or names of processes, in one message


@dataclass
class Peer:
    """A connected process."""

    line: Line
    id: int
    name: str
    values: dict[str, Any]
    heard: float


@dataclass
class Round:
    """What has come of a round, and until when all must have come."""

    deadline: float
    limit: float
    values: dict[int, Any] = field(default_factory=dict)
    for_all: bool = True


class Hub:
    """Listens on the place's port from construction on; ends by itself when every process has left or one is lost."""

    def __init__(self, place: Place, *, limit: float, heartbeat: float) -> None:
        """`limit` is that of the roll call, `heartbeat` how long a process may be silent, both in seconds.

        Raises ConfigError ("processes.address") where the port cannot be had.
        """
        self._place, self._limit, self._heartbeat = place, limit, heartbeat
        self._listener = _listen(place)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._strangers: dict[Line, float] = {}
        self._peers: dict[int, Peer] = {}
        self._names: dict[int, str] = {}
        self._welcomed = False
        self._rounds: dict[str, Round] = {}
        self._left: set[int] = set()
        self._polls: dict[int, int] | None = None
        self._stop: dict[str, Any] | None = None
        self._ended = False
        self._refusal: MaxTextError | None = None
        self._told, self._linger_until = 0, float("inf")
        self._thread = threading.Thread(target=self._run, name="processes-hub", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait until everybody has heard what there was to hear."""
        self._thread.join(seconds)

    # --- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            traceback.print_exception(error)
            self._lose(f"the channel of process 0 failed: {error!r}")
        finally:
            for line in [*(peer.line for peer in self._peers.values()), *self._strangers]:
                line.close()
            self._listener.close()
            self._selector.close()

    def _serve(self) -> None:
        begun = time.monotonic()
        beat = begun
        while not self._ended:
            for key, _ in self._selector.select(_TICK):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            if not self._welcomed and not self._refusal and now - begun > self._limit:
                self._refuse(self._missing())
            self._ended = self._ended or now > self._linger_until
            if now - beat > min(2.0, self._heartbeat / 5):
                beat = now
                self._tell_all(beat=1)
            self._watch(now)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        line = Line(sock)
        self._strangers[line] = time.monotonic()
        self._selector.register(sock, selectors.EVENT_READ, line)

    def _read(self, line: Line) -> None:
        peer = next((peer for peer in self._peers.values() if peer.line is line), None)
        try:
            messages = line.receive()
        except (EOFError, OSError, ValueError):
            self._drop(line)
            if peer is not None:
                self._gone(peer)
            return
        for message in messages:
            if peer is None:
                peer = self._hello(line, message)
                if peer is None:
                    return
            else:
                self._heed(peer, message)

    def _drop(self, line: Line) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.sock)
        self._strangers.pop(line, None)
        line.close()

    # --- the roll call

    def _hello(self, line: Line, message: Mapping[str, Any]) -> Peer | None:
        if message.get("hello") != MAGIC:
            self._drop(line)
            return None
        id, name = message["id"], f"process {message['id']} ({message['host']}, pid {message['pid']})"
        if self._welcomed or self._refusal:
            with contextlib.suppress(OSError):
                line.send(**_refusal(self._refusal or _too_late(name, self._names, self._place)))
            self._drop(line)
            self._count_told(1)
            return None
        peer = Peer(line, id, name, message["values"], time.monotonic())
        self._strangers.pop(line, None)
        if (twin := self._peers.get(id)) is not None:
            self._peers[-1] = peer  # it hears the refusal too
            self._told -= 1
            self._refuse(
                ConfigError(
                    f"two processes say they are number {id} of {self._place.count}: {twin.name} and {name}. "
                    "Give each its own JAX_PROCESS_ID, from 0.",
                    id="processes.twice",
                )
            )
            return None
        self._peers[id] = peer
        if message["count"] != self._place.count:
            self._refuse(
                ConfigError(
                    f"{name} was told of {message['count']} processes, process 0 of {self._place.count}. "
                    "Set the same JAX_NUM_PROCESSES for all.",
                    id="processes.count",
                )
            )
        elif len(self._peers) == self._place.count:
            self._welcome()
        return peer

    def _welcome(self) -> None:
        self._names = {id: peer.name for id, peer in self._peers.items()}
        if (unlike := differences({peer.name: peer.values for _, peer in sorted(self._peers.items())})) is not None:
            self._refuse(
                ConfigError(
                    f"the processes were started with different settings:\n{unlike}\n"
                    "Give every process the same command and environment.",
                    id="processes.config",
                )
            )
            return
        self._welcomed = True
        now = time.monotonic()
        for peer in self._peers.values():
            peer.heard = now
        names = [self._names[id] for id in range(self._place.count)]
        self._tell_all(welcome=names, jax_port=_free_port())

    def _missing(self) -> PeerLost:
        here = [peer.name for _, peer in sorted(self._peers.items())]
        missing = [str(id) for id in range(self._place.count) if id not in self._peers]
        return PeerLost(
            f"after {self._limit:g} s, {len(here)} of {self._place.count} processes are here: {_some(here)}. "
            f"Missing: process {_some(missing)}. Look at their logs, start them with "
            f"JAX_COORDINATOR_ADDRESS={self._place.address}, or raise jax_distributed_initialization_timeout.",
            id="processes.missing",
        )

    def _refuse(self, error: MaxTextError) -> None:
        self._refusal = error
        self._linger_until = time.monotonic() + _LINGER
        self._tell_all(**_refusal(error))
        self._count_told(len(self._peers))

    def _count_told(self, count: int) -> None:
        """A refusal that all have heard is done with."""
        self._told += count
        self._ended = self._ended or (self._refusal is not None and self._told >= self._place.count)

    # --- the run

    def _heed(self, peer: Peer, message: Mapping[str, Any]) -> None:
        peer.heard = time.monotonic()
        if "round" in message:
            self._enter(peer, message)
        elif "stop" in message and self._stop is None:
            self._stop, self._polls = {"signal": message["stop"]}, {}
            self._tell_all(where=1)
        elif "polls" in message and self._polls is not None:
            self._polls[peer.id] = message["polls"]
            self._decide()
        elif "abort" in message:
            self._left.add(peer.id)
            self._lose(f"{peer.name} ended with exit code {message['abort']}: {message['text']}")

    def _decide(self) -> None:
        """Everybody's count of polls is known, and nobody goes on until this is said: stop after the largest."""
        if self._polls is not None and self._stop is not None and self._polls.keys() >= self._peers.keys():
            self._tell_all(stop_at=max(self._polls.values()), **self._stop)
            self._polls = None

    def _enter(self, peer: Peer, message: Mapping[str, Any]) -> None:
        name, limit = message["round"], message["limit"]
        one = self._rounds.setdefault(name, Round(time.monotonic() + limit, limit))
        one.values[peer.id] = message["value"]
        one.for_all = message["for_all"]
        if name == "leave":
            self._left.add(peer.id)
        if len(one.values) < self._place.count:
            return
        del self._rounds[name]
        values = [one.values[id] for id in range(self._place.count)]
        for id in sorted(self._peers, reverse=True):
            self._tell(id, round=name, values=values if one.for_all or id == 0 else None)

    def _watch(self, now: float) -> None:
        """Silent processes, rounds that wait for somebody, connections that say nothing."""
        for line in [line for line, since in self._strangers.items() if now - since > self._limit]:
            self._drop(line)
        for peer in list(self._peers.values()) if self._welcomed else []:
            if now - peer.heard > self._heartbeat:
                self._lose(f"{peer.name} has not been heard for {now - peer.heard:.0f} s: it hangs or its host is gone")
        for name, one in list(self._rounds.items()):
            if now > one.deadline and name != "leave":
                late = [self._names[id] for id in range(self._place.count) if id not in one.values]
                self._lose(f'{_some(late)} did not come to "{name}" within {one.limit:g} s')

    def _gone(self, peer: Peer) -> None:
        self._peers = {key: one for key, one in self._peers.items() if one is not peer}
        if not self._welcomed:
            return  # it may come again, or is missed in the end
        if peer.id not in self._left:
            self._lose(f"{peer.name} is gone: it was killed, or crashed")
        self._decide()
        self._ended = self._ended or not self._peers

    def _lose(self, text: str) -> None:
        if not self._ended:
            self._ended = True
            self._tell_all(lost=text)

    def _tell_all(self, **message: Any) -> None:
        """This process last: it may end on hearing it."""
        for id in sorted(self._peers, reverse=True):
            self._tell(id, **message)

    def _tell(self, id: int, **message: Any) -> None:
        """What cannot be told is noticed when its silence is."""
        with contextlib.suppress(OSError):
            self._peers[id].line.send(**message)


def _listen(place: Place) -> socket.socket:
    local = place.host in ("localhost", "::1") or place.host.startswith("127.")
    try:
        family = socket.AF_INET if local or not socket.has_dualstack_ipv6() else socket.AF_INET6
        host = "127.0.0.1" if local else ""
        return socket.create_server(
            (host, place.port), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        raise ConfigError(
            f"process 0 cannot listen on {place.address}: {error.strerror or error}. Is there another process 0, or "
            "another run? Choose a free port in JAX_COORDINATOR_ADDRESS, the same for all.",
            id="processes.address",
        ) from error


def _free_port() -> int:
    with socket.create_server(("", 0)) as one:
        return int(one.getsockname()[1])


def _too_late(name: str, names: Mapping[int, str], place: Place) -> MaxTextError:
    here = _some([names[id] for id in sorted(names)])
    return ConfigError(
        f"{name} came to the run at {place.address}, but its {place.count} processes are all there: {here}. "
        "Give each process its own JAX_PROCESS_ID, and each run its own address.",
        id="processes.twice",
    )


def _refusal(error: MaxTextError) -> dict[str, Any]:
    return {"refused": str(error), "error": error.id, "code": error.exit_code}


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def differences(values: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A line for each key whose value is not the same in all processes (by name); None: all are alike."""
    (first, own), *others = values.items()
    rows = []
    for key in dict.fromkeys(key for one in values.values() for key in one):
        unlike = [(name, one.get(key)) for name, one in others if one.get(key) != own.get(key)]
        if unlike:
            rows.append(
                f"  {key}: {_show(own.get(key))} in {first}; " + _some([f"{_show(v)} in {n}" for n, v in unlike])
            )
    return None if not rows else "\n".join(rows[:SHOWN] + ([f"  … and {len(rows) - SHOWN} more"] * (len(rows) > SHOWN)))


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "…"
