"""A run that is killed again and again, and must end as if it never had been.

    python -m benchmarks.kill_storm rounds=20 [several=4] [seed=0] [out=docs/reliability.md]

Each round starts the same toy run in the same folder, with durable checkpoints and a local tier, and ends it by
SIGKILL, at one of the named places (`MaxText.faults`) or at a random moment; or lets the disk refuse: full, read-only,
or with an error at a named place. Some starts find the clock set back by a day. Between rounds a file of the newest
checkpoint, of each kind in turn, has a byte flipped, is cut, or is removed. `several` rounds more do the same with a
run of two processes, one of which is killed, or loses its local folder. After each:

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
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.damage import DAMAGES, SET_BACK, is_intact, kind, records, spoil
from MaxText import faults
from MaxText.checkpoint import Store
from MaxText.checkpoint.local import whole

ROOT = Path(__file__).parents[1]
STEPS, PERIOD, LOCAL_PERIOD = 40, 6, 2
RUN = {
    "base_emb_dim": 32, "head_dim": 8, "base_num_query_heads": 4, "base_mlp_dim": 48, "base_num_decoder_layers": 1,
    "max_target_length": 16, "global_batch_size": 8, "eval_steps": 2, "eval_interval": 10, "dtype": "float32",
    "dropout_rate": 0.1,
    "steps": STEPS, "checkpoint_period": PERIOD, "max_num_checkpoints_to_keep": 2, "sample_length": 0,
    "run_name": "storm", "train_files": "[builtin:austen/emma.txt]", "log_period": 1,
    "enable_emergency_checkpoint": True, "local_checkpoint_period": LOCAL_PERIOD,
}  # fmt: skip
REFUSALS = ("full disk", "read-only folder")
ONE = (*faults.RUN, *faults.SAVE, *faults.MANIFEST, *(place for place in faults.LOCAL if place != "local.copies"))
SEVERAL = (*faults.TOGETHER, *faults.LOCAL, *faults.MANIFEST)
DISK_ERRORS = ("save.folder=ENOSPC", "save.state=ENOSPC", "save.manifest-temporary=EIO", "local.begun=ENOSPC",
               "local.pieces=EROFS")  # fmt: skip


@dataclass(frozen=True)
class End:
    """What a start came to: exit codes by process, and what process 0 said."""

    codes: list[int]
    said: str

    @property
    def killed(self) -> bool:
        return -9 in self.codes

    @property
    def complete(self) -> bool:
        return set(self.codes) == {0}


@dataclass
class Storm:
    """The run, what is known of it, and what has happened. `disk`, if `mounted`, can be made full or read-only."""

    folder: Path
    chance: random.Random
    processes: int = 1
    reference: list[dict] = field(default_factory=list)
    damaged: set[Path] = field(default_factory=set)  # the steps that were damaged and may still be there
    durable: int | None = None  # the newest complete step, of either tier, that a restart must find
    counts: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    mounted: bool = False
    seconds: float = 0.0  # that the unbroken run took

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def run(self) -> Path:
        return self.disk / "storm"

    @property
    def node(self) -> Path:
        return self.folder / "node"

    # --- starts

    def start(self, base: Path, fault: str = "", victim: int = 0, *, early: bool = False) -> list[subprocess.Popen]:
        """The processes of the run; `victim` meets the fault, and all find the clock set back where it is `early`."""
        values = RUN | {"base_output_directory": base, "jax_cache_dir": self.folder / "cache"}
        values |= {"local_checkpoint_directory": self.node, "num_cpu_devices": self.processes}
        command = [sys.executable, "train.py", "configs/base.yml", *(f"{key}={value}" for key, value in values.items())]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("M_", "XLA_", "JAX_"))}
        environ |= {"JAX_PLATFORMS": "cpu"} | ({"PYTHONPATH": str(self.folder / "early")} if early else {})
        places = _places(self.processes)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return [
            subprocess.Popen(
                command, cwd=ROOT, env=environ | place | ({"MAXTEXT_FAULT": fault} if id == victim else {}), **pipes
            )
            for id, place in enumerate(places)
        ]

    def end(self, started: list[subprocess.Popen], victim: int = 0, limit: float = 300.0) -> End:
        """Wait; after `limit` seconds the victim is killed."""
        try:
            started[victim].wait(limit)
        except subprocess.TimeoutExpired:
            started[victim].kill()
        said = [process.communicate(timeout=300)[0] for process in started]
        return End([process.returncode for process in started], said[0])

    def unbroken(self) -> None:
        """What the run writes when nobody disturbs it."""
        (self.folder / "early").mkdir()
        (self.folder / "early" / "sitecustomize.py").write_text(SET_BACK)
        began = time.monotonic()
        ended = self.end(self.start(self.folder / "reference"))
        assert ended.complete, ended.said
        self.seconds = time.monotonic() - began
        self.reference = records(self.folder / "reference" / "storm")

    # --- rounds

    def round(self, number: int) -> None:
        """One start, one end, and what must hold after it."""
        place, early = self.choose(number), self.chance.random() < 0.2
        victim = self.chance.randrange(self.processes)
        refused = place in REFUSALS
        self.refuse(place)
        once = place.startswith(("restore.", "finish.", "local.restore"))
        hit = f":{1 if once else self.chance.choice((1, 1, 2, 4))}"
        name, equals, error = place.partition("=")
        fault = "" if refused or place == "a random moment" else f"{name}{hit}{equals}{error}"
        limit = self.chance.uniform(0.3, 1.1) * self.seconds if place == "a random moment" else 300.0
        ended = self.end(self.start(self.disk, fault, victim, early=early), victim, limit)
        self.allow(place)
        self.count(number, place, ended, early=early)
        self.judge_start(number, ended.said)
        self.judge_left(number, complete=ended.complete)
        if ended.complete:
            shutil.rmtree(self.run)
            self.durable, self.damaged = None, set()
        elif self.processes > 1 and self.chance.random() < 0.4:
            self.lose_a_node(number)
        elif self.chance.random() < 0.6:
            self.damage()

    def choose(self, number: int) -> str:
        """The places in turn; every fourth round a random moment, or a disk that refuses."""
        if self.processes > 1:
            return [*SEVERAL, "a random moment"][number % (len(SEVERAL) + 1)]
        if number % 4 == 3:
            refusals = REFUSALS if self.mounted else ()
            return self.chance.choice(("a random moment", "a random moment", *refusals, *DISK_ERRORS))
        return ONE[(number - number // 4) % len(ONE)]

    def count(self, number: int, place: str, ended: End, *, early: bool) -> None:
        """Note what happened; an exit code that nothing explains is a loss."""
        self.counts["kills" if ended.killed else "ends"] += 1
        self.counts["clock set back"] += early
        self.counts["starts"] += self.processes
        expected = {0, 7} if place in REFUSALS or "=" in place else {0}
        expected |= {-9, 77} if ended.killed else set()
        if ended.killed or set(ended.codes) - {0}:
            self.counts[place] += 1
        if set(ended.codes) - expected or "Traceback" in ended.said:
            self.lose(number, f"{place}: exit codes {ended.codes}: {ended.said[-600:]}")

    def refuse(self, place: str) -> None:
        """Make the disk full or read-only."""
        if place == "full disk":
            with open(self.disk / "filler", "wb", buffering=0) as file:
                left = shutil.disk_usage(self.disk).free - self.chance.randrange(1 << 18)
                while left > 0 and (written := file.write(bytes(min(left, 1 << 20)))):
                    left -= written
        elif place == "read-only folder":
            subprocess.run(["mount", "-o", "remount,ro", self.disk], check=True)

    def allow(self, place: str) -> None:
        """Undo `refuse`."""
        if place == "read-only folder":
            subprocess.run(["mount", "-o", "remount,rw", self.disk], check=True)
        (self.disk / "filler").unlink(missing_ok=True)

    # --- verdicts

    def judge_start(self, number: int, said: str) -> None:
        """It began where it had to."""
        if "completed step" not in said:
            return  # ended before it had restored
        found = re.findall(r"RESUMED after (\d+) steps", said)
        began = int(found[-1]) if found else None
        if began is not None and "(local)" in said:
            self.counts["resumed from the local tier"] += 1
        if began is not None and "came from process" in said:
            self.counts["resumed with a peer's copy"] += 1
        if self.durable is not None and began != self.durable:
            self.lose(number, f"began at {began}, and step {self.durable} was the newest intact one")

    def judge_left(self, number: int, *, complete: bool) -> None:
        """What is on the disk now."""
        durable = Store(self.run / "checkpoints")
        nodes = [Store(folder) for folder in sorted(self.node.glob("storm-*/*"))]
        intact = {
            store.folder: [step for step in store.steps() if is_intact(store, step)] for store in (durable, *nodes)
        }
        shown = [{str(step): store.manifest(step) for step in intact[store.folder]} for store in nodes]
        newest = max([*intact[durable.folder], *whole(shown)], default=None)
        if self.durable is not None and (newest is None or newest < self.durable):
            self.lose(number, f"the newest step is {newest}, and {self.durable} was durable")
        self.durable = newest
        self.damaged -= {store.path(step) for store in (durable, *nodes) for step in intact[store.folder]}
        for store in (durable, *nodes):
            spoiled = {store.path(step) for step in store.steps() if step not in intact[store.folder]} - self.damaged
            if spoiled:
                self.lose(number, f"{spoiled} are damaged, and nobody has touched them")
        metrics = self.run / "metrics.jsonl"
        written = records(self.run) if metrics.exists() else []
        wanted = self.reference if complete else [one for one in self.reference if one in written]
        if written != wanted:
            self.lose(number, f"the metrics differ: {[one for one in written if one not in self.reference][:3]}")

    # --- damage

    def damage(self) -> None:
        """Change a file, of each kind in turn, of the newest checkpoint, if there is another to fall back on."""
        durable, nodes = Store(self.run / "checkpoints"), [Store(path) for path in self.node.glob("storm-*/*")]
        steps = [(step, store) for store in (durable, *nodes) for step in store.steps()]
        if len(durable.steps()) < 2 - bool(nodes and len(steps) > len(durable.steps())):
            return
        step, store = max(steps, key=lambda one: (one[0], one[1] is durable))
        kinds: dict[str, list[Path]] = {}
        for path in sorted(path for path in store.path(step).rglob("*") if path.is_file()):
            kinds.setdefault(kind(path), []).append(path)
        number = sum(self.counts[how] for how in DAMAGES)
        name = sorted(kinds)[number % len(kinds)]
        how = DAMAGES[(number // len(kinds)) % len(DAMAGES)]
        spoil(self.chance.choice(kinds[name]), how, self.chance)
        self.counts[how] += 1
        self.counts[f"damaged: {name}"] += 1
        self.damaged.add(store.path(step))
        self.durable = self.newest_left()

    def newest_left(self) -> int | None:
        """The newest intact step, of all processes together."""
        durable, nodes = Store(self.run / "checkpoints"), [Store(path) for path in sorted(self.node.glob("storm-*/*"))]
        shown = [{str(n): one.manifest(n) for n in one.steps() if is_intact(one, n)} for one in nodes]
        return max([*(step for step in durable.steps() if is_intact(durable, step)), *whole(shown)], default=None)

    def lose_a_node(self, number: int) -> None:
        """The local folder of one process is gone, with all it had; its peer's copy must do."""
        nodes = [Store(path) for path in sorted(self.node.glob("storm-*/*"))]
        if len(nodes) != self.processes:
            return
        both = set.intersection(*({step for step in one.steps() if is_intact(one, step)} for one in nodes))
        wanted = max([*both, *Store(self.run / "checkpoints").steps()], default=None)
        shutil.rmtree(self.chance.choice(nodes).folder)
        self.counts["local folder of a process lost"] += 1
        self.durable = self.newest_left()
        if wanted is not None and (self.durable is None or self.durable < wanted):
            self.lose(number, f"with one node gone {self.durable} is the newest step, and {wanted} was on both")

    def lose(self, number: int, what: str) -> None:
        self.losses.append(f"{self.processes} processes, round {number}: {what}")
        print(self.losses[-1], file=sys.stderr, flush=True)


