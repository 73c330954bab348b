"""train.py that also writes down which rows this process drew: `recorder.py FOLDER CONFIG [key=value ...]`.

FOLDER/PID.jsonl has a line for each step: the digest of each row, by its place in the global batch.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def digest(batch: dict[str, np.ndarray], row: int) -> str:
    """Of everything that a row gives to the step."""
    sha = hashlib.sha256()
    for name in sorted(batch):
        sha.update(np.ascontiguousarray(batch[name][row], np.int32).tobytes())
    return sha.hexdigest()[:16]


def places(part: Any) -> list[int]:
    """The place in the global batch of each row that a process draws, in its order."""
    return [micro * part.rows + row for micro in range(part.microbatches) for row in part.span]


def record(folder: Path) -> None:
    """From now on, what `Share` draws is written down."""
    from MaxText.share import Share

    draw = Share.batch
    folder.mkdir(parents=True, exist_ok=True)

    def batch(self: Share, step: int) -> dict[str, np.ndarray]:
        found = draw(self, step)
        if self.dataset.split == "train":
            rows = {place: digest(found, row) for row, place in enumerate(places(self.part))}
            with (folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "rows": rows}) + "\n")
        return found

    Share.batch = batch  # type: ignore[method-assign]


def read(folder: Path) -> dict[int, dict[int, str]]:
    """step → place → digest, of all processes, which must agree where several drew a row."""
    found: dict[int, dict[int, str]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            step = found.setdefault(entry["step"], {})
            for place, value in entry["rows"].items():
                assert step.setdefault(int(place), value) == value, (path, entry["step"], place)
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    record(Path(sys.argv[1]))
    from MaxText.train import main

    sys.exit(main(sys.argv[2:]))
