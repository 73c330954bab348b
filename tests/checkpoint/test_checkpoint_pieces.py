"""Arrays stored in pieces, as several processes store them: here one process with eight devices plays all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from MaxText.checkpoint import Leaf, Store, arrays, manifest, named_leaves, shards
from MaxText.checkpoint.manifest import Manifest
from MaxText.checkpoint.stream import Reader
from tests.checkpoint.helpers import assert_same, host_state, mesh, orbax, raises, state, target


def save(folder: Path, step: int, tree: object) -> None:
    """What `together.write` does, without the waiting."""
    named = named_leaves(tree)
    path = folder / str(step)
    path.mkdir(parents=True)
    described = shards.describe(named)
    shards.outline(path / "state", described)
    files = shards.write(path / "state", arrays.to_host(shards.own_pieces(named), {}))
    everything = manifest.survey(path, skip={f"state/{name}" for name in files})
    everything |= {f"state/{name}": file for name, file in files.items()}
    assert everything == manifest.survey(path)
    manifest.write(path, Manifest(step, {n: d.leaf for n, d in described.items()}, everything, {"config": {}}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pieces")
    save(folder, 5, state(5, mesh(4, 2)))
    return folder


def test_each_piece_is_a_file_and_is_written_once(saved):
    found = {path.name for path in (saved / "5/state/params.embed").iterdir() if not path.name.startswith(".")}
    assert found == {f"{i}.{j}" for i in range(4) for j in range(2)}
    replicated = {path.name for path in (saved / "5/state/params.layers.norm").iterdir()} - {".zarray"}
    assert replicated == {"0"}


@pytest.mark.parametrize("shape", [(4, 2), (8, 1), (2, 4), (1, 1)])
def test_any_mesh_reads_the_pieces(saved, shape):
    store = Store(saved)
    store.verify(5)
    assert_same(store.restore(5, target(mesh(*shape))), host_state(5))


def test_orbax_and_the_converter_read_them_too(saved):
    wanted = {name: np.asarray(leaf) for name, leaf in named_leaves(host_state(5)).items()}
    found = named_leaves(orbax(saved / "5/state"))
    reader = Reader(saved / "5")
    for name, leaf in wanted.items():
        assert found[name].tobytes() == leaf.tobytes(), name
        assert np.asarray(reader.read(name)).tobytes() == leaf.tobytes(), name
    assert (reader.read("params/embed", 3) == wanted["params/embed"][3]).all()


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_a_damaged_piece_is_named(saved, tmp_path, how):
    save(tmp_path, 4, state(4))
    save(tmp_path, 5, state(5))
    piece = tmp_path / "5/state/params.embed/2.1"
    data = bytearray(piece.read_bytes())
    if how == "delete":
        piece.unlink()
    else:
        data[3] ^= 16
        piece.write_bytes(data if how == "flip" else data[:-4])
    with raises("checkpoint.damaged") as caught:
        Store(tmp_path).restore(5, target())
    assert "params.embed/2.1" in str(caught.value)
    step, found, skipped = Store(tmp_path).restore_newest(target())
    assert step == 4 and "2.1" in skipped[0]
    assert_same(found, host_state(4))


def pieces(folder: Path, leaf: Leaf, read: list[str]) -> shards.Pieces:
    """Of params/embed; the files that are read are noted."""
    files = shards.Files(folder, shards.below(Store(folder.parents[1]).read_manifest(5).files, "state"))
    return shards.Pieces(lambda path: read.append(path) or files(path), "params/embed", leaf)


def test_only_pieces_that_are_needed_are_read_and_once(saved):
    read: list[str] = []
    leaf = Store(saved).read_manifest(5).leaves["params/embed"]
    found = pieces(saved / "5/state", leaf, read)
    rows = found.read((slice(4, 8), slice(None)))
    found.read((slice(4, 6), slice(0, 8)))
    assert sorted(read) == [f"params.embed/{name}" for name in (".zarray", "1.0", "1.1")]
    assert (rows == host_state(5)["params"]["embed"][4:8]).all()


def test_a_shape_that_does_not_fit_its_file_is_damage(saved):
    leaf = Store(saved).read_manifest(5).leaves["params/embed"]
    with pytest.raises(shards.Damaged):
        pieces(saved / "5/state", Leaf((2, 2), leaf.dtype, ""), [])
