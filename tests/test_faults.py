"""The named places, and the storm that kills a run at each of them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from MaxText import faults

ROOT = Path(__file__).parents[1]


def test_every_place_is_in_the_code_once():
    texts = [path.read_text() for path in (ROOT / "MaxText").rglob("*.py") if path.name != "faults.py"]
    found = [name for text in texts for name in re.findall(r'faults\.point\("(.*?)"\)', text)]
    assert sorted(found) == sorted(faults.POINTS)


def test_a_place_may_refuse_instead():
    code = "from MaxText import faults\nfaults.point('save.state')\ntry: faults.point('save.state')\n"
    code += "except OSError as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"MAXTEXT_FAULT": "save.state:2=ENOSPC"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[Errno 28] No space left on device: 'save.state'\n"


@pytest.mark.parametrize(("plan", "passed"), [("save.state", 0), ("save.state:3", 2), ("", 5), ("data.batch", 5)])
def test_the_place_ends_the_process(plan, passed):
    code = "from MaxText import faults\nfor i in range(5):\n    faults.point('save.state')\n    print(i, flush=True)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"MAXTEXT_FAULT": plan}, capture_output=True, text=True
    )
    assert len(done.stdout.split()) == passed
    assert done.returncode == (0 if passed == 5 else -signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "rounds"), [(1, 20), (2, 8)])
def test_storm(processes, rounds):
    from benchmarks import kill_storm

    made = kill_storm.storm(rounds, processes=processes)
    assert made.losses == []
    assert made.counts["kills"] >= rounds * 0.4
