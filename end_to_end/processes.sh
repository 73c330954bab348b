#!/usr/bin/env bash
# One run in several processes on this machine: it starts, a process is killed and the others end at once and name it,
# the same command resumes, a signal stops all at one step, and one process alone finishes. The exit code is the verdict.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=$(mktemp -d "${TMPDIR:-/tmp}/processes.XXXXXX")
trap 'rm -rf "$out"' EXIT
unset "${!M_@}"
toy=(configs/base.yml "base_output_directory=$out" run_name=several base_emb_dim=64 head_dim=16 base_mlp_dim=64
  base_num_decoder_layers=1 max_target_length=32 global_batch_size=16 eval_steps=2 sample_length=4 log_period=1
  checkpoint_period=5 num_slices=2)
run=$out/several

launch() { # ARGUMENT... &: the run in two processes, which stand for two slices
  exec "$python" -m MaxText launch processes=2 devices_per_process=2 -- train.py "${toy[@]}" "$@"
}
fail() {
  printf 'FAILED: %s\n' "$*"
  tail -n 20 "$out/said"
  exit 1
}
until_said() { # WORDS: wait until the run in the background has said them
  local deadline=$((SECONDS + 180))
  until grep -q -- "$1" "$out/said"; do
    [ $SECONDS -lt $deadline ] || fail "it never said $1"
    sleep 0.1
  done
}
saved() { ls "$run/checkpoints" 2>/dev/null | grep -c '^[0-9]*$' || true; }

echo '-- a process is killed'
launch steps=100000 num_epoch=-1 >"$out/said" 2>&1 &
launcher=$!
until_said 'completed step: 12,'
until [ "$(saved)" -ge 1 ] && ls "$run"/checkpoints/*/manifest.json >/dev/null 2>&1; do sleep 0.1; done
victim=$(pgrep -P $launcher | tail -n 1)
kill -9 "$victim"
code=0 && wait $launcher || code=$?
[ $code = 77 ] || fail "exit code $code, not that of a lost process"
grep -q "pid $victim) is gone" "$out/said" || fail "the lost process was not named"
grep -q 'process 0 ended with exit code 77' "$out/said" || fail "the survivor did not end with 77"
! pgrep -f "base_output_directory=$out" >/dev/null || fail "a process was left behind"

echo '-- the same command resumes; a signal stops all of it'
launch steps=100000 num_epoch=-1 >"$out/said" 2>&1 &
launcher=$!
until_said 'RESUMED after'
until_said 'completed step:'
kill -TERM $launcher
code=0 && wait $launcher || code=$?
[ $code = 75 ] || fail "exit code $code instead of 75"
done=$(sed -n 's/.*stopped by SIGTERM after \([0-9]*\) steps.*/\1/p' "$out/said")
[ -f "$run/checkpoints/$done/manifest.json" ] || fail "the checkpoint of step $done is missing"

echo '-- one process goes on, with the same slices'
"$python" train.py "${toy[@]}" num_epoch=-1 num_cpu_devices=4 "steps=$((done + 3))" >"$out/said" 2>&1 || fail "exit code $?"
grep -q "RESUMED after $done steps" "$out/said" || fail "it did not resume from $done steps"

echo '-- settings that differ are named before anything is written'
address=127.0.0.1:$("$python" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
different() { # ID steps=N
  JAX_COORDINATOR_ADDRESS=$address JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=$1 \
    "$python" train.py "${toy[@]}" run_name=different num_cpu_devices=2 "$2"
}
different 1 steps=7 >"$out/other" 2>&1 &
code=0 && different 0 steps=5 >"$out/said" 2>&1 || code=$?
[ $code = 2 ] || fail "exit code $code instead of 2"
code=0 && wait $! || code=$?
[ $code = 2 ] || fail "the other ended with exit code $code instead of 2"
grep -q 'steps: 5 in process 0 .*7 in process 1' "$out/said" || fail "the difference was not named"
[ ! -e "$out/different" ] || fail "something was written"

echo '-- a place that cannot be is refused: two of one number, unequal devices, nobody at the address'
placed() { # ID DEVICES: one process of the two, that waits 15 s at most
  JAX_COORDINATOR_ADDRESS=$address JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=$1 "$python" train.py "${toy[@]}" \
    run_name=different steps=5 "num_cpu_devices=$2" jax_distributed_initialization_timeout=15
}
# Whichever of the two comes late is told; the other run goes on if it was complete by then.
placed 1 2 >"$out/other" 2>&1 &
one=$!
placed 1 2 >"$out/twin" 2>&1 &
two=$!
code=0 && placed 0 2 >"$out/said" 2>&1 || code=$?
first=0 && wait $one || first=$?
second=0 && wait $two || second=$?
cat "$out/other" "$out/twin" >>"$out/said"
[ $first = 2 ] || [ $second = 2 ] || fail "exit codes $code, $first and $second: none is 2"
grep -q 'process 1' "$out/said" || fail "the number that came twice was not named"
rm -rf "$out/different"
placed 1 3 >"$out/other" 2>&1 &
code=0 && placed 0 2 >"$out/said" 2>&1 || code=$?
wait
[ $code = 2 ] || [ $code = 3 ] || fail "unequal devices ended with exit code $code"
grep -q 'num_cpu_devices' "$out/said" || fail "unequal devices were not named"
began=$SECONDS
code=0 && placed 1 2 >"$out/said" 2>&1 || code=$?
[ $code = 77 ] || [ $code = 2 ] || fail "nobody at the address ended with exit code $code"
[ $((SECONDS - began)) -lt 40 ] || fail "it waited $((SECONDS - began)) s for nobody"
grep -q "$address" "$out/said" || fail "the address was not named"
! grep -q Traceback "$out/said" "$out/other" "$out/twin" || fail "a traceback"
[ ! -e "$out/different" ] || fail "something was written"
echo 'several processes: all passed'
