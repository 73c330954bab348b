"""No damage passes unnoticed, and the newest intact step is used."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpoint import FORMAT, Store, manifest

from .helpers import DAMAGES, assert_same, data_files, flip, host_state, orbax, raises, state, target


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_in_any_file_is_noticed_by_name(copy, damage):
    for path in data_files(copy.folder):
        whole = path.read_bytes()
        DAMAGES[damage](path)
        for check in (lambda: copy.restore(20, target()), lambda: copy.verify(20)):
            with raises("checkpoint.damaged") as caught:
                check()
            assert f"file {path.relative_to(copy.folder / '20')}" in str(caught.value)
            if path.parent.name != "state":
                assert f"(array {path.parent.name.replace('.', '/')})" in str(caught.value)
        path.write_bytes(whole)
    copy.verify(20)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damage_in_a_large_array(tmp_path, damage):
    """Its file is not read twice: the array's own checksum must find it."""
    array = jnp.arange(100_000, dtype=jnp.float32)
    with Store(tmp_path, asynchronous=False) as store:
        store.save(1, {"w": array}, {})
        DAMAGES[damage](tmp_path / "1" / "state" / "w" / "0")
        with raises("checkpoint.damaged") as caught:
            store.restore(1, {"w": jax.ShapeDtypeStruct(array.shape, array.dtype)})
        assert "file state/w/0 (array w)" in str(caught.value)


def test_without_checksums_a_flipped_byte_would_pass(copy):
    """Orbax does not notice: this is what the checksums are for."""
    (chunk,) = (path for path in data_files(copy.folder) if path.parent.name == "params.embed" and path.name == "0.0")
    flip(chunk)
    found = orbax(copy.folder / "20" / "state")
    assert not np.array_equal(found["params"]["embed"], host_state(20)["params"]["embed"])
    found = copy.restore(20, target(), verify=False)
    assert not np.array_equal(found["params"]["embed"], host_state(20)["params"]["embed"])


def test_damaged_newest_step_falls_back_and_is_moved_aside(copy):
    flip(next(path for path in data_files(copy.folder) if path.name == "0.0"))
    step, found, skipped = copy.restore_newest(target())
    assert step == 10
    assert_same(found, host_state(10))
    assert len(skipped) == 1 and "20" in skipped[0] and "0.0" in skipped[0]
    assert copy.steps() == [10] and 20 in copy.incomplete()
    copy.save(15, state(15), {})
    copy.save(20, state(21), {})
    assert copy.steps() == [10, 15, 20]
    assert (copy.folder / "20.damaged" / "manifest.json").exists()
    assert_same(copy.restore(20, target()), host_state(21))
    copy.close()


def test_every_step_damaged_is_an_error(copy):
    for step in (10, 20):
        shutil.rmtree(copy.folder / str(step) / "state")
    with raises("checkpoint.none") as caught:
        copy.restore_newest(target())
    assert "step 10" in str(caught.value) and "step 20" in str(caught.value)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_step_with_a_damaged_manifest_does_not_exist_but_is_kept(copy, damage):
    DAMAGES[damage](copy.folder / "20" / "manifest.json")
    assert copy.steps() == [10] and "manifest" in copy.incomplete()[20]
    step, _, skipped = copy.restore_newest(target())
    assert step == 10 and len(skipped) == 1
    copy.save(12, state(12), {})
    assert copy.steps() == [10, 12] and (copy.folder / "20.damaged" / "state").exists()
    copy.close()


def test_manifest_of_another_step(copy):
    (copy.folder / "20").rename(copy.folder / "40")
    assert copy.steps() == [10] and "20" in copy.incomplete()[40]


def test_a_later_format_is_left_alone(copy):
    path = copy.folder / "20" / "manifest.json"
    content = json.loads(path.read_text())
    content |= {"format": FORMAT + 1, "news": 1}
    del content["checksum"]
    path.write_text(json.dumps(content | {"checksum": manifest._checksum(content)}))
    assert copy.steps() == [10]
    with raises("checkpoint.newer-format"):
        copy.save(30, state(30), {})
    assert path.exists()
