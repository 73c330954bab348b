"""Files of which rows are prepared."""

import json
from pathlib import Path

import numpy as np
import pytest

from MaxText.data.formats import jsonl


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jsonl, "UNIT_BYTES", 300)
    random = np.random.default_rng(3)
    for name in ("x", "y"):
        texts = [bytes(random.integers(97, 123, n).tolist()).decode() for n in random.integers(0, 90, 30)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return ["x.jsonl", "y.jsonl"]
