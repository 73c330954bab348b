"""What the program sees of the other processes: `Alone`, or `Several`."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from MaxText.errors import MaxTextError, PeerLost
from MaxText.processes.hub import Hub, differences
from MaxText.processes.member import Member
from MaxText.processes.place import Place

_LAST = 0.5  # seconds that process 0 outlives the news of a loss
_GRACE = 5.0  # seconds that an error waits for the same error of the others


class Group(Protocol):
    """The processes of one run. Every method but `abort` is called by all of them, in the same order."""

    id: int
    count: int
    address: str
    """of this host, as process 0 sees it"""

    @property
    def primary(self) -> bool:
        """True in process 0: the one that writes and speaks."""

    def gather(self, name: str, value: Any = None, *, for_all: bool = True) -> list[Any]:
        """What every process gave (JSON), by process id; for_all=False: only process 0 hears it, the others get [].

        May be called from several threads at once if their names differ. A process that does not come in time ends the
        run of all, by name.
        """

    def agree(self, name: str, values: Mapping[str, Any], error: Callable[[str], MaxTextError]) -> None:
        """Raise `error(differences)` in all processes unless `values` (JSON) are the same in all."""

    def poll(self, local: str | None) -> str | None:
        """Ask at a point where the run may stop. `local`: the signal that this process got. All processes get the same
        answer at the same point: None, or the name of a signal."""

    def leave(self, code: int, text: str = "") -> bool:
        """The last call: say how this process ends. True where this one is to speak for all: process 0, or any whose
        ending is its own."""

    def verdict(self) -> None:
        """Call it when a device program failed: if another process is the reason, this does not return."""

    def on_lost(self, action: Callable[[str], None]) -> None:
        """Do `action(sentence)`, from another thread, before this process ends because another is lost."""


class Alone:
    """One process: nothing to wait for."""

    id, count, primary, address = 0, 1, True, "127.0.0.1"

    def gather(self, name: str, value: Any = None, *, for_all: bool = True) -> list[Any]:
        return [value]

    def agree(self, name: str, values: Mapping[str, Any], error: Callable[[str], MaxTextError]) -> None:
        return None

    def poll(self, local: str | None) -> str | None:
        return local

    def leave(self, code: int, text: str = "") -> bool:
        return True

    def verdict(self) -> None:
        return None

    def on_lost(self, action: Callable[[str], None]) -> None:
        return None


class Several:
    """One process of several. When another is lost it says so and ends with exit code 77, whatever it does then."""

    def __init__(self, place: Place, values: dict[str, Any], *, start: float, heartbeat: float, wait: float) -> None:
        """The roll call. All in seconds: its limit, the silence after which a process is lost, the limit of a round.

        Raises what Hub and Member raise.
        """
        self.id, self.count, self._wait = place.id, place.count, wait
        self._lock = threading.Lock()
        self._rounds: Counter[str] = Counter()
        self._asked = False
        self._last_words: list[Callable[[str], None]] = []
        self._hub = Hub(place, limit=start, heartbeat=heartbeat) if place.id == 0 else None
        try:
            self._member = Member(place, values, limit=start, heartbeat=heartbeat, lost=self._end)
        except MaxTextError:
            if self._hub is not None:
                self._hub.join(_GRACE)
            raise
        self.names, self.address = self._member.names, self._member.address
        host = f"[{place.host}]" if ":" in place.host else place.host
        self.jax_address = f"{host}:{self._member.jax_port}"

    @property
    def primary(self) -> bool:
        return self.id == 0

    def _end(self, text: str) -> None:
        """In the listening thread: the main thread may be stuck in a collective for ever."""
        print(f"{text}. Process {self.id} ends [processes.lost]", file=sys.stderr, flush=True)
        try:
            for action in self._last_words:
                action(text)
            if self._hub is not None:  # JAX aborts the others when its service is gone: let them end first
                time.sleep(_LAST)
        finally:
            os._exit(PeerLost.exit_code)

    def on_lost(self, action: Callable[[str], None]) -> None:
        self._last_words.append(action)

    def gather(self, name: str, value: Any = None, *, for_all: bool = True) -> list[Any]:
        with self._lock:
            self._rounds[name] += 1
            unique = name if self._rounds[name] == 1 else f"{name}, time {self._rounds[name]}"
        self._send(round=unique, value=value, limit=self._wait, for_all=for_all)
        came, values = self._member.result(unique, self._wait + _GRACE)
        if not came:  # the hub says who is late, and ends this process; it did not
            self._end(f'process 0 did not answer to "{unique}" within {self._wait + _GRACE:g} s')
        return values or []

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # process 0 is gone: the listening thread ends this process
            self._member.send(**message)

    def agree(self, name: str, values: Mapping[str, Any], error: Callable[[str], MaxTextError]) -> None:
        found = self.gather(name, dict(values))
        if (unlike := differences(dict(zip(self.names, found, strict=True)))) is not None:
            raise error(unlike)

    def poll(self, local: str | None) -> str | None:
        if local is not None and not self._asked:
            self._asked = True
            self._send(stop=local)
        return self._member.poll(self._wait)

    def leave(self, code: int, text: str = "") -> bool:
        patience = self._wait if code == 0 else _GRACE
        self._send(round="leave", value=[code, text], limit=patience, for_all=True)
        came, values = self._member.result("leave", patience)
        if not came:
            self.abort(code, text)
        self._member.close()
        if self._hub is not None:
            self._hub.join(_GRACE)
        return self.primary or not came or any(one != [code, text] for one in values or [])

    def abort(self, code: int, text: str) -> None:
        """End the run of the others with this process's reason."""
        self._member.deafen()
        self._send(abort=code, text=text)
        if self._hub is not None:
            self._hub.join(_GRACE)

    def verdict(self) -> None:
        time.sleep(_GRACE)


def join(place: Place | None, values: dict[str, Any], *, start: float, heartbeat: float, wait: float) -> Group:
    """The group of this process: `Alone` without a place."""
    return Alone() if place is None else Several(place, values, start=start, heartbeat=heartbeat, wait=wait)
