"""SentencePiece models (Kudo and Richardson, 2018, arXiv:1808.06226)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from MaxText.tokenizer.files import damaged, decode_known, identity
from MaxText.tokenizer.library import need

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class SentencePieceTokenizer:
    """A `tokenizer.model`. Special pieces in a text are text: they are never read as the tokens that they spell."""

    def __init__(self, file: Path, content: bytes):
        library = need("sentencepiece", "sentencepiece", "tokenizer_type=sentencepiece")
        try:
            self._model = library.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError) as error:
            raise damaged(file, "SentencePiece", error) from error
        self.name = f"sentencepiece {file.name}"
        self.vocab_size = int(self._model.get_piece_size())
        self.bos_id, self.eos_id = (i if i >= 0 else None for i in (self._model.bos_id(), self._model.eos_id()))
        self.fingerprint = identity("sentencepiece", content, self.bos_id, self.eos_id)
        self.token_bytes = np.array([self._bytes(i) for i in range(self.vocab_size)], np.int32)

    def encode(self, text: bytes | str) -> np.ndarray:
        return np.array(self._model.encode(text.decode() if isinstance(text, bytes) else text), np.int32)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return decode_known(ids, lambda i: 0 <= i < self.vocab_size, self._model.decode)

    def _bytes(self, token: int) -> int:
        model = self._model
        if model.is_control(token) or model.is_unknown(token) or model.is_unused(token):
            return 0
        return 1 if model.is_byte(token) else len(model.id_to_piece(token).replace(SPACE, " ").encode())
