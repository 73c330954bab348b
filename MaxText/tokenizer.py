"""Text to token ids and back.

A tokenizer only maps text; the special tokens (bos, eos) are placed by `data`, which knows where documents begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from MaxText.config import Config

REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


class Tokenizer(Protocol):
    """What the rest of the system needs to know of a tokenizer."""

    @property
    def name(self) -> str:
        """A few words for the start screen."""

    @property
    def fingerprint(self) -> str:
        """Equal exactly when two tokenizers give the same ids for every text."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size-1. The model's vocabulary may be larger (padded), never smaller."""

    @property
    def bos_id(self) -> int:
        """Marks the beginning of a document."""

    @property
    def eos_id(self) -> int:
        """Marks the end of a document."""

    @property
    def token_bytes(self) -> np.ndarray:
        """int32 [vocab_size]: bytes of text that each id stands for, 0 for special tokens."""

    def encode(self, text: bytes | str) -> np.ndarray:
        """The ids of `text`, int32 [tokens], without special tokens. `bytes` are taken as UTF-8."""

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of `ids`. Special tokens give nothing; ids or byte sequences without a text give U+FFFD."""


class ByteTokenizer:
    """One id per byte of UTF-8 (0..255), then bos (256) and eos (257). Needs no file."""

    name = "byte"
    bos_id = 256
    eos_id = 257
    vocab_size = 258
    fingerprint = "byte vocab=258 bos=256 eos=257"

    def __init__(self) -> None:
        self.token_bytes = np.where(np.arange(self.vocab_size) < 256, 1, 0).astype(np.int32)

    def encode(self, text: bytes | str) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return b"".join(self._bytes_of(int(i)) for i in ids).decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        if 0 <= token < 256:
            return bytes((token,))
        # A model whose vocabulary is padded can emit ids that no text has: they are shown, not hidden.
        return b"" if token in (self.bos_id, self.eos_id) else REPLACEMENT


def make(cfg: Config) -> Tokenizer:
    """The tokenizer that `tokenizer_type` names."""
    return {"byte": ByteTokenizer}[cfg.tokenizer_type]()
