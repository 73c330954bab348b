"""`tokenizer.json`, read by Hugging Face's `tokenizers`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.errors import DataError
from MaxText.tokenizer.files import damaged, decode_known, identity
from MaxText.tokenizer.library import need
from MaxText.tokenizer.pieces import SPACE

_BYTE = re.compile("<0x[0-9A-F]{2}>")
# What the files call them that do not say so in a tokenizer_config.json beside them.
_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>", "[BOS]", "[CLS]")
_EOS = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "[EOS]", "[SEP]")


class HuggingFaceTokenizer:
    """A `tokenizer.json`. Special tokens in a text are text: they are never read as the tokens that they spell."""

    def __init__(self, file: Path, content: bytes):
        library = need("tokenizers", "tokenizers", "tokenizer_type=huggingface")
        try:
            table = json.loads(content)
            self._model = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise damaged(file, "Hugging Face", error) from error
        self._model.encode_special_tokens = True
        self._model.no_truncation()
        self._model.no_padding()
        vocabulary: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
        self._special = frozenset(t["id"] for t in table.get("added_tokens") or () if t.get("special"))
        self._known = frozenset(vocabulary.values())
        self.name = f"huggingface {file.parent.name}/{file.name}"
        self.bos_id, self.eos_id = _ends(file, vocabulary)
        # Special tokens behind the others that no text contains (of images, of chats) need no row in the model.
        self.vocab_size = (
            max(self._known - self._special | {i for i in (self.bos_id, self.eos_id) if i is not None}) + 1
        )
        self.fingerprint = identity("huggingface", content, self.bos_id, self.eos_id)
        self.token_bytes = self._sizes(table, vocabulary)

    def encode(self, text: bytes | str) -> np.ndarray:
        (encoding,) = self._model.encode_batch_fast(
            [text.decode() if isinstance(text, bytes) else text], add_special_tokens=False
        )
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return decode_known(ids, self._known.__contains__, self._decode)

    def _decode(self, ids: list[int]) -> str:
        return str(self._model.decode(ids, skip_special_tokens=True))

    def _sizes(self, table: Mapping[str, Any], vocabulary: Mapping[str, int]) -> np.ndarray:
        """Bytes of each id. Byte-level tokens are spelt with one letter a byte, others as text."""
        kinds = json.dumps([table.get("decoder"), table.get("pre_tokenizer")])
        byte_level = '"ByteLevel"' in kinds
        added = {t["id"] for t in table.get("added_tokens") or ()}
        sizes = np.zeros(self.vocab_size, np.int32)
        for token, number in vocabulary.items():
            if number in self._special or number >= self.vocab_size:
                continue
            if byte_level and number not in added:
                sizes[number] = len(token)
            else:
                sizes[number] = 1 if _BYTE.fullmatch(token) else len(token.replace(SPACE, " ").encode())
        return sizes


def _ends(file: Path, vocabulary: Mapping[str, int]) -> tuple[int | None, int | None]:
    """bos and eos: 1. as the tokenizer_config.json beside the file says, 2. by the names that are common."""
    config = file.with_name("tokenizer_config.json")
    said: dict[str, Any] = {}
    if config.exists():
        try:
            said = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{config} is not JSON: {error}.", id="tokenizer.damaged") from error
    return _end(said, "bos_token", _BOS, vocabulary), _end(said, "eos_token", _EOS, vocabulary)


def _end(said: Mapping[str, Any], key: str, names: Iterable[str], vocabulary: Mapping[str, int]) -> int | None:
    if key in said:
        token = said[key]["content"] if isinstance(said[key], dict) else said[key]
        return None if token is None else vocabulary.get(token)
    return next((vocabulary[name] for name in names if name in vocabulary), None)
