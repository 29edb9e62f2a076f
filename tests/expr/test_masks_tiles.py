"""Which tiles a mask lets the kernels skip, by the class that the kernels' own machine gives."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import changes_of, class_by_machine, class_of_tile, machine_symbols
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import lookup, masks
from cupyflash.expr.bind import bind
from cupyflash.expr.interval import EMPTY, FULL, PARTIAL, tile_class
from cupyflash.expr.lower import lower
from cupyflash.expr.tile_classes import tile_classes
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes


def classes(mask, sizes, block=32, block_k=None, b=0, h=0):
    """The class of every tile of a batch entry and head, (tiles of queries, tiles of keys)."""
    block_k = block_k or block
    tree = tile_class(bind(mask.expr, flat_sizes(sizes)))
    changes = changes_of(tile=lower(tree))
    length_q, length_k = (int(np.max(x)) for x in (sizes.len_q, sizes.len_k))
    rows = []
    for i0 in range(0, length_q, block):
        row = []
        for j0 in range(0, length_k, block_k):
            ni, nj = min(block, length_q - i0), min(block_k, length_k - j0)
            symbols = machine_symbols(sizes, (b, h, i0, ni, j0, nj))
            row.append(class_of_tile(changes, symbols, ni, nj))
        rows.append(row)
    return np.array(rows)


def true_classes(mask, sizes, block=32, block_k=None, b=0, h=0):
    """What a perfect answer would be, from the whole mask."""
    block_k = block_k or block
    array = mask.to_array(sizes.lead, sizes.heads, sizes.len_q, sizes.len_k)
    array = array.reshape(-1, sizes.heads, sizes.len_q, sizes.len_k)[b, h]
    rows = []
    for i0 in range(0, sizes.len_q, block):
        tiles = [array[i0 : i0 + block, j0 : j0 + block_k] for j0 in range(0, sizes.len_k, block_k)]
        rows.append([FULL if t.all() else PARTIAL if t.any() else EMPTY for t in tiles])
    return np.array(rows)


def test_causal_visits_528_of_1024_tiles():
    found = classes(masks.causal(), Sizes((1,), 1, 1024, 1024))
    assert found.shape == (32, 32)
    assert (found != EMPTY).sum() == 528
    assert (found == PARTIAL).sum() == 32


DOCUMENTS = np.repeat(np.arange(5), [40, 64, 100, 33, 63])
LAYOUT = np.random.default_rng(1).random((5, 5)) < 0.4
CHOSEN = np.array([[1, 0, 1], [-1, 0, 9], [2, 1, -5], [3, 2, 4], [-1, -1, -1]])
PAIRS = np.random.default_rng(2).random((300, 300)) < 0.5
PAIRS[:64, 96:200] = True
PAIRS[96:200, :128] = False

PERFECT = {
    "causal": masks.causal(),
    "causal, offset": masks.causal(-45),
    "window": masks.window(50, 10),
    "window to the left": masks.window(50, None),
    "prefix": masks.prefix(77),
    "prefix or causal": masks.prefix(100) | masks.causal(),
    "lengths": masks.lengths(130, 200),
    "causal and lengths": masks.causal() & masks.lengths([170]),
    "not causal": ~masks.causal(),
    "segments": masks.segments(DOCUMENTS),
    "causal documents": masks.segments(DOCUMENTS) & masks.causal(),
    "blocks": masks.blocks(LAYOUT, 64, 64),
    "small blocks": masks.blocks(np.random.default_rng(3).random((30, 30)) < 0.1, 10, 10),
    "chosen": masks.chosen(CHOSEN, 64),
    "chosen, small blocks": masks.chosen(np.concatenate([CHOSEN] * 6), (10, 16)),
    "chosen for each query": masks.chosen(CHOSEN[np.arange(300) // 70], (1, 32)),
    "dense": masks.dense(PAIRS),
    "tree": masks.tree(PAIRS),
    "dilated by 1": masks.dilated(1),
    "everything": masks.window(None, None),
    "nothing": masks.mask(lambda b, h, i, j: False),
    "the user's": masks.mask(lambda b, h, i, j: (i // 64 == j // 64) | (j < 3)),
    "by looked-up numbers": masks.mask(lambda b, h, i, j: j < lookup(np.arange(300) // 2)[i]),
    "in floats": masks.mask(lambda b, h, i, j: i * 0.5 + 3.0 > j),
}


@pytest.mark.parametrize("name", PERFECT)
@pytest.mark.parametrize(("block_q", "block_k"), [(32, 32), (64, 16)])
def test_every_tile_that_can_be_skipped_is(name, block_q, block_k):
    sizes = Sizes((1,), 1, 300, 300)
    found = classes(PERFECT[name], sizes, block_q, block_k)
    np.testing.assert_array_equal(found, true_classes(PERFECT[name], sizes, block_q, block_k))


@given(st.integers(0, 2**32 - 1))
def test_no_tile_that_has_a_chosen_block_is_skipped(seed):
    draws = np.random.default_rng(seed)
    block, tile = draws.integers(1, 20, 2), draws.integers(1, 40, 2)
    lengths = draws.integers(1, 90, 2)
    blocks = -(-lengths // block)
    indices = draws.integers(-2, blocks[1] + 2, (2, 2, blocks[0], int(draws.integers(5))))
    mask = masks.chosen(indices, (int(block[0]), int(block[1])))
    if seed % 2:
        mask = mask & masks.causal()
    sizes = Sizes((2,), 2, *(int(n) for n in lengths))
    found = classes(mask, sizes, *(int(n) for n in tile), b=1, h=1)
    wanted = true_classes(mask, sizes, *(int(n) for n in tile), b=1, h=1)
    assert ((found == wanted) | (found == PARTIAL)).all()
    if not seed % 2:  # nothing is lost but by the number of keys for which rows are searched
        np.testing.assert_array_equal(found, wanted)
    # The same by NumPy, for the tiles of all heads.
    tree = tile_class(bind(mask.expr, flat_sizes(sizes)))
    i, j = (np.arange(0, n, size) for n, size in zip(lengths, tile, strict=True))
    symbols = {
        "b": 1, "h": 1, "i_low": i[:, None], "j_low": j,
        "i_high": np.minimum(i + tile[0], lengths[0])[:, None] - 1,
        "j_high": np.minimum(j + tile[1], lengths[1]) - 1,
        "len_q": lengths[0], "len_k": lengths[1], "start_q": 0, "start_k": 0,
    }  # fmt: skip
    for machine in ("cpu", "gpu", "exact"):
        by_numpy = tile_classes(tree, {x: np.asarray(y) for x, y in symbols.items()}, machine)
        np.testing.assert_array_equal(np.broadcast_to(by_numpy, found.shape), found)


@pytest.mark.parametrize(("len_q", "len_k"), [(100, 300), (300, 100), (1, 300), (65, 64)])
def test_causal_of_unequal_lengths(len_q, len_k):
    sizes = Sizes((1,), 1, len_q, len_k)
    np.testing.assert_array_equal(
        classes(masks.causal(), sizes), true_classes(masks.causal(), sizes)
    )


def test_a_sum_of_masks_may_be_less_than_perfect_but_never_wrong():
    # j < 50 or j >= 40 holds everywhere, which intervals do not see in the tile of both ends.
    mask = masks.mask(lambda b, h, i, j: (j < 50) | (j >= 40))
    sizes = Sizes((1,), 1, 96, 96)
    found = classes(mask, sizes)
    assert (found[:, 1] == PARTIAL).all()
    assert (found[:, [0, 2]] == FULL).all()


def test_dilated_tiles_are_partial():
    assert (classes(masks.dilated(3), Sizes((1,), 1, 64, 64)) == PARTIAL).all()
    # one query and one key leave nothing open
    found = classes(masks.dilated(3), Sizes((1,), 1, 4, 6), 1)
    assert (found != PARTIAL).all()


def test_classes_by_batch_entry_and_head():
    sizes = Sizes((2, 3), 2, 128, 128)
    mask = masks.lengths(np.array([[32], [64]])) & masks.mask(
        lambda b, h, i, j: (h == 0) | (i == j)
    )
    for b in range(6):
        for h in range(2):
            found = classes(mask, sizes, b=b, h=h)
            visited = (found != EMPTY).sum()
            length = [32, 64][b // 3]
            assert visited == (4 * length // 32 if h == 0 else length // 32)


def test_classes_of_packed_sequences():
    len_q, len_k = np.array([64, 128]), np.array([96, 128])
    sizes = Sizes((2,), 1, len_q, len_k, np.array([0, 64]), np.array([0, 96]))
    ids_q = np.repeat([0, 1, 2], [64, 32, 96])
    ids_k = np.repeat([0, 1, 2], [96, 32, 96])
    mask = masks.causal() & masks.segments(ids_q, ids_k)
    tree = tile_class(bind(mask.expr, flat_sizes(sizes)))
    # the first sequence: j <= i + 32
    assert class_by_machine(tree, sizes, (0, 0, 0, 32, 0, 32)) == FULL
    assert class_by_machine(tree, sizes, (0, 0, 0, 32, 32, 32)) == PARTIAL
    assert class_by_machine(tree, sizes, (0, 0, 0, 32, 64, 32)) == EMPTY
    # the second, whose first 32 rows are a document of their own
    assert class_by_machine(tree, sizes, (1, 0, 0, 32, 0, 32)) == PARTIAL
    assert class_by_machine(tree, sizes, (1, 0, 32, 32, 0, 32)) == EMPTY
    assert class_by_machine(tree, sizes, (1, 0, 64, 32, 32, 32)) == FULL


def test_a_large_range_of_looked_up_numbers_falls_back_to_the_whole_array():
    layout = np.zeros((300, 300), bool)
    sizes = Sizes((1,), 1, 300, 300)
    assert (classes(masks.dense(layout), sizes, 300) == EMPTY).all()
    assert (classes(masks.dense(~layout), sizes, 300) == FULL).all()
    layout[299, 299] = True
    assert (classes(masks.dense(layout), sizes, 300) == PARTIAL).all()
    floats = np.ones((300, 300), np.float32)
    mask = masks.mask(lambda b, h, i, j: lookup(floats)[i, j] > 0)
    assert (classes(mask, sizes, 300) == PARTIAL).all()  # not known
    assert (classes(mask, sizes, 100) == FULL).all()


@pytest.mark.parametrize("width", [1, 3, 15, 16, 17, 31, 40])
def test_arrays_of_any_width_and_strides(width):
    """Booleans side by side are read several at a time; other bytes than 1 are true, too."""
    rng = np.random.default_rng(width)
    rows = np.ones((40, 6 * width), np.uint8)
    rows[rng.random(rows.shape) < 0.5 / width] = 0
    rows[:, 2 * width : 3 * width], rows[8:24, width : 2 * width] = 0, 255
    array = rows.view(bool)
    for each in (array, array[::-1, ::-1], np.asfortranarray(array), array[:, ::2]):
        sizes = Sizes((1,), 1, *each.shape)
        found = classes(masks.dense(each), sizes, 8, width)
        assert np.array_equal(found, true_classes(masks.dense(each), sizes, 8, width))
