import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText.data import rows as rows_
from MaxText.data.corpus import join
from MaxText.data.rows import SyntheticRows

documents = st.lists(st.integers(2, 30), min_size=1, max_size=12)
row_length = st.integers(1, 17)


def of(stream, lengths, length, packing=True):
    return rows_.make(stream, rows_.starts_of(lengths), length, "concat_then_split" if packing else "none")


def make(lengths, length, packing=True):
    """Rows over documents whose tokens are all different, so that each can be told from every other."""
    ends = np.cumsum(lengths)
    parts = [np.arange(end - n, end) + 1000 for n, end in zip(lengths, ends, strict=True)]
    rows = of(*join(parts, np.uint16), length, packing)
    return [p.tolist() for p in parts], rows, rows.take(np.arange(rows.count))


def expected(parts, length, packing):
    """The definition, slowly: the pairs of each document in one line, cut every `length`."""
    line = [(a, b, d) for d, p in enumerate(parts) for a, b in zip(p[:-1], p[1:], strict=True)]
    lines = [line] if packing else [[x for x in line if x[2] == d] for d in range(len(parts))]
    return [chunk[i : i + length] for chunk in lines for i in range(0, len(chunk), length)]


@given(documents, row_length, st.booleans())
def test_rows_are_the_documents_pairs_cut_at_the_row_length(lengths, length, packing):
    parts, _, batch = make(lengths, length, packing)
    want = expected(parts, length, packing)
    assert len(want) == len(batch["inputs"])
    for i, pairs in enumerate(want):
        n, pad = len(pairs), [0] * (length - len(pairs))
        documents_in_row = list(dict.fromkeys(d for *_, d in pairs))
        assert batch["inputs"][i].tolist() == [a for a, *_ in pairs] + pad
        assert batch["targets"][i].tolist() == [b for _, b, _ in pairs] + pad
        assert batch["segments"][i].tolist() == [1 + documents_in_row.index(d) for *_, d in pairs] + pad
        assert batch["loss_mask"][i].tolist() == [1] * n + pad
        starts = [next(j for j in range(n) if pairs[j][2] == d) for *_, d in pairs]
        assert batch["positions"][i].tolist() == [j - s for j, s in enumerate(starts)] + pad


@given(documents, row_length, st.booleans())
def test_every_token_with_a_predecessor_is_a_target_exactly_once(lengths, length, packing):
    parts, _, batch = make(lengths, length, packing)
    real = batch["loss_mask"] == 1
    assert sorted(batch["targets"][real].tolist()) == [t for p in parts for t in p[1:]]
    assert (batch["targets"][real] == batch["inputs"][real] + 1).all()  # the successor in its own document


@given(documents, row_length, st.booleans())
def test_rows_rebuild_the_stream(lengths, length, packing):
    """From the arrays alone: a pair that begins with the target of the pair before it goes on in its document."""
    parts, _, batch = make(lengths, length, packing)
    rebuilt = []
    for a, b in zip(batch["inputs"][batch["loss_mask"] == 1], batch["targets"][batch["loss_mask"] == 1], strict=True):
        if not rebuilt or rebuilt[-1][-1] != a:
            rebuilt.append([int(a)])
        rebuilt[-1].append(int(b))
    assert rebuilt == parts


@given(documents, row_length, st.booleans())
def test_only_the_last_row_of_a_packing_is_padded(lengths, length, packing):
    _, rows, batch = make(lengths, length, packing)
    pairs = batch["loss_mask"].sum(axis=1)
    assert np.array_equal(pairs, rows.pairs(np.arange(rows.count)))
    assert (pairs > 0).all()
    if packing:
        assert (pairs[:-1] == length).all()
    else:
        assert (batch["segments"].max(axis=1) == 1).all()


@given(documents, row_length, st.data())
def test_random_access(lengths, length, choice):
    """Any rows in any order, padding among them, are the same rows."""
    _, rows, batch = make(lengths, length)
    index = np.array(choice.draw(st.lists(st.integers(-1, rows.count - 1), max_size=9)), np.int64)
    taken = rows.take(index)
    for key, whole in batch.items():
        assert taken[key].dtype == np.int32
        assert taken[key].shape == (len(index), length)
        assert np.array_equal(taken[key], np.where(index[:, None] >= 0, whole[index], 0))


def test_a_value_of_zero_is_a_token_like_any_other():
    rows = of(np.zeros(5, np.uint16), np.array([5]), 4)
    assert rows.take(np.array([0]))["loss_mask"].tolist() == [[1, 1, 1, 1]]


def test_ids_above_16_bits():
    rows = of(np.array([70000, 199999, 3], np.int32), np.array([3]), 4)
    assert rows.take(np.array([0]))["targets"].tolist() == [[199999, 3, 0, 0]]


@pytest.mark.parametrize("vocabulary", [2, 288, 129280])
def test_synthetic_rows(vocabulary):
    rows = SyntheticRows(seed=3, vocabulary=vocabulary, length=64)
    batch = rows.take(np.arange(32))
    assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert 0 <= batch["inputs"].min() <= batch["targets"].max() < vocabulary
    assert abs(batch["inputs"].mean() / (vocabulary - 1) - 0.5) < 0.05
    assert np.array_equal(batch["inputs"][7:9], rows.take(np.array([7, 8]))["inputs"])
    assert not np.array_equal(batch["inputs"][0], batch["inputs"][1])
    assert not np.array_equal(batch["inputs"], SyntheticRows(4, vocabulary, 64).take(np.arange(32))["inputs"])
    assert all(batch[k].dtype == np.int32 for k in batch)
    assert not any(v.any() for v in rows.take(np.array([-1])).values())
