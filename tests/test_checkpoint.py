"""Nothing is lost: bit-exact on any mesh, strict, and no damage passes unnoticed."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from MaxText.checkpoint import FORMAT, Store, arrays, manifest, named_leaves, tree
from MaxText.errors import StorageError

ROOT = Path(__file__).parents[1]


def mesh(*shape):
    return jax.make_mesh(shape, ("fsdp", "tensor")[: len(shape)], axis_types=(AxisType.Explicit,) * len(shape))


def sharding(on, array):
    axes = on.axis_names if array.ndim == len(on.axis_names) else ()
    return NamedSharding(on, PartitionSpec(*axes))


def host_state(seed=0):
    """Every kind of leaf: matrices of several dtypes, a scalar, zeros, optax's named tuples with empty ones inside."""
    rng = np.random.default_rng(seed)
    params = {
        "embed": rng.standard_normal((16, 8), dtype=np.float32),
        "layers": {"w": rng.standard_normal((8, 8)).astype(jnp.bfloat16), "norm": np.ones(24, np.float32)},
    }
    opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(jax.tree.map(jnp.asarray, params))
    opt = jax.tree.map(np.asarray, opt)
    return {"step": np.int32(seed).reshape(()), "params": params, "opt": opt, "flags": np.array([True, False] * 4)}


def state(seed=0, on=None):
    on = on or mesh(4, 2)
    return jax.tree.map(lambda array: jax.device_put(array, sharding(on, array)), host_state(seed))


def target(on=None):
    on = on or mesh(4, 2)
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding(on, array)), host_state()
    )


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for name, leaf in named_leaves(found).items():
        other = np.asarray(named_leaves(wanted)[name])
        assert leaf.dtype == other.dtype and np.asarray(leaf).tobytes() == other.tobytes(), name


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "checkpoints", asynchronous=False) as made:
        yield made


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 10 and 20 on disk, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Store(folder, asynchronous=False) as made:
        for step in (10, 20):
            made.save(step, state(step), {"config": {"steps": 30}})
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Store(Path(shutil.copytree(saved, tmp_path / "checkpoints")), asynchronous=False)


def raises(id):
    return pytest.raises(StorageError, check=lambda error: error.id == id)


# --- what goes in comes out


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
    monkeypatch.setattr(arrays, "read", lambda *_: pytest.fail("read"))
    with raises("checkpoint.unfit") as caught:
        copy.restore_newest(unfit(change))
    assert all(word in str(caught.value) for word in words)


def test_a_long_table_is_cut(copy):
    with raises("checkpoint.unfit") as caught:
        copy.restore(20, {str(i): jax.ShapeDtypeStruct((1,), np.float32) for i in range(100)})
    assert len(str(caught.value).splitlines()) < 50


# --- damage


def data_files(folder):
    return sorted(path for path in (folder / "20").rglob("*") if path.is_file() and path.name != "manifest.json")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


DAMAGES = {"flip": flip, "truncate": truncate, "delete": Path.unlink, "empty": lambda path: path.write_bytes(b"")}


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


def test_damage_that_the_files_do_not_show(copy, monkeypatch):
    """Bytes changed between the disk and us: the array is named."""
    read = arrays.read

    def changing(*args):
        found = read(*args)
        found["params/embed"].view(np.uint8)[3, 3] ^= 1
        return found

    monkeypatch.setattr(arrays, "read", changing)
    with raises("checkpoint.damaged") as caught:
        copy.restore(20, target())
    assert "array params/embed: CRC" in str(caught.value)


def test_without_checksums_a_flipped_byte_would_pass(copy):
    """Orbax does not notice: this is what the checksums are for."""
    (chunk,) = (path for path in data_files(copy.folder) if path.parent.name == "params.embed" and path.name == "0.0")
    flip(chunk)
    named = arrays.read(copy.folder / "20" / "state", copy.manifest(20)["leaves"])
    assert not np.array_equal(named["params/embed"], host_state(20)["params"]["embed"])


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


