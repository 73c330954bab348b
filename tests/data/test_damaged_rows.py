"""No byte of prepared rows, their manifest, or what an interrupted `data prepare` left is used once it has changed."""

import os
from pathlib import Path

import numpy as np
import pytest

from MaxText.data import prepare, prepared
from MaxText.errors import DataError, Preempted, StorageError

from .preparing import keys_of, make, pair


@pytest.mark.parametrize("name", ["tokens.bin", "blocks.npy", "starts.npy", "records.npy"])
def test_damage_is_found(files, name):
    make(keys_of(files))
    path = Path("rows/train-0") / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError) as caught:
        list(pair(keys_of(files)))
    assert caught.value.id == "data.truncated"
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=name):
        prepared.verify("rows")
    with pytest.raises(DataError, match="Delete rows"):
        make(keys_of(files))


@pytest.mark.parametrize("packing", ["concat_then_split", "best_fit"])
def test_what_becomes_of_the_tables_later_changes_no_batch(files, packing):
    keys = keys_of(files, packing_type=packing)
    make(keys)
    a, b = pair(keys)
    for path in Path("rows/train-0").glob("*.npy"):
        with path.open("r+b") as file:  # in place, as a copy over it does
            file.write(bytes(path.stat().st_size))
        os.truncate(path, 7)
    for step in range(20):
        one, other = a.batch(step), b.batch(step)
        assert all(np.array_equal(one[k], other[k]) for k in one)
        assert a.show(step) == b.show(step)


def test_any_changed_bit_of_the_manifest_is_refused(files):
    make(keys_of(files, held_out_every=0, mixture_weights=[1e-5, 0.99999]))
    path = Path("rows/manifest.json")
    whole = path.read_bytes()
    number = whole.index(b"1e-05") * 8  # 1E-05 is the same one
    for place in [*range(0, len(whole) * 8, 17), *range(number - 16, number + 56)]:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError) as caught:
            prepared.manifest("rows")
        assert caught.value.id == "data.damaged"


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "7", "{}", '{"format": 2}', '{"format": 2, "checksum": 3}', "[" * 9999]
)
def test_what_is_no_manifest_is_refused_by_every_reader(files, content):
    make(keys_of(files))
    Path("rows/manifest.json").write_text(content)
    readers = [
        lambda: prepared.verify("rows"),
        lambda: make(keys_of(files)),
        lambda: list(pair(keys_of(files))),
    ]
    for reader in readers:
        with pytest.raises(DataError) as caught:
            reader()
        assert caught.value.id == "data.damaged"


def test_rows_of_an_older_format_are_named_so(files):
    make(keys_of(files))
    Path("rows/manifest.json").write_text('{"format": 1}')
    with pytest.raises(DataError) as caught:
        prepared.manifest("rows")
    assert caught.value.id == "data.format"


def interrupt_the_join(files, monkeypatch, **more):
    """A folder that has every part, and nothing else."""
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_join", raise_interrupt)
        with pytest.raises(Preempted):
            make(keys_of(files, **more))
    return sorted(Path("rows/parts").glob("*.npz"))


def raise_interrupt(*_):
    raise KeyboardInterrupt


def is_as_if_made_at_once(files):
    make(keys_of(files), "once")
    for path in Path("once").rglob("*.*"):
        assert path.read_bytes() == (Path("rows") / path.relative_to("once")).read_bytes(), path
    return True


DAMAGES = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),  # as a power failure leaves them
    "flipped": lambda data: data[:-70] + bytes([data[-70] ^ 1]) + data[-69:],
    "last": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "gone": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_made_again(files, damage, monkeypatch, capsys):
    signs = interrupt_the_join(files, monkeypatch)
    broken = [signs[1], signs[2].with_suffix(".npy")]
    for path in broken:
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(DAMAGES[damage](path.read_bytes()))
    again, tokenize = [], prepare.corpus.tokenize
    monkeypatch.setattr(prepare.corpus, "tokenize", lambda unit, *how: again.append(unit) or tokenize(unit, *how))
    make(keys_of(files))
    assert len(again) == 2
    told = capsys.readouterr().err
    assert "made again" in told and all(path.stem in told for path in broken[damage == "gone" :])
    assert is_as_if_made_at_once(files)


def test_any_changed_byte_of_a_part_is_found(files, monkeypatch, capsys):
    sign = interrupt_the_join(files, monkeypatch)[1]
    assert prepare.parts.whole(sign.parent, [sign.stem], True) == {sign.stem}
    for path in (sign, sign.with_suffix(".npy")):
        data = path.read_bytes()
        for place in range(0, len(data), 3):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
            assert not prepare.parts.whole(sign.parent, [sign.stem], True)
        path.write_bytes(data)
    capsys.readouterr()


