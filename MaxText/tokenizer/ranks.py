"""tiktoken's ranks (`*.tiktoken`) and Mistral's `tekken.json`, read by `tiktoken`."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from MaxText.errors import DataError
from MaxText.tokenizer.files import damaged, decode_known, identity
from MaxText.tokenizer.library import need

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORD_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _WORD_END + r"|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _WORD_END + r"|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Family(NamedTuple):
    """What a file of ranks does not say: how text is cut into words, its special ids."""

    pattern: str
    vocab_size: int
    bos: int | None
    eos: int


_FAMILIES = {
    50_256: _Family(_GPT2, 50_257, None, 50_256),  # gpt2, r50k_base
    50_280: _Family(_GPT2, 50_281, None, 50_256),  # p50k_base: its end stands amid the ranks
    100_256: _Family(_CL100K, 100_277, None, 100_257),  # cl100k_base
    128_000: _Family(_CL100K, 128_256, 128_000, 128_001),  # Llama 3
    199_998: _Family(_O200K, 201_088, None, 199_999),  # o200k_base, o200k_harmony
}
"""Number of ranks → family."""


class TiktokenTokenizer:
    """Byte-pair ranks. Special tokens in a text are text: they are never read as the tokens that they spell."""

    def __init__(self, file: Path, content: bytes):
        library = need("tiktoken", "tiktoken", "tokenizer_type=tiktoken")
        try:
            ranks, self._first, family = _tekken(content) if content[:1] == b"{" else _ranks(content, file)
            self._model = library.Encoding(file.stem, pat_str=family.pattern, mergeable_ranks=ranks, special_tokens={})
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise damaged(file, "tiktoken", error) from error
        self.name = f"tiktoken {file.name}"
        self.vocab_size, self.bos_id, self.eos_id = family.vocab_size, family.bos, family.eos
        self.fingerprint = identity("tiktoken", content, self.bos_id, self.eos_id)
        self.token_bytes = np.zeros(self.vocab_size, np.int32)
        for token, rank in ranks.items():
            self.token_bytes[rank + self._first] = len(token)
        self._known = frozenset(np.flatnonzero(self.token_bytes).tolist())

    def encode(self, text: bytes | str) -> np.ndarray:
        ids = self._model.encode_ordinary(text.decode() if isinstance(text, bytes) else text)
        return np.array(ids, np.int32) + self._first

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        shown = (i for i in map(int, ids) if i in self._known or not 0 <= i < self.vocab_size)
        return decode_known(shown, self._known.__contains__, self._decode)

    def _decode(self, ids: list[int]) -> str:
        return str(self._model.decode([i - self._first for i in ids], errors="replace"))


def _ranks(content: bytes, file: Path) -> tuple[dict[bytes, int], int, _Family]:
    """Lines of a token in base64 and its rank."""
    pairs = (line.split() for line in content.splitlines() if line)
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    if len(ranks) not in _FAMILIES:
        raise DataError(
            f"{file} holds {len(ranks)} ranks, which is none of the known families: "
            f"{', '.join(map(str, _FAMILIES))}. Its tokenizer.json can be read with tokenizer_type=huggingface.",
            id="tokenizer.damaged",
        )
    return ranks, 0, _FAMILIES[len(ranks)]


def _tekken(content: bytes) -> tuple[dict[bytes, int], int, _Family]:
    """Mistral's file: its special tokens come first, so every rank is moved up by their number."""
    table = json.loads(content)
    config = table["config"]
    special = int(config["default_num_special_tokens"])
    size = int(config["default_vocab_size"])
    ranks = {base64.b64decode(t["token_bytes"]): int(t["rank"]) for t in table["vocab"][: size - special]}
    names = {t["token_str"]: int(t["rank"]) for t in table.get("special_tokens") or ()}
    return ranks, special, _Family(config["pattern"], size, names.get("<s>", 1), names.get("</s>", 2))
