"""Import and export hold about one layer in memory, however many there are; `benchmarks.convert` measures processes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.convert import model, write_source
from MaxText.checkpoint import manifest
from MaxText.checkpoint.stream import Reader
from MaxText.convert import safetensors, transfer

WIDTH = 256


def peak(work: Callable[[], object]) -> int:
    """Bytes that `work` held at most, beyond what was there before; NumPy reports its arrays to tracemalloc."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_the_peak_does_not_grow_with_the_layers(tmp_path: Path, kind: str):
    peaks: dict[str, list[int]] = {"import": [], "export": [], "copy": []}
    for layers in (1, 2, 12):
        folder = tmp_path / str(layers)
        folder.mkdir()
        source, stored = folder / "hf", folder / "in"
        write_source(source, model(kind, layers, WIDTH))
        peaks["import"].append(peak(lambda a=source, b=stored: transfer.import_model(a, b, {})))
        peaks["export"].append(peak(lambda a=stored, b=folder / "out": transfer.export_model(a, b, {})))
        peaks["copy"].append(peak(lambda a=source, b=folder / "copy": transfer.export_model(a, b, {})))
        written = [(folder / name / safetensors.SINGLE).read_bytes() for name in ("hf", "out", "copy")]
        assert written[0] == written[1] == written[2]
    total, described = len(written[0]), 4096 * len(safetensors.read_folder(source))  # names, shapes and places
    largest = 4 * max(4096 * WIDTH, 16 * WIDTH * WIDTH // 4)
    for verb, (_, two, twelve) in peaks.items():
        assert twelve < two + described, (verb, peaks)
        assert twelve < 2 * largest < total / 2, (verb, peaks, largest)


def test_an_array_in_several_chunks_is_read_slice_by_slice(tmp_path: Path):
    """As several processes may write one; the rest of the array stays where it is."""
    import tensorstore

    write_source(tmp_path / "hf", model("dense", 3, 128))
    transfer.import_model(tmp_path / "hf", tmp_path / "in", {})
    step = tmp_path / "in/checkpoints/0"
    name = "decoder/layers/0/mlp/wi_0"
    whole = Reader(step, "params/").read(name)
    (folder,) = (step / "state").glob("params*mlp.wi_0")
    (folder / "0.0.0").unlink()
    chunks = {"shape": whole.shape, "chunks": [1, 64, 96], "dtype": "<f4", "compressor": None, "order": "C"}
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder)}, "metadata": chunks}
    tensorstore.open(spec, create=True, delete_existing=True).result().write(whole).result()
    was = manifest.read(step)
    (step / manifest.NAME).unlink()
    manifest.write(step, replace(was, files=manifest.survey(step)))
    reader = Reader(step, "params/")
    reader.verify()
    np.testing.assert_array_equal(reader.read(name), whole)
    np.testing.assert_array_equal(reader.read(name, 2), whole[2])
    np.testing.assert_array_equal(reader.read(name, 1, 70), whole[1, 70])
    transfer.export_model(tmp_path / "in", tmp_path / "out", {})
    assert (tmp_path / "out" / safetensors.SINGLE).read_bytes() == (tmp_path / "hf" / safetensors.SINGLE).read_bytes()
