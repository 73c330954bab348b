"""`data prepare`: tokenize and pack once, by several processes; what was done is kept when it is interrupted.

1. Each unit is tokenized into a part of its own, written under another name first. 2. Parts are joined in order, the
rows planned. 3. The manifest is written last. Started again with the same recipe, only what is missing is done.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from MaxText.data import blocks, corpus, opening, packing, parts, prepared, recipe, rows, sealed
from MaxText.data.continuing import differences
from MaxText.data.corpus import Corpus, Part, Words
from MaxText.data.dataset import Split
from MaxText.data.progress import Progress
from MaxText.data.recipe import Source
from MaxText.data.units import Unit
from MaxText.errors import ConfigError, DataError, Preempted, StorageError
from MaxText.tokenizer import Tokenizer

if TYPE_CHECKING:
    from MaxText.config import Config

PARTS = "parts"  # the folder of what was done, inside of the one that is made
_GOES_ON = "What was done so far is kept; the same command goes on."
_REFUSED = "Whole parts are kept in {parts}: bad_documents=drop goes on with them; once a file is mended, remove {out}."
_KEPT = {"data.damaged": _GOES_ON, "data.no-targets": ""}  # by the id of a DataError
_JOINED = re.compile("(train|eval)-[0-9]+")
_words: Words | None = None  # of this worker process


def prepare(cfg: Config, tokenizer: Tokenizer, out: Path, workers: int = 0) -> str:
    """Write the rows of every split of `cfg` to the folder `out`, by `workers` processes (0 = one for each core).

    Returns what was made, for people. Raises DataError for the data, ConfigError where `out` holds other rows,
    StorageError where it cannot be written, Preempted where it was interrupted.
    """
    if cfg.dataset_type in ("prepared", "synthetic") or cfg.hf_streaming:
        raise ConfigError(f"dataset_type={cfg.dataset_type} is not to be prepared. Name its sources.", id="cli.usage")
    opening.check_tokenizer(cfg, tokenizer)
    splits: list[Split] = ["train", "eval"] if recipe.has_eval(cfg) else ["train"]
    sources = {split: opening.sources_of(cfg, split) for split in splits}
    facts = _facts(cfg, tokenizer, sources)
    if os.path.exists(out / prepared.MANIFEST):
        return _complete(out, sources["train"], facts)
    before = {folder for folder in (out / PARTS, out, *out.parents, *out.glob("*")) if os.path.exists(folder)}
    try:
        return _prepare(cfg, tokenizer, out, workers, sources, facts)
    except KeyboardInterrupt as error:
        raise Preempted(f"interrupted. {_left(out, before)}", id="data.interrupted") from error
    except OSError as error:
        raise StorageError(
            f"{error.filename or out} cannot be written: {error.strerror or error}. {_left(out, before)}",
            id="data.write",
        ) from error
    except DataError as error:
        raise DataError(f"{error} {_left(out, before, _KEPT.get(error.id, _REFUSED))}", id=error.id) from error


def _left(out: Path, before: set[Path], kept: str = "What was done so far is kept; the same command goes on.") -> str:
    """What becomes of a try that failed: whole parts stay, if the command can go on (`kept` says so); where there is
    none, nothing does that was not there `before`."""
    if os.path.exists(out / prepared.MANIFEST):
        return "The rows are complete all the same."
    if kept and any(parts.finished(out / PARTS)):
        return kept.format(parts=out / PARTS, out=out)
    try:
        _remove(out, before)
    except OSError as error:
        return f"Remove {out}: {error.filename} cannot be removed ({error.strerror})."
    return "Nothing was written."


def _remove(out: Path, before: set[Path]) -> None:
    parts.clear(out / PARTS)
    for one in out.glob("*-*"):
        if _JOINED.fullmatch(one.name) and one not in before:
            shutil.rmtree(one)
    for one in (out / PARTS, out, *out.parents):
        if one not in before and one.is_dir() and not any(one.iterdir()):
            one.rmdir()


def _complete(out: Path, source: list[Source], facts: dict[str, Any]) -> str:
    """What a complete folder holds. It may have been damaged since: every byte is read."""
    try:
        found = prepared.manifest(str(out))
        _require_same(out, {key: found.get(key) for key in facts}, facts)
        prepared.verify(str(out))
    except DataError as error:
        raise DataError(f"{error}\nDelete {out} and give the same command again.", id=error.id) from error
    kept, now = [entry["weight"] for entry in found["splits"]["train"]], [one.weight for one in source]
    note = f"\n  the folder keeps mixture_weights={kept}; {now} count where training is given them"
    return f"{out} is complete: {_describe(found)}{note if kept != now else ''}"


def _prepare(
    cfg: Config,
    tokenizer: Tokenizer,
    out: Path,
    workers: int,
    sources: dict[Split, list[Source]],
    facts: dict[str, Any],
) -> str:
    folder = out / PARTS
    folder.mkdir(parents=True, exist_ok=True)
    before = parts.recipe_of(folder)
    if before is not None:
        _require_same(out, before, facts)
    folder.mkdir(exist_ok=True)
    sealed.write(folder / parts.RECIPE, facts)
    names = _names(sources)
    words = opening.words_of(cfg, tokenizer)
    _tokenize(cfg, words, names, folder, workers)
    entries = {
        split: [_join(cfg, words, out, names, split, number, source) for number, source in enumerate(found)]
        for split, found in sources.items()
    }
    manifest = facts | {"splits": entries}
    sealed.write(out / prepared.MANIFEST, manifest)
    parts.clear(folder)
    return f"{out}: {_describe(manifest)}"


def _facts(cfg: Config, tokenizer: Tokenizer, sources: dict[Split, list[Source]]) -> dict[str, Any]:
    """What the manifest says beside the counts: everything that the rows depend on."""
    recipes = {s: opening.recipe_fingerprint(cfg, tokenizer, found, s) for s, found in sources.items()}
    return {
        "format": prepared.FORMAT,
        "dataset_type": cfg.dataset_type,
        "source": opening.describe(cfg, sources["train"]),
        "max_target_length": cfg.max_target_length,
        "packing": opening.packing_kind(cfg),
        "add_bos": cfg.add_bos,
        "add_eos": cfg.add_eos,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": cfg.vocab_size,
        "data_shuffle_seed": cfg.data_shuffle_seed,
        "recipe": recipes,
    }


def _require_same(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    before, now = (_flat(json.loads(json.dumps(facts))) for facts in (before, now))
    lines = differences(before, now, "there")
    if lines:
        table = "\n".join(f"  {line}" for line in lines)
        raise ConfigError(
            f"out={out} holds rows of another recipe:\n{table}\nChoose another folder, or remove this one.",
            id="data.prepare-other",
        )


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """The recipes of the splits key by key."""
    recipes = facts.pop("recipe", None) or {}
    return facts | {f"{split} {key}": value for split, one in recipes.items() for key, value in one.items()}


def _names(sources: dict[Split, list[Source]]) -> dict[Unit, str]:
    """The name of the part of each unit; a unit that is in two splits (held_out_every) is one."""
    names: dict[Unit, str] = {}
    for found in sources.values():
        for source in found:
            for unit in source.units:
                names.setdefault(unit, f"{len(names):07}")
    return names


def _tokenize(cfg: Config, words: Words, names: dict[Unit, str], folder: Path, workers: int) -> None:
    """Every part that is not there yet."""
    there = parts.whole(folder, names.values(), words.refuse)
    left = [(unit, name) for unit, name in names.items() if name not in there]
    total, done = sum(u.size for u in names), sum(u.size for u in names) - sum(u.size for u, _ in left)
    with Progress("tokenize", total, done) as progress:
        for unit, result in _results(cfg, words, left, folder, _workers(workers, len(left))):
            if result is not None:
                raise DataError(result[0], id=result[1])
            progress.add(unit.size)


def _workers(wanted: int, tasks: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(wanted or cores, tasks)


def _results(
    cfg: Config, words: Words, left: list[tuple[Unit, str]], folder: Path, workers: int
) -> Iterator[tuple[Unit, tuple[str, str] | None]]:
    """(unit, None or its error) as they are done."""
    if workers < 2:
        yield from ((unit, _make(unit, folder / name, words)) for unit, name in left)
        return
    started = partial(_start, cfg.tokenizer_type, cfg.tokenizer_path, words.vocabulary, words.add_bos, words.add_eos,
                      words.refuse)  # fmt: skip
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=started)
    try:
        with _uninterrupted():  # what is started here ignores Ctrl-C: the parent alone answers it
            waiting = {pool.submit(_make, unit, folder / name): unit for unit, name in left}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    except BrokenProcessPool as error:
        raise StorageError(
            "a worker process ended unasked, probably for want of memory. The same command goes on; workers=1 needs "
            "the least.",
            id="data.worker",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start(kind: str, path: str, vocabulary: int, add_bos: bool, add_eos: bool, refuse: bool) -> None:
    """What a worker needs, made once."""
    global _words
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from MaxText.tokenizer import open_tokenizer

    _words = Words(open_tokenizer(kind, path), vocabulary, add_bos, add_eos, refuse)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _make(unit: Unit, where: Path, words: Words | None = None) -> tuple[str, str] | None:
    """Tokenize one unit and write its part; (message, id) of a DataError, which does not survive pickling."""
    words = words or _words
    assert words is not None
    try:
        part = corpus.tokenize(unit, words)
    except DataError as error:
        return str(error), error.id
    parts.save(where, part)
    return None


def _load(where: Path) -> Part:
    try:
        return parts.load(where)
    except sealed.Broken as error:
        raise DataError(f"{where} has changed since it was written: {error}.", id="data.damaged") from error


def _join(
    cfg: Config, words: Words, out: Path, names: dict[Unit, str], split: Split, number: int, source: Source
) -> dict[str, Any]:
    """The folder of one part of a split; returns its entry in the manifest."""
    folder = out / f"{split}-{number}"
    folder.mkdir(exist_ok=True)
    held_out = split == "eval" and cfg.held_out_every > 0
    loaded = ((unit, _load(out / PARTS / names[unit])) for unit in source.units)
    written = 0

    def sink(tokens: np.ndarray) -> None:
        nonlocal written
        written += len(tokens)
        writer.write(tokens.astype(words.dtype, copy=False))

    with (folder / prepared.TOKENS).open("wb") as file:
        writer = blocks.Writer(file)
        whole = corpus.build(loaded, words.dtype, cfg.held_out_every, held_out, sink)
    np.save(folder / prepared.CHECKSUMS, writer.checksums)
    opening.require_targets(split, source.name, len(whole.lengths))
    count = _save_rows(cfg, folder, whole)
    sealed.settle(folder)
    return {
        "name": source.name,
        "weight": source.weight,
        "folder": folder.name,
        "identity": source.identity(),
        "files": [list(span) for span in whole.files],
        "documents": len(whole.lengths),
        "tokens": written,
        "bytes": whole.text_bytes,
        "rows": count,
        "targets": written - len(whole.lengths),
        "dropped": whole.dropped,
        "bad": whole.bad,
        "dtype": np.dtype(words.dtype).name,
        "arrays": {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": writer.sha256.hexdigest() if path.name == prepared.TOKENS else prepared.checksum(path),
            }
            for path in sorted(folder.iterdir())
        },
    }


def _save_rows(cfg: Config, folder: Path, whole: Corpus) -> int:
    """Starts, numbers and plan of a corpus; returns its rows."""
    np.save(folder / "starts.npy", rows.starts_of(whole.lengths))
    np.save(folder / "records.npy", whole.records)
    kind, length = opening.packing_kind(cfg), cfg.max_target_length
    if kind == "concat_then_split":
        return -(-int((whole.lengths - 1).sum()) // length)
    alone = kind == "none"
    plan = packing.alone(whole.lengths, length) if alone else packing.plan(whole.lengths, length, kind)
    for name, values in plan._asdict().items():
        np.save(folder / f"plan-{name}.npy", values)
    return len(plan.first) - 1


def _describe(manifest: dict[str, Any]) -> str:
    lines = []
    for split, entries in manifest["splits"].items():
        for entry in entries:
            lost = [f"{count:,} {reason}" for reason, count in entry["dropped"].items()]
            slots = entry["rows"] * manifest["max_target_length"]
            lines.append(
                f"  {split} {entry['name']}: {entry['documents']:,} documents, {entry['tokens']:,} tokens, "
                f"{entry['rows']:,} rows of {manifest['max_target_length']} ({entry['targets'] / slots:.1%} filled); "
                f"dropped: {', '.join(lost) or 'nothing'}"
            )
            lines += [f"    {name} {fault}" for name, fault in entry["bad"][:20]]
    return "\n".join([manifest["source"], *lines])
