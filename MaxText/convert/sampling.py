"""`generate`: a text, or ids, continued by the weights of a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from MaxText import tokenizer
from MaxText.convert import words
from MaxText.convert.gguf_words import BytePairs
from MaxText.convert.score import place
from MaxText.convert.source import Source
from MaxText.convert.verbs import words_missing
from MaxText.errors import DataError
from MaxText.generate import generate, make_sampler


def continue_ids(
    source: Source, ids: list[int], new: int, temperature: float = 0.0, devices: Sequence[jax.Device] | None = None
) -> list[int]:
    """`ids` and `new` further ones; the likeliest at temperature 0."""
    if not ids or min(ids) < 0 or max(ids) >= source.cfg.vocab_size:
        raise DataError(f"ids must lie between 0 and {source.cfg.vocab_size - 1}. [score.ids]", id="score.ids")
    placed = place(source, devices)
    slots = np.zeros((1, len(ids) + new), np.int32)
    slots[0, : len(ids)] = ids
    with jax.set_mesh(placed.mesh), jax.default_matmul_precision("highest"):
        sampler = make_sampler(
            placed.cfg, placed.layout.unsplit("activation_batch", "activation_length"), slots.shape[1]
        )
        whole = NamedSharding(placed.mesh, PartitionSpec())
        arguments = (slots, np.int32(len(ids)), np.asarray([temperature], np.float32), jax.random.key(0))
        found = sampler(placed.params, *(jax.device_put(x, whole) for x in arguments))
        return [int(i) for i in np.asarray(found)[0]]


def continue_text(source: Source, prompt: str, new: int, temperature: float = 0.0) -> str:
    """`prompt` and its continuation by at most `new` tokens."""
    own = _own_words(source)
    speech = own or _run_words(source)
    placed = place(source)
    cfg = placed.cfg.replace(add_bos=False) if isinstance(own, BytePairs) else placed.cfg
    with jax.set_mesh(placed.mesh):
        return generate(cfg, placed.layout, placed.params, speech, prompt, new, (temperature,))[0]


def _own_words(source: Source) -> Any:
    """The tokenizer that came with the weights, unless tokenizer_type asks for another."""
    if str(source.cfg.origin("tokenizer_type")) == "command line":
        return None
    where = words.folder(source)
    if (found := words.read(source)) is None and where is not None and (where / words.FILES[0]).is_file():
        return tokenizer.open_tokenizer("huggingface", str(where / words.FILES[0]))  # by its library
    return found


def _run_words(source: Source) -> Any:
    """The tokenizer that tokenizer_type asks for, or that the run had; byte is nobody's choice for foreign weights."""
    if str(source.cfg.origin("tokenizer_type")) == "default":
        raise words_missing(source)
    found = tokenizer.make(source.cfg)
    if found.vocab_size > source.cfg.vocab_size:
        raise words_missing(source)
    return found
