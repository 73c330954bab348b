"""What the kill storm does to files and clocks, and how it looks at what is left."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from MaxText.checkpoint import Store
from MaxText.errors import StorageError

DAMAGES = ("byte flipped", "file cut", "file removed")
# What clocks say is not reproducible.
CLOCKS = {
    "seconds", "tokens_per_second_per_device", "tflops_per_device", "data_wait_seconds", "save_stall_seconds",
    "eval_seconds",
}  # fmt: skip
# Python's clock, a day early: imported by every Python that has this text as sitecustomize.py on its path.
SET_BACK = """
import datetime, time
DAY = 86_400
time.time = lambda real=time.time: real() - DAY
time.time_ns = lambda real=time.time_ns: real() - DAY * 10**9
for name in ("gmtime", "localtime"):
    early = lambda when=None, real=getattr(time, name): real(time.time() if when is None else when)
    setattr(time, name, early)
time.strftime = lambda how, when=None, real=time.strftime: real(how, when or time.localtime())

class Early(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) - datetime.timedelta(days=1)

datetime.datetime = Early
"""


def is_intact(store: Store, step: int) -> bool:
    """Whether every byte is as it was saved."""
    try:
        store.verify(step)
    except StorageError:
        return False
    return True


def kind(path: Path) -> str:
    """What a file of a checkpoint is: a description of an array, one of the tree, the manifest, or an array's bytes."""
    if re.fullmatch(r"[0-9.]+", path.name):
        return "array" if path.stat().st_size > 64 else "scalar"
    return path.name


def spoil(path: Path, how: str, chance: random.Random) -> None:
    """Flip a bit of a file, cut it in half, or remove it."""
    data = bytearray(path.read_bytes())
    if how == "file removed" or not data:
        path.unlink()
        return
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data if how == "byte flipped" else data[: len(data) // 2])


def records(run: Path) -> list[dict]:
    """The metrics of a run without what clocks say; a torn last line is left out."""
    content = (run / "metrics.jsonl").read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCKS} for line in lines]
