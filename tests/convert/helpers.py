"""The goldens, and how tests read them. `tests/goldens/make.py` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from MaxText.convert.score import make_batch
from MaxText.convert.source import Source, open_source

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES = sorted(folder.name for folder in GOLDENS.iterdir() if (folder / "golden.npz").is_file())
FLOAT32 = {"dtype": "float32", "weight_dtype": "float32"}


def golden(family: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / family / "golden.npz") as file:
        return dict(file)


def source(family: str, **overrides: Any) -> Source:
    return open_source(GOLDENS / family, FLOAT32 | overrides)


def batch(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The golden's three documents: one in a row of its own, two packed into the next."""
    first, *packed = (found[f"tokens_{i}"] for i in range(3))
    segments = np.stack([np.ones_like(first), np.repeat([1, 2], [len(ids) for ids in packed])])
    return make_batch(np.stack([first, np.concatenate(packed)]), segments)


def rows(found: dict[str, np.ndarray], name: str) -> np.ndarray:
    """What the reference says of each document, laid out as `batch` lays out the documents."""
    first, *packed = (found[f"{name}_{i}"] for i in range(3))
    if name == "token_loss":  # the last token of a document has no target
        first, *packed = (np.append(losses, 0.0) for losses in (first, *packed))
    return np.stack([first, np.concatenate(packed)])
