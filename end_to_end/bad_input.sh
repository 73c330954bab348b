#!/usr/bin/env bash
# What people get wrong, and the answer: the exit code of the family, one message that names the culprit, no traceback,
# and nothing created. Mistakes in the configuration are answered before JAX is imported. The exit code is the verdict.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=$(mktemp -d "${TMPDIR:-/tmp}/bad-input.XXXXXX")
full=''
trap '[ -z "$full" ] || umount "$full"; rm -rf "$out"' EXIT
unset "${!M_@}"
passed=0 failed=0

# A JAX that only says that it was asked for: first in the search path where a mistake must be found without it.
mkdir -p "$out/poison" "$out/text"
echo 'raise SystemExit("JAX was imported before the configuration was valid")' >"$out/poison/jax.py"
: >"$out/text/empty.txt"
printf 'A short text, far too short for six hundred steps.\n' >"$out/text/short.txt"
printf '{"text": "a"}\n{"text": "caf\351"}\n' >"$out/text/latin.jsonl"
printf '{"txt": "a"}\n' >"$out/text/column.jsonl"
printf '{"text": "some text"}\n' | gzip | head -c 20 >"$out/text/torn.jsonl.gz"
printf '\n{"text": ""}\n' >"$out/text/nothing.jsonl"
printf '{"text": "a"}\n{"text": 5}\n' >"$out/text/schema.jsonl"
printf '{"text": "a"}\n{"text": "cut' >"$out/text/cut.jsonl"
printf 'a nice caf\303' >"$out/text/cut.txt"
printf 'x\n' >"$out/text/locked.txt" && chmod 0 "$out/text/locked.txt"
mkdir "$out/text/folder"
"$python" - "$out/text" <<'PY'
import sys
import pyarrow as arrow
import pyarrow.parquet as parquet
from array_record.python.array_record_module import ArrayRecordWriter
folder = sys.argv[1]
parquet.write_table(arrow.table({"text": ["some text"] * 9}), f"{folder}/torn.parquet")
parquet.write_table(arrow.table({"text": [7] * 9}), f"{folder}/numbers.parquet")
writer = ArrayRecordWriter(f"{folder}/torn.array_record", "group_size:1")
for _ in range(9):
    writer.write(b"some text")
writer.close()
with open(f"{folder}/torn.tfrecord", "wb") as file:
    file.write((9).to_bytes(8, "little") + b"crc.some textcrc.")
for name in ("parquet", "array_record", "tfrecord"):
    with open(f"{folder}/torn.{name}", "r+b") as file:
        file.truncate(file.seek(0, 2) - 5)
PY
printf 'steps: 1e-3\n' >"$out/text/fraction.yml"
printf 'steps: 3\nlearning_rate: 1e-3\nsteps: 5\n' >"$out/text/twice.yml"
printf 'steps: [1\n' >"$out/text/torn.yml"