# --- saves that die


def test_leftovers_are_ignored_then_removed_by_the_next_save(copy):
    for name in ("30", "40"):
        shutil.copytree(copy.folder / "20", copy.folder / name)
        (copy.folder / name / "manifest.json").unlink()
    (copy.folder / "40" / "state").rename(copy.folder / "40" / "state.orbax-checkpoint-tmp")
    assert copy.steps() == [10, 20] and set(copy.incomplete()) == {30, 40}
    step, _, skipped = copy.restore_newest(target())
    assert step == 20 and len(skipped) == 2
    assert (copy.folder / "40").exists()
    copy.save(30, state(30), {})
    assert copy.steps() == [10, 20, 30] and not (copy.folder / "40").exists()
    copy.close()


KILLED = """
    import os, signal, sys, jax.numpy as jnp
    from pathlib import Path
    from MaxText.checkpoint import Store, arrays, manifest, store
    at, module = sys.argv[2], {"write": arrays, "survey": manifest, "sync_folder": manifest}
    die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
    saver = Store(Path(sys.argv[1]))
    saver.save(1, {"w": jnp.ones((4, 4))}, {})
    saver.wait()
    if at == "replace":
        os.replace = die
    elif at == "inside":
        import orbax.checkpoint as ocp
        ocp.PyTreeCheckpointHandler.finalize = die
    else:
        setattr(module[at], at, die)
    saver.save(2, {"w": jnp.ones((4, 4)) * 2}, {})
    saver.wait()
"""


@pytest.mark.parametrize("moment", ["write", "inside", "survey", "sync_folder", "replace"])
def test_killed_at_any_boundary_of_a_save(tmp_path, moment):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), moment]
    assert subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE).returncode == -signal.SIGKILL
    assert (tmp_path / "2").exists()
    with Store(tmp_path, asynchronous=False) as store:
        assert store.steps() == [1]
        w = {"w": jax.ShapeDtypeStruct((4, 4), np.float32)}
        step, found, skipped = store.restore_newest(w)
        assert step == 1 and np.all(np.asarray(found["w"]) == 1) and len(skipped) == 1
        store.save(2, {"w": jnp.full((4, 4), 3.0)}, {})
        assert np.all(np.asarray(store.restore(2, w)["w"]) == 3)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "1", "2"]


def test_a_failed_background_save_is_told_at_the_next_call(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing")

    with pytest.MonkeyPatch.context() as patch:
        for told in ("check", "wait", "save", "close"):
            store = Store(tmp_path / told)
            store.save(1, state(), {})
            store.wait()
            patch.setattr(arrays, "write", fail)
            store.save(2, state(), {})
            store._pending.exception()  # it is over
            patch.undo()
            call = (lambda: store.save(3, state(), {})) if told == "save" else getattr(store, told)  # noqa: B023
            with raises("checkpoint.not-saved") as caught:
                call()
            assert "RESOURCE_EXHAUSTED" in str(caught.value) and "bytes" in str(caught.value)
            assert store.steps() == [1]
            if told != "close":
                with raises("checkpoint.not-saved"):
                    store.check()
            store.close()  # told once is enough


def test_check_does_not_wait(tmp_path, monkeypatch):
    gate = threading.Event()
    write = arrays.write
    monkeypatch.setattr(arrays, "write", lambda *args: (gate.wait(), write(*args)))
    with Store(tmp_path) as store:
        store.save(1, state(), {})
        store.check()
        assert store.steps() == []
        gate.set()
        store.wait()
        assert store.steps() == [1]


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], stderr=subprocess.DEVNULL
        ).returncode
    )
    if not mounted:
        pytest.skip("this user cannot mount a small disk; test_file_size_limit covers the rest")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_disk_full(small_disk):
    little = {"w": jnp.ones((1000,))}
    with Store(small_disk / "checkpoints") as store:
        store.save(1, little, {})
        store.save(2, {"w": jnp.ones((100_000,))}, {})  # 400 kB
        with raises("checkpoint.not-saved") as caught:
            store.wait()
        assert "400,000" in str(caught.value)
    with Store(small_disk / "checkpoints") as store:
        assert store.steps() == [1]
        store.save(2, little, {})  # the leftovers made room
        store.wait()
        assert store.steps() == [1, 2]


