"""Drawings of masks, and the tiles that they count: those that the kernels visit."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from expressions import bound_or_none, class_by_machine, expressions, problems, tile_symbols, tiles
from harness import attend
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import ArgumentError, ArgumentTypeError, figures, lookup, masks
from cupyflash.costs.explanation import cached, dense
from cupyflash.costs.figures import mask
from cupyflash.costs.figures import survey as module
from cupyflash.costs.figures.survey import survey
from cupyflash.costs.figures.svg import PAINT, ticks
from cupyflash.costs.figures.terminal import ascii_only
from cupyflash.expr.bind import Dense, bind
from cupyflash.expr.interval import EMPTY, FULL, PARTIAL, tile_class
from cupyflash.expr.nodes import as_expr, symbol
from cupyflash.expr.tile_classes import RANGE_LIMIT, tile_classes
from cupyflash.reference.cpu import tables

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = np.repeat(np.arange(4), [30, 50, 8, 112])
RANDOM = np.random.default_rng(0).random((3, 40, 50)) < 0.4
MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(20, 3),
    "prefix": masks.prefix(11) | masks.causal(),
    "dilated": masks.dilated(3),
    "by entry": masks.lengths([20, 37]) & masks.causal(),
    "by head": masks.mask(lambda b, h, i, j: (h == 1) & (i > j) | (j < 7)),
    "dense": masks.dense(np.random.default_rng(1).random((3, 41, 37)) < 0.02),
    "nothing": masks.mask(lambda b, h, i, j: i < 0),
}

# -- classes --------------------------------------------------------------------------------------


@given(st.data())
def test_classes_are_those_of_the_kernels_on_the_cpu(data):
    sizes = data.draw(problems())
    bound = bound_or_none(data.draw(expressions("bool")), sizes)
    if bound is None:
        return
    where_ = data.draw(tiles(sizes))
    classes = tile_class(bound)
    _, numbers = tile_symbols(sizes, where_)
    found = tile_classes(classes, numbers, "cpu")
    assert int(found) == class_by_machine(classes, sizes, where_)


def test_ranges_are_as_long_as_the_kernels_look():
    text = (ROOT / "kernels_cu" / "common" / "lookup.cuh").read_text()
    assert RANGE_LIMIT["cpu"] == tables.RANGE_LIMIT
    assert RANGE_LIMIT["gpu"] == int(re.search(r"RANGE_LIMIT = (\d+)", text)[1])


def test_bounds_stop_at_the_ends_on_a_gpu_alone():
    numbers = np.arange(5000)
    far = lookup(numbers)  # a range of which no kernel looks at: its ends are those of 64 bits
    bound = bind(masks.mask(lambda b, h, i, j: far[i] - 7 < j).expr, Dense((1,), 1, 5000, 5000))
    corners = {"i_low": 0, "i_high": 4999, "j_low": 0, "j_high": 4999}
    for machine in ("cpu", "gpu"):
        assert tile_classes(tile_class(bound), corners, machine) == PARTIAL
    low, high = -(2**63), 2**63 - 1
    cases = [
        (symbol("i_low") + symbol("j_low"), lambda a, b: a + b),
        (symbol("i_low") - symbol("j_low"), lambda a, b: a - b),
        (symbol("i_low") * symbol("j_low"), lambda a, b: a * b),
        (-symbol("i_low") + as_expr(0) * symbol("j_low"), lambda a, b: -a),
        (abs(symbol("i_low")) + as_expr(0) * symbol("j_low"), lambda a, b: abs(a)),
    ]
    a, b = np.array([[low, high, -1, 2**40, 3]]), np.array([[low], [high], [-1], [2**40], [-5]])
    for tree, exact in cases:
        found = tile_classes(tree, {"i_low": a, "j_low": b}, "gpu")
        for x, y, value in np.broadcast(a, b, np.broadcast_to(found, (5, 5))):
            assert value == min(max(exact(int(x), int(y)), low), high), (tree, x, y)


# -- surveys --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at_a_time", "missing"), [(1, 0), (2**18, 0), (2**18, 3)])
@pytest.mark.parametrize("name", MASKS)
def test_everything_counted_is_there(name, at_a_time, missing, monkeypatch):
    monkeypatch.setattr(module, "AT_A_TIME", at_a_time)
    monkeypatch.setattr(module, "PAIRS_AT_A_TIME", 60)
    sizes, block_q, block_kv = Dense((2,), 3, 41, 37), 8, 5
    mask = MASKS[name]
    bound = None if mask is None else bind(mask.expr, sizes)
    found = survey(
        bound, sizes, block_q, block_kv, missing=missing, most_cells=[(3, 8), (99, 99)], at=(1, 2)
    )
    pairs = np.ones((2, 3, 41, 37), bool) if mask is None else mask.to_array(2, 3, 41, 37)
    assert found.pairs == pairs.sum()
    counts, visited, keys, queries = [0, 0, 0], 0, 0, 0
    classes = np.zeros((2, 3, 6, 8), int)
    for b, h, i, j in np.ndindex(classes.shape):
        rows = slice(max(8 * i - missing, 0), 8 * i + 8 - missing)
        tile = pairs[b, h, rows, j * 5 : j * 5 + 5]
        kind = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
        classes[b, h, i, j] = kind
        counts[kind] += 1
        if kind != EMPTY:
            visited += tile.size
            keys, queries = keys + tile.shape[1], queries + tile.shape[0]
    assert found.tiles == tuple(counts)
    assert (found.visited_pairs, found.visited_keys, found.visited_queries) == (
        visited, keys, queries,
    )  # fmt: skip
    seen = (classes != EMPTY).any(axis=2)
    assert found.touched_keys == 5 * seen.sum() - 3 * seen[..., -1].sum()
    assert found.by_head == (name in ("by head", "dense"))
    coarse, fine = found.grids
    np.testing.assert_array_equal(fine.classes, classes[1, 2])
    ends = [8 - missing, 16 - missing, 24 - missing, 32 - missing, 40 - missing, 41]
    np.testing.assert_array_equal(fine.edges_q, [0, *ends])
    assert (coarse.down, coarse.across, coarse.tiles.shape) == (2, 1, (3, 8, 3))
    for row in range(3):
        both = classes[1, 2, 2 * row : 2 * row + 2]
        alike = [column[0] if (column == column[0]).all() else PARTIAL for column in both.T]
        np.testing.assert_array_equal(coarse.classes[row], alike)


@given(
    st.data(), st.integers(1, 9), st.integers(1, 7),
    st.sampled_from(["cpu", "gpu", "exact"]), st.sampled_from([1, 7, 60]),
)  # fmt: skip
def test_a_rectangle_says_what_its_tiles_say(data, block_q, block_kv, machine, limit):
    missing = data.draw(st.integers(0, block_q - 1))
    sizes = Dense((1,), 1, *data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40))))
    bound = bound_or_none(data.draw(expressions("bool")), sizes)
    if bound is None:
        return
    shape = -(-(sizes.len_q + missing) // block_q), -(-sizes.len_k // block_kv)
    i, j = np.arange(shape[0])[:, None] * block_q - missing, np.arange(shape[1]) * block_kv
    corners = {
        "i_low": np.maximum(i, 0), "i_high": np.minimum(i + block_q, sizes.len_q) - 1,
        "j_low": j, "j_high": np.minimum(j + block_kv, sizes.len_k) - 1,
    }  # fmt: skip
    with mock.patch.dict(RANGE_LIMIT, {"cpu": limit, "gpu": limit}):
        each = tile_classes(tile_class(bound), module.symbols_of(sizes, 0, 0, **corners), machine)
        found = survey(
            bound, sizes, block_q, block_kv, missing=missing, machine=machine,
            most_cells=[(99, 99)], count_pairs=False,
        )  # fmt: skip
    np.testing.assert_array_equal(found.grids[0].classes, np.broadcast_to(each, shape))


def test_lengths_of_any_size():
    long = 10_000_000
    found = survey(masks.causal().expr, Dense((1,), 1, long, long), 128, 64, most_cells=[(9, 9)])
    rows = long // 128
    assert found.tiles == (rows * (rows - 1), 2 * rows, rows * (rows - 1))
    assert found.visited_keys == 64 * found.tiles.visited
    assert found.touched_keys == long
    assert found.pairs is None
    assert found.grids[0].tiles.sum() == 2 * rows**2
    everything = survey(None, Dense((3,), 2, 10**9, 10**9 + 1), 64, 64)
    assert everything.pairs == everything.visited_pairs == 6 * 10**9 * (10**9 + 1)
    drawn = figures.mask_tiles(masks.window(4096, 0), 10**8, block_q=128, block_kv=128)
    assert len(drawn.svg) < 100_000


def test_what_would_take_too_long_is_told(monkeypatch):
    with pytest.raises(
        ArgumentError, match=r"got 4,000,000,000 queries and .* fewer than 2\^62 pairs"
    ):
        survey(None, Dense((1,), 1, 4 * 10**9, 4 * 10**9), 64, 64)
    monkeypatch.setattr(module, "MOST_LOOKS", 1000)
    stripes = masks.mask(lambda b, h, i, j: (i + j) % 3 != 0)
    with pytest.raises(
        ArgumentError, match=r"^mask: got one with more than 1,000 tiles of 8 queries x 4 keys"
    ):
        figures.mask_tiles(stripes, 10_000, block_q=8, block_kv=4)


def test_pairs_that_are_too_many_are_not_counted(monkeypatch):
    monkeypatch.setattr(module, "MOST_PAIRS", 100)
    sizes = Dense((1,), 1, 41, 37)
    assert survey(masks.causal().expr, sizes, 8, 5).pairs is None
    assert survey(None, sizes, 8, 5).pairs == 41 * 37


def test_tiles_are_those_that_the_kernels_visit():
    q = np.zeros((1, 200, 8), np.float32)
    array = np.zeros((200, 200), bool)
    array[:70, :40] = array[:, 190] = True
    mask, sizes = masks.dense(array), Dense((), 1, 200, 200)
    bound = bind(mask.expr, sizes)
    cpu, gpu = (survey(bound, sizes, 64, 32, machine=machine).tiles for machine in ("cpu", "gpu"))
    assert cpu.visited == attend(q, q, q, (64, 32), mask=mask).visited == 8
    # On a GPU 64 x 32 elements are too many to look at: of 4 x 7 tiles, those of the last 8 rows
    # and the last 8 columns alone may be EMPTY.
    assert gpu == (9, 19, 0)
    assert survey(bound, sizes, 64, 32, machine="exact").tiles == cpu
    drawn, theirs = (
        figures.mask_tiles(mask, 200, block_q=64, block_kv=32, machine=machine).svg
        for machine in ("exact", "gpu")
    )
    assert "EMPTY 20 (skipped)" in drawn
    assert "EMPTY 9 (skipped)" in theirs


# -- SVG ------------------------------------------------------------------------------------------

BOX = re.compile(r"M[\d.]+ [\d.]+h([\d.]+)v([\d.]+)h-[\d.]+z")


def areas(text: str) -> dict[str, float]:
    """Area of the cells of each paint, as a share of the whole matrix."""
    root = ET.fromstring(text)
    found = {}
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        boxes = BOX.findall(path.get("d"))
        if boxes:
            paint = f'fill="{path.get("fill")}"'
            if path.get("fill-opacity"):
                paint += f' fill-opacity="{path.get("fill-opacity")}"'
            found[paint] = sum(float(w) * float(h) for w, h in boxes)
    total = sum(found.values())
    return {paint: area / total for paint, area in found.items()}


def test_the_area_of_a_colour_is_its_part_of_the_pairs():
    made = figures.mask_pairs(masks.causal(), 24, 40, block_q=8, block_kv=8)
    found = areas(made.svg)
    # Tiles: 3 x 5, of which 3 on the diagonal are PARTIAL, with 36 of 64 pairs each, 3 are EMPTY.
    assert found[PAINT[FULL]] == pytest.approx(9 / 15, abs=1e-3)
    assert found[PAINT[PARTIAL]] == pytest.approx(3 * 36 / 960, abs=1e-3)
    assert found[PAINT[EMPTY]] == pytest.approx(3 / 15, abs=1e-3)
    assert "684 of 960 pairs attend" in made.svg
    plain = areas(figures.mask_pairs(masks.causal(), 24, 40).svg)
    assert plain[PAINT[FULL]] == pytest.approx(684 / 960, abs=1e-3)
    # The last tile of 100 keys is smaller than the others, and so it is drawn.
    tiled = areas(figures.mask_tiles(masks.prefix(64), 64, 100).svg)
    assert tiled[PAINT[FULL]] == pytest.approx(0.64, abs=1e-3)
    assert tiled[PAINT[EMPTY]] == pytest.approx(0.36, abs=1e-3)


def test_large_matrices_stay_small_documents(tmp_path):
    made = figures.mask_tiles(masks.causal(), 131072, block_q=128, block_kv=64)
    assert len(made.svg) < 20_000
    assert "a cell stands for 11 x 22 tiles" in made.svg
    assert "EMPTY 1,047,552 (skipped)" in made.svg
    assert max(map(len, made.text.splitlines())) <= 100
    made.save(tmp_path / "causal.svg")
    assert (tmp_path / "causal.svg").read_text(encoding="utf-8") == made._repr_svg_()


def test_ticks_end_at_the_length():
    assert ticks(4096) == [0, 1024, 2048, 3072, 4096]
    assert ticks(300) == [0, 128, 300]
    assert ticks(1) == [0, 1]


# -- masks draw themselves ------------------------------------------------------------------------

DRAWN = {
    "causal": (masks.causal(), "32 queries, 32 keys"),
    "window": (masks.window(1024, 0), "2,048 queries, 2,048 keys"),
    "documents": (masks.segments(DOCUMENTS) & masks.causal(), "200 queries, 200 keys"),
    "dense": (masks.dense(RANDOM), "40 queries, 50 keys"),
    "blocks": (masks.blocks(np.eye(8, dtype=bool), 64, 32), "512 queries, 256 keys"),
    "lengths": (masks.lengths([20, 30]), "32 queries, 32 keys"),
    "lookup": (masks.mask(lambda b, h, i, j: lookup(DOCUMENTS)[i] == 2), "200 queries, 200 keys"),
    "half": (masks.mask(lambda b, h, i, j: lookup(DOCUMENTS[:20])[i + 0] > j), "16 queries, 16"),
    "a long title & signs": (
        masks.mask(lambda b, h, i, j: (i < j) & (j < i + 4000) | (j == 3) & (i != j)),
        "8,192 queries, 8,192 keys",
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_mask_draws_itself(name):
    mask, words = DRAWN[name]
    text = mask._repr_svg_()
    ET.fromstring(text)
    assert f"an example: {words}" in text
    assert text == figures.example(mask).svg


def test_a_mask_that_fits_no_size_is_not_drawn():
    mask = masks.mask(lambda b, h, i, j: lookup(np.arange(4))[i - 1] == j)
    assert mask._repr_svg_() is None  # a notebook shows its words
    assert figures.example(mask) is None


def test_pictures_in_a_terminal():
    made = figures.mask_tiles(masks.window(70, 0) | masks.prefix(1), 256)
    lines = str(made).splitlines()
    assert [re.split("[│]", line)[1] for line in lines[2:6]] == [
        "▒▒······", "▒▒▒▒····", "▒▒▒▒▒▒··", "▒▒▒▒▒▒▒▒",
    ]  # fmt: skip
    assert ascii_only(str(made)).isascii()
    assert "#" not in ascii_only(lines[3])
    assert "one pair of a query and a key" in figures.mask_pairs(masks.causal(), 8).text


def test_the_examples_of_docstrings():
    for each in (mask, dense, cached):
        tried = doctest.testmod(each)
        assert tried.attempted > 1
        assert not tried.failed


def test_errors():
    with pytest.raises(ArgumentTypeError, match="mask: got ndarray; expected a mask of cupyflash"):
        figures.mask_tiles(np.ones((3, 3), bool), 3)
    with pytest.raises(ArgumentError, match="len_q: got 0; expected an integer of 1 or more"):
        figures.mask_tiles(None, 0)
    with pytest.raises(ArgumentError, match=r"at most 256, .*figures\.mask_tiles draws any number"):
        figures.mask_pairs(masks.causal(), 257)
    with pytest.raises(ArgumentError, match="machine: got 'tpu'; expected one of cpu, gpu, exact"):
        figures.mask_tiles(None, 8, machine="tpu")
    with pytest.raises(ArgumentError, match=r"at: got \(1, 0\); expected a batch entry below 1"):
        figures.mask_pairs(masks.causal(), 8, at=(1, 0))


@pytest.mark.parametrize(
    ("mask", "sizes", "line"),
    [
        (None, (1000, 600), "██ all 160 tiles of 64 queries x 64 keys are FULL"),
        (
            masks.lengths(0),
            (1000, 64),
            "·· all 16 tiles of 64 queries x 64 keys are EMPTY, skipped",
        ),
        (masks.dilated(2), (1000, 64), "▒▒ all 16 tiles of 64 queries x 64 keys are PARTIAL"),
        (masks.causal(), (50, 50), "▒▒ the one tile of 64 queries x 64 keys is PARTIAL"),
    ],
)
def test_tiles_that_are_all_alike_are_one_line(mask, sizes, line):
    drawn = figures.mask_tiles(mask, *sizes)
    assert drawn.text == line
    assert ET.fromstring(drawn.svg) is not None


def test_pairs_that_are_all_alike_are_one_line():
    assert figures.mask_pairs(None, 20).text == "██ all 400 pairs of a query and a key attend"
    hidden = figures.mask_pairs(masks.lengths(0), 1)
    assert hidden.text == "·· the one pair of a query and a key is masked"
    assert (
        figures.mask_pairs(masks.causal(), 1).text == "██ the one pair of a query and a key attends"
    )


def test_a_title_may_hold_anything():
    """XML holds no control characters; a tag in a title is text."""
    drawn = figures.mask_tiles(masks.causal(), 64, title="<script>\x1b[31m\x00").svg
    assert ET.fromstring(drawn).find("{*}title").text == "<script>\ufffd[31m\ufffd"
