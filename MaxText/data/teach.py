"""`tokenizer train`: a small SentencePiece or byte-level BPE vocabulary from the training text. Both are lossless."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from MaxText.data import corpus, opening, units
from MaxText.data.units import Unit
from MaxText.errors import ConfigError, DataError, StorageError
from MaxText.tokenizer.library import need

if TYPE_CHECKING:
    from MaxText.config import Config

_MOST = 1 << 30  # bytes of text that are read
_LINE = 4096  # characters of one sentence
SPECIAL = ("<unk>", "<s>", "</s>")


def train(cfg: Config, out: Path, vocab_size: int) -> str:
    """Train on the training text of `cfg` (its first GiB) and write `out`: *.model or *.json. Returns what was made.

    Raises ConfigError for another ending and for a file that is there, DataError where the text is too little or, as in
    training, cannot be read, StorageError for the disk.
    """
    kinds = {".model": ("sentencepiece", _pieces), ".json": ("huggingface", _pairs)}
    if out.suffix not in kinds:
        raise ConfigError(f"out={out} must end in .model (SentencePiece) or .json (byte-level BPE)", id="cli.usage")
    kind, teach = kinds[out.suffix]
    if os.path.lexists(out):
        raise ConfigError(f"out={out} is there already. Remove it, or name another file.", id="tokenizer.exists")
    left_out: list[str] = []
    text = lines(cfg, left_out)
    first = next(text, None)
    if first is None:
        raise DataError("the training data hold no text.", id="data.no-documents")
    content = teach(itertools.chain([first], text), vocab_size)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_name(out.name + ".new")
        temporary.write_bytes(content)
        os.replace(temporary, out)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}.", id="tokenizer.write") from error
    from MaxText import tokenizer

    made = tokenizer.open_tokenizer(kind, str(out))
    size = -(-made.vocab_size // 32) * 32
    without = f", without {len(left_out)} documents that cannot be read" if left_out else ""
    return f"{out}: {made.vocab_size} ids{without}\ntokenizer_type={kind} tokenizer_path={out} vocab_size={size}"


def lines(cfg: Config, left_out: list[str]) -> Iterator[str]:
    """The lines of the training text, without their ends; long ones in parts.

    DataError for a document that cannot be read; with bad_documents=drop why goes to `left_out`.
    """
    left = _MOST
    for source in opening.sources_of(cfg, "train"):
        for unit in source.units:
            for text in _texts(unit, cfg.bad_documents == "refuse", left_out):
                left -= len(text)
                for line in filter(None, text.split("\n")):
                    yield from (line[i : i + _LINE] for i in range(0, len(line), _LINE))
                if left <= 0:
                    return


def _texts(unit: Unit, refuse: bool, left_out: list[str]) -> Iterator[str]:
    for number, item in enumerate(units.read(unit)):
        fault = item.fault or (corpus.not_text(item.content) if isinstance(item.content, bytes) else None)
        if fault and refuse:
            raise corpus.refusal(unit, [(number, fault)])
        if fault:
            left_out.append(fault.text)
        elif isinstance(item.content, bytes):
            yield item.content.decode()


def _pieces(text: Iterator[str], vocab_size: int) -> bytes:
    """BPE pieces with a fallback to bytes. Nothing is normalised, so decode(encode(text)) is the text."""
    library = need("sentencepiece", "sentencepiece", "a SentencePiece vocabulary")
    model = io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=text, model_writer=model, model_type="bpe", vocab_size=vocab_size,
            character_coverage=0.9999, byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
            remove_extra_whitespaces=False, split_digits=True, user_defined_symbols=["\n"],
            max_sentence_length=4 * _LINE,
            minloglevel=2,
        )  # fmt: skip
    except (RuntimeError, ValueError, OSError) as error:
        raise _too_little(vocab_size, error) from error
    return model.getvalue()


def _pairs(text: Iterator[str], vocab_size: int) -> bytes:
    """Byte-level BPE as GPT-2's, with <unk>, <s> and </s>."""
    library = need("tokenizers", "tokenizers", "a byte-level BPE vocabulary")
    smallest = 256 + len(SPECIAL)
    if vocab_size < smallest:
        raise _too_little(vocab_size, f"bytes and special tokens alone are {smallest}")
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator((line + "\n" for line in text), trainer)
    return model.to_str(pretty=True).encode()


def _too_little(vocab_size: int, error: object) -> DataError:
    said = " ".join(itertools.islice(str(error).split(), 40))
    return DataError(
        f"vocab_size={vocab_size} does not fit the text: {said}. Choose another vocab_size, or give more text.",
        id="tokenizer.train",
    )