def test_the_part_of_another_unit_is_not_used(files, monkeypatch, capsys):
    first, second = interrupt_the_join(files, monkeypatch)[:2]
    for ending in (".npy", ".npz"):
        second.with_suffix(ending).write_bytes(first.with_suffix(ending).read_bytes())
    make(keys_of(files))
    assert second.stem in capsys.readouterr().err
    assert is_as_if_made_at_once(files)


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_its_recipe_no_part_is_used(files, damage, monkeypatch, capsys):
    """They could be those of another one."""
    interrupt_the_join(files, monkeypatch, add_bos=False)
    path = Path("rows/parts/recipe.json")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    make(keys_of(files))
    assert "recipe.json" in capsys.readouterr().err
    assert is_as_if_made_at_once(files)


def test_a_part_that_changes_while_it_is_joined(files, monkeypatch):
    join = prepare._join

    def damaging(*arguments):
        path = next(Path("rows/parts").glob("*.npy"))
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        return join(*arguments)

    with monkeypatch.context() as patch, pytest.raises(DataError) as caught:
        patch.setattr(prepare, "_join", damaging)
        make(keys_of(files))
    assert caught.value.id == "data.damaged"
    make(keys_of(files))
    assert is_as_if_made_at_once(files)


def test_parts_with_bad_documents_are_not_used_where_those_are_refused(files, monkeypatch):
    with open("x.jsonl", "a") as file:
        file.write("{broken\n")
    interrupt_the_join(files, monkeypatch, bad_documents="drop")
    with pytest.raises(DataError) as caught:
        make(keys_of(files))
    assert caught.value.id == "data.json"


def test_a_refusal_leaves_nothing_behind(files):
    with open("x.jsonl", "r+b") as file:
        file.write(b"{broken}")
    before = sorted(Path().rglob("*"))
    with pytest.raises(DataError) as caught:
        make(keys_of(files), "new/rows")
    assert caught.value.id == "data.json"
    assert sorted(Path().rglob("*")) == before


def test_a_refusal_after_the_last_part_leaves_nothing_behind(files):
    Path("x.jsonl").write_text('{"text": "a"}\n')
    before = sorted(Path().rglob("*"))
    with pytest.raises(DataError) as caught:  # nothing is held out of so few
        make(keys_of(files[:1], held_out_every=100), "new/rows")
    assert caught.value.id == "data.no-targets"
    assert sorted(Path().rglob("*")) == before


def test_a_refusal_keeps_parts_that_can_be_used(files, monkeypatch):
    with open("y.jsonl", "a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match="kept in rows/parts: bad_documents=drop goes on") as caught:
        make(keys_of(files))
    assert caught.value.id == "data.json"
    done = len(list(Path("rows/parts").glob("*.npz")))
    again, tokenize = [], prepare.corpus.tokenize
    monkeypatch.setattr(prepare.corpus, "tokenize", lambda unit, *how: again.append(unit) or tokenize(unit, *how))
    make(keys_of(files, bad_documents="drop"))
    assert done > 2 and len(again) == 1


def test_an_interrupt_after_the_manifest_takes_nothing_away(files, monkeypatch):
    clear = prepare.parts.clear

    def late(folder):
        if not Path("rows/manifest.json").exists():
            return clear(folder)
        for path in folder.glob("*.npz"):
            path.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(Preempted):
        patch.setattr(prepare.parts, "clear", late)
        make(keys_of(files))
    assert prepared.verify("rows")
    assert "complete" in make(keys_of(files))


def test_what_others_keep_in_the_folder_stays(files):
    for folder in ("rows/parts", "rows/train-7"):
        Path(folder).mkdir(parents=True)
        Path(folder, "mine.txt").write_text("mine")
    with open("x.jsonl", "r+b") as file:
        text = file.read()
        file.seek(0)
        file.write(b"{broken}")
    with pytest.raises(DataError):
        make(keys_of(files))
    Path("x.jsonl").write_bytes(text)
    make(keys_of(files))
    assert Path("rows/train-7/mine.txt").read_text() == Path("rows/parts/mine.txt").read_text() == "mine"
    assert [path.name for path in Path("rows/parts").iterdir()] == ["mine.txt"]


def test_where_nothing_can_be_written(files):
    with pytest.raises(StorageError, match="Nothing was written") as caught:
        make(keys_of(files), "/proc/rows")
    assert caught.value.id == "data.write"


def test_other_weights_of_a_complete_folder_are_told(files):
    keys = keys_of(files, mixture_weights=[0.25, 0.75])
    make(keys)
    assert "mixture_weights" not in make(keys)
    said = make(keys | {"mixture_weights": [0.5, 0.5]})
    assert "complete" in said and "keeps mixture_weights=[0.25, 0.75]" in said
