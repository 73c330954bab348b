"""The tokenizer inside a GGUF file: byte-level BPE (GPT-2, Radford et al., 2019), in Python."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

# GPT-2's split of a text. Python's classes stand for Unicode's: [^\W\d_] for letters, \d for numbers.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
# SmolLM splits numbers into digits first.
SPLITS = {"gpt-2": (_GPT2,), "default": (_GPT2,), "smollm": (r"\d|\D+", _GPT2)}
_CONTROL = 3  # token types: 1 normal, 2 unknown, 3 control, 6 byte


def _letters() -> dict[int, str]:
    """GPT-2's letter for every byte: itself if it is printable, else one from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


LETTERS = _letters()
BYTES = {letter: byte for byte, letter in LETTERS.items()}


class BytePairs:
    """A byte-level BPE tokenizer; see `tokenizer.Tokenizer` for what its members mean."""

    name = "byte pairs"

    def __init__(
        self, tokens: list[str], merges: list[str], control: set[int], bos: int, eos: int, splits: tuple[str, ...]
    ):
        self.tokens, self.merges, self.control = tokens, merges, control
        self.digits_apart = len(splits) > 1
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._splits = [re.compile(split) for split in splits]
        self.bos_id, self.eos_id, self.vocab_size = bos, eos, len(tokens)
        digest = hashlib.sha256(json.dumps([tokens, merges, sorted(control), bos, eos]).encode()).hexdigest()[:16]
        self.fingerprint = f"bpe vocab={len(tokens)} sha256={digest}"
        lengths = [0 if i in control else len(self._bytes(token)) for i, token in enumerate(tokens)]
        self.token_bytes = np.asarray(lengths, np.int32)
        self._merged = functools.lru_cache(maxsize=1 << 16)(self._merge)

    def encode(self, text: bytes | str) -> np.ndarray:
        """The ids of `text`, int32, without special tokens."""
        pieces = [text.decode(errors="replace") if isinstance(text, bytes) else text]
        for split in self._splits:
            pieces = [part for piece in pieces for part in split.findall(piece)]
        return np.asarray([i for piece in pieces for i in self._merged(piece)], np.int32)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of `ids`; special tokens give nothing."""
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size and int(i) not in self.control]
        return b"".join(self._bytes(self.tokens[i]) for i in known).decode(errors="replace")

    def _bytes(self, token: str) -> bytes:
        return b"".join(bytes((BYTES[c],)) if c in BYTES else c.encode() for c in token)

    def _merge(self, piece: str) -> tuple[int, ...]:
        """The ids of one piece: neighbours are joined, the pair that was learned first before the others."""
        parts = [LETTERS[byte] for byte in piece.encode()]
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:], strict=False))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            joined, i = [], 0
            while i < len(parts):
                both = tuple(parts[i : i + 2]) == best
                joined.append(parts[i] + parts[i + 1] if both else parts[i])
                i += 2 if both else 1
            parts = joined
        return tuple(self._ids[part] for part in parts)


def make(metadata: Mapping[str, Any]) -> BytePairs | None:
    """The tokenizer in a GGUF file's metadata; None if it is not of this kind."""
    if metadata.get("tokenizer.ggml.model") != "gpt2" or metadata.get("tokenizer.ggml.pre", "default") not in SPLITS:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    control = {i for i, kind in enumerate(kinds) if kind == _CONTROL}
    bos, eos = (metadata.get(f"tokenizer.ggml.{name}_token_id", 0) for name in ("bos", "eos"))
    splits = SPLITS[metadata.get("tokenizer.ggml.pre", "default")]
    return BytePairs(tokens, metadata["tokenizer.ggml.merges"], control, bos, eos, splits)
