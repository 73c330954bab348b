"""The store of a run's checkpoints. See `Store`."""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Self

from MaxText import faults
from MaxText.checkpoint import arrays, disk, manifest, shards, together, tree
from MaxText.checkpoint.manifest import Invalid, Manifest
from MaxText.errors import StorageError
from MaxText.processes import Alone, Group

_STATE = "state"
_DAMAGED = ".damaged"
_SMALL = 1 << 16  # bytes: files that describe arrays are checked before Orbax trusts them


class Store:
    """Checkpoints of one run in `folder`: `<folder>/<step>/state/` and `<folder>/<step>/manifest.json`.

    - A step exists when its manifest does, which is written last. What a killed save leaves is ignored, and removed
      when the next save begins.
    - Arrays are stored whole, without a trace of the mesh; checksums are verified when they are restored.
    - The newest `keep` steps are kept (None: all), and of the older ones the multiples of `keep_period`. The others go
      only after a newer one is durable and read back.
    - With `asynchronous`, `save` returns once the arrays are copied to host memory; a thread does the rest. Its
      failure is raised by the next `check`, `save`, `wait` or `close`.
    - One process at a time may write: it holds a lock on `<folder>/.lock`.

    Reading (`steps`, `latest`, `manifest`, `verify`, `incomplete`) changes nothing and needs no device.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None = None,
        keep_period: int | None = None,
        asynchronous: bool = True,
        group: Group | None = None,
    ) -> None:
        """Nothing is read or created yet; `keep` is at least 1. `group`: the processes that save and restore together,
        each calling `prepare`, `save`, `restore` and `restore_newest` at the same point."""
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}: the newest checkpoint is always kept")
        self.folder = folder.absolute()
        self._keep, self._keep_period, self._group = keep, keep_period, group or Alone()
        self._damaged: set[int] = set()
        self._buffers: dict[str, Any] = {}
        self._lock: IO[str] | None = None
        self._prepared = False
        self._pending: Future[None] | None = None
        self._failure: StorageError | None = None
        self._reported = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None

    def elsewhere(self, folder: Path) -> Store:
        """Another store, to read from, with the same processes."""
        return Store(folder, asynchronous=False, group=self._group)

    # --- reading

    def steps(self) -> list[int]:
        """Return the complete steps, ascending, without those that this process found damaged."""
        return [step for step, reason in self._scan().items() if reason is None]

    def latest(self) -> int | None:
        """Return the newest complete step; `incomplete` says what was passed over."""
        return next((step for step in reversed(self._folders()) if self._reason(step) is None), None)

    def incomplete(self) -> dict[int, str]:
        """Return the steps whose folders are there but cannot be used, and why."""
        return {step: str(reason) for step, reason in self._scan().items() if reason is not None}

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
            return manifest.read(self._path(step))
        except Invalid as error:
            known = ", ".join(map(str, self.steps())) or "none"
            raise StorageError(
                f"there is no checkpoint of step {step} in {self.folder}: {error}. Complete steps: {known}.",
                id="checkpoint.no-step",
            ) from error

    def verify(self, step: int) -> None:
        """Read every file of `step`; raise StorageError ("checkpoint.damaged") naming those that have changed."""
        if problems := manifest.differences(self._path(step), self.read_manifest(step)):
            raise manifest.damaged(self._path(step), problems)

    def require_fit(self, step: int, target: Any) -> None:
        """Raise StorageError ("checkpoint.unfit", with a table) unless `step` has `target`'s arrays. Reads none."""
        tree.require_fit(self.read_manifest(step).leaves, tree.named_leaves(target), f"checkpoint {self._path(step)}")

    def restore(self, step: int, target: Any, *, verify: bool = True) -> Any:
        """Return the state of `step` in the structure and shardings of `target`.

        Args:
          target: tree of jax.ShapeDtypeStruct, each with the sharding wanted; any mesh will do.
          verify: compare checksums. Leave it on: nothing else notices a changed byte.

        Raises:
          StorageError: "checkpoint.unfit", with a table, before anything is read: names, shapes or dtypes differ;
            "checkpoint.damaged", naming files and arrays; "checkpoint.no-step".
        """
        import jax

        saved = self.read_manifest(step)
        faults.point("restore.begun")
        wanted = tree.named_leaves(target)
        tree.require_fit(saved.leaves, wanted, f"checkpoint {self._path(step)}")
        if self._group.count > 1 or not all(leaf.crc for leaf in saved.leaves.values()):
            read = functools.partial(self._read_pieces, step, saved, wanted)
            placed = together.restore(self._group, self._path(step), read)
            return jax.tree.unflatten(jax.tree.structure(target), placed)
        host = self._read(step, saved)
        faults.point("restore.read")
        crcs = arrays.start_checksums(host) if verify else {}  # while the arrays go to the devices
        placed = arrays.to_devices(host, wanted)
        self._compare(step, saved, {name: crc.result() for name, crc in crcs.items()})
        return jax.tree.unflatten(jax.tree.structure(target), placed)

    def restore_newest(self, target: Any) -> tuple[int, Any, list[str]]:
        """Restore the newest intact step; return it, the state, and why newer ones were passed over.

        Damaged steps count as absent from then on; the next save moves them aside to `<step>.damaged`.

        Raises:
          StorageError: "checkpoint.unfit" as in `restore`; "checkpoint.none" if no step is intact.
        """
        skipped = []
        for step, reason in sorted(self._scan().items(), reverse=True):
            if reason is not None:
                skipped.append(f"step {step}: {reason}")
                continue
            try:
                return step, self.restore(step, target), skipped
            except StorageError as error:
                if error.id != "checkpoint.damaged":
                    raise
                skipped.append(f"step {step}: {error}")
                self._damaged.add(step)
        found = "\n".join(skipped) or "there is none"
        raise StorageError(f"no intact checkpoint in {self.folder}: {found}", id="checkpoint.none")

    def _require_described(self, step: int, saved: Manifest) -> Path:
        """The step's folder, once all files have their lengths, and the small ones their bytes."""
        path = self._path(step)
        if problems := manifest.differences(path, saved, contents_up_to=_SMALL):
            raise manifest.damaged(path, problems)
        return path

    def _read_pieces(self, step: int, saved: Manifest, wanted: dict[str, Any]) -> list[Any]:
        path = self._require_described(step, saved)
        try:
            return shards.read(path / _STATE, saved.leaves, shards.below(saved.files, _STATE), wanted)
        except shards.Damaged as error:
            raise manifest.damaged(path, [str(error)]) from error

    def _read(self, step: int, saved: Manifest) -> arrays.Host:
        path = self._require_described(step, saved)
        try:
            return arrays.read(path / _STATE, saved.leaves)
        except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files
            problems = manifest.differences(path, saved) or [f"it cannot be read: {error}"]
            raise manifest.damaged(path, problems) from error

    def _compare(self, step: int, saved: Manifest, crcs: dict[str, str]) -> None:
        wrong = [
            f"array {name}: CRC {found}, saved {saved.leaves[name].crc}"
            for name, found in crcs.items()
            if found != saved.leaves[name].crc
        ]
        if wrong:  # the files tell where; where they do not, the arrays themselves do
            raise manifest.damaged(self._path(step), manifest.differences(self._path(step), saved) or wrong)

    def _scan(self) -> dict[int, Invalid | None]:
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
            manifest.read(self._path(step))
        except Invalid as error:
            return error
        return None

    def _path(self, step: int) -> Path:
        return self.folder / str(step)

    # --- writing

    def prepare(self) -> None:
        """Make sure that this process can write here; called by the first `save`, better before training starts.

        Raises:
          StorageError: "checkpoint.not-writable"; "checkpoint.in-use" (another process writes here);
            "checkpoint.newer-format" (steps here are of a later version of this program).
        """
        if self._prepared:
            return
        if newer := [step for step, reason in self._scan().items() if reason and reason.newer]:
            raise StorageError(
                f"{self.folder} holds steps of a later version of this program: {newer}. "
                "Update it, or use another run_name.",
                id="checkpoint.newer-format",
            )
        with disk.writing(self.folder):
            together.in_all(self._group, "checkpoint folder", self._open, primary_only=True)
            if self._group.count > 1:
                together.require_shared(self._group, self.folder)
            self._prepared = True

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = disk.lock(self.folder)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> float:
        """Save `state` (a tree of jax.Array) as `step`; return the seconds that the caller was kept waiting.

        On return the arrays may be donated or deleted. `meta` is any JSON: config, data fingerprint, plan.

        Raises:
          StorageError: an earlier save failed ("checkpoint.not-saved"); `step` or a later one exists
            ("checkpoint.later-step"); or as `prepare`.
        """
        begun = time.perf_counter()
        self.wait()
        self.prepare()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise StorageError(
                f"cannot save step {step} in {self.folder}: step {latest} is there already. "
                "Resume from it, or use another run_name.",
                id="checkpoint.later-step",
            )
        meta = json.loads(json.dumps(meta))  # ours from here on
        named = tree.named_leaves(state)
        write = self._write
        if self._group.count > 1:
            write, named = functools.partial(self._write_together, shards.describe(named)), shards.own_pieces(named)
        host = arrays.to_host(named, self._buffers)
        if self._thread is None:
            write(step, host, meta)
        else:
            self._buffers = host
            self._pending = self._thread.submit(write, step, host, meta)
        return time.perf_counter() - begun

    def check(self) -> None:
        """Raise StorageError ("checkpoint.not-saved") if a background save has failed; costs nothing."""
        if self._pending is not None and self._pending.done():
            self.wait()
        elif self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Return once the last save is durable; raise StorageError if it failed, now or earlier."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except StorageError as error:
                self._failure = error
        if self._failure is not None:
            self._reported = True
            raise self._failure

    def close(self) -> None:
        """Wait for the last save and let go of folder and memory; raises a failure only if nobody has seen it."""
        try:
            if self._pending is not None or not self._reported:
                self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._lock is not None:
                self._lock.close()
                self._lock = None
            self._prepared = False
            self._buffers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, step: int, host: arrays.Host, meta: dict[str, Any]) -> None:
        """Everything after the host copy. In this order: state, its durability, manifest, then what may go."""
        path = self._path(step)
        nbytes = sum(array.nbytes for array in host.values())
        with disk.writing(self.folder, step, nbytes):
            faults.point("save.begun")
            self._clean()
            disk.require_room(self.folder, nbytes)
            path.mkdir()
            faults.point("save.folder")
            pending = arrays.start_checksums(host)  # of what was copied, not of what was written
            arrays.write(path / _STATE, host)
            faults.point("save.state")
            files = manifest.survey(path)
            faults.point("save.surveyed")
            manifest.sync_folder(self.folder)
            crcs = {name: crc.result() for name, crc in pending.items()}
            # An array of one chunk is stored as its bytes.
            chunks = {n: f"{_STATE}/{tree.folder_name(n)}/{shards.chunk_name([0] * x.ndim)}" for n, x in host.items()}
            sizes = {chunks[name]: array.nbytes for name, array in host.items()}
            arrays.require_read_back(files, sizes, {chunks[name]: crc for name, crc in pending.items()})
            leaves = {name: tree.Leaf(array.shape, array.dtype.name, crcs[name]) for name, array in host.items()}
            manifest.write(path, Manifest(step, leaves, files, meta, arrays.versions(), _now()))
            self.prune()

    def _write_together(
        self, described: dict[str, shards.Description], step: int, pieces: arrays.Host, meta: dict[str, Any]
    ) -> None:
        """The same by several processes, each with its pieces."""
        nbytes = sum(piece.nbytes for piece in pieces.values())

        def begin() -> None:
            self._clean()
            disk.require_room(self.folder, nbytes)

        with disk.writing(self.folder, step, nbytes):
            together.write(self._group, self._path(step), step, begin, described, pieces, meta, _now, self.prune)

    def _clean(self) -> None:
        """Remove what dead saves left, move aside what is damaged."""
        for old, reason in self._scan().items():
            if reason is None or reason.newer:
                continue
            if reason.absent and old not in self._damaged:
                shutil.rmtree(self._path(old))
                continue
            aside = self.folder / f"{old}{_DAMAGED}"
            if aside.exists():
                shutil.rmtree(aside)
            self._path(old).rename(aside)
            self._damaged.discard(old)

    def superseded(self) -> list[int]:
        """The steps that are neither among the newest `keep` nor multiples of `keep_period`, ascending."""
        older = self.steps()[: -self._keep] if self._keep is not None else []
        return [step for step in older if not (self._keep_period and step % self._keep_period == 0)]

    def prune(self) -> None:
        """Delete what is superseded. First the manifest: a half-deleted step does not exist."""
        for step in self.superseded():
            (self._path(step) / manifest.NAME).unlink()
            faults.point("prune.manifest")
            shutil.rmtree(self._path(step))
            faults.point("prune.done")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
