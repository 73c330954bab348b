"""One process's end of the channel, and the thread that listens on it."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from MaxText.errors import ConfigError, DataError, MaxTextError, PeerLost
from MaxText.processes.place import Place
from MaxText.processes.wire import MAGIC, Line

_RETRY = 0.2  # seconds between attempts to reach process 0
_FAMILIES = {kind.exit_code: kind for kind in (ConfigError, DataError, PeerLost)}


class Member:
    """Connected to the hub, with a thread that answers it whatever the main thread does.

    `lost` is called from that thread, once, with a sentence, when another process is lost; it does not return.
    """

    def __init__(
        self, place: Place, values: dict[str, Any], *, limit: float, heartbeat: float, lost: Callable[[str], None]
    ) -> None:
        """Return when all processes are here and alike.

        Raises:
          PeerLost: "processes.unreachable", "processes.missing"; ConfigError: "processes.address", ".twice", ".count",
            ".config".
        """
        self._place, self._heartbeat, self._lost = place, heartbeat, lost
        self._changed = threading.Condition()
        self._results: dict[str, list[Any]] = {}
        self._polls = 0
        self._held = False
        self._stop: tuple[int, str] | None = None
        self._closing = False
        self._line = self._connect(limit)
        self.address: str = self._line.sock.getsockname()[0]
        try:
            who = {"id": place.id, "count": place.count, "host": place.hostname, "pid": place.pid}
            self._line.send(hello=MAGIC, values=values, **who)
            welcome, rest = self._await_welcome(limit)
        except BaseException:
            self._line.close()
            raise
        self.names: list[str] = welcome["welcome"]
        self.jax_port: int = welcome["jax_port"]
        self._thread = threading.Thread(target=self._run, args=(rest,), name="processes", daemon=True)
        self._thread.start()

    # --- the roll call

    def _connect(self, limit: float) -> Line:
        deadline = time.monotonic() + limit
        why = "no answer"
        while time.monotonic() < deadline:
            try:
                return Line(socket.create_connection((self._place.host, self._place.port), timeout=5.0))
            except OSError as error:
                why = error.strerror or str(error)
            time.sleep(_RETRY)
        raise PeerLost(
            f"process {self._place.id} ({self._place.hostname}) could not reach process 0 at {self._place.address} "
            f"within {limit:g} s: {why}. Is process 0 running, and is JAX_COORDINATOR_ADDRESS its host and port?",
            id="processes.unreachable",
        )

    def _await_welcome(self, limit: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The welcome, and what came behind it. The hub has the same limit and better words: it gets 5 s more."""
        deadline = time.monotonic() + limit + 5.0
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._line], [], [], left)[0]:
                continue
            try:
                messages = [message for message in self._line.receive() if "beat" not in message]
            except (EOFError, OSError, ValueError) as error:
                raise self._no_hub(f"closed the connection ({type(error).__name__})") from error
            if not messages:
                continue
            if "refused" in messages[0]:
                kind = _FAMILIES.get(messages[0]["code"], MaxTextError)
                raise kind(messages[0]["refused"], id=messages[0]["error"])
            if "welcome" in messages[0]:
                return messages[0], messages[1:]
            raise self._no_hub("answered with something else")
        raise self._no_hub(f"accepted the connection but said nothing for {limit + 5:g} s")

    def _no_hub(self, what: str) -> ConfigError:
        return ConfigError(
            f"what listens at {self._place.address} {what}: it is no process 0 of this run, or it ended. "
            "JAX_COORDINATOR_ADDRESS must be host and port of process 0, the same for all processes.",
            id="processes.address",
        )

    # --- the thread

    def _run(self, waiting: list[dict[str, Any]]) -> None:
        heard = beat = time.monotonic()
        every = min(2.0, self._heartbeat / 5)
        try:
            for message in waiting:
                self._heed(message)
            while not self._closing:
                if select.select([self._line], [], [], every / 2)[0]:
                    heard = time.monotonic()
                    for message in self._line.receive():
                        self._heed(message)
                now = time.monotonic()
                if now - beat > every:
                    beat = now
                    self._line.send(beat=1)
                if now - heard > self._heartbeat:
                    self._mourn(f"{self.names[0]} has not been heard for {now - heard:.0f} s")
                    return
        except (EOFError, OSError, ValueError):
            self._mourn(f"{self.names[0]} is gone: it was killed, or crashed")

    def _mourn(self, text: str) -> None:
        if not self._closing:
            self._closing = True
            self._lost(text)

    def _heed(self, message: dict[str, Any]) -> None:
        if "lost" in message:
            self._mourn(message["lost"])
        elif "where" in message:
            with self._changed:
                self._held = True
                polls = self._polls
            self._line.send(polls=polls)
        elif "stop_at" in message:
            with self._changed:
                self._stop, self._held = (message["stop_at"], message["signal"]), False
                self._changed.notify_all()
        elif "round" in message:
            with self._changed:
                self._results[message["round"]] = message["values"]
                self._changed.notify_all()

    # --- for any thread of the program

    def send(self, **message: Any) -> None:
        """Raises OSError where process 0 is gone; the thread will say so."""
        self._line.send(**message)

    def result(self, name: str, seconds: float) -> tuple[bool, list[Any] | None]:
        """(it came within `seconds`, what all processes said in the round `name`)."""
        with self._changed:
            came = self._changed.wait_for(lambda: name in self._results, timeout=seconds)
            return came, self._results.pop(name, None)

    def poll(self, seconds: float) -> str | None:
        """Count one point at which the run may stop; the signal's name from the agreed one on."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._held, timeout=seconds):
                self._mourn(f"process 0 asked for a stop, but named no step within {seconds:g} s")
            self._polls += 1
            return self._stop[1] if self._stop is not None and self._polls > self._stop[0] else None

    def deafen(self) -> None:
        """From now on nothing that comes ends this process."""
        self._closing = True

    def close(self) -> None:
        """Close the connection and end the thread; the others are not alarmed if `leave` was said before."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._line.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._line.close()
