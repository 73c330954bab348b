#!/usr/bin/env bash
# A first run as a person makes it, with a small model: what is printed, what lies in the run folder, the same command
# again, more steps, the goodput report, and the promise that numbers repeat to the bit. The exit code is the verdict.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=$(mktemp -d "${TMPDIR:-/tmp}/first-run.XXXXXX")
trap 'rm -rf "$out"' EXIT
export PYTHONUNBUFFERED=1
unset "${!M_@}"

small=(base_emb_dim=32 base_num_query_heads=2 base_num_kv_heads=1 head_dim=16 base_mlp_dim=64 base_num_decoder_layers=2
  per_device_batch_size=4 max_target_length=64 eval_steps=2 sample_length=8 log_period=1 checkpoint_period=5
  learning_rate_schedule_steps=18 "base_output_directory=$out" "jax_cache_dir=$out/xla")

fail() {
  printf 'FAILED: %s\n' "$1" >&2
  sed 's/^/  | /' "$out/log" >&2
  exit 1
}
# train RUN [key=value ...]: a run that must end well; what it prints is in $out/log.
train() {
  printf -- '-- %s\n' "$*"
  "$python" train.py configs/base.yml "${small[@]}" "run_name=$1" "${@:2}" >"$out/log" 2>&1 </dev/null || fail "exit code $?"
  ! grep -q Traceback "$out/log" || fail "a traceback in the log of a run that ended well"
}
says() { grep -q -i -E -- "$1" "$out/log" || fail "the log does not say: $1"; }
step_lines() {
  local number='[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?'
  grep -c -E "^completed step: [0-9]+, seconds: $number, TFLOP/s/device: $number, Tokens/s/device: $number, total_weights: [0-9]+, loss: $number\$" "$out/log" || true
}

# records RUN STEPS: metrics.jsonl holds each step once, in order, with every key, and a finite loss.
records() {
  "$python" - "$out/$1/metrics.jsonl" "$2" <<'END' >>"$out/log" 2>&1 || fail "metrics.jsonl of $1"
import json, math, sys
KEYS = {"step", "loss", "lm_loss", "total_weights", "grad_norm", "learning_rate", "seconds"}
steps = [r for r in map(json.loads, open(sys.argv[1], encoding="utf-8")) if "grad_norm" in r]
assert [r["step"] for r in steps] == list(range(int(sys.argv[2]))), [r["step"] for r in steps]
assert all(KEYS <= r.keys() for r in steps), KEYS - steps[0].keys()
assert all(math.isfinite(r["loss"]) and r["total_weights"] > 0 for r in steps)
END
}

# same RUN RUN: every metric of every step equal to the bit, but for what a clock measures.
same() {
  "$python" - "$out/$1/metrics.jsonl" "$out/$2/metrics.jsonl" <<'END' >>"$out/log" 2>&1 || fail "$1 and $2 differ"
import json, sys
def numbers(path):
    timed = ("second", "tflop", "time", "wait", "memory")
    records = (r for r in map(json.loads, open(path, encoding="utf-8")) if "grad_norm" in r)
    return [{k: v for k, v in r.items() if not any(word in k for word in timed)} for r in records]
left, right = map(numbers, sys.argv[1:])
assert len(left) == len(right), (len(left), len(right))
different = [(a["step"], k, a.get(k), b.get(k)) for a, b in zip(left, right) for k in a.keys() | b.keys() if a.get(k) != b.get(k)]
assert left and not different, different[:10]
END
}

train one steps=12 "metrics_file=$out/copy.jsonl"
says FRESH
[ "$(step_lines)" = 12 ] || fail "$(step_lines) plain step lines instead of 12"
says 'per byte'
records one 12
cmp "$out/one/metrics.jsonl" "$out/copy.jsonl" || fail "metrics_file differs from metrics.jsonl"
[ -n "$(find "$out/one/checkpoints" -name manifest.json)" ] || fail "no checkpoint with a manifest"
grep -q -r --include='*.yml' 'command line' "$out/one" || fail "no resolved config with the origin of its values"

train one steps=12 # again: nothing is left to do
says complete
[ "$(step_lines)" = 0 ] || fail "a run that was complete made more steps"
records one 12

train one steps=18 # more
says RESUME
[ "$(step_lines)" = 6 ] || fail "$(step_lines) steps after the resume instead of 6"
records one 18

train two steps=18 # the unbroken run, and its repetition
train three steps=18
same two three
same one two

"$python" -m MaxText goodput "$out/one" >"$out/log" 2>&1 || fail "goodput: exit code $?"
says step
says rework
cat "$out/log"
"$python" - "$out/one" <<'END' >>"$out/log" 2>&1 || fail "the parts of the ledger do not sum to its wall time"
import sys
from pathlib import Path
from MaxText import goodput
ledger = next(Path(sys.argv[1]).glob("*goodput*"))
report = goodput.read(ledger)
assert len(report.attempts) >= 2, len(report.attempts)
assert sum(report.us.values()) + report.unaccounted_us + report.downtime_us == report.wall_us > 0, report
END
echo "first run: passed"
