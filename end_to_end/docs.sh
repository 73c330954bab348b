#!/usr/bin/env bash
# Every command that the documentation shows, made small: `train.py` lines get a few steps, the others run as they stand.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=$(mktemp -d "${TMPDIR:-/tmp}/docs.XXXXXX")
trap 'rm -rf "$out"' EXIT
unset "${!M_@}"
small=(steps=2 eval_steps=1 sample_length=2 base_emb_dim=64 head_dim=16 base_mlp_dim=64 base_num_decoder_layers=1
  max_target_length=32 eval_interval=-1 learning_rate_schedule_steps=-1)
"$python" -c "import numpy; numpy.save('$out/tokens.npy', numpy.arange(24).reshape(2, 12))"

count=0
while read -r line; do
  eval "words=(${line#.venv/bin/python }
)" # quotes and comments are the shell's
  count=$((count + 1))
  case $line in
    *plan_only=true*) ;; # spends nothing
    *" train.py "*) words+=("${small[@]}" "base_output_directory=$out" "run_name=run$count") ;;
  esac
  words=("${words[@]/runs\/base/$out/run1}")
  for name in exports/ imports/ tokens.npy scores.npz; do words=("${words[@]/"$name"/"$out/$name"}"); done
  printf -- '-- %s\n' "${words[*]}"
  "$python" "${words[@]}" >"$out/log" 2>&1 </dev/null || { cat "$out/log" && exit 1; }
done < <(sed -n '/^```sh$/,/^```$/p' README.md docs/*.md | grep -E '^\.venv/bin/python ')
[ "$count" -ge 8 ] || { echo "found only $count commands in the documentation" && exit 1; }
echo "$count commands of the documentation ran"
