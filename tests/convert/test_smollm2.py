"""A real model, where the package that carries it can be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_smollm2_through_every_verb(clean_environ):
    environ = clean_environ | {"PYTHON": sys.executable}
    command = ["bash", str(ROOT / "end_to_end" / "smollm2.sh")]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if "SKIPPED" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert "all well" in done.stdout
