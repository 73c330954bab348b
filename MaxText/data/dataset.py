"""A split of the data as global batches: `batch(step)`, a pure function of (recipe, seed, global batch, step)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from MaxText.data import sources
from MaxText.data.order import ORDER_VERSION, Order
from MaxText.data.rows import Batch, Rows, SyntheticRows, TextRows, join
from MaxText.errors import DataError, DataExhausted
from MaxText.tokenizer import Tokenizer

if TYPE_CHECKING:
    from MaxText.config import Config

Split = Literal["train", "eval"]

FORMAT = 1  # part of the fingerprint: change it whenever the rows of a recipe change
_BLOCK = 1 << 16  # rows looked at in one go when a summary counts
SYNTHETIC_EVAL_BATCHES = 8  # the fixed eval set of synthetic data when eval_steps=-1


@dataclass(frozen=True)
class Dataset:
    """One split in rows of `length` tokens, `global_batch` rows to a step. Nothing in here changes after it is opened.

    source: one line for people. documents, tokens (with special tokens), bytes (of text), rows: 0 for endless data.
    dropped: documents without a row, counted by reason.
    fingerprint: the recipe, JSON-able; equal recipes give equal batches.
    """

    split: Split
    source: str
    documents: int
    tokens: int
    bytes: int
    length: int
    global_batch: int
    dropped: dict[str, int]
    fingerprint: dict[str, Any]
    contents: Rows
    order: Order

    @property
    def rows(self) -> int:
        """Rows in one epoch; 0 = endless."""
        return self.contents.count or 0

    @property
    def batches(self) -> int | None:
        """Global batches; None = endless. Train: whole batches in num_epoch epochs. Eval: the last one is padded."""
        return self.order.batches

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Global batch `step`, or its `rows` (a host's share): int32 [rows, length] arrays
        inputs, targets, positions, segments, loss_mask.

        Raises DataExhausted when `step` is past the end.
        """
        if step < 0:
            raise ValueError(f"step {step} < 0")
        check_enough(self, step + 1)
        first, stop, stride = (rows or slice(None)).indices(self.global_batch)
        if stride != 1 or (rows and (rows.stop or 0) > self.global_batch):
            raise ValueError(f"{rows} is no contiguous part of a global batch of {self.global_batch} rows")
        return self.contents.take(self.order.rows_at(step * self.global_batch + first, step * self.global_batch + stop))

    def summary(self, steps: int | None = None) -> dict[str, Any]:
        """Accounting after `steps` global batches (default: all there are).

        rows seen; rows_repeated (seen in an earlier epoch) and rows_unseen; epochs; tokens: real targets;
        padding: slots without one; dropped: documents by reason; packing_efficiency: tokens / (tokens + padding).
        """
        steps = steps if steps is not None else self.batches
        if steps is None:
            raise ValueError("the data are endless: say how many steps")
        slots = steps * self.global_batch
        limit = slots if self.order.epochs is None or not self.rows else min(slots, self.rows * self.order.epochs)
        tokens = self._targets(limit)
        return {
            "rows": limit,
            "rows_repeated": max(0, limit - self.rows) if self.rows else 0,
            "rows_unseen": max(0, self.rows - limit),
            "epochs": limit / self.rows if self.rows else 0.0,
            "tokens": tokens,
            "padding": slots * self.length - tokens,
            "dropped": dict(self.dropped),
            "packing_efficiency": tokens / (slots * self.length) if slots else 0.0,
        }

    def _targets(self, rows: int) -> int:
        """Real targets in the first `rows` rows of the order."""
        whole, rest = divmod(rows, self.rows) if self.rows else (0, rows)
        first = whole * self.rows
        return (whole * self._count(0, self.rows) if whole else 0) + self._count(first, first + rest)

    def _count(self, first: int, stop: int) -> int:
        blocks = ((i, min(i + _BLOCK, stop)) for i in range(first, stop, _BLOCK))
        return sum(int(self.contents.pairs(self.order.rows_at(*block)).sum()) for block in blocks)


def check_enough(dataset: Dataset, steps: int) -> None:
    """DataExhausted when the split holds fewer than `steps` global batches. For the time before anything starts."""
    available = dataset.batches
    if available is None or steps <= available:
        return
    order, per_step = dataset.order, dataset.global_batch * dataset.length
    need, rows = f"{steps * per_step:,} tokens in {steps * order.global_batch:,} rows", dataset.rows
    if dataset.split == "eval":
        raise DataExhausted(
            f"eval_steps={steps} needs {need}, but the eval data hold {rows:,} rows = {available} batches of "
            f"{order.global_batch}. Set eval_steps={available}, or -1 for all.",
            id="data.exhausted",
        )
    epochs = order.epochs or 0
    cure = f"num_epoch={-(-steps * order.global_batch // rows)} (or -1: for ever)"
    cure += f", or steps={available}" if available else ", or a smaller batch"
    raise DataExhausted(
        f"The data end before step {steps}: {steps} steps of {order.global_batch} x {dataset.length} need {need}, but "
        f"{rows:,} rows x num_epoch={epochs} give {rows * epochs * dataset.length:,} tokens = {available} whole steps. "
        f"Set {cure}.",
        id="data.exhausted",
    )


