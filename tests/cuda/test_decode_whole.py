"""Small caches, whose tasks have a block each: one kernel with the bits of two, on the CPU."""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
from caches import hidden, in_pages, results
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.problem import cached
from cupyflash.problem.options import Options

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
FORMS = {
    "sm80": (np.dtype(np.float16), Blocks()),
    "hopper": (np.dtype(ml_dtypes.bfloat16), Blocks(hopper=True)),
    "simt": (np.dtype(np.float32), Blocks()),
    "simt-f64": (np.dtype(np.float64), Blocks()),
}
OPTIONS = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(40, 0)},
    "not a range": {"mask": masks.mask(lambda b, h, i, j: (i + j + h) % 3 != 0)},
    "hides leaves": {"mask": masks.mask(lambda b, h, i, j: j // 64 % 2 != h % 2)},
    "hides a head": {"mask": masks.mask(lambda b, h, i, j: h != 1)},
    "softcap": {"score_mod": scores.softcap(2.0)},
    "negative scale": {"scale": -0.3},
    "scale 0": {"scale": 0.0},
    "sink": {"sink": np.array([0.5, -1.0, 3.0, -np.inf], np.float32)},
}
LENGTHS = np.array([480, 0, 131])


def run(
    blocks, multiprocessors, schedule, q, k, v, table=None, lengths=LENGTHS, late=(), **options
):
    """Return out, lse and the parts of the launches; results begin as NaN."""
    parts = []

    def runs(special):
        parts.append(special.spec.part)
        return True

    call = cached.call(q, k, v, lengths, table, None, Options(**options))
    out, lse = results(call)
    blocks = dataclasses.replace(blocks, multiprocessors=multiprocessors)
    Emulator(blocks, schedule, runs=runs, late=late).forward(call, out, lse)
    return out, lse, set(parts)


def equal_bits(blocks, *arrays, multiprocessors=64, **options):
    want = run(blocks, 2, FORWARD, *arrays, **options)
    assert want[2] == {"decode", "join"}
    for schedule in (REVERSE, randomly(5)):
        got = run(blocks, multiprocessors, schedule, *arrays, **options)
        assert got[2] == {"decode"}
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])


@mostly_thorough(
    ("form", "name", "page"),
    [*itertools.product(FORMS, OPTIONS, [None, 24])],
    quick=[("sm80", "sink", None), ("hopper", "window", 24), ("simt", "plain", 24)],
    why="other masks, scores and layouts, a build each",
)
def test_a_block_with_a_whole_task_has_the_bits_of_two_kernels(form, name, page):
    """Whichever leaves a mask leaves, and in whatever order blocks come."""
    dtype, blocks = FORMS[form]
    rng = np.random.default_rng(17)
    q, k, v = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((3, 4, 3, 40), (3, 2, 480, 40), (3, 2, 480, 56))
    )
    k, v = hidden(k, LENGTHS), hidden(v, LENGTHS)
    table = None
    if page:
        (k, table), (v, _) = (in_pages(x, page, np.random.default_rng(3)) for x in (k, v))
    equal_bits(blocks, q, k, v, table, **OPTIONS[name])


@pytest.mark.thorough("other sizes of heads, a build each")
@pytest.mark.parametrize(("d", "d_v"), [(8, 24), (16, 200), (256, 256), (192, 128)])
@pytest.mark.parametrize("form", FORMS)
def test_other_heads(form, d, d_v):
    dtype, blocks = FORMS[form]
    rng = np.random.default_rng(18)
    q, k, v = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((3, 4, 9, d), (3, 2, 250, d), (3, 2, 250, d_v))
    )
    simt = form.startswith("simt")
    # As many SMs as there are tasks: then these may have the most bytes.
    more = {"multiprocessors": 30 if simt else 12, "lengths": np.array([250, 0, 131])}
    if simt and d + 64 < d_v:  # a leaf has no room
        assert run(blocks, schedule=FORWARD, q=q, k=k, v=v, **more)[2] == {"decode", "join"}
    else:
        equal_bits(blocks, q, k, v, **more)


