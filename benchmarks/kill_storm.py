"""A run that is killed again and again, and must end as if it never had been.

    python -m benchmarks.kill_storm [rounds=20] [seed=0] [out=docs/reliability.md]

Each round starts the same toy run in the same folder and ends it by SIGKILL, at one of the named places
(`MaxText.faults`) or at a random moment; some rounds then flip a byte of a checkpoint, cut one of its files, or remove
one. After each:

1. the checkpoint that was newest and complete before is still there, intact, or its damage is found, by name;
2. the next start resumes from it (from the one before it, where it was damaged);
3. the metrics file holds each step at most once, bit for bit what the unbroken run wrote.

A run that comes to its end is compared as a whole, and the next begins anew. One JSON line at the end.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from MaxText import faults
from MaxText.checkpoint import Store
from MaxText.errors import StorageError

ROOT = Path(__file__).parents[1]
STEPS, PERIOD = 40, 4
RUN = {
    "base_emb_dim": 32, "head_dim": 8, "base_num_query_heads": 4, "base_mlp_dim": 48, "base_num_decoder_layers": 1,
    "max_target_length": 16, "global_batch_size": 8, "eval_steps": 2, "eval_interval": 10, "dtype": "float32",
    "steps": STEPS, "checkpoint_period": PERIOD, "max_num_checkpoints_to_keep": 2, "sample_length": 0,
    "run_name": "storm", "train_files": "[builtin:austen/emma.txt]", "log_period": 1,
}  # fmt: skip
DAMAGES = ("byte flipped", "file cut", "file removed")
CLOCKS = {"seconds", "tokens_per_second_per_device", "tflops_per_device", "data_wait_seconds", "save_stall_seconds",
          "eval_seconds"}  # fmt: skip


@dataclass
class Storm:
    """The run, what is known of it, and what has happened."""

    folder: Path
    chance: random.Random
    reference: list[dict] = field(default_factory=list)
    damaged: int | None = None  # the step that was damaged in the round before
    durable: int | None = None  # the newest complete step that a restart must find
    counts: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "storm"

    def start(self, folder: Path, fault: str = "") -> subprocess.Popen[str]:
        """The run as a process."""
        values = RUN | {"base_output_directory": folder, "jax_cache_dir": self.folder / "cache"}
        command = [sys.executable, "train.py", "configs/base.yml", *(f"{key}={value}" for key, value in values.items())]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("M_", "XLA_", "JAX_"))}
        environ |= {"MAXTEXT_FAULT": fault, "JAX_PLATFORMS": "cpu"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=environ, **pipes)  # type: ignore[call-overload, no-any-return]

    def unbroken(self) -> None:
        """What the run writes when nobody disturbs it."""
        process = self.start(self.folder / "reference")
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        self.reference = records(self.folder / "reference" / "storm")

    def round(self, number: int) -> None:
        """One start, one end, and what must hold after it."""
        places = [*faults.POINTS, "a random moment"]
        place = places[number % len(places)]
        once = place.startswith(("restore.", "finish."))
        fault = "" if place == "a random moment" else f"{place}:{1 if once else self.chance.choice((1, 1, 2, 5))}"
        process = self.start(self.folder, fault)
        limit = self.chance.uniform(1.0, 6.0) if not fault else 300.0
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        self.judge_start(number, said)
        self.counts["kills" if process.returncode == -9 else "ends"] += 1
        if process.returncode == -9:
            self.counts[place] += 1
        elif process.returncode != 0:
            self.lose(number, f"exit code {process.returncode}: {said[-300:]}")
        self.judge_left(number, complete=process.returncode == 0)
        if process.returncode == 0:
            shutil.rmtree(self.run)
            self.durable = self.damaged = None
        elif self.chance.random() < 0.5:
            self.damage()

    def judge_start(self, number: int, said: str) -> None:
        """It began where it had to."""
        if "completed step" not in said:
            return  # ended before it had restored
        found = re.search(r"RESUMED after (\d+) steps instead", said) or re.search(r"RESUMED after (\d+) steps", said)
        began = int(found[1]) if found else None
        if self.damaged is not None and "damaged" not in said and began == self.damaged:
            self.lose(number, f"the damaged step {began} was used")
        elif self.durable is not None and (began is None or began < self.durable):
            self.lose(number, f"began at {began}, and step {self.durable} was durable")

    def judge_left(self, number: int, *, complete: bool) -> None:
        """What is on the disk now."""
        store = Store(self.run / "checkpoints")
        intact = [step for step in store.steps() if self.is_intact(store, step)]
        newest = intact[-1] if intact else None
        if self.durable is not None and (newest is None or newest < self.durable):
            self.lose(number, f"the newest step is {newest}, and {self.durable} was durable")
        self.durable = newest
        if spoiled := [step for step in store.steps() if step not in intact and step != self.damaged]:
            self.lose(number, f"steps {spoiled} are damaged, and nobody has touched them")
        self.damaged = self.damaged if self.damaged not in intact else None
        metrics = self.run / "metrics.jsonl"
        written = records(self.run) if metrics.exists() else []
        wanted = self.reference if complete else [one for one in self.reference if one in written]
        if written != wanted:
            self.lose(number, f"the metrics differ: {[one for one in written if one not in self.reference][:3]}")

    def is_intact(self, store: Store, step: int) -> bool:
        """Whether every byte is as it was saved."""
        try:
            store.verify(step)
        except StorageError:
            return False
        return True

    def damage(self) -> None:
        """Change a file of the newest checkpoint, if there is another to fall back on."""
        steps = Store(self.run / "checkpoints").steps()
        if len(steps) < 2:
            return
        files = [path for path in (self.run / "checkpoints" / str(steps[-1])).rglob("*") if path.is_file()]
        path, how = self.chance.choice(sorted(files)), self.chance.choice(DAMAGES)
        data = bytearray(path.read_bytes())
        if how == "file removed" or not data:
            path.unlink()
        else:
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
            path.write_bytes(data if how == "byte flipped" else data[: len(data) // 2])
        self.counts[how] += 1
        self.damaged, self.durable = steps[-1], steps[-2]

    def lose(self, number: int, what: str) -> None:
        self.losses.append(f"round {number}: {what}")


def records(run: Path) -> list[dict]:
    """The metrics of a run without what clocks say; a torn last line is left out."""
    content = (run / "metrics.jsonl").read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCKS} for line in lines]


def storm(rounds: int, seed: int = 0) -> Storm:
    """That many rounds; whatever was lost stands in `losses`."""
    folder = Path(tempfile.mkdtemp(prefix="storm."))
    try:
        made = Storm(folder, random.Random(seed))
        made.unbroken()
        for number in range(rounds):
            made.round(number)
        return made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table(made: Storm, rounds: int, seed: int, seconds: float) -> str:
    """docs/reliability.md."""
    rows = "\n".join(f"| {name} | {count} |" for name, count in sorted(made.counts.items()))
    return f"""# Reliability

Made by `python -m benchmarks.kill_storm rounds={rounds} seed={seed} out=docs/reliability.md`,
{time.strftime("%Y-%m-%d")}, in {seconds:.0f} s.

A toy run of {STEPS} steps that saves every {PERIOD}, ended by SIGKILL at named places (`MaxText/faults.py`) and at
random moments, its newest checkpoint damaged between some of the starts. After each start and each end: what was
durable is there, damage is found and passed over, and every line of the metrics equals the unbroken run's to the bit.

**{rounds} rounds, {made.counts["kills"]} kills, {sum(made.counts[how] for how in DAMAGES)} damaged files:
losses = {len(made.losses)}.**

| what happened | times |
| --- | --- |
{rows}
"""


def main(arguments: list[str]) -> int:
    values = dict(argument.split("=", 1) for argument in arguments)
    rounds, seed = int(values.get("rounds", 20)), int(values.get("seed", 0))
    began = time.monotonic()
    made = storm(rounds, seed)
    seconds = time.monotonic() - began
    if "out" in values:
        Path(values["out"]).write_text(table(made, rounds, seed, seconds))
    print(json.dumps({"rounds": rounds, "seconds": round(seconds), "losses": made.losses, **made.counts}))
    return 1 if made.losses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