def _places(processes: int) -> list[dict[str, str]]:
    """The environment of each process: its place among them."""
    if processes == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as one:
        address = f"127.0.0.1:{one.getsockname()[1]}"
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    return [shared | {"JAX_PROCESS_ID": str(id)} for id in range(processes)]


def storm(rounds: int, seed: int = 0, processes: int = 1) -> Storm:
    """That many rounds; whatever was lost stands in `losses`."""
    folder = Path(tempfile.mkdtemp(prefix="storm."))
    made = Storm(folder, random.Random(seed), processes)
    made.disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "storm", str(made.disk)]
    made.mounted = not subprocess.run(mount, capture_output=True).returncode
    try:
        made.unbroken()
        for number in range(rounds):
            made.round(number)
        return made
    finally:
        if made.mounted:
            subprocess.run(["umount", "-l", str(made.disk)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def table(storms: dict[str, tuple[Storm, int]], how: str, seconds: float) -> str:
    """docs/reliability.md; `storms`: by what ran, with their numbers of rounds."""
    parts = []
    for title, (made, rounds) in storms.items():
        rows = "\n".join(f"| {name} | {count} |" for name, count in sorted(made.counts.items()) if count)
        files = sum(made.counts[how] for how in DAMAGES)
        parts.append(
            f"## {title}\n\n**{rounds} rounds, {made.counts['kills']} kills, {files} damaged files: "
            f"losses = {len(made.losses)}.**\n\n| what happened | times |\n| --- | --- |\n{rows}\n"
        )
    return f"""# Reliability

Made by `python -m benchmarks.kill_storm {how}`,
{time.strftime("%Y-%m-%d")}, in {seconds:.0f} s.

A toy run of {STEPS} steps that saves every {PERIOD}, and every {LOCAL_PERIOD} in the local tier. It is ended by
SIGKILL at named places (`MaxText/faults.py`; the tables count the ends there) and at random moments; its disk is full,
read-only, or refuses at a named place; some starts find the clock set back by a day; its newest checkpoint is damaged
between some of the starts, each kind of file in turn. After each start and each end: the newest intact step is the one
it resumes from, what was durable is there, damage is found and passed over, and every line of the metrics equals the
unbroken run's to the bit. A loss would be any exception to that, or an exit code that nothing explains.

{chr(10).join(parts)}"""


def main(arguments: list[str]) -> int:
    values = dict(argument.split("=", 1) for argument in arguments)
    rounds, several, seed = (
        int(values.get(key, default)) for key, default in (("rounds", 20), ("several", 4), ("seed", 0))
    )
    began = time.monotonic()
    two = {"Two processes": (storm(several, seed, 2), several)} if several else {}
    storms = {"One process": (storm(rounds, seed), rounds)} | two
    seconds = time.monotonic() - began
    if "out" in values:
        how = f"rounds={rounds} several={several} seed={seed} out={values['out']}"
        Path(values["out"]).write_text(table(storms, how, seconds))
    losses = [loss for made, _ in storms.values() for loss in made.losses]
    counts = {title: dict(made.counts) for title, (made, _) in storms.items()}
    print(json.dumps({"rounds": rounds, "several": several, "seconds": round(seconds), "losses": losses, **counts}))
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
