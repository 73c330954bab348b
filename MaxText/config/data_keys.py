"""The keys of data and tokenizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from MaxText.config.fields import Count, Files, Group, SizeOrMinusOne, key

TRAIN_BOOKS = tuple(
    f"builtin:austen/{book}.txt" for book in ("emma", "mansfieldpark", "prideprejudice", "sensesensibility")
)


def zero_or_two(value: int) -> int:
    """0, or at least 2"""
    if value < 0 or value == 1:
        raise PydanticCustomError("zero_or_two", "0, or at least 2")
    return value


class Data(Group):
    title = "data"
    dataset_type: Literal["text", "tfds", "grain", "hf", "prepared", "synthetic"] = key(
        "text", "text = the files below; prepared = rows of `data prepare`; synthetic = random tokens"
    )
    train_files: Files = key(
        TRAIN_BOOKS, "text: files, patterns, folders to learn from; builtin: = shipped with MaxText"
    )
    eval_files: Files = key(("builtin:austen/persuasion.txt",), "text: the same, held out; [] = none")
    dataset_path: str = key("", "tfds: the folder of the data sets (data_dir); prepared: the folder of the rows")
    dataset_name: str = key("", "tfds: name of the data set, such as c4/en:3.1.0")
    eval_dataset_name: str = key("", 'tfds: the one to evaluate on; "" = dataset_name')
    train_split: str = key("train", "tfds, hf: the split to learn from")
    eval_split: str = key("validation", 'tfds: the split held out; "" = none')
    grain_train_files: str = key("", "grain: files as pattern, or pattern,weight;pattern,weight for a mixture")
    grain_eval_files: str = key("", 'grain: files held out; "" = none')
    grain_train_mixture_config_path: str = key("", 'grain: JSON file of {"name": {"path": pattern, "weight": number}}')
    grain_file_type: Literal["arrayrecord", "parquet", "tfrecord"] = key("arrayrecord", "grain: format of the files")
    hf_path: str = key("", "hf: name on the hub, folder of a saved one, or json, parquet, csv, text, arrow")
    hf_name: str = key("", "hf: its configuration")
    hf_data_dir: str = key("", "hf: its data_dir")
    hf_train_files: Files = key((), "hf: its data_files, to learn from")
    hf_eval_split: str = key("", "hf: the split held out")
    hf_eval_files: Files = key((), "hf: data_files held out; hf_eval_split is then a split of them (train)")
    hf_streaming: bool = key(False, "hf: read front to back, not by index; then nothing is downloaded first")
    train_data_columns: Files = key(("text",), "the column of a record that holds its text, in training data")
    eval_data_columns: Files = key(("text",), "the same in held-out data")
    tokenize_train_data: bool = key(True, "false = the column of training data holds token ids")
    tokenize_eval_data: bool = key(True, "the same of held-out data")
    mixture_weights: tuple[float, ...] = key(
        (), "a mixture: the share of rows that each of train_files gives; [] = none"
    )
    mixture_schedule: Files = key((), "other shares from a step on, as STEP:W/W/...; [] = the same all along")
    held_out_every: Annotated[int, AfterValidator(zero_or_two)] = key(
        0, "hold out every n-th document of the training data instead of other files; 0 = off"
    )
    bad_documents: Literal["refuse", "drop"] = key("refuse", "what is done about one that cannot be read")
    quarantine: Files = key((), "documents that train nothing: names as `data show` prints them")
    packing: bool = key(True, "put several documents into one row")
    packing_type: Literal["concat_then_split", "first_fit", "best_fit"] = key(
        "concat_then_split", "how rows are filled; a fit cuts no document that is shorter than a row"
    )
    num_epoch: SizeOrMinusOne = key(4, "passes over the training data, after which it has run out; -1 = for ever")
    enable_data_shuffling: bool = key(True, "shuffle the rows, anew in each epoch")
    data_shuffle_seed: Count = key(0, "seed of the shuffle")
    data_cache_dir: str = key("~/.cache/maxtext/data", 'folder of packing plans, kept between runs; "" = none')
    tokenizer_type: Literal["byte", "sentencepiece", "huggingface", "tiktoken"] = key(
        "byte", "byte = ids 0-255 are bytes, 256 begins, 257 ends a document; else tokenizer_path"
    )
    tokenizer_path: str = key("", "file of the tokenizer, or its folder; the byte tokenizer has none")
    add_bos: bool = key(True, "begin each document with the bos id")
    add_eos: bool = key(True, "end each document with the eos id")
