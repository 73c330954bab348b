"""Text to token ids and back.

A tokenizer only maps text; the special tokens (bos, eos) are placed by `data`, which knows where documents begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from MaxText.tokenizer.byte import ByteTokenizer
from MaxText.tokenizer.protocol import REPLACEMENT, Tokenizer

if TYPE_CHECKING:
    from MaxText.config import Config

__all__ = ["REPLACEMENT", "ByteTokenizer", "Tokenizer", "make", "open_tokenizer"]


def make(cfg: Config) -> Tokenizer:
    """The tokenizer that `tokenizer_type` and `tokenizer_path` name. DataError where the file does not fit."""
    return open_tokenizer(cfg.tokenizer_type, cfg.tokenizer_path)


def open_tokenizer(kind: str, path: str) -> Tokenizer:
    """The same by the values of these keys."""
    if kind == "byte":
        return ByteTokenizer()
    from MaxText.tokenizer import files  # its libraries are imported late

    return files.open_file(kind, path)
