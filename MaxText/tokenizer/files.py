"""Tokenizers that are files: found, told apart, opened. Each module imports its library when it is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from MaxText.errors import DataError
from MaxText.tokenizer.protocol import REPLACEMENT, Tokenizer

_NAMES = {
    "sentencepiece": ("tokenizer.model", "*.model"),
    "huggingface": ("tokenizer.json",),
    "tiktoken": ("tekken.json", "*.tiktoken", "tokenizer.model"),
}
"""tokenizer_type → what its file is called in a folder, the likeliest first."""


def open_file(kind: str, path: str) -> Tokenizer:
    """The tokenizer of `tokenizer_type=kind` in the file or folder `path`. DataError where it is none."""
    file = _find(kind, Path(path).expanduser())
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer_path={path} cannot be read: {error.strerror}.", id="tokenizer.missing") from error
    if not content:
        raise DataError(f"tokenizer_path={path} is empty (0 bytes).", id="tokenizer.damaged")
    if kind == "sentencepiece":
        from MaxText.tokenizer.pieces import SentencePieceTokenizer

        return SentencePieceTokenizer(file, content)
    if kind == "huggingface":
        from MaxText.tokenizer.hugging import HuggingFaceTokenizer

        return HuggingFaceTokenizer(file, content)
    from MaxText.tokenizer.ranks import TiktokenTokenizer

    return TiktokenTokenizer(file, content)


def damaged(file: Path, kind: str, error: object) -> DataError:
    """The error for a file that is not what tokenizer_type says."""
    line = (str(error).strip() or repr(error)).splitlines()[0]
    return DataError(
        f"{file} is no {kind} tokenizer: {line}. Check tokenizer_type: sentencepiece reads tokenizer.model, "
        "huggingface tokenizer.json, tiktoken *.tiktoken and tekken.json.",
        id="tokenizer.damaged",
    )


def identity(kind: str, content: bytes, bos: int | None, eos: int | None) -> str:
    """The fingerprint of a tokenizer: of everything in its file."""
    return f"{kind} sha256:{hashlib.sha256(content).hexdigest()} bos={bos} eos={eos}"


def decode_known(
    ids: Iterable[int] | np.ndarray, known: Callable[[int], bool], decode: Callable[[list[int]], str]
) -> str:
    """`decode` of the ids, with U+FFFD for those that are not `known`."""
    text, run = [], []
    for token in map(int, ids):
        if known(token):
            run.append(token)
            continue
        text += [decode(run), REPLACEMENT.decode()]
        run = []
    return "".join([*text, decode(run)])


def _find(kind: str, path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise DataError(
                f"tokenizer_path={path} does not exist. It is a file or folder of this machine; nothing is downloaded.",
                id="tokenizer.missing",
            )
        return path
    found = [file for pattern in _NAMES[kind] for file in sorted(path.glob(pattern))]
    if not found:
        raise DataError(
            f"tokenizer_path={path} is a folder without {' or '.join(_NAMES[kind])}, "
            f"which tokenizer_type={kind} reads.",
            id="tokenizer.missing",
        )
    return found[0]
