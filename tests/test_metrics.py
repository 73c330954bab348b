"""The metrics file keeps every bit of every step; the console's line keeps its form."""

import contextlib
import io
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText import metrics
from MaxText.errors import StorageError

ROOT = Path(__file__).parents[1]
LINE = re.compile(
    r"completed step: (\d+), seconds: (\d+\.\d{3}), TFLOP/s/device: (\d+\.\d{3}), "
    r"Tokens/s/device: (\d+\.\d), total_weights: (\d+), loss: (\d+\.\d{3})"
)


def record(step, **values):
    base = {"step": step, "seconds": 0.2125, "tflops_per_device": 0.0414, "tokens_per_second_per_device": 9612.06}
    return base | {"total_weights": 4096.0, "loss": 2.37449} | values


def bits(value):
    return struct.pack("d", value)


# --- the file


@given(st.floats())
def test_floats_read_back_to_the_bit(value):
    line = metrics.encode({"loss": value})
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = metrics._decode(line.encode())["loss"]
    assert math.isnan(back) if math.isnan(value) else bits(back) == bits(value)


def test_scalars_of_libraries(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    with metrics.Writer(tmp_path / "m.jsonl") as writer:
        writer.write({"step": np.int32(3), "loss": np.float32(0.1), "grad_norm": jnp.float32(0.1), "z": jnp.nan})
    (back,) = metrics.read(tmp_path / "m.jsonl")
    assert back["step"] == 3 and isinstance(back["step"], int)
    assert np.float32(back["loss"]) == np.float32(0.1) == np.float32(back["grad_norm"])
    assert math.isnan(back["z"])


def test_every_line_is_in_the_file_at_once(tmp_path):
    with metrics.Writer(tmp_path / "run" / "m.jsonl", also=tmp_path / "other" / "copy.jsonl") as writer:
        for step in range(3):
            writer.write(record(step))
            assert [line["step"] for line in metrics.read(tmp_path / "run" / "m.jsonl")] == list(range(step + 1))
        writer.sync()
    assert (tmp_path / "other" / "copy.jsonl").read_bytes() == (tmp_path / "run" / "m.jsonl").read_bytes()


def test_what_is_no_file_has_nothing_to_send_to_the_disk():
    with metrics.Writer(Path(os.devnull)) as writer:
        writer.write({"step": 0})
        writer.sync()


def test_same_file_given_twice_is_written_once(tmp_path):
    path = tmp_path / "m.jsonl"
    with metrics.Writer(path, also=path) as writer:
        writer.write(record(0))
    assert len(metrics.read(path)) == 1


def test_rewind_drops_what_will_be_done_again_in_both_files(tmp_path):
    paths = [tmp_path / "m.jsonl", tmp_path / "copy.jsonl"]
    with metrics.Writer(*paths) as writer:
        for step in range(6):
            writer.write(record(step))
            if step % 2:
                writer.write({"step": step, "eval_loss": 2.0})
        writer.write({"note": "no step"})
        before = paths[0].read_bytes().splitlines()
        assert writer.rewind(4) == 3
        writer.write(record(4, loss=1.0))
    for path in paths:
        after = path.read_bytes().splitlines()
        assert after[:-2] == before[:6]  # untouched to the byte
        assert [line.get("step") for line in metrics.read(path)][-2:] == [None, 4]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy.jsonl", "m.jsonl"]


def test_rewind_to_the_start_and_past_the_end(tmp_path):
    with metrics.Writer(tmp_path / "m.jsonl") as writer:
        assert writer.rewind(0) == 0
        writer.write(record(0))
        assert writer.rewind(9) == 0
        assert writer.rewind(0) == 1
    assert metrics.read(tmp_path / "m.jsonl") == []


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_rewind_interrupted_leaves_the_old_file(tmp_path, monkeypatch, moment):
    writer = metrics.Writer(tmp_path / "m.jsonl")
    writer.write(record(0))
    old = (tmp_path / "m.jsonl").read_bytes()

    def stop(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, moment, stop)
        with pytest.raises(StorageError):
            writer.rewind(0)
    assert (tmp_path / "m.jsonl").read_bytes() == old


def test_torn_last_line_is_no_record(tmp_path):
    path = tmp_path / "m.jsonl"
    with metrics.Writer(path) as writer:
        writer.write(record(0))
        writer.write(record(1))
    path.write_bytes(path.read_bytes()[:-5])
    assert [line["step"] for line in metrics.read(path)] == [0]
    with metrics.Writer(path) as writer:
        writer.write(record(1))
    assert [line["step"] for line in metrics.read(path)] == [0, 1]


def test_not_writable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        metrics.Writer(tmp_path / "file" / "m.jsonl")
    assert caught.value.id == "metrics.not-written" and str(tmp_path / "file") in str(caught.value)


def test_disk_full():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with metrics.Writer(Path("/dev/full")) as writer, pytest.raises(StorageError) as caught:
        writer.write(record(0))
    assert caught.value.id == "metrics.not-written"


def test_a_write_cut_short_is_an_error_and_no_record(tmp_path, monkeypatch):
    with metrics.Writer(tmp_path / "m.jsonl") as writer:
        writer.write(record(0))
        real = writer._files[0].write
        with monkeypatch.context() as patch, pytest.raises(StorageError):
            patch.setattr(writer, "_files", [SimpleNamespace(write=lambda line: real(line[:9]), close=lambda: None)])
            writer.write(record(1))
    assert [line["step"] for line in metrics.read(tmp_path / "m.jsonl")] == [0]


def test_definitions_cover_the_console():
    assert set(record(0)) <= set(metrics.DEFINITIONS)


# --- the console


def test_plain_line_keeps_its_form():
    line = metrics.plain_line(record(9, seconds=0.213, loss=2.374, tokens_per_second_per_device=9612.1))
    assert line == (
        "completed step: 9, seconds: 0.213, TFLOP/s/device: 0.041, Tokens/s/device: 9612.1, "
        "total_weights: 4096, loss: 2.374"
    )
    assert LINE.fullmatch(metrics.plain_line(record(123456, total_weights=7)))


def test_a_pipe_gets_plain_lines_each_period():
    stream = io.StringIO()
    console = metrics.Console(stream, first_step=3, total_steps=26, log_period=10)
    console.say("hello")
    for step in range(3, 26):
        console.report(record(step))
    console.close()
    hello, *lines = stream.getvalue().splitlines()
    assert hello == "hello"
    assert [int(LINE.fullmatch(line)[1]) for line in lines] == [3, 9, 19, 25]


def test_non_finite_loss_is_shown():
    assert metrics.plain_line(record(0, loss=math.nan)).endswith("loss: nan")


def on_a_terminal(body: str) -> str:
    """Run `body` with its output on a pseudo-terminal; return all that was written there."""
    main, terminal = pty.openpty()
    code = "import sys\nfrom MaxText import metrics\n" + textwrap.dedent(body)
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=terminal, env=environ) as process:
        os.close(terminal)
        chunks = []
        with contextlib.suppress(OSError):  # raised when the other end closes
            while chunk := os.read(main, 4096):
                chunks.append(chunk)
        os.close(main)
    assert process.returncode == 0
    return b"".join(chunks).decode()


def test_a_terminal_gets_a_bar_that_stays():
    record_ = record(4)
    shown = on_a_terminal(f"""
        with metrics.Console(sys.stdout, 0, 5, 10) as console:
            console.report({record_ | {"step": 3}})
            console.say("[saved] step 4")
            console.report({record_})
        print("after")
    """)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "[saved] step 4" in text
    last = text.replace("\r", "\n").split("after")[0].strip().splitlines()[-1]
    assert "step 5/5" in last and "loss 2.374" in last and "9,612 tokens/s/device" in last
    assert "completed step" not in text
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def test_rich_is_imported_only_for_a_terminal():
    code = "import io, sys\nfrom MaxText import metrics\nmetrics.Console(io.StringIO(), 0, 2, 1).say('x')\n"
    code += "print(sorted({'rich', 'jax', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
