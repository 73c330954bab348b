"""The fast tier: frequent checkpoints on the disk or in the memory of each node. See `Local`."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from MaxText import faults
from MaxText.checkpoint import arrays, disk, manifest, shards, together, tree
from MaxText.checkpoint.background import Background
from MaxText.checkpoint.manifest import File, Manifest
from MaxText.checkpoint.peers import Peers
from MaxText.checkpoint.steps import Steps
from MaxText.processes import Group

IDENTITY = ".run"  # in the durable folder: which run the local folders belong to
_OWNER = "run"  # in a local folder: the path of that run
_KEEP_DAMAGED = 1


@dataclass(frozen=True)
class Found:
    """A step that the processes have in their local folders, whole, all together."""

    manifest: Manifest
    holders: Mapping[int, Mapping[str, File]]
    """the files of the state that each process has, by path"""


class Local:
    """Each process writes its pieces to DIRECTORY/RUN-IDENTITY/PROCESS/STEP/, and a copy to the next process's folder.

    A step counts where, for each process that wrote it, its own folder or that of the next one is left: so one lost
    node costs nothing. Its manifest, its checksums and what happens to a damaged one are as those of a `Store`; it is
    not sent to the disk (fsync), for what a power failure takes from a node is found by its checksum. One step is kept,
    and goes once all processes have the next. Every method but `check`, `wait` and `path` is called by all processes.
    """

    def __init__(self, directory: Path, run: Path, group: Group, *, asynchronous: bool, seconds: float) -> None:
        """Nothing is read or created yet. `run`: its folder; `seconds`: the limit of a wait for a process."""
        self._directory, self._run, self._group, self._seconds = directory.expanduser().absolute(), run, group, seconds
        self._background = Background(asynchronous=asynchronous)
        self._buffers: dict[str, Any] = {}
        self._steps: Steps | None = None
        self._peers: Peers | None = None
        self._attempt = ""
        self.found: dict[int, Found] = {}  # what `survey` found, without what was passed over

    # --- reading

    def survey(self) -> dict[int, Found]:
        """The steps that are whole, of all processes together. Reads manifests and looks at sizes, no more."""
        self._steps = self._steps or self._folder()
        shown = {}
        for step in self._steps.steps() if self._steps else []:
            one = self._steps.read_manifest(step)  # type: ignore[union-attr]
            if not manifest.differences(self._steps.path(step), one, contents_up_to=0):  # type: ignore[union-attr]
                shown[str(step)] = one.as_dict()
        self.found = whole(self._group.gather("local checkpoints", shown))
        return self.found

    def incomplete(self) -> dict[int, str]:
        """The steps that are here but cannot be used, and why. After `survey`."""
        unusable = {step: str(why) for step, why in self._steps.scan().items() if why} if self._steps else {}
        apart = [step for step in self._steps.steps() if step not in self.found] if self._steps else []
        return unusable | dict.fromkeys(apart, "the other processes' parts of it are not there")

    def path(self, step: int) -> Path:
        """This process's folder of `step`."""
        assert self._steps is not None
        return self._steps.path(step)

    def _folder(self) -> Steps | None:
        """This process's steps; None where the run has no identity yet, and so no local folder."""
        try:
            identity = (self._run / "checkpoints" / IDENTITY).read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        name = f"{self._run.name}-{manifest.crc(f'{identity} {self._run.absolute()}'.encode())}"
        return Steps(self._directory / name / str(self._group.id), keep=1, keep_damaged=_KEEP_DAMAGED)

    def require_fit(self, step: int, target: Any) -> None:
        """As `Store.require_fit`."""
        tree.require_fit(self.found[step].manifest.leaves, tree.named_leaves(target), f"checkpoint {self.path(step)}")

    def restore(self, step: int, target: Any) -> tuple[Any, list[str]]:
        """The state of `step` as `target` wants it, and what had to come from another process.

        Raises StorageError: "checkpoint.damaged" in all processes where one misses a piece.
        """
        import jax

        found, path = self.found[step], self.path(step)
        wanted = tree.named_leaves(target)
        source = _Pieces(self._group.id, path / "state", step, found.holders, self._peers)

        def read() -> list[Any]:
            faults.point("local.restore")
            try:
                return shards.read(source, found.manifest.leaves, wanted)
            except shards.Damaged as error:
                raise manifest.damaged(path, [str(error)]) from error

        placed = together.restore(self._group, path, read)
        notes = self._group.gather(f"local checkpoint {step}: from others", source.notes())
        return jax.tree.unflatten(jax.tree.structure(target), placed), [text for one in notes for text in one]

    def pass_over(self, step: int) -> None:
        """`step` counts as absent from now on, and is moved aside by the next save."""
        self.found.pop(step, None)
        if self._steps is not None:
            self._steps.pass_over(step)

    # --- writing

    def prepare(self) -> None:
        """Make the folders and find the other processes. `survey` has been called, and the durable folder is there.

        Raises StorageError: "checkpoint.not-writable", "checkpoint.in-use", "checkpoint.newer-format".
        """
        with disk.writing(self._directory):
            together.in_all(self._group, "identity of the run", self._identify, primary_only=True)
            together.in_all(self._group, "local folder", self._open)
        if self._group.count > 1:
            assert self._steps is not None
            self._peers = Peers(self._group, self._steps.folder, self._seconds)
        self._attempt = self._group.gather("attempt", secrets.token_hex(8))[0]

    def _identify(self) -> None:
        place = self._run / "checkpoints" / IDENTITY
        if not place.exists():
            place.write_text(secrets.token_hex(8) + "\n")

    def _open(self) -> None:
        self._steps = self._steps or self._folder()
        assert self._steps is not None
        self._steps.require_readable_format()
        self._steps.open()
        (self._steps.folder / _OWNER).write_text(str(self._run.absolute()))
        for step in self._steps.steps():
            if step not in self.found:
                self._steps.pass_over(step)
        self._forget_others(self._steps.folder)

    def _forget_others(self, own: Path) -> None:
        """Remove what an earlier run at the same place, since deleted, has left in this process's folders."""
        for folder in self._directory.glob(f"{self._run.name}-*/{own.name}"):
            owner = folder / _OWNER
            if folder != own and owner.is_file() and owner.read_text() == str(self._run.absolute()):
                shutil.rmtree(folder)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> float:
        """As `Store.save`. StorageError where an earlier one failed, in any process, or a later one exists."""
        begun = time.perf_counter()
        self.wait()
        assert self._steps is not None, "prepare comes first"
        self._steps.require_later(step)
        before = (self._group.id - 1) % self._group.count
        held = {"attempt": self._attempt, "count": self._group.count, "holds": sorted({self._group.id, before})}
        meta = json.loads(json.dumps({**meta, "local": held}))
        named = tree.named_leaves(state)
        described = shards.describe(named)
        host = arrays.to_host(shards.own_pieces(named), self._buffers)
        if self._background.asynchronous:
            self._buffers = host
        self._background.start(functools.partial(self._write, self._steps, step, described, host, meta))
        return time.perf_counter() - begun

    def _write(
        self,
        steps: Steps,
        step: int,
        described: Mapping[str, shards.Description],
        host: arrays.Host,
        meta: dict[str, Any],
    ) -> None:
        path, state, what = steps.path(step), steps.path(step) / "state", f"local checkpoint {step}"
        nbytes = sum(piece.nbytes for piece in host.values()) * len(meta["local"]["holds"])

        def own() -> dict[str, File]:
            steps.clean()
            disk.require_room(steps.folder, nbytes)
            shards.describe_in(state, described)
            return shards.write(state, host, sync=False)

        def close() -> None:
            copies = self._peers.taken(step) if self._peers else {}
            files = manifest.survey(path, skip={f"state/{name}" for name in files_here | copies}, sync=False)
            files |= {f"state/{name}": file for name, file in (files_here | copies).items()}
            leaves = {name: one.leaf for name, one in described.items()}
            written = datetime.now(UTC).isoformat(timespec="seconds")
            manifest.write(path, Manifest(step, leaves, files, meta, arrays.versions(), written))

        with disk.writing(steps.folder, step, nbytes):
            faults.point("local.begun")
            files_here = together.in_all(self._group, f"{what}: pieces", own)
            faults.point("local.pieces")
            together.in_all(self._group, f"{what}: copies", lambda: self._send(step, state, files_here))
            faults.point("local.copies")
            together.in_all(self._group, f"{what}: manifest", close)  # from here on all processes have it
            faults.point("local.manifest")
            steps.prune()
            faults.point("local.pruned")

    def _send(self, step: int, state: Path, files: Mapping[str, File]) -> None:
        if self._peers is not None:
            self._peers.send((self._group.id + 1) % self._group.count, step, state, files)

    def check(self) -> None:
        """As `Store.check`."""
        self._background.check()

    def wait(self) -> None:
        """As `Store.wait`."""
        self._background.wait()

    def close(self, durable: int | None = None) -> None:
        """Let go of the folder. What is not newer than the `durable` step goes: it would only take room."""
        try:
            self._background.close()
            if self._steps is not None and durable is not None:
                self._free(self._steps, durable)
        finally:
            if self._peers is not None:
                self._peers.close()
            if self._steps is not None:
                self._steps.unlock()
            self._buffers = {}

    def _free(self, steps: Steps, durable: int) -> None:
        for step in steps.steps():
            if step <= durable:
                steps.remove(step)
        if not steps.scan():
            shutil.rmtree(steps.folder)
            with contextlib.suppress(OSError):  # another process of this node may have its folder there
                steps.folder.parent.rmdir()


