"""`data prepare`: tokenize and pack once, by several processes; what was done is kept when it is interrupted.

1. Each unit is tokenized into a part of its own, written under another name first. 2. Parts are joined in order, the
rows planned. 3. The manifest is written last. Started again with the same recipe, only what is missing is done.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
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

from MaxText.data import blocks, corpus, opening, packing, prepared, recipe, rows
from MaxText.data.continuing import differences
from MaxText.data.corpus import Corpus, Part, Words
from MaxText.data.dataset import Split
from MaxText.data.progress import Progress
from MaxText.data.recipe import Source
from MaxText.data.units import Fault, Unit
from MaxText.errors import ConfigError, DataError, Preempted, StorageError
from MaxText.tokenizer import Tokenizer

if TYPE_CHECKING:
    from MaxText.config import Config

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
    try:
        return _prepare(cfg, tokenizer, out, workers, sources, facts)
    except KeyboardInterrupt as error:
        raise Preempted(
            "interrupted. What was done so far is kept; the same command goes on.", id="data.interrupted"
        ) from error
    except OSError as error:
        raise StorageError(
            f"{error.filename or out} cannot be written: {error.strerror or error}. What was done so far is kept; "
            "the same command goes on.",
            id="data.write",
        ) from error


def _require_whole(out: Path) -> None:
    """What was complete once may have been damaged since: every byte is read."""
    try:
        prepared.verify(str(out))
    except DataError as error:
        raise DataError(f"{error}\nDelete {out} and give the same command again.", id="data.damaged") from error


def _prepare(
    cfg: Config,
    tokenizer: Tokenizer,
    out: Path,
    workers: int,
    sources: dict[Split, list[Source]],
    facts: dict[str, Any],
) -> str:
    if (out / prepared.MANIFEST).exists():
        found = prepared.manifest(str(out))
        _require_same(out, {key: found.get(key) for key in facts}, facts)
        _require_whole(out)
        return f"{out} is complete: {_describe(found)}"
    parts = out / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    recipe_file = parts / "recipe.json"
    if recipe_file.exists():
        _require_same(out, json.loads(recipe_file.read_text(encoding="utf-8")), facts)
    _write_text(recipe_file, json.dumps(facts, indent=1))
    names = _names(sources)
    words = opening.words_of(cfg, tokenizer)
    _tokenize(cfg, words, names, parts, workers)
    entries = {
        split: [_join(cfg, words, out, names, split, number, source) for number, source in enumerate(found)]
        for split, found in sources.items()
    }
    manifest = facts | {"splits": entries}
    _write_text(out / prepared.MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False))
    shutil.rmtree(parts)
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


def _tokenize(cfg: Config, words: Words, names: dict[Unit, str], parts: Path, workers: int) -> None:
    """Every part that is not there yet."""
    left = [(unit, name) for unit, name in names.items() if not (parts / f"{name}.npz").exists()]
    total, done = sum(u.size for u in names), sum(u.size for u in names) - sum(u.size for u, _ in left)
    with Progress("tokenize", total, done) as progress:
        for unit, result in _results(cfg, words, left, parts, _workers(workers, len(left))):
            if result is not None:
                raise DataError(result[0], id=result[1])
            progress.add(unit.size)


def _workers(wanted: int, tasks: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(wanted or cores, tasks)


def _results(
    cfg: Config, words: Words, left: list[tuple[Unit, str]], parts: Path, workers: int
) -> Iterator[tuple[Unit, tuple[str, str] | None]]:
    """(unit, None or its error) as they are done."""
    if workers < 2:
        yield from ((unit, _make(unit, parts / name, words)) for unit, name in left)
        return
    started = partial(_start, cfg.tokenizer_type, cfg.tokenizer_path, words.vocabulary, words.add_bos, words.add_eos,
                      words.refuse)  # fmt: skip
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=started)
    try:
        with _uninterrupted():  # what is started here ignores Ctrl-C: the parent alone answers it
            waiting = {pool.submit(_make, unit, parts / name): unit for unit, name in left}
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
    temporary = where.with_name(f"{where.name}.{os.getpid()}")
    np.save(f"{temporary}.npy", part.tokens)
    os.replace(f"{temporary}.npy", f"{where}.npy")
    about = np.array(json.dumps({"seen": part.seen, "dropped": part.dropped, "bad": part.bad}))
    np.savez(f"{temporary}.npz", lengths=part.lengths, records=part.records, text_bytes=part.text_bytes, about=about)
    os.replace(f"{temporary}.npz", f"{where}.npz")  # the sign that the part is whole
    return None


def _load(where: Path) -> Part:
    with np.load(f"{where}.npz") as found:
        about = json.loads(str(found["about"]))
        bad = [(record, Fault(*fault)) for record, fault in about["bad"]]
        tokens = np.load(f"{where}.npy", mmap_mode="r")
        return Part(
            tokens, found["lengths"], found["records"], found["text_bytes"], about["seen"], about["dropped"], bad
        )


def _join(
    cfg: Config, words: Words, out: Path, names: dict[Unit, str], split: Split, number: int, source: Source
) -> dict[str, Any]:
    """The folder of one part of a split; returns its entry in the manifest."""
    folder = out / f"{split}-{number}"
    folder.mkdir(exist_ok=True)
    held_out = split == "eval" and cfg.held_out_every > 0
    loaded = ((unit, _load(out / "parts" / names[unit])) for unit in source.units)
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


def _write_text(path: Path, text: str) -> None:
    """Whole or not at all, and on the disk before this returns."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
