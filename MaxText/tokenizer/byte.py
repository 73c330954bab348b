"""The tokenizer that needs no file."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from MaxText.tokenizer.protocol import REPLACEMENT


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
