"""A changed byte of prepared rows is never trained on: the step that would see it says where it is."""

from __future__ import annotations

import os

import numpy as np
import pytest

from MaxText import data, tokenizer
from MaxText.data import blocks, prepare, prepared
from MaxText.errors import DataError
from tests.runs import kept, records, run, toy_config

from .helpers import make_config


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 64)


@pytest.mark.parametrize("pieces", [[0], [1], [31, 1], [64, 64], [5, 0, 200, 3], [333]])
def test_what_was_written_is_read(tmp_path, small, pieces):
    ids = np.random.default_rng(0).integers(0, 1 << 16, sum(pieces)).astype(np.uint16)
    with (tmp_path / "ids").open("wb") as file:
        writer = blocks.Writer(file)
        for piece in np.split(ids, np.cumsum(pieces)[:-1]):
            writer.write(piece)
    assert len(writer.checksums) == -(-len(ids) * 2 // 64)
    assert writer.sha256.hexdigest() == prepared.checksum(tmp_path / "ids")
    checked = blocks.Checked(tmp_path / "ids", ids.dtype, writer.checksums)
    assert len(checked) == len(ids)
    index = np.random.default_rng(1).integers(0, max(len(ids), 1), (7, 5 if len(ids) else 0))
    np.testing.assert_array_equal(checked.take(index), ids[index])
    np.testing.assert_array_equal(checked.take(np.arange(len(ids))), ids)


def test_each_changed_byte_is_found_by_those_who_read_it(tmp_path, small):
    ids = np.arange(100, dtype=np.int32)
    with (tmp_path / "ids").open("wb") as file:
        writer = blocks.Writer(file)
        writer.write(ids)
    whole = (tmp_path / "ids").read_bytes()
    for place in range(0, 400, 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        (tmp_path / "ids").write_bytes(damaged)
        checked = blocks.Checked(tmp_path / "ids", ids.dtype, writer.checksums)
        for index in range(100):
            if index // 16 != place // 64:
                assert checked.take(np.array([index])) == [index]
                continue
            first = place // 64 * 64
            with pytest.raises(DataError, match=f"bytes {first} to {min(first + 64, 400) - 1}: they have changed") as e:
                checked.take(np.array([index]))
            assert e.value.id == "data.damaged"


def test_a_file_that_gets_shorter_while_it_is_open(tmp_path, small):
    with (tmp_path / "ids").open("wb") as file:
        writer = blocks.Writer(file)
        writer.write(np.arange(100, dtype=np.int32))
    checked = blocks.Checked(tmp_path / "ids", np.dtype(np.int32), writer.checksums)
    os.truncate(tmp_path / "ids", 70)
    np.testing.assert_array_equal(checked.take(np.arange(16)), np.arange(16))
    with pytest.raises(DataError, match="bytes 64 to 127: only 6 of them are left"):
        checked.take(np.arange(17))
    with pytest.raises(DataError, match="checksums for 7 blocks"):
        blocks.Checked(tmp_path / "ids", np.dtype(np.int32), writer.checksums)


@pytest.mark.parametrize("name", ["starts", "records", "blocks", "plan-document", "plan-first", "plan-pairs"])
def test_the_tables_are_checked_before_the_first_step(tmp_path, name):
    cfg = make_config(packing_type="best_fit", num_epoch=1)
    prepare.prepare(cfg, tokenizer.make(cfg), tmp_path / "rows", 1)
    cfg = cfg.replace(dataset_type="prepared", dataset_path=str(tmp_path / "rows"), train_files=[])
    path = tmp_path / "rows/train-0" / f"{name}.npy"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name}.npy holds other bytes") as caught:
        data.open_split(cfg, tokenizer.make(cfg), "train", 4)
    assert caught.value.id == "data.damaged"


def test_a_run_stops_at_the_step_and_goes_on_when_the_file_is_whole(tmp_path, capsys):
    cfg = toy_config(tmp_path)
    rows = tmp_path / "rows"
    prepare.prepare(cfg, tokenizer.make(cfg), rows, 1)
    how = {"dataset_type": "prepared", "dataset_path": str(rows), "train_files": []}
    assert run(tmp_path, **how) == 0
    unbroken = records(tmp_path)
    assert unbroken[-1]["step"] >= 5

    cfg = toy_config(tmp_path, **how)
    path = rows / "train-0" / prepared.TOKENS
    seen = [_blocks(data.open_split(cfg, tokenizer.make(cfg), "train", 16), step) for step in range(4)]
    fresh = sorted(seen[3] - set.union(*seen[:3]))
    assert fresh, "every block that step 3 reads was read before"
    with path.open("r+b") as file:
        file.seek(fresh[0] * blocks.BLOCK + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    capsys.readouterr()
    broken = {"run_name": "broken"}
    assert run(tmp_path, **how, **broken) == DataError("", id="").exit_code
    said = capsys.readouterr().err
    assert f"bytes {fresh[0] * blocks.BLOCK} to" in said and "Traceback" not in said
    assert kept(tmp_path, "broken") == [2, 3]  # what was trained is saved
    assert [r["step"] for r in records(tmp_path, "broken") if "loss" in r][-1] == 2
    with path.open("r+b") as file:
        file.seek(fresh[0] * blocks.BLOCK + 100)
        file.write(byte)
    assert run(tmp_path, **how, **broken) == 0
    assert records(tmp_path, "broken") == unbroken


def _blocks(dataset: data.Dataset, step: int) -> set[int]:
    """The blocks of tokens.bin that a step reads."""
    stream = dataset.parts[0].contents.stream
    read, done = stream._read, set()
    stream._read = lambda block, into: (done.add(block), read(block, into))
    dataset.batch(step)
    return done