def test_file_size_limit(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with Store(tmp_path, asynchronous=False) as store:
            store.save(1, {"w": jnp.ones((10,))}, {})
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
            with raises("checkpoint.not-saved"):
                store.save(2, {"w": jnp.ones((100_000,))}, {})
            assert store.steps() == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_bytes_changed_on_the_way_to_the_disk_fail_the_save(store, monkeypatch):
    write = arrays.write

    def flipping(folder, host):
        write(folder, host)
        flip(next(folder.rglob("0.0")))

    monkeypatch.setattr(arrays, "write", flipping)
    with raises("checkpoint.not-saved"):
        store.save(1, state(), {})
    assert store.steps() == []


# --- order, retention, place


def test_saving_below_a_later_step_is_refused(copy):
    for step in (15, 20):
        with raises("checkpoint.later-step"):
            copy.save(step, state(), {})
    assert copy.steps() == [10, 20]
    copy.close()


@pytest.mark.parametrize("keep", [1, 2])
def test_retention(tmp_path, keep):
    with Store(tmp_path, keep=keep) as store:
        for step in range(1, 5):
            store.save(step, {"w": jnp.ones(3) * step}, {})
        store.wait()
        assert store.steps() == [1, 2, 3, 4][-keep:]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", *map(str, range(5 - keep, 5))]


def test_keep_none_of_them_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep"):
        Store(tmp_path, keep=0)


def test_nothing_old_goes_before_the_new_step_is_durable(tmp_path, monkeypatch):
    with Store(tmp_path, keep=1, asynchronous=False) as store:
        store.save(1, {"w": jnp.ones(3)}, {})
        with monkeypatch.context() as patch, raises("checkpoint.not-saved"):
            patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            store.save(2, {"w": jnp.ones(3)}, {})
        assert store.steps() == [1]
        store.save(2, {"w": jnp.ones(3)}, {})
        assert store.steps() == [2]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with Store(tmp_path / "file" / "checkpoints") as store, raises("checkpoint.not-writable") as caught:
        assert store.latest() is None
        store.prepare()
    assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write and look anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with Store(tmp_path / "checkpoints") as store, raises("checkpoint.not-writable"):
            store.prepare()
        tmp_path.chmod(0)
        with raises("checkpoint.not-readable"):
            store.latest()
    finally:
        tmp_path.chmod(0o700)


def test_two_writers(tmp_path):
    with Store(tmp_path, asynchronous=False) as first:
        first.prepare()
        first.prepare()
        second = Store(tmp_path, asynchronous=False)
        with raises("checkpoint.in-use") as caught:
            second.prepare()
        assert str(os.getpid()) in str(caught.value)
        first.save(1, {"w": jnp.ones(3)}, {})
        assert second.steps() == [1]  # reading is free
    second.prepare()
    second.close()


def test_jax_and_orbax_are_imported_late():
    code = "import sys, MaxText.checkpoint; print(sorted({'jax', 'orbax', 'orbax.checkpoint'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_nest_and_unnest_are_inverse():
    named = {"a/b/c": 1, "a/d": 2, "e": 3, "a/0/x": 4}
    assert tree.unnest(tree.nest(named)) == named


def test_another_program_can_read_it_with_orbax(copy):
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(copy.folder / "20" / "state")
    np.testing.assert_array_equal(found["params"]["embed"], host_state(20)["params"]["embed"])
