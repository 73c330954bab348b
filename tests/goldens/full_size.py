"""Makes full_size.json: names and shapes of the tensors of every recipe at full size, as the reference model has them.

    .venv/bin/python tests/goldens/full_size.py write FOLDER                 # our config.json of every recipe
    /tmp/hf/bin/python tests/goldens/full_size.py read FOLDER [RECIPE ...]   # torch and transformers, as for make.py

The second line builds the models on torch's meta device, where weights have shapes and no memory, and takes the names
under which they are saved. Of each model the table holds the class, a hash of the config.json that the reference took,
the number of tensors, how many numbers they hold, a hash of all names and shapes, and the names with their
counters left out, so that a difference can be found.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TABLE = HERE / "full_size.json"


def summary(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What the table holds of tensors with these names and shapes."""
    lines = sorted(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
    patterns = Counter(re.sub(r"\.\d+(?=\.)", ".#", line) for line in lines)
    return {
        "tensors": len(lines),
        "numbers": sum(math.prod(shape) for shape in shapes.values()),
        "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32],
        "shapes": [f"{count} {pattern}" for pattern, count in sorted(patterns.items())],
    }


def config_hash(theirs: Mapping[str, Any]) -> str:
    """Changes with every value of a config.json."""
    return hashlib.sha256(json.dumps(theirs, sort_keys=True).encode()).hexdigest()[:16]


def write(folder: Path) -> None:
    """config.json of every recipe that a family expresses, as FOLDER/RECIPE.json."""
    from MaxText import config
    from MaxText.convert import hf_config
    from MaxText.errors import ConfigError

    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted((HERE.parents[1] / "configs" / "models").glob("*.yml")):
        try:
            _, theirs = hf_config.write(config.make(model_name=file.stem))
        except ConfigError as error:
            print(f"{file.stem}: {error.id}")
            continue
        (folder / f"{file.stem}.json").write_text(json.dumps(theirs, indent=1))


def reference(theirs: dict[str, Any]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """(class, saved names and shapes) of the reference model that a config.json describes."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    kind = getattr(transformers, theirs["architectures"][0])
    config = kind.config_class.from_dict({**theirs, "attn_implementation": "eager"})
    with torch.device("meta"):
        model = kind(config)
    tensors = model.state_dict()
    for name in [
        name for name in tensors if any(re.search(part, name) for part in model._keys_to_ignore_on_save or ())
    ]:
        del tensors[name]
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return kind.__name__, {name: tuple(t.shape) for name, t in revert_weight_conversion(model, tensors).items()}


def read(folder: Path, only: Sequence[str]) -> None:
    """The table, of all of FOLDER or with new lines for `only`."""
    table = json.loads(TABLE.read_text()) if only and TABLE.is_file() else {}
    for file in sorted(folder.glob("*.json")):
        if only and file.stem not in only:
            continue
        theirs = json.loads(file.read_text())
        name, shapes = reference(json.loads(file.read_text()))  # which changes what it gets
        table[file.stem] = {"class": name, "config": config_hash(theirs), **summary(shapes)}
        print(file.stem, name, table[file.stem]["numbers"], flush=True)
    TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=0) + "\n")


if __name__ == "__main__":
    verb, where, *names = sys.argv[1:]
    write(Path(where)) if verb == "write" else read(Path(where), names)