class _Pieces:
    """A source of `shards.read`: this process's file if it is as it was saved, else that of another process."""

    def __init__(
        self, id: int, state: Path, step: int, holders: Mapping[int, Mapping[str, File]], peers: Peers | None
    ) -> None:
        self._id, self._state, self._step, self._peers = id, state, step, peers
        self._holders = {id: holders.get(id, {}), **holders}
        self._came: dict[int, list[str]] = {}

    def __call__(self, path: str) -> np.ndarray:
        wrong: list[str] = []
        for holder, files in self._holders.items():
            try:
                if holder == self._id:
                    return shards.Files(self._state, files)(path)
                if path in files and self._peers is not None:
                    data = self._fetch(self._peers, holder, path, files[path])
                    self._came.setdefault(holder, []).append(wrong[0])
                    return data
            except shards.Damaged as error:
                wrong.append(f"state/{path}, process {holder}: {error.problem}")
        raise shards.Damaged(path, "; ".join(wrong) or "no process has it")

    def _fetch(self, peers: Peers, holder: int, path: str, saved: File) -> np.ndarray:
        try:
            data = peers.fetch(holder, self._step, path, saved.size)
        except OSError as error:
            raise shards.Damaged(path, str(error.strerror or error)) from error
        if (found := manifest.crc(data)) != saved.crc:
            raise shards.Damaged(path, f"its bytes have changed (CRC {found}, saved {saved.crc})")
        return data

    def notes(self) -> list[str]:
        """What came from others, and why the first of it did."""
        return [
            f"{len(reasons)} files of the local checkpoint for process {self._id} came from process {holder} "
            f"({reasons[0]})"
            for holder, reasons in sorted(self._came.items())
        ]


def whole(shown: list[dict[str, Any]]) -> dict[int, Found]:
    """The steps whose pieces are all there, newest first; `shown`: the manifests of each process, by step."""
    written: dict[int, dict[str, dict[int, Manifest]]] = {}  # by step, attempt and process
    for id, one in enumerate(shown):
        for content in one.values():
            made = manifest.from_dict(content)
            written.setdefault(made.step, {}).setdefault(made.meta["local"]["attempt"], {})[id] = made
    found = {}
    for step, attempts in sorted(written.items(), reverse=True):
        for held in attempts.values():
            first = next(iter(held.values()))
            here = {id for one in held.values() for id in one.meta["local"]["holds"]}
            if here == set(range(first.meta["local"]["count"])):
                found[step] = Found(first, {id: shards.below(one.files, "state") for id, one in held.items()})
    return found
