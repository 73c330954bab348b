"""What goes in comes out, to the bit, on any mesh; what does not fit is refused."""

import json
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText import crc
from MaxText.checkpoint import FORMAT, Store, manifest, named_leaves, shards, tree

from .helpers import ROOT, assert_same, host_state, mesh, orbax, raises, state, target


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (1, 8), (8, 1), (1, 1)])
def test_restores_to_the_bit_onto_any_mesh(copy, shape):
    on = mesh(*shape)
    found = copy.restore(20, target(on))
    assert_same(found, host_state(20))
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(target(on)), strict=True):
        assert leaf.sharding == wanted.sharding


@pytest.mark.parametrize("asynchronous", [True, False])
def test_buffers_may_be_donated_once_save_returns(tmp_path, asynchronous):
    """And every save has its own values, although the host buffers are used again."""
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), tree), donate_argnums=0)
    now, wanted = state(0)["params"], host_state(0)["params"]
    shape = target()["params"]
    with Store(tmp_path, asynchronous=asynchronous) as store:
        for step in range(1, 4):
            store.save(step, now, {})
            now = advance(now)
        for _ in range(3):
            now = advance(now)
        store.wait()
        for step in range(1, 4):
            assert_same(store.restore(step, shape), wanted)
            wanted = jax.tree.map(lambda x: x + np.ones((), x.dtype), wanted)


def test_restored_state_may_be_donated(copy):
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), tree), donate_argnums=0)
    found = copy.restore(20, target())["params"]
    for _ in range(3):
        found = advance(found)
    wanted = host_state(20)["params"]
    for _ in range(3):
        wanted = jax.tree.map(lambda x: x + np.ones((), x.dtype), wanted)
    assert_same(found, wanted)


def test_names_come_from_keys_and_fields():
    assert list(named_leaves(host_state())) == [
        "flags",
        "opt/1/0/count",
        *(f"opt/1/0/{moment}/{leaf}" for moment in ("mu", "nu") for leaf in ("embed", "layers/norm", "layers/w")),
        *(f"params/{leaf}" for leaf in ("embed", "layers/norm", "layers/w")),
        "step",
    ]


def test_ambiguous_names_are_refused():
    with pytest.raises(ValueError, match="names"):
        named_leaves({"a": {"b": 1}, "a/b": 2})
    with pytest.raises(ValueError, match="names"):
        named_leaves({"a": {"b": 1}, "a.b": 2})


def test_manifest_says_what_there_is(copy):
    content = copy.manifest(20)
    assert (content["format"], content["step"], content["meta"]) == (FORMAT, 20, {"config": {"steps": 30}})
    assert {"maxtext", "jax", "numpy", "orbax-checkpoint", "python"} == set(content["versions"])
    wanted = named_leaves(host_state(20))
    assert set(content["leaves"]) == set(wanted)
    leaf = content["leaves"]["params/layers/w"]
    assert (leaf["shape"], leaf["dtype"]) == ([8, 8], "bfloat16")
    assert leaf["crc"] == manifest.crc(wanted["params/layers/w"].tobytes())
    files = {
        path.relative_to(copy.folder / "20").as_posix() for path in (copy.folder / "20").rglob("*") if path.is_file()
    }
    assert files == {*content["files"], "manifest.json"}
    json.dumps(content)


@pytest.mark.parametrize("size", [0, 1, 63, 4097, 300_001])
def test_checksums_are_those_of_zlib(size):
    """Whichever library computes them, and in whatever blocks."""
    data = np.random.default_rng(size).bytes(size)
    assert crc.text(crc.update(data[size // 3 :], crc.update(data[: size // 3]))) == f"{zlib.crc32(data):08x}"


def test_checksum_does_not_depend_on_the_mesh(tmp_path):
    found = []
    for shape in ((4, 2), (1, 8)):
        with Store(tmp_path / str(shape), asynchronous=False) as store:
            store.save(1, state(1, mesh(*shape)), {})
            found.append(store.manifest(1)["leaves"])
    assert found[0] == found[1]


def test_reading_writes_nothing(copy, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert copy.steps() == [10, 20] and copy.latest() == 20 and copy.incomplete() == {}
    copy.manifest(10)
    copy.verify(10)
    copy.restore_newest(target())
    absent = Store(tmp_path / "absent", asynchronous=False)
    assert absent.steps() == [] and absent.latest() is None
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_step(copy):
    with raises("checkpoint.no-step") as caught:
        copy.restore(15, target())
    assert "10, 20" in str(caught.value)


def test_no_step_at_all(store):
    with raises("checkpoint.none"):
        store.restore_newest(target())


def test_meta_is_fixed_when_save_returns(tmp_path):
    meta = {"a": [1]}
    with Store(tmp_path) as store:
        store.save(1, state(), meta)
        meta["a"].append(2)
        store.wait()
        assert store.manifest(1)["meta"] == {"a": [1]}
        with pytest.raises(TypeError):
            store.save(2, state(), {"a": object()})
        assert store.latest() == 1


def test_jax_and_orbax_are_imported_late():
    code = "import sys, MaxText.checkpoint; print(sorted({'jax', 'orbax', 'orbax.checkpoint'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_nest_and_unnest_are_inverse():
    named = {"a/b/c": 1, "a/d": 2, "e": 3, "a/0/x": 4}
    assert tree.unnest(tree.nest(named)) == named


def test_another_program_can_read_it_with_orbax(copy):
    np.testing.assert_array_equal(
        orbax(copy.folder / "20" / "state")["params"]["embed"], host_state(20)["params"]["embed"]
    )


# --- strict


def unfit(change):
    wanted = target()
    change(wanted)
    return wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["params"].update(extra=t["step"]), ["params/extra", "missing in the checkpoint", "int32[]"]),
        (lambda t: t["params"].pop("embed"), ["params/embed", "not in the model", "float32[16, 8]"]),
        (
            lambda t: t["params"].update(embed=jax.ShapeDtypeStruct((16, 9), np.float32)),
            ["params/embed", "float32[16, 8]", "float32[16, 9]"],
        ),
        (
            lambda t: t["params"].update(embed=jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)),
            ["params/embed", "float32[16, 8]", "bfloat16[16, 8]"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_is_read(copy, monkeypatch, change, words):
    monkeypatch.setattr(shards, "read", lambda *_: pytest.fail("read"))
    with raises("checkpoint.unfit") as caught:
        copy.restore_newest(unfit(change))
    assert all(word in str(caught.value) for word in words)


def test_a_long_table_is_cut(copy):
    with raises("checkpoint.unfit") as caught:
        copy.restore(20, {str(i): jax.ShapeDtypeStruct((1,), np.float32) for i in range(100)})
    assert len(str(caught.value).splitlines()) < 50


def test_only_arrays_that_are_named_may_be_left_out(copy):
    """Parameters alone, of a whole state, by the one function that restores."""
    wanted = {"params": target()["params"]}
    with raises("checkpoint.unfit") as caught:
        copy.restore(20, wanted, ignore=("opt/", "flags"))
    assert "step" in str(caught.value) and "opt/" not in str(caught.value)
    found = copy.restore(20, wanted, ignore=("opt/", "flags", "step"))
    assert_same(found, {"params": host_state(20)["params"]})