verdict() { # EXIT_CODE EXPECTED WORD NAME
  local why=''
  [ "$1" = "$2" ] || why="exit code $1, expected $2"
  [ -z "$3" ] || grep -q -F -- "$3" "$out/err" || why="$why; the message does not name $3"
  ! grep -q Traceback "$out/err" "$out/log" || why="$why; a traceback"
  [ ! -e "$out/runs" ] || why="$why; something was created: $(find "$out/runs" | head -n 3)"
  rm -rf "$out/runs"
  if [ -z "$why" ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    printf 'FAILED %s: %s\n' "$4" "$why"
    cat "$out/log" "$out/err" | head -n 12 | sed 's/^/  | /'
  fi
}
run() { # command line of train.py: its output in $out/log and $out/err
  timeout 300 "$python" train.py "$@" >"$out/log" 2>"$out/err" </dev/null
}
# refuses CODE WORD [key=value ...] for configs/base.yml; refuses_file the same for a CONFIG of one's own.
refuses() { refuses_file "$1" "$2" configs/base.yml "${@:3}"; }
refuses_file() {
  if [ "$1" = 2 ]; then
    PYTHONPATH="$out/poison" run "${@:3}" "base_output_directory=$out/runs"
  else
    run "${@:3}" "base_output_directory=$out/runs" "jax_cache_dir=$out/xla"
  fi
  verdict $? "$1" "$2" "${*:3}"
}

# The configuration: exit code 2.
refuses 2 learning_rate leraning_rate=1e-3
refuses 2 steps steps=soon
refuses 2 steps steps=2.5
refuses 2 adam_b1 adam_b1=1.5
refuses 2 per_device_batch_size per_device_batch_size=-1
refuses 2 scan_layers scan_layers=perhaps
refuses 2 remat_policy remat_policy=some
refuses 2 nonesuch model_name=nonesuch
refuses 2 emb_dim emb_dim=64
refuses 2 steps steps
refuses 2 num_kv_heads base_num_query_heads=4 base_num_kv_heads=3
refuses 2 max_target_length max_target_length=1
refuses 2 mixture_weights "train_files=[a.txt,b.txt]" "mixture_weights=[0.7,0.2]"
refuses 2 dataset_name dataset_type=tfds
refuses 2 global_batch_size global_batch_size=10 gradient_accumulation_steps=4
refuses 2 remat_policy steps=soon remat_policy=some # both at once
M_STEPS=soon refuses 2 M_STEPS
refuses_file 2 nonesuch.yml "$out/text/nonesuch.yml"
refuses_file 2 steps "$out/text/fraction.yml"
refuses_file 2 steps "$out/text/twice.yml"
refuses_file 2 torn.yml "$out/text/torn.yml"
PYTHONPATH="$out/poison" run && code=0 || code=$?
verdict "$code" 2 CONFIG "no argument at all"

# The plan: 3.
refuses 3 fsdp ici_fsdp_parallelism=3 num_cpu_devices=8
refuses 3 tensor ici_tensor_parallelism=3 base_num_query_heads=4 num_cpu_devices=3
refuses 3 'devices' ici_fsdp_parallelism=2 ici_tensor_parallelism=2 num_cpu_devices=8
refuses 3 "2 pipeline stages" ici_pipeline_parallelism=2 ici_fsdp_parallelism=1 base_num_decoder_layers=3 num_cpu_devices=2
refuses 3 "8 pipeline stages" ici_pipeline_parallelism=8 ici_fsdp_parallelism=1 base_num_decoder_layers=4 num_cpu_devices=8
refuses 3 'has no experts' ici_expert_parallelism=2 ici_fsdp_parallelism=1 num_cpu_devices=2
refuses 3 num_experts=3 ici_expert_parallelism=2 ici_fsdp_parallelism=1 num_experts=3 num_experts_per_tok=1 num_cpu_devices=2
refuses 3 max_target_length=250 ici_context_parallelism=4 ici_fsdp_parallelism=1 max_target_length=250 num_cpu_devices=4
refuses 3 num_query_heads ici_context_parallelism=4 ici_fsdp_parallelism=1 context_parallel_strategy=ulysses \
  base_num_query_heads=6 base_num_kv_heads=2 num_cpu_devices=4
refuses 3 num_kv_heads ici_tensor_parallelism=4 ici_fsdp_parallelism=1 base_num_kv_heads=2 num_cpu_devices=4
refuses 3 'multiple of 8' global_batch_size=12 num_cpu_devices=8
refuses 3 slices num_slices=3 num_cpu_devices=8
refuses 3 nonesuch 'logical_axis_rules=[embed=nonesuch]' num_cpu_devices=2

# The data: 4, and 5 where they end too early.
refuses 4 nonesuch.txt "train_files=[$out/text/nonesuch.txt]"
refuses 4 empty.txt "train_files=[$out/text/empty.txt]"
refuses 4 vocab_size vocab_size=100
refuses 4 'byte offset 27' "train_files=[$out/text/latin.jsonl]"
refuses 4 'byte offset 10' "train_files=[$out/text/cut.txt]"
refuses 4 'byte offset 27' "train_files=[$out/text/cut.jsonl]"
refuses 4 'holds int' "train_files=[$out/text/schema.jsonl]"
refuses 4 'holds int' "train_files=[$out/text/numbers.parquet]"
refuses 4 torn.parquet "train_files=[$out/text/torn.parquet]"
refuses 4 torn.array_record dataset_type=grain "grain_train_files=$out/text/torn.array_record"
refuses 4 'byte offset 0' "train_files=[$out/text/torn.tfrecord]"
refuses 4 'grain_file_type' dataset_type=grain "grain_train_files=$out/text/torn.parquet"
refuses 4 'no data file' "train_files=[$out/text/folder]"
refuses 4 'mount' dataset_type=prepared dataset_path=gs://bucket/rows
refuses 4 gcsfs "train_files=[gs://bucket/a.txt]"
refuses 2 'sum to 1.1' "train_files=[a.txt,b.txt]" "mixture_weights=[0.5,0.5]" "mixture_schedule=[9:0.5/0.6]"
refuses 4 'sum to 1.1' dataset_type=grain "grain_train_files=a,0.5;b,0.6"
refuses 4 'it has txt' "train_files=[$out/text/column.jsonl]"
refuses 4 torn.jsonl.gz "train_files=[$out/text/torn.jsonl.gz]"
refuses 4 'no document' "train_files=[$out/text/nothing.jsonl]"
refuses 4 nonesuch.model tokenizer_type=sentencepiece "tokenizer_path=$out/text/nonesuch.model"
refuses 4 'data prepare' dataset_type=prepared "dataset_path=$out/text"
refuses 4 nonesuch.txt "quarantine=[nonesuch.txt]"
refuses 5 steps "train_files=[$out/text/short.txt]" num_epoch=1

# A file without permission. Root may read everything, unless it gives that up.
plain=()
if [ "$(id -u)" = 0 ]; then plain=(setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-dac_override,-dac_read_search); fi
if ${plain[@]+"${plain[@]}"} true 2>/dev/null; then
  timeout 300 ${plain[@]+"${plain[@]}"} "$python" train.py configs/base.yml "train_files=[$out/text/locked.txt]" \
    "base_output_directory=$out/runs" "jax_cache_dir=$out/xla" >"$out/log" 2>"$out/err" </dev/null
  verdict $? 4 "Permission denied" "a file without permission"
else
  echo "left out: a file without permission (root, and no setpriv)"
fi

# The disk: 7. A file where a folder should be stops root as well.
: >"$out/file"
run configs/base.yml steps=1 "base_output_directory=$out/file/runs" "jax_cache_dir=$out/xla"
verdict $? 7 "$out/file" "a folder that cannot be made"
mkdir "$out/full"
if mount -t tmpfs -o size=1m none "$out/full" 2>/dev/null; then
  full=$out/full
  run configs/base.yml steps=2 eval_steps=1 sample_length=4 "base_output_directory=$full" "jax_cache_dir=$out/xla"
  verdict $? 7 "$full" "a disk that is full"
else
  echo "left out: a full disk (no tmpfs can be mounted here)"
fi

# Weights: what is not there is 4, what is damaged or does not fit 7, what cannot be expressed or contradicts itself 2.
verb() { # CODE WORD VERB ...: its output would be $out/runs
  timeout 300 "$python" -m MaxText "${@:3}" >"$out/log" 2>"$out/err" </dev/null
  verdict $? "$1" "$2" "${*:3}"
}
model() { # KEY=JSON ...: $out/model is a good model but for these keys of its config.json
  rm -rf "$out/model"
  cp -r tests/goldens/mixtral "$out/model"
  "$python" - "$out/model/config.json" "$@" <<'PY'
import json, sys
path, *changes = sys.argv[1:]
content = json.load(open(path))
content.update((key, json.loads(value)) for key, value in (change.split("=", 1) for change in changes))
json.dump(content, open(path, "w"))
PY
}
PYTHONPATH="$out/poison" verb 2 cli.usage import nowhere
PYTHONPATH="$out/poison" verb 2 "foo=3 (command line)" generate nowhere ids=1 foo=3
verb 4 convert.no-source import "$out/nowhere" "$out/runs"
verb 4 convert.unknown-source export "$out/text" "$out/runs"
verb 4 convert.no-source recipe from-hf "$out/nowhere" "$out/runs"
model
verb 4 convert.no-source score "$out/model" "tokens=$out/nowhere.npy" "out=$out/runs"
verb 4 score.array score "$out/model" "tokens=$out/text/short.txt" "out=$out/runs"
verb 4 score.ids generate "$out/model" ids=96
verb 4 convert.no-source generate "$out/nowhere" ids=1
refuses 4 convert.no-source "load_parameters_path=$out/nowhere"
refuses 7 "does not fit this model" "load_parameters_path=$out/model"
model 'model_type="mamba"'
verb 2 convert.unknown-family import "$out/model" "$out/runs"
model 'quantization_config={"bits": 4}'
verb 2 quantization_config import "$out/model" "$out/runs"
model num_key_value_heads=3
verb 2 config.heads import "$out/model" "$out/runs"
model num_experts_per_tok=9
verb 2 config.experts-per-token recipe from-hf "$out/model" "$out/runs"
model vocab_size=128
verb 7 model.embed_tokens.weight import "$out/model" "$out/runs"
model num_hidden_layers=2
verb 7 convert.unfit import "$out/model" "$out/runs"
model
truncate -s -100 "$out/model/model-00002-of-00003.safetensors"
verb 7 convert.truncated import "$out/model" "$out/runs"
truncate -s 5 "$out/model/model-00002-of-00003.safetensors"
verb 7 convert.truncated export "$out/model" "$out/runs"
rm "$out/model/model-00002-of-00003.safetensors"
verb 7 convert.index import "$out/model" "$out/runs"
echo '{' >"$out/model/model.safetensors.index.json"
verb 7 convert.damaged import "$out/model" "$out/runs"
printf 'GGUF\3\0\0\0' >"$out/short.gguf"
verb 7 convert.truncated import "$out/short.gguf" "$out/runs"
refuses 2 sliding_window_size 'layer_pattern=[global]' sliding_window_size=8

# MaxText's 1e-3 without a dot, which YAML alone takes for text, is a number.
printf 'base_config: %s\nlearning_rate: 1e-3\nplan_only: true\n' "$PWD/configs/base.yml" >"$out/text/good.yml"
run "$out/text/good.yml" "base_output_directory=$out/runs" && code=0 || code=$?
rm -rf "$out/runs"
verdict "$code" 0 "" "learning_rate: 1e-3"

printf 'bad input: %d passed, %d failed\n' "$passed" "$failed"
[ "$failed" = 0 ]
