import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText.data.order import Order, fold, permute

GOLDEN = "24776f19c69b6e611741804a47c6c03253c30f66cde821e6ae6c07711e309486"


def permutation(size, seed, epoch=0):
    return permute(np.arange(size), size, fold(seed, np.full(size, epoch)))


def order(rows, batch, *, seed=0, shuffle=True, epochs=None, pad=False):
    return Order(rows, batch, seed, shuffle, epochs, pad)


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 2**40))
def test_each_epoch_is_a_permutation(size, seed, epoch):
    assert np.array_equal(np.sort(permutation(size, seed, epoch)), np.arange(size))


@given(st.integers(2, 10**15), st.integers(0, 2**31))
def test_sizes_beyond_memory_stay_distinct_and_in_range(size, seed):
    index = np.unique(np.linspace(0, size - 1, 200).astype(np.int64))
    row = permute(index, size, fold(seed, np.zeros(len(index))))
    assert len(np.unique(row)) == len(index)
    assert 0 <= row.min() <= row.max() < size


def test_the_order_of_a_seed_never_changes():
    """A new result here breaks the resume of every run: then ORDER_VERSION has to change as well."""
    assert permutation(11, seed=1, epoch=2).tolist() == [10, 9, 7, 2, 5, 4, 6, 1, 3, 8, 0]
    assert hashlib.sha256(permutation(24413, seed=7).tobytes()).hexdigest() == GOLDEN


def test_seeds_and_epochs_are_independent():
    """Also along the diagonal: epoch 1 of seed 7 is not epoch 0 of seed 8."""
    orders = [permutation(1000, seed, epoch) for seed in (0, 7, 8) for epoch in (0, 1, 2)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert np.sum(a == b) < 12  # about one place in common is expected, Poisson


@pytest.mark.parametrize("size", [1000, 4096, 24412])
def test_neighbours_are_uncorrelated(size):
    """z of the serial correlation over 40 seeds: its root mean square is 1 for random permutations."""
    orders = [permutation(size, seed) for seed in range(40)]
    z = np.array([np.corrcoef(p[:-1], p[1:])[0, 1] for p in orders]) * np.sqrt(size)
    assert 0.6 < np.sqrt(np.mean(z**2)) < 1.4


@pytest.mark.parametrize("size, permutations", [(2, 2), (3, 6), (4, 24)])
def test_all_permutations_are_equally_likely(size, permutations):
    seeds = 1000 * permutations
    keys = np.concatenate([fold(seed, np.zeros(size)) for seed in range(seeds)])
    orders = permute(np.tile(np.arange(size), seeds), size, keys).reshape(seeds, size)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == permutations
    assert ((counts - 1000) ** 2 / 1000).sum() < 3 * permutations  # chi squared, permutations - 1 degrees of freedom


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 4), st.booleans())
def test_epochs_pass_over_every_row_exactly_once(rows, batch, epochs, shuffle):
    o = order(rows, batch, epochs=epochs, shuffle=shuffle)
    stream = np.concatenate([o.rows_at(s * batch, (s + 1) * batch) for s in range(-(-rows * epochs // batch))])
    for e in range(epochs):
        assert np.array_equal(np.sort(stream[e * rows : (e + 1) * rows]), np.arange(rows))
    assert (stream[rows * epochs :] == -1).all()


@pytest.mark.parametrize(
    "rows, batch, epochs, pad, batches",
    [(10, 4, 1, False, 2), (10, 4, 2, False, 5), (10, 4, 1, True, 3), (3, 4, 1, False, 0), (3, 4, 1, True, 1),
     (10, 4, None, False, None), (None, 4, 1, False, None)],
)  # fmt: skip
def test_batches(rows, batch, epochs, pad, batches):
    assert order(rows, batch, epochs=epochs, pad=pad).batches == batches


def test_unshuffled_order_is_the_listed_one():
    assert order(5, 4, shuffle=False).rows_at(3, 12).tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]
