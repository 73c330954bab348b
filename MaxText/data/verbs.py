"""`python -m MaxText data prepare | show | verify` and `python -m MaxText tokenizer train`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from MaxText import config, tokenizer
from MaxText.data.dataset import Shown
from MaxText.errors import ConfigError

USAGE = """usage: python -m MaxText data VERB ...
  prepare CONFIG [key=value ...] out=FOLDER [workers=N]   tokenize and pack once; train with dataset_type=prepared
  show CONFIG [key=value ...] step=N [row=N]              the documents that a step sees
  verify FOLDER                                           prepared rows against their checksums"""
TOKENIZER_USAGE = """usage: python -m MaxText tokenizer train CONFIG [key=value ...] vocab_size=N out=FILE
  train_files of CONFIG are read. FILE ends in .model: SentencePiece; in .json: byte-level BPE for tokenizers"""


def data(arguments: Sequence[str]) -> str:
    """Run one of the data verbs; returns what it says."""
    verbs: dict[str, Callable[[Sequence[str]], str]] = {"prepare": _prepare, "show": _show, "verify": _verify}
    if not arguments or arguments[0] not in verbs:
        raise _usage(f"no verb {arguments[0]}" if arguments else "a verb is missing")
    return verbs[arguments[0]](arguments[1:])


def train_tokenizer(arguments: Sequence[str]) -> str:
    """`tokenizer train`; returns what was made."""
    if not arguments or arguments[0] != "train":
        raise ConfigError(f"the verb is train [cli.usage]\n{TOKENIZER_USAGE}", id="cli.usage")
    rest, own = _own(arguments[1:], {"out": "", "vocab_size": ""}, TOKENIZER_USAGE)
    from MaxText.data import teach

    return teach.train(config.load(rest), _local(own["out"]), _number("vocab_size", own["vocab_size"], 1))


def _prepare(arguments: Sequence[str]) -> str:
    rest, own = _own(arguments, {"out": "", "workers": "0"}, USAGE)
    from MaxText.data import prepare

    cfg = config.load(rest)
    workers = _number("workers", own["workers"])
    return prepare.prepare(cfg, tokenizer.make(cfg), _local(own["out"]), workers)


def _verify(arguments: Sequence[str]) -> str:
    if len(arguments) != 1:
        raise _usage("verify takes one folder")
    from MaxText.data import prepared

    return prepared.verify(arguments[0])


def _show(arguments: Sequence[str]) -> str:
    rest, own = _own(arguments, {"step": "", "row": "-1"}, USAGE)
    from MaxText.data import open_train

    cfg = config.load(rest)
    step, row = _number("step", own["step"]), _number("row", own["row"], least=-1)
    words = tokenizer.make(cfg)
    dataset = open_train(cfg, words, _global_batch(cfg))
    if row >= dataset.global_batch:
        raise ConfigError(f"row={row} is beyond the batch: rows 0..{dataset.global_batch - 1}", id="cli.usage")
    rows = slice(row, row + 1) if row >= 0 else None
    shown = dataset.show(step, rows)
    batch = dataset.batch(step, rows)
    lines = [f"step {step}: {dataset.source}"]
    for number, one in enumerate(shown):
        lines += _row(one, batch["inputs"][number], batch["loss_mask"][number], words)
    return "\n".join(lines)


def _row(one: Shown, inputs: Any, mask: Any, words: tokenizer.Tokenizer) -> list[str]:
    lines = [f"row {one.place} (epoch {one.epoch}, row {one.row} of {one.part}):"]
    for name, piece in one.pieces:
        here = slice(piece.column, piece.column + piece.pairs)
        untrained = "" if mask[here].any() else ", trains nothing"
        text = " ".join(words.decode(inputs[here][:40]).split())
        last = piece.offset + piece.pairs - 1
        lines.append(f"  {name} tokens {piece.offset}..{last}{untrained}: {text[:60]}")
    return lines


def _global_batch(cfg: config.Config) -> int:
    """1. global_batch_size, 2. what the planner makes of the devices that are here."""
    if cfg.global_batch_size:
        return cfg.global_batch_size
    from MaxText import decoder, hardware, planner

    found = hardware.detect()
    resolved, _ = hardware.resolve(cfg, found)
    return planner.make(resolved, decoder.declare(resolved), found).global_batch_size


def _own(arguments: Sequence[str], defaults: dict[str, str], usage: str) -> tuple[list[str], dict[str, str]]:
    """The arguments that are for `config.load`, and the verb's own `name=value`; one without default must be there."""
    own, rest = dict(defaults), []
    for argument in arguments:
        name, mark, value = argument.partition("=")
        if mark and name in defaults:
            own[name] = value
        else:
            rest.append(argument)
    missing = [name for name, value in own.items() if not value]
    if missing:
        names = " and ".join(f"{name}=..." for name in missing)
        raise ConfigError(f"{names} is missing [cli.usage]\n{usage}", id="cli.usage")
    return rest, own


def _local(out: str) -> Path:
    """What is written, and mapped into memory later, lies on a file system of this machine."""
    if "://" in out:
        raise ConfigError(f"out={out} is a URL. Give a local path, or mount the bucket.", id="cli.usage")
    return Path(out).expanduser()


def _number(name: str, text: str, least: int = 0) -> int:
    if not re.fullmatch(r"-?[0-9]{1,12}", text) or int(text) < least:
        raise ConfigError(f"{name}={text} is no whole number from {least} on [cli.usage]", id="cli.usage")
    return int(text)


def _usage(text: str) -> ConfigError:
    return ConfigError(f"{text} [cli.usage]\n{USAGE}", id="cli.usage")
