"""The checkpoints of a run in both tiers: the durable ones, and those on each node. See `Tiers`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from MaxText.checkpoint.local import Local
from MaxText.checkpoint.store import Store
from MaxText.errors import StorageError

LOCAL_NOT_SAVED = "checkpoint.local-not-saved"


@dataclass(frozen=True)
class Newest:
    """The step to go on from: `where` it lies, in words, and what its manifest says of the run."""

    step: int
    where: str
    meta: dict[str, Any]


@dataclass(frozen=True)
class Restored:
    """A state, where it came from, and what had to be passed over or fetched for it."""

    step: int
    state: Any
    where: str
    meta: dict[str, Any]
    notes: list[str] = field(default_factory=list)


class Tiers:
    """Durable checkpoints in `durable`, and, where `local` is given, faster ones; the newest intact of both counts.

    Of one step in both, the durable one. All processes call all methods but `check` at the same point.
    """

    def __init__(self, durable: Store, local: Local | None = None) -> None:
        self.durable, self._local = durable, local

    def newest(self) -> tuple[Newest | None, list[str]]:
        """The newest complete step, and why others cannot be used. Reads no array, writes nothing."""
        notes = [f"checkpoint {step} cannot be used: {why}" for step, why in self.durable.incomplete().items()]
        found = self._local.survey() if self._local else {}
        if self._local:
            notes += [
                f"local checkpoint {step} cannot be used: {why}" for step, why in self._local.incomplete().items()
            ]
        latest = self.durable.latest()
        if self._local and (fast := max(found, default=-1)) > (-1 if latest is None else latest):
            return Newest(fast, self._where_local(fast), found[fast].manifest.meta), notes
        if latest is None:
            return None, notes
        return Newest(latest, str(self.durable.path(latest)), self.durable.manifest(latest)["meta"]), notes

    def _where_local(self, step: int) -> str:
        assert self._local is not None
        return f"{self._local.path(step)} (local)"

    def require_fit(self, step: int, target: Any) -> None:
        """StorageError ("checkpoint.unfit") unless `step`, the newest, has the arrays of `target`. Reads none."""
        if self._local and step != self.durable.latest():
            self._local.require_fit(step, target)
        else:
            self.durable.require_fit(step, target)

    def prepare(self) -> None:
        """Make sure that this process can write; after `newest`. Raises as `Store.prepare` and `Local.prepare`."""
        self.durable.prepare()
        if self._local:
            self._local.prepare()

    def restore_newest(self, target: Any) -> Restored:
        """The newest intact step of both tiers.

        Damaged ones count as absent from then on, and are moved aside by the next save of their tier.

        Raises:
          StorageError: "checkpoint.unfit" as in `Store.restore`; "checkpoint.none" if no step is intact.
        """
        notes = [f"step {step}: {why}" for step, why in self.durable.incomplete().items()]
        for step, restore, pass_over in self._candidates(target):
            try:
                found = restore(step)
            except StorageError as error:
                if error.id != "checkpoint.damaged":
                    raise
                notes.append(f"step {step}: {error}")
                pass_over(step)
                continue
            return Restored(found.step, found.state, found.where, found.meta, notes + found.notes)
        said = "\n".join(notes) or "there is none"
        raise StorageError(f"no intact checkpoint in {self.durable.folder}: {said}", id="checkpoint.none")

    def _candidates(self, target: Any) -> list[tuple[int, Callable[[int], Restored], Callable[[int], None]]]:
        """The steps of both tiers, newest first, each with what restores it and what rules it out."""

        def durable(step: int) -> Restored:
            state = self.durable.restore(step, target)
            return Restored(step, state, str(self.durable.path(step)), self.durable.manifest(step)["meta"])

        def fast(step: int) -> Restored:
            assert self._local is not None
            meta = self._local.found[step].manifest.meta
            state, notes = self._local.restore(step, target)
            return Restored(step, state, self._where_local(step), meta, notes)

        found = [(step, 1, durable, self.durable.pass_over) for step in self.durable.steps()]
        if self._local is not None:
            found += [(step, 0, fast, self._local.pass_over) for step in self._local.found]
        ordered = sorted(found, key=lambda one: one[:2], reverse=True)
        return [(step, restore, pass_over) for step, _, restore, pass_over in ordered]

    def save(self, step: int, state: Any, meta: dict[str, Any], *, local: bool = False) -> float:
        """As `Store.save`, in one of the tiers."""
        if local:
            assert self._local is not None
            with _of_the_local_tier():
                return self._local.save(step, state, meta)
        return self.durable.save(step, state, meta)

    def check(self) -> None:
        """Raise the StorageError of a background save of either tier that has failed; costs nothing."""
        self.durable.check()
        if self._local:
            with _of_the_local_tier():
                self._local.check()

    def latest(self) -> int | None:
        """The newest complete durable step."""
        return self.durable.latest()

    def close(self) -> None:
        """Wait for saves, let go of folders; raises a failure only if nobody has seen it."""
        try:
            self.durable.close()
        finally:
            if self._local:
                with _of_the_local_tier():
                    self._local.close(self.durable.latest())


@contextlib.contextmanager
def _of_the_local_tier() -> Iterator[None]:
    """What failed there says nothing about the durable one: another id, and the way out."""
    try:
        yield
    except StorageError as error:
        if error.id != "checkpoint.not-saved":
            raise
        raise StorageError(
            f"{error}\nThe local tier needs that room on every node. Without enable_emergency_checkpoint, "
            "local_checkpoint_directory and local_checkpoint_period the run goes on without it.",
            id=LOCAL_NOT_SAVED,
        ) from error