def open_split(cfg: Config, tokenizer: Tokenizer, split: Split, global_batch: int) -> Dataset:
    """Reads, checks and tokenizes one split. Raises DataError.

    dataset_type=text: `train_files` for num_epoch epochs, by row in random order if enable_data_shuffling;
    `eval_files` once, in order.
    dataset_type=synthetic: endless random ids for train (num_epoch has no meaning there), eval_steps batches for eval.
    """
    if tokenizer.vocab_size > cfg.vocab_size:
        raise DataError(
            f"The {tokenizer.name} tokenizer has ids 0..{tokenizer.vocab_size - 1}, but vocab_size={cfg.vocab_size}. "
            f"Set vocab_size={tokenizer.vocab_size} or more, such as {-(-tokenizer.vocab_size // 32) * 32}.",
            id="data.vocabulary",
        )
    opener = {"text": _open_text, "synthetic": _open_synthetic}[cfg.dataset_type]
    return opener(cfg, tokenizer, split, global_batch)


def _open_text(cfg: Config, tokenizer: Tokenizer, split: Split, global_batch: int) -> Dataset:
    documents = [sources.read(file) for file in _files(cfg, split)]
    ids = [_ids(document, tokenizer, cfg) for document in documents]
    kept = [i for i in ids if len(i) > 1]
    if not kept:
        raise DataError(
            f"{split}_files: no document has two tokens: nothing to predict. Add text, or set add_bos=true.",
            id="data.no-targets",
        )
    stream, lengths = join(kept, np.uint16 if cfg.vocab_size <= 1 << 16 else np.int32)
    rows = TextRows(stream, lengths, cfg.max_target_length, packing=cfg.packing)
    return Dataset(
        split=split,
        source=_describe(documents),
        documents=len(kept),
        tokens=len(stream),
        bytes=sum(len(d.text) for d in documents),
        length=cfg.max_target_length,
        global_batch=global_batch,
        dropped={"single token": len(ids) - len(kept)} if len(ids) > len(kept) else {},
        fingerprint=_fingerprint(cfg, split, global_batch)
        | {
            "files": [f"{d.name.rpartition('/')[2]} {len(d.text)} bytes sha256:{d.sha256}" for d in documents],
            "tokenizer": tokenizer.fingerprint,
            "add_bos": cfg.add_bos,
            "add_eos": cfg.add_eos,
            "packing": cfg.packing_type if cfg.packing else "none",
        },
        contents=rows,
        order=_order(cfg, split, rows.count, global_batch),
    )


def _open_synthetic(cfg: Config, tokenizer: Tokenizer, split: Split, global_batch: int) -> Dataset:
    eval_batches = cfg.eval_steps if cfg.eval_steps > 0 else SYNTHETIC_EVAL_BATCHES
    rows = SyntheticRows(
        seed=2 * cfg.data_shuffle_seed + (split == "eval"),
        vocabulary=cfg.vocab_size,
        length=cfg.max_target_length,
        count=eval_batches * global_batch if split == "eval" else None,
    )
    return Dataset(
        split=split,
        source=f"synthetic: random ids below {cfg.vocab_size}" + ("" if split == "eval" else ", endless"),
        documents=rows.count or 0,
        tokens=(rows.count or 0) * (cfg.max_target_length + 1),
        bytes=0,
        length=cfg.max_target_length,
        global_batch=global_batch,
        dropped={},
        fingerprint=_fingerprint(cfg, split, global_batch)
        | {"data_shuffle_seed": cfg.data_shuffle_seed, "vocab_size": cfg.vocab_size},
        contents=rows,
        order=Order(rows.count, global_batch, seed=0, shuffle=False, epochs=1, pad=split == "eval"),
    )


def _files(cfg: Config, split: Split) -> list[sources.File]:
    """The files of `split`, after a check that the other split, if there is one, has none of them."""
    names = {"train": cfg.train_files, "eval": cfg.eval_files}
    found = {s: sources.find(n, f"{s}_files") for s, n in names.items() if n or s == split}
    if len(found) == 2:
        sources.refuse_overlap(found["train"], found["eval"])
    return found[split]


def _ids(document: sources.Document, tokenizer: Tokenizer, cfg: Config) -> np.ndarray:
    bos = [tokenizer.bos_id] if cfg.add_bos else []
    eos = [tokenizer.eos_id] if cfg.add_eos else []
    ids = np.concatenate([np.array(bos, np.int32), tokenizer.encode(document.text), np.array(eos, np.int32)])
    if len(ids) and not 0 <= ids.min() <= ids.max() < cfg.vocab_size:
        raise DataError(
            f"{document.name}: token ids {ids.min()}..{ids.max()} are not all within 0..{cfg.vocab_size - 1} "
            f"(vocab_size={cfg.vocab_size}); the tokenizer says it has {tokenizer.vocab_size}.",
            id="data.token-range",
        )
    return ids


def _order(cfg: Config, split: Split, rows: int, global_batch: int) -> Order:
    if split == "eval":
        return Order(rows, global_batch, seed=0, shuffle=False, epochs=1, pad=True)
    epochs = None if cfg.num_epoch < 0 else cfg.num_epoch
    return Order(rows, global_batch, cfg.data_shuffle_seed, cfg.enable_data_shuffling, epochs, pad=False)


def _fingerprint(cfg: Config, split: Split, global_batch: int) -> dict[str, Any]:
    """What every recipe has. num_epoch is not in it: it ends the data but changes no batch, so a run can go on."""
    shuffled = split == "train" and cfg.dataset_type == "text" and cfg.enable_data_shuffling
    return {
        "format": FORMAT,
        "dataset_type": cfg.dataset_type,
        "split": split,
        "max_target_length": cfg.max_target_length,
        "global_batch": global_batch,
        "order": f"{ORDER_VERSION} seed={cfg.data_shuffle_seed}" if shuffled else "as listed",
    }


def _describe(documents: list[sources.Document]) -> str:
    names = [d.name.rpartition("/")[2] for d in documents]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"text: {shown} ({sum(len(d.text) for d in documents):,} bytes)"
