"""Classes of pieces: many at once by rectangles, and the extremes of runs of an array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import masks
from cupyflash.expr import tile_classes
from cupyflash.expr.bind import Dense
from cupyflash.expr.interval import EMPTY, FULL
from cupyflash.lazy import Kept
from cupyflash.pieces import schedule

LENGTH = 1000
IDS = np.sort(np.random.default_rng(0).integers(0, 9, LENGTH))
TRIED = {
    "causal": masks.causal(),
    "window": masks.window(70, 10),
    "segments": masks.segments(IDS),
    "documents or prefix": (masks.causal() & masks.segments(IDS)) | masks.prefix(33),
    "heads": masks.mask(lambda b, h, i, j: (i - j) // 100 == h),
    "entries": masks.lengths(np.array([500, 520])),
    "dilated": masks.dilated(3),
}


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize("at_once", [False, True], ids=["heads apart", "all heads"])
def test_rectangles_prove_what_pieces_prove(name, at_once, monkeypatch):
    """In any order of chunks; and they examine far fewer."""
    monkeypatch.setattr(schedule, "_MOST_CHUNKS", 0)  # nothing is kept
    if at_once:
        monkeypatch.setattr(schedule, "MOST_CLASSES", 1)
    rng = np.random.default_rng(1)
    rows, keys = (
        [chunk for n in rng.permutation(len(every)) for chunk in [every[n]]]
        for every in (schedule.chunks(LENGTH, 7), schedule.chunks(LENGTH, 9))
    )
    sizes = Dense((2,), 2, LENGTH, LENGTH)
    looked = []
    classes_of = schedule.tile_classes

    def counted(root, symbols, machine):
        looked.append(len(symbols["i_low"]))
        return classes_of(root, symbols, machine)

    monkeypatch.setattr(schedule, "tile_classes", counted)
    made = []
    for first in (2**40, 16):
        monkeypatch.setattr(schedule, "FIRST_RECTANGLES", first)
        looked.clear()
        made.append((schedule.classes(TRIED[name], sizes, rows, keys), sum(looked)))
    (each, of_each), (together, of_together) = made
    assert np.array_equal(each, together)
    assert of_each == each.size
    assert of_together < (0.5 if name not in ("dilated", "heads") else 1.2) * of_each


def test_what_only_numbers_decide_is_proven_once(monkeypatch):
    chunks = schedule.chunks(LENGTH, 100)
    sizes = [
        Dense((2,), heads, LENGTH, len_k) for heads, len_k in ((2, LENGTH), (3, LENGTH), (2, 900))
    ]

    def found(width, problem, rows=chunks):
        return schedule.classes(masks.window(width, 0), problem, rows, chunks)

    monkeypatch.setattr(schedule, "_kept", Kept(64))
    made = [found(70, sizes[0]), found(170, sizes[0]), *(found(70, x) for x in sizes[1:])]
    made.append(found(70, sizes[0], chunks[1:]))
    assert len(schedule._kept.results) == 5
    with monkeypatch.context() as patch:
        patch.setattr(schedule, "_classes", None)
        assert found(70, sizes[0]) is made[0]
        assert not made[0].flags.writeable
    assert not np.array_equal(made[0], made[1])
    schedule._kept.most = 5
    found(71, sizes[0])
    assert len(schedule._kept.results) == 1


def test_what_arrays_decide_is_looked_at_each_time():
    ids = np.zeros(LENGTH, np.int64)
    mask, sizes = masks.segments(ids), Dense((1,), 1, LENGTH, LENGTH)
    chunks = schedule.chunks(LENGTH, 500)
    assert (schedule.classes(mask, sizes, chunks, chunks) == FULL).all()
    ids[500:] = 1
    assert (schedule.classes(mask, sizes, chunks, chunks) == [[FULL, EMPTY], [EMPTY, FULL]]).all()


@given(st.data())
@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.float32, np.float16], ids=str)
def test_extremes_of_runs(dtype, data):
    size = data.draw(st.integers(1, 12))
    numbers = data.draw(st.lists(st.integers(-9, 9), min_size=size, max_size=size))
    array = (np.array(numbers) > 0) if dtype is np.bool_ else np.array(numbers, dtype)
    runs = data.draw(
        st.lists(st.tuples(st.integers(0, size), st.integers(-1, size - 1)), min_size=1)
    )
    low, high = np.array(runs).T
    kind = {"b": np.bool_, "i": np.int64, "f": np.float32}[array.dtype.kind]
    for smallest in (False, True):
        found = tile_classes._of_runs(array, low, high, kind, smallest)
        for (a, b), value in zip(runs, found, strict=True):
            expected = tile_classes._extreme(
                array, np.array([a]), np.array([b]), kind, smallest, "exact"
            )
            assert value == kind(expected)
            assert found.dtype == kind