@mostly_thorough(
    ("form", "name", "length"),
    [
        (form, name, length)
        for form, name, length in itertools.product(("sm80", "hopper"), OPTIONS, (513, 1500))
    ],
    quick=[("hopper", "sink", 1500), ("sm80", "hides leaves", 1500)],
    why="other masks and scores, a build each",
)
def test_warps_take_several_leaves_in_turn(form, name, length):
    """Which are nodes of two levels; small ones lie where those of one leaf for a warp do."""
    dtype, blocks = FORMS[form]
    rng = np.random.default_rng(19)
    q, k, v = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((4, 4, 2, 24), (4, 4, 1500, 24), (4, 4, 1500, 24))
    )
    lengths = np.array([length, 512, 0, 1025 if length > 1025 else 448])
    arrays = q, hidden(k, lengths), hidden(v, lengths)
    equal_bits(blocks, *arrays, multiprocessors=16, lengths=lengths, **OPTIONS[name])


CHANGES = {  # lengths before, and by how many pages the table's entries are off
    "lengths": ((400, 1, 0), 0),
    "all lengths": ((0, 480, 480), 0),
    "the table": ((480, 0, 131), 1),
    "both": ((70, 480, 1), 1),
}


@mostly_thorough(
    ("form", "name", "page"),
    [
        (form, name, page)
        for form, name, page in itertools.product(FORMS, CHANGES, (None, 16, 3))
        if page or not CHANGES[name][1]
    ],
    quick=[("sm80", "all lengths", None), ("sm80", "both", 16), ("simt", "both", 16)],
    why="other forms and changes",
)
def test_what_the_grid_ahead_writes_at_its_end_is_read(form, name, page):
    """A kernel that begins early guesses lengths and pages, and looks at them again."""
    dtype, blocks = FORMS[form]
    rng = np.random.default_rng(20)
    q, k, v = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((3, 4, 2, 32), (3, 2, 480, 32), (3, 2, 480, 32))
    )
    want = run(blocks, 64, FORWARD, q, k, v)
    before, moved = CHANGES[name]
    table, held = None, np.array(before)
    late = [(held, LENGTHS), (q, q.copy())]
    if page:
        (k, table), (v, _) = (in_pages(x, page, np.random.default_rng(3)) for x in (k, v))
        late.append((table, table.copy()))
        table[...] = (table + moved) % len(k)
    q[...] = np.nan
    got = run(blocks, 64, FORWARD, q, k, v, table, held, tuple(late))
    assert got[2] == want[2] == {"decode"}
    assert np.array_equal(held, LENGTHS)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


# Room for keys, heads of keys, and SMs that as many tasks of three entries fill.
SIZES = {"1 node": (512, 5, 2), "2 nodes": (1024, 4, 3), "4 nodes": (2000, 2, 3), "8": (4096, 2, 6)}


@mostly_thorough(
    ("size", "name", "page"),
    [(size, name, page) for size in SIZES for name in OPTIONS for page in (None, 16, 24)],
    quick=[("2 nodes", "sink", 16), ("4 nodes", "window", None)],
    why="other sizes, masks and scores, a build each",
)
def test_tasks_of_nodes_have_the_bits_of_two_kernels(size, name, page):
    """In a block that has several of them, too; one of the tasks that blocks could have is none."""
    room, heads, multiprocessors = SIZES[size]
    if page == 24:
        room = room // 24 * 24
    dtype, nodes = FORMS["hopper"]
    rng = np.random.default_rng(21)
    lengths = np.array([room, 0, room // 2 + 5])
    q, k, v = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((3, 2 * heads, 2, 24), (3, heads, room, 24), (3, heads, room, 24))
    )
    options = dict(OPTIONS[name])
    if name == "sink":
        options["sink"] = np.resize(options["sink"], 2 * heads)
    k, v, table = hidden(k, lengths), hidden(v, lengths), None
    if page:
        (k, table), (v, _) = (in_pages(x, page, np.random.default_rng(3)) for x in (k, v))
    arrays = nodes, 1, FORWARD, q, k, v, table, lengths
    want = run(*arrays, **options)
    assert want[2] == {"decode", "join"}
    for schedule in (REVERSE, randomly(5)):
        got = run(nodes, multiprocessors, schedule, *arrays[3:], **options)
        assert got[2] == {"decode"}
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])
