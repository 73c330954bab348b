"""The store of a run's checkpoints. See `Store`."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from MaxText import faults
from MaxText.checkpoint import arrays, disk, manifest, shards, together, tree
from MaxText.checkpoint.background import Background
from MaxText.checkpoint.manifest import Manifest
from MaxText.checkpoint.steps import Steps
from MaxText.errors import StorageError
from MaxText.processes import Alone, Group

_STATE = "state"
_SMALL = 1 << 16  # bytes: files that describe arrays are checked before they are trusted


class Store(Steps):
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
        super().__init__(folder, keep=keep, keep_period=keep_period)
        self._group = group or Alone()
        self._background = Background(asynchronous=asynchronous)
        self._buffers: dict[str, Any] = {}
        self._prepared = False

    def elsewhere(self, folder: Path) -> Store:
        """Another store, to read from, with the same processes."""
        return Store(folder, asynchronous=False, group=self._group)

    # --- reading

    def require_fit(self, step: int, target: Any) -> None:
        """Raise StorageError ("checkpoint.unfit", with a table) unless `step` has `target`'s arrays. Reads none."""
        tree.require_fit(self.read_manifest(step).leaves, tree.named_leaves(target), f"checkpoint {self.path(step)}")

    def restore(self, step: int, target: Any, *, verify: bool = True, ignore: tuple[str, ...] = ()) -> Any:
        """Return the state of `step` in the structure and shardings of `target`.

        Args:
          target: tree of jax.ShapeDtypeStruct, each with the sharding wanted; any mesh will do.
          verify: compare checksums. Leave it on: nothing else notices a changed byte.
          ignore: arrays of the step whose names begin so need not be in `target`, and are not read.

        Raises:
          StorageError: "checkpoint.unfit", with a table, before anything is read: names, shapes or dtypes differ;
            "checkpoint.damaged", naming files and arrays; "checkpoint.no-step".
        """
        import jax

        saved = self.read_manifest(step)
        faults.point("restore.begun")
        wanted = tree.named_leaves(target)
        tree.require_fit(saved.leaves, wanted, f"checkpoint {self.path(step)}", ignore)
        placed = together.restore(self._group, self.path(step), lambda: self._read(step, saved, wanted, verify))
        faults.point("restore.read")
        return jax.tree.unflatten(jax.tree.structure(target), placed)

    def restore_newest(self, target: Any) -> tuple[int, Any, list[str]]:
        """Restore the newest intact step; return it, the state, and why newer ones were passed over.

        Damaged steps count as absent from then on; the next save moves them aside to `<step>.damaged`.

        Raises:
          StorageError: "checkpoint.unfit" as in `restore`; "checkpoint.none" if no step is intact.
        """
        skipped = []
        for step, reason in sorted(self.scan().items(), reverse=True):
            if reason is not None:
                skipped.append(f"step {step}: {reason}")
                continue
            try:
                return step, self.restore(step, target), skipped
            except StorageError as error:
                if error.id != "checkpoint.damaged":
                    raise
                skipped.append(f"step {step}: {error}")
                self.pass_over(step)
        found = "\n".join(skipped) or "there is none"
        raise StorageError(f"no intact checkpoint in {self.folder}: {found}", id="checkpoint.none")

    def _read(self, step: int, saved: Manifest, wanted: dict[str, Any], verify: bool) -> list[Any]:
        path = self.path(step)
        if problems := manifest.differences(path, saved, contents_up_to=_SMALL if verify else 0):
            raise manifest.damaged(path, problems)
        try:
            files = shards.Files(path / _STATE, shards.below(saved.files, _STATE), verify)
            return shards.read(files, saved.leaves, wanted)
        except shards.Damaged as error:
            raise manifest.damaged(path, [str(error)]) from error

    # --- writing

    def prepare(self) -> None:
        """Make sure that this process can write here; called by the first `save`, better before training starts.

        Raises:
          StorageError: "checkpoint.not-writable"; "checkpoint.in-use" (another process writes here);
            "checkpoint.newer-format" (steps here are of a later version of this program).
        """
        if self._prepared:
            return
        self.require_readable_format()
        with disk.writing(self.folder):
            together.in_all(self._group, "checkpoint folder", self.open, primary_only=True)
            if self._group.count > 1:
                together.require_shared(self._group, self.folder)
            self._prepared = True

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
        self.require_later(step)
        meta = json.loads(json.dumps(meta))  # ours from here on
        named = tree.named_leaves(state)
        write: Callable[..., None] = self._write
        if self._group.count > 1:
            write, named = functools.partial(self._write_together, shards.describe(named)), shards.own_pieces(named)
        host = arrays.to_host(named, self._buffers)
        if self._background.asynchronous:
            self._buffers = host
        self._background.start(functools.partial(write, step, host, meta))
        return time.perf_counter() - begun

    def check(self) -> None:
        """Raise StorageError ("checkpoint.not-saved") if a background save has failed; costs nothing."""
        self._background.check()

    def wait(self) -> None:
        """Return once the last save is durable; raise StorageError if it failed, now or earlier."""
        self._background.wait()

    def close(self) -> None:
        """Wait for the last save and let go of folder and memory; raises a failure only if nobody has seen it."""
        try:
            self._background.close()
        finally:
            self.unlock()
            self._prepared = False
            self._buffers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, step: int, host: arrays.Host, meta: dict[str, Any]) -> None:
        """Everything after the host copy. In this order: state, its durability, manifest, then what may go."""
        path = self.path(step)
        nbytes = sum(array.nbytes for array in host.values())
        with disk.writing(self.folder, step, nbytes):
            faults.point("save.begun")
            self.clean()
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
            self.clean()
            disk.require_room(self.folder, nbytes)

        with disk.writing(self.folder, step, nbytes):
            together.write(self._group, self.path(step), step, begin, described, pieces, meta, _now, self.prune)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
