"""One world for every test: eight virtual CPU devices, a compile cache that outlives the run, and no rank promotion.

All of it is environment, set before JAX is imported, so that a test file that needs no JAX never loads it.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import zlib
from pathlib import Path

import pytest

DEVICES = 8
BEFORE = dict(os.environ)
CACHE = Path(tempfile.gettempdir()) / f"maxtext-tests-xla-{os.getuid()}"

assert "jax" not in sys.modules, "a pytest plugin imported JAX before tests/conftest.py could set it up"
xla_flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
os.environ.update(
    JAX_PLATFORMS="cpu",
    XLA_FLAGS=f"{xla_flags} --xla_force_host_platform_device_count={DEVICES}".strip(),
    # JAX 0.10.2 sizes its CPU thread pool by this and deadlocks when it is small and many sharded steps are in flight.
    NPROC="32",
    JAX_NUMPY_RANK_PROMOTION="raise",
    JAX_COMPILATION_CACHE_DIR=str(CACHE),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    # Data sets that a test reads by the library of Hugging Face leave nothing in the home folder, and ask no hub.
    HF_HOME=str(CACHE.with_name(f"maxtext-tests-hf-{os.getuid()}")),
    HF_HUB_OFFLINE="1",
)
# A user's M_* would override keys in every test.
for name in [name for name in os.environ if name.startswith("M_")]:
    del os.environ[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", default="1/1", help="K/N: the tests whose name falls into part K of N, whatever the rest"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of one part, told by their names alone, so that every test has its day."""
    part, parts = map(int, config.getoption("--part").split("/"))
    others = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != part % parts]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


@pytest.fixture
def clean_environ() -> dict[str, str]:
    """The environment as a person has it, without what this file sets: for tests that start MaxText as a process."""
    return {name: value for name, value in BEFORE.items() if not name.startswith(("M_", "JAX_", "XLA_", "NPROC"))}
