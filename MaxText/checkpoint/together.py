"""One step saved and restored by several processes: who does what, and when they wait for one another.

Process 0 makes the folder and, last, the manifest; each process writes its pieces in between. What goes wrong in one of
them goes wrong in all, with the same words.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from MaxText import faults
from MaxText.checkpoint import arrays, disk, manifest, shards
from MaxText.checkpoint.manifest import File, Manifest
from MaxText.checkpoint.shards import Description
from MaxText.errors import StorageError
from MaxText.processes import Group

_SEEN_SECONDS = 60.0  # network file systems may show a new file that late


def in_all(group: Group, what: str, action: Callable[[], Any], *, primary_only: bool = False) -> Any:
    """Do `action` (in all processes, or in process 0 while the others wait); what fails in one is raised in all: the
    StorageError, or an OSError with what was said."""
    if group.count == 1:
        return action()
    problem, result = None, None
    if group.primary or not primary_only:
        try:
            result = action()
        except StorageError as error:
            problem = [str(error), error.id]
        except Exception as error:
            problem = [f"{disk.cause(error)} (process {group.id})", ""]
    problems = [one for one in group.gather(what, problem) if one]
    for text, id in problems:
        if id:
            raise StorageError(text, id=id)
    if problems:
        raise OSError(errno.EIO, "; ".join(text for text, _ in problems))
    return result


def require_shared(group: Group, folder: Path) -> None:
    """StorageError ("checkpoint.not-shared") unless every process sees what process 0 has written to `folder`."""
    token = group.gather("token of the checkpoint folder", time.time_ns() if group.primary else None)[0]
    mark = folder / ".shared"
    if group.primary:
        mark.write_text(str(token))
    group.gather("token written")
    until = time.monotonic() + _SEEN_SECONDS
    while not (seen := _holds(mark, str(token))) and time.monotonic() < until and folder.parent.is_dir():
        time.sleep(0.5)
    blind = [str(id) for id, sees in enumerate(group.gather("token seen", seen)) if not sees]
    if group.primary:
        mark.unlink(missing_ok=True)
    if blind:
        raise StorageError(
            f"{folder}, made by process 0, is not there for process {', '.join(blind)}. "
            "Set base_output_directory to a folder that all hosts share.",
            id="checkpoint.not-shared",
        )


def _holds(mark: Path, token: str) -> bool:
    try:
        return mark.read_text() == token
    except OSError:
        return False


def write(
    group: Group,
    path: Path,
    step: int,
    begin: Callable[[], None],
    described: Mapping[str, Description],
    pieces: arrays.Host,
    meta: dict[str, Any],
    written: Callable[[], str],
    end: Callable[[], None],
) -> None:
    """Save step `step` in `path`. Process 0 does `begin` before anything else, and `end` once it is durable."""
    state = path / "state"

    def open_folder() -> None:
        faults.point("save.together-begun")
        begin()
        path.mkdir()
        shards.outline(state, described)

    in_all(group, f"checkpoint {step}: folder", open_folder, primary_only=True)
    faults.point("save.together-folder")
    files = in_all(group, f"checkpoint {step}: pieces", lambda: shards.write(state, pieces))
    faults.point("save.together-pieces")
    found = group.gather(f"checkpoint {step}: files", {p: [f.size, f.crc] for p, f in files.items()}, for_all=False)
    faults.point("save.together-files")

    def close_folder() -> None:
        everything = manifest.survey(path, skip={f"state/{p}" for one in found for p in one})
        everything |= {f"state/{p}": File(size, crc) for one in found for p, (size, crc) in one.items()}
        manifest.sync_folder(path.parent)
        leaves = {name: one.leaf for name, one in described.items()}
        manifest.write(path, Manifest(step, leaves, everything, meta, arrays.versions(), written()))
        end()

    in_all(group, f"checkpoint {step}: manifest", close_folder, primary_only=True)


def restore(group: Group, path: Path, action: Callable[[], Any]) -> Any:
    """`action()`, which restores the step in `path`; StorageError ("checkpoint.damaged") in all if it is in one."""
    problem, result = "", None
    try:
        result = action()
    except StorageError as error:
        if error.id != "checkpoint.damaged":
            raise
        problem = str(error)
    problems = dict.fromkeys(one for one in group.gather(f"checkpoint {path.name} restored", problem) if one)
    if problems:
        raise StorageError("\n".join(problems), id="checkpoint.damaged")
    return result
