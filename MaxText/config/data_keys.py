"""The keys of data and tokenizer."""

from __future__ import annotations

from typing import Literal

from MaxText.config.fields import Count, Files, Group, SizeOrMinusOne, key

TRAIN_BOOKS = tuple(
    f"builtin:austen/{book}.txt" for book in ("emma", "mansfieldpark", "prideprejudice", "sensesensibility")
)


class Data(Group):
    title = "data"
    dataset_type: Literal["text", "synthetic"] = key("text", "text = the files below; synthetic = random tokens")
    train_files: Files = key(TRAIN_BOOKS, "text files to learn from; builtin: = shipped with MaxText")
    eval_files: Files = key(("builtin:austen/persuasion.txt",), "text files held out; [] = none")
    packing: bool = key(True, "put several documents into one row")
    packing_type: Literal["concat_then_split"] = key("concat_then_split", "how rows are filled")
    num_epoch: SizeOrMinusOne = key(4, "passes over the training data, after which it has run out; -1 = for ever")
    enable_data_shuffling: bool = key(True, "shuffle the rows, anew in each epoch")
    data_shuffle_seed: Count = key(0, "seed of the shuffle")
    tokenizer_type: Literal["byte"] = key("byte", "byte = ids 0-255 are bytes, 256 begins and 257 ends a document")
    tokenizer_path: str = key("", "file of the tokenizer; the byte tokenizer has none")
    add_bos: bool = key(True, "begin each document with the bos id")
    add_eos: bool = key(True, "end each document with the eos id")
