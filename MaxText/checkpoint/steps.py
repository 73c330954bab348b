"""The steps in one folder, as files: which exist, whether they are whole, which may go. Needs no device."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO, Any

from MaxText import faults
from MaxText.checkpoint import disk, manifest
from MaxText.checkpoint.manifest import Invalid, Manifest
from MaxText.errors import StorageError

_DAMAGED = ".damaged"


class Steps:
    """`<folder>/<step>/`, each with a manifest. Reading changes nothing; `open`, `clean` and `prune` write.

    The newest `keep` steps are kept (None: all), and of the older ones the multiples of `keep_period`. Of those that
    are moved aside because they are damaged, the newest `keep_damaged`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None = None,
        keep_period: int | None = None,
        keep_damaged: int | None = None,
    ) -> None:
        """Nothing is read or created yet; `keep` is at least 1."""
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}: the newest checkpoint is always kept")
        self.folder = folder.absolute()
        self._keep, self._keep_period, self._keep_damaged = keep, keep_period, keep_damaged
        self._damaged: set[int] = set()
        self._lock: IO[str] | None = None

    # --- reading

    def steps(self) -> list[int]:
        """Return the complete steps, ascending, without those that this process found damaged."""
        return [step for step, reason in self.scan().items() if reason is None]

    def latest(self) -> int | None:
        """Return the newest complete step; `incomplete` says what was passed over."""
        return next((step for step in reversed(self._folders()) if self._reason(step) is None), None)

    def incomplete(self) -> dict[int, str]:
        """Return the steps whose folders are there but cannot be used, and why."""
        return {step: str(reason) for step, reason in self.scan().items() if reason is not None}

    def manifest(self, step: int) -> dict[str, Any]:
        """Return what `step` says it holds: {format, step, leaves, files, meta, versions, written}.

        Raises StorageError: "checkpoint.no-step".
        """
        return self.read_manifest(step).as_dict()

    def read_manifest(self, step: int) -> Manifest:
        """The same as a record. Raises as `manifest`."""
        try:
            if step in self._damaged:
                raise Invalid("it is damaged")
            return manifest.read(self.path(step))
        except Invalid as error:
            known = ", ".join(map(str, self.steps())) or "none"
            raise StorageError(
                f"there is no checkpoint of step {step} in {self.folder}: {error}. Complete steps: {known}.",
                id="checkpoint.no-step",
            ) from error

    def verify(self, step: int) -> None:
        """Read every file of `step`; raise StorageError ("checkpoint.damaged") naming those that have changed."""
        if problems := manifest.differences(self.path(step), self.read_manifest(step)):
            raise manifest.damaged(self.path(step), problems)

    def scan(self) -> dict[int, Invalid | None]:
        """Every step folder, ascending, and why it is not a complete step (None: it is)."""
        return {step: self._reason(step) for step in self._folders()}

    def _folders(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self.folder) if name.isdecimal())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError(
                f"the checkpoints in {self.folder} cannot be looked at: {error.strerror}", id="checkpoint.not-readable"
            ) from error

    def _reason(self, step: int) -> Invalid | None:
        if step in self._damaged:
            return Invalid("it is damaged")
        try:
            manifest.read(self.path(step))
        except Invalid as error:
            return error
        return None

    def path(self, step: int) -> Path:
        """The folder of `step`."""
        return self.folder / str(step)

    # --- writing

    def open(self) -> None:
        """Make the folder and lock it for this process. Raises StorageError ("checkpoint.in-use") and OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = disk.lock(self.folder)

    def unlock(self) -> None:
        """Let another process write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def require_readable_format(self) -> None:
        """StorageError ("checkpoint.newer-format") if steps here are of a later version of this program."""
        if newer := [step for step, reason in self.scan().items() if reason and reason.newer]:
            raise StorageError(
                f"{self.folder} holds steps of a later version of this program: {newer}. "
                "Update it, or use another run_name.",
                id="checkpoint.newer-format",
            )

    def require_later(self, step: int) -> None:
        """StorageError ("checkpoint.later-step") if `step` or a later one is here already."""
        latest = self.latest()
        if latest is not None and step <= latest:
            raise StorageError(
                f"cannot save step {step} in {self.folder}: step {latest} is there already. "
                "Resume from it, or use another run_name.",
                id="checkpoint.later-step",
            )

    def pass_over(self, step: int) -> None:
        """From now on `step` counts as absent; the next `clean` moves it aside."""
        self._damaged.add(step)

    def clean(self) -> None:
        """Remove what dead saves left, move aside what is damaged."""
        for old, reason in self.scan().items():
            if reason is None or reason.newer:
                continue
            if reason.absent and old not in self._damaged:
                shutil.rmtree(self.path(old))
                continue
            aside = self.folder / f"{old}{_DAMAGED}"
            if aside.exists():
                shutil.rmtree(aside)
            self.path(old).rename(aside)
            self._damaged.discard(old)
        if self._keep_damaged is not None:
            aside_all = sorted(self.folder.glob(f"*{_DAMAGED}"), key=lambda path: int(path.stem))
            for path in aside_all[: len(aside_all) - self._keep_damaged]:
                shutil.rmtree(path)

    def superseded(self) -> list[int]:
        """The steps that neither are among the newest `keep` nor multiples of `keep_period`, ascending."""
        older = self.steps()[: -self._keep] if self._keep is not None else []
        return [step for step in older if not (self._keep_period and step % self._keep_period == 0)]

    def prune(self) -> None:
        """Delete what is superseded."""
        for step in self.superseded():
            self.remove(step)

    def remove(self, step: int) -> None:
        """Delete `step`. First the manifest: a half-deleted step does not exist."""
        (self.path(step) / manifest.NAME).unlink()
        faults.point("prune.manifest")
        shutil.rmtree(self.path(step))
        faults.point("prune.done")
