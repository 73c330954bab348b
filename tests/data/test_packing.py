"""First and best fit against their definitions; every token is there exactly once; the plan is kept and found again."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText.data import packing, rows

KINDS = ["first_fit", "best_fit"]
lengths_of = st.lists(st.integers(2, 30), min_size=1, max_size=40)


def naive(sizes, length, kind):
    """Rows of pieces by the definition: look at every open row."""
    room, row_of = [], []
    for size in sizes:
        fits = [r for r in range(len(room)) if room[r] >= size]
        if not fits:
            room.append(length)
            fits = [len(room) - 1]
        best = min(room[r] for r in fits)
        row = fits[0] if kind == "first_fit" else next(r for r in fits if room[r] == best)
        room[row] -= size
        row_of.append(row)
    return row_of, room


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_pieces_go_where_the_definition_says(kind, sizes):
    place = packing._first_fit if kind == "first_fit" else packing._best_fit
    got = place(sizes, 17)
    want, room = naive(sizes, 17, kind)
    if kind == "first_fit":
        assert got == want
    # Of rows with equal room best fit may take another than the naive one: the fill of the rows is the same.
    assert sorted(np.bincount(got, sizes, minlength=len(room)).tolist()) == sorted(17.0 - r for r in room)


@pytest.mark.parametrize("kind", KINDS)
@given(lengths_of, st.integers(1, 17))
def test_every_pair_is_in_one_row_and_only_long_documents_are_cut(kind, lengths, length):
    plan = packing.plan(np.array(lengths), length, kind)
    covered = [np.zeros(n - 1, int) for n in lengths]
    for d, o, p in zip(plan.document, plan.offset, plan.pairs, strict=True):
        covered[d][o : o + p] += 1
        assert p == length or o + p == lengths[d] - 1  # a whole row, or the rest of the document
    assert all((c == 1).all() for c in covered)
    fill = np.add.reduceat(plan.pairs, plan.first[:-1])
    assert (fill <= length).all() and (fill > 0).all()
    assert plan.first[0] == 0 and plan.first[-1] == len(plan.document)


@pytest.mark.parametrize("kind", KINDS)
@given(lengths_of, st.integers(1, 17), st.data())
def test_rows_of_a_plan(kind, lengths, length, choice):
    """The arrays of each row are its pieces, one after the other, each a segment with positions from 0."""
    ends = np.cumsum(lengths)
    stream = np.concatenate([np.arange(e - n, e) + 100 for e, n in zip(ends, lengths, strict=True)])
    made = rows.make(stream, rows.starts_of(np.array(lengths)), length, kind)
    index = np.array(choice.draw(st.lists(st.integers(-1, made.count - 1), min_size=1, max_size=6)))
    batch = made.take(index)
    assert np.array_equal(made.pairs(index), batch["loss_mask"].sum(axis=1))
    assert made.total == sum(n - 1 for n in lengths)
    for b, row in enumerate(index):
        pieces = made.pieces(int(row)) if row >= 0 else []
        inputs = [100 + ends[p.document] - lengths[p.document] + p.offset + i for p in pieces for i in range(p.pairs)]
        pad = [0] * (length - len(inputs))
        assert batch["inputs"][b].tolist() == inputs + pad
        assert batch["targets"][b].tolist() == [i + 1 for i in inputs] + pad
        assert batch["positions"][b].tolist() == [i for p in pieces for i in range(p.pairs)] + pad
        assert batch["segments"][b].tolist() == [n + 1 for n, p in enumerate(pieces) for _ in range(p.pairs)] + pad
        assert [p.column for p in pieces] == np.cumsum([0, *(p.pairs for p in pieces)])[:-1].tolist()


@pytest.mark.parametrize("kind", [*KINDS, "concat_then_split", "none"])
def test_quarantined_documents_keep_their_place_and_train_nothing(kind):
    lengths = np.array([9, 4, 30, 6, 5])
    stream, starts = np.arange(lengths.sum()), rows.starts_of(lengths)
    plain = rows.make(stream, starts, 16, kind)
    masked = rows.make(stream, starts, 16, kind, masked=np.array([1, 2]))
    every = np.arange(plain.count)
    a, b = plain.take(every), masked.take(every)
    assert all(np.array_equal(a[k], b[k]) for k in a if k != "loss_mask")
    hidden = np.isin(a["inputs"], np.r_[9:13, 13:43]) & (a["loss_mask"] == 1)
    assert np.array_equal(b["loss_mask"], a["loss_mask"] * ~hidden)
    assert masked.total == plain.total - 3 - 29 == masked.pairs(every).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_made_once(kind, tmp_path, monkeypatch):
    lengths = np.random.default_rng(0).integers(2, 50, 500)
    made = packing.plan(lengths, 16, kind, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1

    def again(*_):
        raise AssertionError("planned twice")

    monkeypatch.setattr(packing, "_plan", again)
    found = packing.plan(lengths, 16, kind, str(tmp_path))
    assert all(np.array_equal(a, b) for a, b in zip(made, found, strict=True))
    for other in ((lengths[:-1], 16, kind), (lengths, 17, kind)):
        with pytest.raises(AssertionError):
            packing.plan(*other, str(tmp_path))


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other", "another", "bare"])
def test_a_plan_that_is_damaged_is_made_again(damage, tmp_path, capsys):
    lengths = np.random.default_rng(0).integers(2, 50, 500)
    made = packing.plan(lengths, 16, "best_fit", str(tmp_path))
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    flipped = whole[:900] + bytes([whole[900] ^ 1]) + whole[901:]
    packing.plan(lengths[:300], 16, "best_fit", str(tmp_path / "another"))
    (another,) = (tmp_path / "another").iterdir()  # whole, but of other documents
    bare = io.BytesIO()
    np.savez(bare, **made._asdict())  # an archive, but with no checksum
    contents = {"empty": b"", "cut": whole[:-99], "flipped": flipped, "other": b"no archive"}
    contents |= {"another": another.read_bytes(), "bare": bare.getvalue()}
    kept.write_bytes(contents[damage])
    for warned in (True, False):
        found = packing.plan(lengths, 16, "best_fit", str(tmp_path))
        assert all(np.array_equal(a, b) for a, b in zip(made, found, strict=True))
        assert (kept.name in capsys.readouterr().err) == warned


def test_fills_well():
    """Documents of many lengths: rows are full to 98 % at least, and no document shorter than a row is cut."""
    lengths = np.random.default_rng(1).lognormal(4.5, 1, 20_000).astype(int) + 2
    for kind in KINDS:
        plan = packing.plan(lengths, 512, kind)
        assert (lengths - 1).sum() / (512 * (len(plan.first) - 1)) > 0.98
