"""`open_split`: from the configuration to a data set that is read, checked and tokenized."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from MaxText.config.data_rules import stage
from MaxText.data import corpus, mixture, packing, recipe, rows
from MaxText.data.corpus import Corpus, Stream, Words
from MaxText.data.dataset import Dataset, Part, Split
from MaxText.data.mixture import MIXTURE_VERSION, Mixture
from MaxText.data.names import Names, canonical, quarantined
from MaxText.data.order import ORDER_VERSION, Order
from MaxText.data.recipe import Source
from MaxText.data.rows import SyntheticRows
from MaxText.errors import DataError
from MaxText.tokenizer import Tokenizer

if TYPE_CHECKING:
    from MaxText.config import Config

FORMAT = 1  # part of the fingerprint: change it whenever the rows of a recipe change
SYNTHETIC_EVAL_BATCHES = 8  # the fixed eval set of synthetic data when eval_steps=-1


def open_split(cfg: Config, tokenizer: Tokenizer, split: Split, global_batch: int) -> Dataset:
    """Reads, checks and tokenizes one split. Raises DataError.

    Training data: num_epoch epochs, by row in random order if enable_data_shuffling. Held-out data: once, in order.
    dataset_type=synthetic: endless random ids for train (num_epoch has no meaning there), eval_steps batches for eval.
    """
    check_tokenizer(cfg, tokenizer)
    if cfg.dataset_type == "synthetic":
        return _open_synthetic(cfg, split, global_batch)
    if cfg.dataset_type == "prepared":
        from MaxText.data import prepared

        return prepared.open_split(cfg, tokenizer, split, global_batch)
    found = sources_of(cfg, split)
    words = words_of(cfg, tokenizer)
    streamed = split == "eval" and cfg.hf_streaming  # not read further than it is evaluated on
    enough = max(cfg.eval_steps, 0) * global_batch * cfg.max_target_length if streamed else 0
    corpora = [read(source, words, cfg.held_out_every, split, enough) for source in found]
    weights = [source.weight for source in found]
    dropped: Counter[str] = Counter()
    for one in corpora:
        dropped.update(one.dropped)
    return Dataset(
        split=split,
        source=describe(cfg, found),
        documents=sum(len(one.lengths) for one in corpora),
        tokens=sum(len(one.tokens) for one in corpora),
        bytes=sum(one.text_bytes for one in corpora),
        length=cfg.max_target_length,
        global_batch=global_batch,
        dropped=dict(dropped),
        fingerprint=fingerprint_of(cfg, split, global_batch)
        | recipe_fingerprint(cfg, tokenizer, found, split)
        | mixture_fingerprint(cfg, [source.name for source in found], weights),
        parts=parts_of(cfg, split, global_batch, list(map(material_of, found, corpora))),
        mixture=mixture_of(cfg, weights, global_batch) if len(found) > 1 else None,
        bad=tuple(bad for one in corpora for bad in one.bad),
    )


def sources_of(cfg: Config, split: Split) -> list[Source]:
    """The sources of a split. What is held out is one set, also of a mixture."""
    found = recipe.open_sources(cfg, split)
    return [_together(found)] if split == "eval" else found


def check_tokenizer(cfg: Config, tokenizer: Tokenizer) -> None:
    """DataError where the tokenizer does not fit the model, or has no token that the configuration wants placed."""
    if tokenizer.vocab_size > cfg.vocab_size:
        raise DataError(
            f"The {tokenizer.name} tokenizer has ids 0..{tokenizer.vocab_size - 1}, but vocab_size={cfg.vocab_size}. "
            f"Set vocab_size={tokenizer.vocab_size} or more, such as {-(-tokenizer.vocab_size // 32) * 32}.",
            id="data.vocabulary",
        )
    for key, token in (("add_bos", tokenizer.bos_id), ("add_eos", tokenizer.eos_id)):
        if getattr(cfg, key) and token is None and cfg.dataset_type != "synthetic":
            raise DataError(
                f"{key}=true, but the {tokenizer.name} tokenizer has no such token. Set {key}=false.",
                id="data.special-token",
            )


def words_of(cfg: Config, tokenizer: Tokenizer) -> Words:
    return Words(tokenizer, cfg.vocab_size, cfg.add_bos, cfg.add_eos, refuse=cfg.bad_documents == "refuse")


def read(source: Source, words: Words, held_out_every: int, split: Split, enough: int = 0) -> Corpus:
    """All documents of a source that belong to `split`, tokenized here and now; see `corpus.tokenize` for `enough`."""
    parts = ((unit, corpus.tokenize(unit, words, enough)) for unit in source.units)
    return corpus.build(parts, words.dtype, held_out_every, held_out=split == "eval" and held_out_every > 0)


def packing_kind(cfg: Config) -> str:
    return cfg.packing_type if cfg.packing else "none"


class Material(NamedTuple):
    """The tokens of one part of a split, ready to be cut into rows."""

    name: str
    weight: float
    stream: Stream
    starts: np.ndarray
    names: Names
    plan: packing.Plan | None = None  # None: made here


def material_of(source: Source, one: Corpus) -> Material:
    return Material(source.name, source.weight, one.tokens, rows.starts_of(one.lengths), Names(one.files, one.records))


def parts_of(cfg: Config, split: Split, global_batch: int, materials: list[Material]) -> tuple[Part, ...]:
    """The parts of a data set, quarantined documents masked."""
    for one in materials:
        require_targets(split, one.name, len(one.starts))
    names = [one.names for one in materials]
    masked = quarantined(names, cfg.quarantine) if split == "train" else [rows.NONE_MASKED] * len(names)
    parts = []
    for number, one in enumerate(materials):
        if len(masked[number]) == len(one.starts):
            raise DataError(
                f"quarantine names all {len(one.starts)} documents of {split} data ({one.name}), so there is nothing "
                "to train on. Take documents out of the quarantine, or leave this source out.",
                id="data.no-targets",
            )
        kind, length, cache = packing_kind(cfg), cfg.max_target_length, cfg.data_cache_dir
        contents = rows.make(one.stream, one.starts, length, kind, masked[number], cache, one.plan)
        parts.append(Part(one.name, contents, order_of(cfg, split, contents.count, global_batch, number), one.names))
    return tuple(parts)


def require_targets(split: Split, name: str, documents: int) -> None:
    if not documents:
        raise DataError(
            f"{split} data ({name}): no document has two tokens, so there is nothing to predict. Add text, or set "
            "add_bos=true.",
            id="data.no-targets",
        )


def order_of(cfg: Config, split: Split, count: int, global_batch: int, part: int = 0) -> Order:
    """The order of the rows of one part. Each part of a mixture has a shuffle of its own."""
    if split == "eval":
        return Order(count, global_batch, seed=0, shuffle=False, epochs=1, pad=True)
    epochs = None if cfg.num_epoch < 0 else cfg.num_epoch
    seed = cfg.data_shuffle_seed + (part << 40)
    return Order(count, global_batch, seed, cfg.enable_data_shuffling, epochs, pad=False)


def mixture_of(cfg: Config, weights: list[float], global_batch: int) -> Mixture:
    """The mixture of parts with these weights, and its schedule."""
    stages = [(0, weights), *((step * global_batch, list(shares)) for step, shares in map(stage, cfg.mixture_schedule))]
    for step, shares in stages:
        if len(shares) != len(weights):
            raise DataError(
                f"mixture_schedule has {len(shares)} weights from row {step} on, and the mixture {len(weights)} parts.",
                id="data.mixture",
            )
    return mixture.make(stages, cfg.data_shuffle_seed)


def fingerprint_of(cfg: Config, split: Split, global_batch: int) -> dict[str, Any]:
    """What every recipe has. num_epoch is not in it: it ends the data but changes no batch, so a run can go on."""
    train = split == "train" and cfg.dataset_type != "synthetic"
    quarantine = {"quarantine": sorted(set(map(canonical, cfg.quarantine)))} if train and cfg.quarantine else {}
    return quarantine | {
        "format": FORMAT,
        "dataset_type": cfg.dataset_type,
        "split": split,
        "max_target_length": cfg.max_target_length,
        "global_batch": global_batch,
        "order": f"{ORDER_VERSION} seed={cfg.data_shuffle_seed}"
        if train and cfg.enable_data_shuffling
        else "as listed",
    }


def recipe_fingerprint(cfg: Config, tokenizer: Tokenizer, found: list[Source], split: Split) -> dict[str, Any]:
    """What changes a document, a row or its place; keys with their default value are left out."""
    lines = [source.identity() for source in found]
    seen: dict[str, Any] = {
        "files": lines[0] if len(lines) == 1 else [line for one in lines for line in one],
        "tokenizer": tokenizer.fingerprint,
        "add_bos": cfg.add_bos,
        "add_eos": cfg.add_eos,
        "packing": packing_kind(cfg),
    }
    if packing_kind(cfg) in ("first_fit", "best_fit"):
        seen["packing"] += f" {packing.PLAN_VERSION}"
    options = recipe.column(cfg, "train" if cfg.held_out_every else split)
    changed = {
        "column": options["column"] if options["column"] != "text" else None,
        "ids": options["ids"] or None,
        "held_out_every": cfg.held_out_every or None,
    }
    return seen | {key: value for key, value in changed.items() if value is not None}


def mixture_fingerprint(cfg: Config, names: list[str], weights: list[float]) -> dict[str, Any]:
    """What decides which part gives a row; nothing where there is one part."""
    if len(names) == 1:
        return {}
    shares = [f"{name.rpartition('/')[2]} {weight:g}" for name, weight in zip(names, weights, strict=True)]
    return {"mixture": [MIXTURE_VERSION, *shares], "mixture_schedule": list(cfg.mixture_schedule)}


def _together(found: list[Source]) -> Source:
    """One source of all: what is held out of a mixture is one fixed set."""
    if len(found) == 1:
        return found[0]
    return Source(
        name="held out",
        units=tuple(unit for source in found for unit in source.units),
        size=sum(source.size for source in found),
        identity=lambda: [line for source in found for line in source.identity()],
        files=tuple(file for source in found for file in source.files),
    )


def describe(cfg: Config, found: list[Source]) -> str:
    """One line about the sources."""
    files = [file.name.rpartition("/")[2] for source in found for file in source.files]
    shown = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    shown = shown if files else ", ".join(source.name for source in found)
    mixed = f" in a mixture of {len(found)}" if len(found) > 1 else ""
    return f"{cfg.dataset_type}: {shown} ({sum(source.size for source in found):,} bytes){mixed}"


def _open_synthetic(cfg: Config, split: Split, global_batch: int) -> Dataset:
    eval_batches = cfg.eval_steps if cfg.eval_steps > 0 else SYNTHETIC_EVAL_BATCHES
    contents = SyntheticRows(
        seed=2 * cfg.data_shuffle_seed + (split == "eval"),
        vocabulary=cfg.vocab_size,
        length=cfg.max_target_length,
        count=eval_batches * global_batch if split == "eval" else None,
    )
    order = Order(contents.count, global_batch, seed=0, shuffle=False, epochs=1, pad=split == "eval")
    return Dataset(
        split=split,
        source=f"synthetic: random ids below {cfg.vocab_size}" + ("" if split == "eval" else ", endless"),
        documents=contents.count or 0,
        tokens=(contents.count or 0) * (cfg.max_target_length + 1),
        bytes=0,
        length=cfg.max_target_length,
        global_batch=global_batch,
        dropped={},
        fingerprint=fingerprint_of(cfg, split, global_batch)
        | {"data_shuffle_seed": cfg.data_shuffle_seed, "vocab_size": cfg.vocab_size},
        parts=(Part("synthetic", contents, order),),
    )
