"""What a split is made of: configuration → sources, each with its units and what identifies it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from MaxText.config.data_rules import weights_fault
from MaxText.data import sources, units
from MaxText.data.sources import File
from MaxText.data.units import Unit
from MaxText.errors import DataError
from MaxText.tokenizer.library import need

if TYPE_CHECKING:
    from MaxText.config import Config
    from MaxText.data.dataset import Split


@dataclass(frozen=True)
class Source:
    """One entry of a mixture, or all there is. shares: its weight, 1 outside a mixture.

    files: of which it is read, empty for data sets that a library finds; size: bytes, about.
    identity(): lines that change whenever a document may have changed; may read all files.
    """

    name: str
    units: tuple[Unit, ...]
    size: int
    identity: Callable[[], list[str]]
    files: tuple[File, ...] = ()
    weight: float = 1.0


def has_eval(cfg: Config) -> bool:
    """Whether the configuration names held-out data."""
    if cfg.held_out_every:
        return True
    if cfg.dataset_type == "prepared":
        from MaxText.data import prepared

        return "eval" in prepared.manifest(cfg.dataset_path)["splits"]
    named = {
        "text": cfg.eval_files,
        "tfds": cfg.eval_split,
        "grain": cfg.grain_eval_files,
        "hf": cfg.hf_eval_split or cfg.hf_eval_files,
    }
    return bool(named.get(cfg.dataset_type, cfg.eval_files))


def open_sources(cfg: Config, split: Split) -> list[Source]:
    """The sources of `split`; with held_out_every both splits have those of train. Raises DataError."""
    split = "train" if cfg.held_out_every else split
    opener = {"text": _text, "grain": _grain, "hf": _hf, "tfds": _tfds}[cfg.dataset_type]
    found = opener(cfg, split)
    if not any(source.units for source in found):
        raise DataError(f"the {split} data hold no document.", id="data.no-documents")
    return found


def column(cfg: Config, split: Split) -> dict[str, Any]:
    """Which column a unit of the split reads, and as what."""
    name = (cfg.train_data_columns if split == "train" else cfg.eval_data_columns)[0]
    ids = not (cfg.tokenize_train_data if split == "train" else cfg.tokenize_eval_data)
    return {"column": name, "ids": ids, "vocabulary": cfg.vocab_size}


def _text(cfg: Config, split: Split) -> list[Source]:
    names = {"train": cfg.train_files, "eval": cfg.eval_files}
    found = {s: sources.find(n, f"{s}_files") for s, n in names.items() if n or s == split}
    if len(found) == 2 and not cfg.held_out_every:
        sources.refuse_overlap(found["train"], found["eval"])
    if split == "eval" or not cfg.mixture_weights:
        return [_of_files("text", found[split], column(cfg, split))]
    entries = zip(cfg.train_files, cfg.mixture_weights, strict=True)
    parts = [(entry, sources.find([entry], "train_files"), weight) for entry, weight in entries]
    return [replace(_of_files(entry, files, column(cfg, split)), weight=weight) for entry, files, weight in parts]


def _of_files(name: str, files: Sequence[File], options: dict[str, Any], reader: str = "") -> Source:
    """One source of files, each read by the ending of its name or by `reader`."""
    whole = [Unit(reader or units.reader_of(f.path), f.name, f.path, 0, f.size, size=f.size, **options) for f in files]
    return Source(
        name=name,
        units=tuple(part for unit in whole for part in units.split(unit)),
        size=sum(f.size for f in files),
        identity=lambda: [f"{f.name.rpartition('/')[2]} {f.size} bytes {sources.digest(f)}" for f in files],
        files=tuple(files),
    )


def _grain(cfg: Config, split: Split) -> list[Source]:
    options = column(cfg, split)
    if split == "eval":
        files = _grain_files(cfg, cfg.grain_eval_files, "grain_eval_files")
        return [_of_files("grain", files, options, cfg.grain_file_type)]
    entries = [(name, _grain_files(cfg, at, "grain_train_files"), weight) for name, at, weight in _grain_entries(cfg)]
    return [replace(_of_files(n, files, options, cfg.grain_file_type), weight=w) for n, files, w in entries]


def _grain_files(cfg: Config, patterns: str, key: str) -> list[File]:
    """The files of patterns with commas between them, which must not look like another format."""
    names = [patterns] if "{" in patterns else [pattern.strip() for pattern in patterns.split(",")]
    files = sources.find(names, key)
    for file in files:
        looks = units.reader_of(file.path)
        if looks not in ("text", cfg.grain_file_type):
            raise DataError(
                f"{file.name} looks like {looks}, but grain_file_type={cfg.grain_file_type}. Set grain_file_type, or "
                f"{key} to the files of that type.",
                id="data.format",
            )
    return files


def _grain_entries(cfg: Config) -> list[tuple[str, str, float]]:
    """(name, pattern, weight) of each part, from `a,0.7;b,0.3`, from one pattern, or from the JSON file."""
    key = "grain_train_files"
    if cfg.grain_train_mixture_config_path:
        key = "grain_train_mixture_config_path"
        entries = _mixture_file(cfg.grain_train_mixture_config_path)
    elif ";" in cfg.grain_train_files:
        parts = [part.rpartition(",") for part in cfg.grain_train_files.split(";") if part.strip()]
        entries = [(pattern.strip(), pattern.strip(), _weight(weight, key)) for pattern, _, weight in parts]
    else:
        return [(cfg.grain_train_files, cfg.grain_train_files, 1.0)]
    fault = weights_fault(tuple(weight for *_, weight in entries), len(entries))
    if fault:
        raise DataError(f"{key}: {fault}.", id="data.mixture")
    return entries


def _mixture_file(path: str) -> list[tuple[str, str, float]]:
    try:
        table = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        return [(name, one["path"], _weight(one["weight"], path)) for name, one in table.items()]
    except OSError as error:
        raise sources.unreadable(path, error) from error
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f'{path} is no mixture: {error!r}. It is JSON of the form {{"NAME": {{"path": PATTERN, "weight": 0.7}}}}.',
            id="data.mixture",
        ) from error


def _weight(text: object, key: str) -> float:
    try:
        return float(str(text))
    except ValueError as error:
        raise DataError(f"{key}: {text!r} is no weight; write pattern,0.7;pattern,0.3", id="data.mixture") from error


def _hf(cfg: Config, split: Split) -> list[Source]:
    from MaxText.data.formats import hub

    streamed = {"streaming": True} if cfg.hf_streaming else {}
    how, name = hf_arguments(cfg, split, **streamed), f"{cfg.hf_path}/{hf_split(cfg, split)}"
    if cfg.hf_streaming:
        whole = Unit("hf", name, how, 0, 0, **column(cfg, split))
        return [Source(cfg.hf_path, tuple(units.split(whole)), 0, lambda: [name, "streamed"])]
    table = hub.load(how)
    size = int(getattr(table, "dataset_size", 0) or 0)
    whole = Unit("hf", name, how, 0, 0, size=size, **column(cfg, split))

    def identity() -> list[str]:
        files = [File(f["filename"], f["filename"], 1, f["filename"]) for f in table.cache_files]
        return [f"{name} {len(table)} records", *(f"arrow {sources.digest(f)}" for f in files)]

    return [Source(cfg.hf_path, tuple(units.split(whole)), size, identity)]


def hf_split(cfg: Config, split: Split) -> str:
    if split == "train":
        return cfg.train_split
    return cfg.hf_eval_split or "train"


def hf_arguments(cfg: Config, split: Split, **more: Any) -> str:
    """JSON of the arguments of `datasets.load_dataset`, or of {"saved": folder, "split"} for a saved data set."""
    local = Path(cfg.hf_path).expanduser()
    if (local / "dataset_info.json").exists() or (local / "dataset_dict.json").exists():
        return json.dumps({"saved": str(local), "split": hf_split(cfg, split)})
    files = cfg.hf_train_files if split == "train" else cfg.hf_eval_files or cfg.hf_train_files
    given = {
        "path": cfg.hf_path,
        "name": cfg.hf_name or None,
        "data_dir": cfg.hf_data_dir or None,
        "data_files": list(files) or None,
        "split": hf_split(cfg, split),
    }
    return json.dumps({k: v for k, v in (given | more).items() if v is not None}, sort_keys=True)


def _tfds(cfg: Config, split: Split) -> list[Source]:
    """TFDS says which records of which files a split is; they are read as any other records, without TensorFlow."""
    from MaxText.data.formats import records

    name = cfg.dataset_name if split == "train" else cfg.eval_dataset_name or cfg.dataset_name
    info = _tfds_info(name, cfg.dataset_path)
    wanted = cfg.train_split if split == "train" else cfg.eval_split
    try:
        instructions = info.splits[wanted].file_instructions
    except (KeyError, ValueError, AssertionError) as error:
        raise DataError(
            f"{info.full_name} has no split {wanted}; it has {', '.join(info.splits) or 'none'}. Set "
            f"{'train_split' if split == 'train' else 'eval_split'}.",
            id="data.split",
        ) from error
    reader = {"array_record": "arrayrecord", "tfrecord": "tfrecord"}.get(info.file_format.value)
    if reader is None:
        raise DataError(f"{info.full_name} is stored as {info.file_format.value}, not array_record.", id="data.format")
    found = []
    for part in instructions:
        take = part.take if part.take >= 0 else part.examples_in_shard - part.skip
        unit = Unit(reader, str(part.filename), str(part.filename), part.skip, part.skip + take, **column(cfg, split))
        found += records.by_count(unit) if reader == "arrayrecord" else [unit]
    files = sources.find(list(dict.fromkeys(unit.path for unit in found)), "dataset_path")
    identity = [f"{info.full_name} {wanted} {sum(u.stop - u.start for u in found)} records"]
    return [
        Source(
            name=info.full_name,
            units=tuple(found),
            size=sum(f.size for f in files),
            identity=lambda: identity + [f"{f.name.rpartition('/')[2]} {sources.digest(f)}" for f in files],
            files=tuple(files),
        )
    ]


def _tfds_info(name: str, folder: str) -> Any:
    tfds = need("tensorflow_datasets", "tensorflow-datasets", "dataset_type=tfds")
    try:
        return tfds.builder(name, data_dir=folder or None, try_gcs=False).info
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise DataError(
            f"dataset_name={name} cannot be opened in {folder or '~/tensorflow_datasets'}: {first} Build it with "
            "file_format=array_record, or set dataset_path to the folder that holds it.",
            id="data.missing",
        ) from error
