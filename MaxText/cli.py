"""The verbs beside training: `python -m MaxText VERB ...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from MaxText import config, launch
from MaxText.errors import ConfigError, MaxTextError, StorageError

USAGE = """usage: python -m MaxText VERB ...
  config CONFIG [key=value ...]   print every value and where it comes from
  plan CONFIG [key=value ...]     what a run needs and how fast it will be; json=FILE, explain=ARRAY, compile=true
  doctor CONFIG [key=value ...]   problems of a recipe on a hardware, with their fixes; --apply writes them
  base                            print a CONFIG file with every key and its default (configs/base.yml)
  keys                            print the reference of all keys (docs/keys.md)
  launch processes=N -- train.py CONFIG ...  one run in N processes on this machine
  goodput RUN                     print where the wall-clock time of a run folder went
  checkpoint ls|verify|diff|prune RUN  what the checkpoints of a run folder hold; needs no device
  import SRC OUT                  weights of a Hugging Face folder or GGUF file to a checkpoint, with its recipe
  export SRC OUT                  a Hugging Face folder; verify=true compares what both compute
  recipe from-hf SRC [OUT.yml]    the recipe of its architecture, for model_name
  score SRC tokens=T.npy out=S.npz  logits, losses and gradients=true: norms, in float32
  generate SRC prompt=TEXT        a continuation
  data prepare|show|verify ...    rows made once; the documents of a step; checksums of rows (`data` says more)
  tokenizer train ...             a vocabulary from the training text (`tokenizer` says more)
  help                            print this
SRC is a Hugging Face folder, a GGUF file, a run folder, or the folder of a checkpoint step.
Training: python train.py CONFIG [key=value ...]"""


def _config(arguments: Sequence[str]) -> str:
    return config.load(arguments).dump()


def _goodput(arguments: Sequence[str]) -> str:
    if len(arguments) != 1:
        raise ConfigError(
            "goodput takes one run folder: python -m MaxText goodput runs/NAME [cli.usage]", id="cli.usage"
        )
    from pathlib import Path

    from MaxText import goodput

    return goodput.format(goodput.read(Path(arguments[0])))


def _convert(name: str) -> Callable[[Sequence[str]], str]:
    def run(arguments: Sequence[str]) -> str:
        from MaxText.convert import verbs

        return getattr(verbs, name)(arguments)

    return run


def _checkpoint(arguments: Sequence[str]) -> str:
    from MaxText.checkpoint import verbs

    return verbs.run(arguments)


def _plan(arguments: Sequence[str]) -> str:
    from MaxText import plan_verb

    return plan_verb.plan(arguments)


def _doctor(arguments: Sequence[str]) -> str:
    from MaxText import doctor

    return doctor.doctor(arguments)


def _data(name: str) -> Callable[[Sequence[str]], str]:
    def run(arguments: Sequence[str]) -> str:
        from MaxText.data import verbs

        return getattr(verbs, name)(arguments)

    return run


def _alone(verb: str, text: Callable[[], str]) -> Callable[[Sequence[str]], str]:
    def run(arguments: Sequence[str]) -> str:
        if arguments:
            raise ConfigError(f"{verb} takes no arguments, and got {' '.join(arguments)} [cli.usage]", id="cli.usage")
        return text()

    return run


VERBS: dict[str, Callable[[Sequence[str]], str]] = {
    "config": _config,
    "base": _alone("base", config.base_yml),
    "keys": _alone("keys", config.keys_md),
    "goodput": _goodput,
    "plan": _plan,
    "doctor": _doctor,
    "checkpoint": _checkpoint,
    "import": _convert("import_"),
    "export": _convert("export"),
    "recipe": _convert("recipe"),
    "score": _convert("score"),
    "generate": _convert("generate"),
    "data": _data("data"),
    "tokenizer": _data("train_tokenizer"),
    "help": lambda arguments: USAGE,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; prints its text on stdout, or an error on stderr. Returns the exit code."""
    verb, *arguments = (sys.argv[1:] if argv is None else argv) or ["help"]
    verb = "help" if verb in ("-h", "--help") else verb
    try:
        if verb == "launch":
            return launch.run(arguments)
        if verb not in VERBS:
            raise ConfigError(f"{verb} is no verb [cli.usage]\n{USAGE}", id="cli.usage")
        text = VERBS[verb](arguments)
    except MaxTextError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return StorageError.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    try:
        print(text.rstrip("\n"), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
