#!/usr/bin/env bash
# A short storm, other faults each day: a run is killed, its disk refuses, its checkpoints are damaged; nothing durable
# may be lost, and the metrics are those of the unbroken run to the bit. docs/reliability.md is made by a long one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset "${!M_@}"
"${PYTHON:-.venv/bin/python}" -m benchmarks.kill_storm rounds=20 several=4 "seed=$(date +%j)"
