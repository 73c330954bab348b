"""What the rest of the system needs to know of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


class Tokenizer(Protocol):
    """Text to ids and back; nothing in here changes after it is made, and it may be pickled."""

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
    def bos_id(self) -> int | None:
        """Marks the beginning of a document; None where there is no such token."""

    @property
    def eos_id(self) -> int | None:
        """Marks the end of a document; None where there is no such token."""

    @property
    def token_bytes(self) -> np.ndarray:
        """int32 [vocab_size]: bytes of text that each id stands for, 0 for special tokens."""

    def encode(self, text: bytes | str) -> np.ndarray:
        """The ids of `text`, int32 [tokens], without special tokens. `bytes` are taken as UTF-8."""

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of `ids`. Special tokens give nothing; ids or byte sequences without a text give U+FFFD."""
