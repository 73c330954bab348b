"""`python -m MaxText checkpoint ls | verify | diff | prune`: what the folders hold, without devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from MaxText.checkpoint.manifest import Manifest
from MaxText.checkpoint.shards import below
from MaxText.checkpoint.store import Store
from MaxText.checkpoint.tree import folder_name
from MaxText.errors import ConfigError, StorageError

USAGE = """usage: python -m MaxText checkpoint ...
  ls RUN                            the steps of a run, and what is wrong with those that cannot be used
  verify RUN [step=N]               read every byte and compare checksums; exit code 7 if something has changed
  diff A B                          two steps, each RUN/checkpoints/N, or RUN for its newest
  prune RUN keep=K [every=P] [dry_run=true]   delete all but the newest K and the multiples of P"""


def run(arguments: Sequence[str]) -> str:
    """The verb: returns what to print. Raises ConfigError ("cli.usage") and what the stores raise."""
    name, *rest = arguments or [""]
    if name not in VERBS:
        raise _usage(f"checkpoint {name}: no such verb")
    paths = [argument for argument in rest if not re.match(r"[a-z_]+=", argument)]
    settings = dict(argument.split("=", 1) for argument in rest if argument not in paths)
    verb, places, known = VERBS[name]
    if len(paths) != places or not settings.keys() <= known:
        raise _usage(f"checkpoint {name} takes {places} folder(s) and {', '.join(sorted(known)) or 'no setting'}")
    return verb(*map(Path, paths), **settings)


def _usage(problem: str) -> ConfigError:
    return ConfigError(f"{problem} [cli.usage]\n{USAGE}", id="cli.usage")


def _number(key: str, text: str) -> int:
    if not text.isdecimal():
        raise _usage(f"{key}={text}: not a whole number")
    return int(text)


def _store(run: Path) -> Store:
    """The checkpoints of a run folder, or of the folder of checkpoints itself."""
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    store = Store(folder)
    if not store.steps() and not store.incomplete():
        raise StorageError(f"there are no checkpoints in {folder}.", id="checkpoint.none")
    return store


def ls(run: Path) -> str:
    """Steps, ascending: when written, how large, of how many arrays; and the unusable ones, with the reason."""
    store = _store(run)
    rows = []
    for step in store.steps():
        one = store.read_manifest(step)
        rows.append((str(step), one.written, f"{one.nbytes:,} bytes", f"{len(one.leaves)} arrays"))
    rows += [(str(step), "not usable", reason, "") for step, reason in store.incomplete().items()]
    return _table(sorted(rows, key=lambda row: int(row[0])))


def verify(run: Path, step: str = "") -> str:
    """One line for each step. StorageError ("checkpoint.damaged") with all lines if one is not as it was saved; one
    whose save did not finish never was, but some step must be there."""
    store = _store(run)
    steps = [_number("step", step)] if step else store.steps()
    other = {} if step else {one: why for one, why in store.scan().items() if why is not None}
    lines = [f"{one}: no checkpoint: {why}" for one, why in other.items()]
    damaged = not steps or any(not why.absent for why in other.values())
    for one in steps:
        try:
            store.verify(one)
            lines.append(f"{one}: intact, {store.read_manifest(one).nbytes:,} bytes read")
        except StorageError as error:
            if error.id != "checkpoint.damaged":
                raise
            lines.append(f"{one}: {error}")
            damaged = True
    if damaged:
        raise StorageError("\n".join(lines), id="checkpoint.damaged")
    return "\n".join(lines)


def diff(a: Path, b: Path) -> str:
    """What differs between two steps, by their manifests: no array is read."""
    one, other = _manifest(a), _manifest(b)
    rows = [
        *_different("array", _arrays(one), _arrays(other)),
        *_different("config", one.meta.get("config", {}), other.meta.get("config", {})),
        *_different("data", one.meta.get("data", {}), other.meta.get("data", {})),
        *_different("plan", one.meta.get("plan", {}), other.meta.get("plan", {})),
        *_different("version", one.versions, other.versions),
    ]
    same = sum(_arrays(other).get(name) == value for name, value in _arrays(one).items())
    head = f"step {one.step} in {a} and step {other.step} in {b}: {same} of {len(one.leaves)} arrays are the same"
    return "\n".join([head, *rows])


def _manifest(path: Path) -> Manifest:
    """Of RUN/checkpoints/N, or of the newest step of RUN."""
    if path.name.isdecimal() and not (path / "checkpoints").is_dir():  # a run may be called 2026
        return Store(path.absolute().parent).read_manifest(int(path.name))
    store = _store(path)
    if (latest := store.latest()) is None:
        reasons = "\n".join(f"  {step}: {why}" for step, why in store.incomplete().items())
        raise StorageError(f"{store.folder} holds no complete checkpoint:\n{reasons}", id="checkpoint.none")
    return store.read_manifest(latest)


def _arrays(one: Manifest) -> dict[str, str]:
    """Shape, type and checksum of each array; of one in pieces, the checksums of its pieces."""
    found = {}
    for name, leaf in one.leaves.items():
        pieces = below(one.files, f"state/{folder_name(name)}")
        crc = leaf.crc or " ".join(f"{place}:{file.crc}" for place, file in sorted(pieces.items()) if place[0] != ".")
        found[name] = f"{leaf.dtype}{list(leaf.shape)} CRC {crc}"
    return found


def _different(kind: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
    return [f"  {kind} {key}: {one.get(key, 'absent')} | {other.get(key, 'absent')}" for key in keys]


def prune(run: Path, keep: str = "", every: str = "0", dry_run: str = "false") -> str:
    """Delete the steps that neither are among the newest `keep` nor multiples of `every`. The newest that stays is read
    and compared first; StorageError ("checkpoint.damaged") and nothing is deleted if it is not intact."""
    if not keep:
        raise _usage(f"checkpoint prune {run}: say how many of the newest steps stay, such as keep=3")
    count, period = _number("keep", keep), _number("every", every)
    if count < 1 or dry_run not in ("true", "false"):
        raise _usage("keep=K needs at least 1, and dry_run is true or false")
    found = _store(run)
    store = Store(found.folder, keep=count, keep_period=period or None)
    goes = store.superseded()
    if not goes:
        return "nothing to delete"
    if dry_run == "true":
        return f"would delete {', '.join(map(str, goes))}"
    store.verify(store.steps()[-1])
    with store:
        store.prepare()
        store.prune()
    return f"deleted {', '.join(map(str, goes))}; kept {', '.join(map(str, store.steps()))}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)


VERBS: dict[str, tuple[Callable[..., str], int, set[str]]] = {
    "ls": (ls, 1, set()),
    "verify": (verify, 1, {"step"}),
    "diff": (diff, 2, set()),
    "prune": (prune, 1, {"keep", "every", "dry_run"}),
}
