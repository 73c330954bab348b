"""The verbs `import`, `export`, `recipe`, `score` and `generate`: arguments to calls. Light until a call is made."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from MaxText import config, runtime
from MaxText.convert.folder import writing
from MaxText.errors import ConfigError, DataError, StorageError

if TYPE_CHECKING:
    import numpy as np

    from MaxText.convert.source import Source

SRC = "SRC: a Hugging Face folder, a GGUF file, a run folder, or the folder of a checkpoint step"
USAGES = {
    "import": "import SRC OUT [weight_dtype=...] [key=value ...]",
    "export": "export SRC OUT [dtype=float32|bfloat16] [verify=true] [shard_bytes=N] [key=value ...]",
    "recipe": "recipe from-hf SRC [OUT.yml]",
    "score": "score SRC tokens=T.npy out=SCORES.npz [segments=S.npy] [positions=P.npy] [loss_mask=M.npy] "
    "[gradients=true] [key=value ...]",
    "generate": "generate SRC prompt=TEXT|ids=1,2,3 [sample_length=N] [temperature=T] [key=value ...]",
}
_PAIR = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# Reading weights needs one device and float32; a person may ask for others.
FLOAT32 = {"dtype": "float32", "weight_dtype": "float32"}


def usage(verb: str, problem: str) -> ConfigError:
    return ConfigError(f"{problem} [cli.usage]\nusage: python -m MaxText {USAGES[verb]}\n{SRC}", id="cli.usage")


def split(
    verb: str, arguments: Sequence[str], places: int, own: Sequence[str]
) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """(positional arguments, the verb's own settings, keys of the configuration).

    Raises:
      ConfigError: "cli.usage"; as `config.require_keys`, so that a mistake is answered before JAX is imported.
    """
    positional, typed = list(arguments[:places]), arguments[places:]
    wrong = [argument for argument in positional if _PAIR.match(argument)]
    wrong += [argument for argument in typed if not _PAIR.match(argument)]
    if wrong or len(positional) != places:
        what = "one name" if places == 1 else f"{places} names"
        raise usage(verb, f"{verb} takes {what} and then key=value, and got {' '.join(arguments) or 'nothing'}")
    pairs = dict(argument.split("=", 1) for argument in typed)
    mine = {key: pairs.pop(key) for key in own if key in pairs}
    try:
        config.require_keys(pairs)
    except ConfigError as error:
        raise ConfigError(f"{error}\nusage: python -m MaxText {USAGES[verb]}", id=error.id) from error
    return positional, mine, pairs


def prepare(overrides: dict[str, Any]) -> None:
    """What has to be said to the process before JAX is imported: the keys of hardware and mesh."""
    runtime.prepare(config.make_from({}, "", {key: value for key, value in overrides.items() if _of_process(key)}))


def _of_process(key: str) -> bool:
    return key.endswith("_parallelism") or key in ("hardware", "num_cpu_devices", "num_slices", "jax_cache_dir")


def _true(verb: str, mine: dict[str, str], key: str) -> bool:
    value = mine.get(key, "false").lower()
    if value not in ("true", "false"):
        raise usage(verb, f"{key}={value} is neither true nor false")
    return value == "true"


def import_(arguments: Sequence[str]) -> str:
    """`import SRC OUT`."""
    (src, out), _, overrides = split("import", arguments, 2, ())
    prepare(overrides)
    from MaxText.convert import transfer

    return transfer.import_model(Path(src), Path(out), overrides)


def export(arguments: Sequence[str]) -> str:
    """`export SRC OUT`."""
    (src, out), mine, overrides = split("export", arguments, 2, ("dtype", "verify", "shard_bytes"))
    check, dtype, shard = _true("export", mine, "verify"), mine.get("dtype", ""), mine.get("shard_bytes", "0")
    if dtype not in ("", "float32", "bfloat16") or not shard.isdecimal():
        raise usage("export", f"dtype={dtype} shard_bytes={shard}: dtype is float32 or bfloat16, shard_bytes a number")
    prepare(overrides)
    from MaxText.convert import transfer

    reference = FLOAT32 | overrides if check else None
    source, verdict = transfer.export_model(Path(src), Path(out), overrides, dtype, int(shard), reference)
    return "\n".join([f"exported {source.kind} {src} to {out}", *(f"  {note}" for note in source.notes), *verdict])


def recipe(arguments: Sequence[str]) -> str:
    """`recipe from-hf SRC [OUT.yml]`: the recipe, or where it was written."""
    if len(arguments) not in (2, 3) or arguments[0] != "from-hf":
        raise usage("recipe", "recipe knows from-hf, and takes a source")
    from MaxText.convert import hf_config
    from MaxText.convert.source import read_recipe

    src = Path(arguments[1])
    src = src.parent if src.name == hf_config.NAME and src.is_file() else src
    kind, ours = read_recipe(src)
    text = hf_config.to_yaml(ours, f"{src.absolute().name}: the architecture of the {kind} source.")
    if len(arguments) == 2:
        return text
    out = Path(arguments[2])
    if out.exists():
        raise ConfigError(f"{out} is there already; choose another name. [convert.not-empty]", id="convert.not-empty")
    with writing(out):
        out.write_text(text)
    return f"wrote {out}; use it with model_name={out if '/' in str(out) else f'./{out}'}"


def score(arguments: Sequence[str]) -> str:
    """`score SRC tokens=T.npy out=SCORES.npz`."""
    names = ("segments", "positions", "loss_mask")
    (src,), mine, overrides = split("score", arguments, 1, ("tokens", "out", "gradients", *names))
    if missing := [key for key in ("tokens", "out") if key not in mine]:
        raise usage("score", f"{' and '.join(missing)} is missing")
    gradients = _true("score", mine, "gradients")
    _require_room_for(Path(mine["out"]))
    prepare(overrides)
    from MaxText.convert import score as scoring
    from MaxText.convert.source import open_source

    arrays = {name: _array(mine[name]) for name in ("tokens", *names) if name in mine}
    source = open_source(Path(src), FLOAT32 | overrides)
    batch = scoring.make_batch(arrays.pop("tokens"), **arrays)
    found = scoring.score(source, batch, gradients)
    _save(Path(mine["out"]), found)
    targets = int(found["loss_mask"].sum())
    return f"loss {float(found['loss']):.6f} nats/token over {targets} targets; wrote {mine['out']}"


def _array(path: str) -> np.ndarray:
    import numpy as np

    try:
        array = np.load(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} is not there. Check the path. [convert.no-source]", id="convert.no-source") from error
    except (OSError, ValueError, EOFError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read as .npy: {why} [score.array]", id="score.array") from error
    good = isinstance(array, np.ndarray) and array.ndim in (1, 2) and array.size
    if not good or array.dtype.kind not in "iub":
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else "several arrays"
        text = f"{path} holds {found}; whole numbers [rows, length] are wanted. [score.array]"
        raise DataError(text, id="score.array")
    return array.astype(np.int64)


def _require_room_for(out: Path) -> None:
    """Before hours of work: can the file be made?"""
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        why = "it is a folder" if out.is_dir() else f"{out.parent} is no folder that can be written to"
        raise StorageError(f"out={out}: {why}. [convert.not-written]", id="convert.not-written")


def _save(out: Path, arrays: Mapping[str, np.ndarray]) -> None:
    import numpy as np

    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    with writing(out, partial):
        with open(partial, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        partial.replace(out)


def generate(arguments: Sequence[str]) -> str:
    """`generate SRC prompt=TEXT`: prompt and continuation, or ids where the prompt is ids."""
    own = ("prompt", "ids", "sample_length", "temperature")
    (src,), mine, overrides = split("generate", arguments, 1, own)
    if ("prompt" in mine) == ("ids" in mine):
        raise usage("generate", "give prompt=TEXT or ids=1,2,3")
    try:
        length, temperature = int(mine.get("sample_length", "64")), float(mine.get("temperature", "0"))
        ids = [int(part) for part in mine["ids"].split(",")] if "ids" in mine else None
    except ValueError as error:
        raise usage("generate", f"not a number: {error}") from error
    if length < 1 or not 0 <= temperature < float("inf"):
        text = f"sample_length={length} temperature={temperature:g}: at least 1, and at least 0 and finite"
        raise usage("generate", text)
    prepare(overrides)
    from MaxText.convert import sampling
    from MaxText.convert.source import open_source

    source = open_source(Path(src), FLOAT32 | overrides)
    if ids is not None:
        return ",".join(map(str, sampling.continue_ids(source, ids, length, temperature)))
    return sampling.continue_text(source, mine["prompt"], length, temperature)


def words_missing(source: Source) -> ConfigError:
    """The error for a prompt in words where there is no tokenizer."""
    return ConfigError(
        f"{source.path} brings no tokenizer that is read here. Give tokenizer_type=... or the prompt as ids=1,2,3. "
        "[convert.no-tokenizer]",
        id="convert.no-tokenizer",
    )
