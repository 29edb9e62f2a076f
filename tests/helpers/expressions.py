"""The register machine run on expressions: shared by the tests of `expr`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st
from numba import types

from cupyflash.errors import ArgumentError
from cupyflash.expr.bind import bind
from cupyflash.expr.evaluate import evaluate, evaluate_exactly
from cupyflash.expr.lower import lower
from cupyflash.masks import flat_sizes, position_symbols
from cupyflash.reference.cpu import array_mask, program, tile
from cupyflash.reference.cpu.arguments import CHANGES, NO_RANGES, Changes, FunctionPointers
from cupyflash.reference.cpu.calls import Bound
from cupyflash.reference.cpu.jit import (
    INT,
    INTS,
    TABLE,
    kernel,
    pointer_of,
    prepare,
    takes,
    vector,
    whole_rows,
)
from cupyflash.reference.cpu.microkernel import PANEL
from cupyflash.reference.cpu.tile_lists import no_lists
from cupyflash.reference.spec.naive import Sizes
from cupyflash.testing.trees import (  # noqa: F401
    FUNCTIONS,
    HARD_FLOATS,
    arrays,
    expressions,
)


@st.composite
def problems(draw):
    """Sizes of small problems, of one length or packed."""
    heads = draw(st.integers(1, 2))
    if draw(st.booleans()):
        lead = draw(st.sampled_from([(), (1,), (2,), (2, 2)]))
        return Sizes(lead, heads, draw(st.integers(1, 12)), draw(st.integers(1, 12)))
    n = draw(st.integers(1, 3))
    len_q, len_k = (
        np.array(draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)), np.int64)
        for _ in range(2)
    )
    return Sizes((n,), heads, len_q, len_k, np.cumsum(len_q) - len_q, np.cumsum(len_k) - len_k)


def of_batch(sizes, b):
    """The sizes of batch entry b, as numbers."""
    return {
        name: int(np.broadcast_to(getattr(sizes, name), int(np.prod(sizes.lead)))[b])
        for name in ("len_q", "len_k", "start_q", "start_k")
    }


@st.composite
def tiles(draw, sizes):
    """A tile (b, h, i0, ni, j0, nj) of a problem."""
    b = draw(st.integers(0, int(np.prod(sizes.lead)) - 1))
    one = of_batch(sizes, b)
    corner = [b, draw(st.integers(0, sizes.heads - 1))]
    for length in (one["len_q"], one["len_k"]):
        first = draw(st.integers(0, length - 1))
        corner += [first, draw(st.integers(1, length - first))]
    return tuple(corner)


def bound_or_none(expr, sizes):
    """The bound expression, or None where `bind` finds no proof that it is safe."""
    try:
        return bind(expr, flat_sizes(sizes))
    except ArgumentError:
        return None


# -- the readers, over one tile -------------------------------------------------------------------


def tile_symbols(sizes, where_):
    """The symbols of a tile for NumPy: positions (ni, nj), and its corners."""
    b, h, i0, ni, j0, nj = where_
    i, j = np.ix_(np.arange(i0, i0 + ni), np.arange(j0, j0 + nj))
    numbers = SimpleNamespace(**of_batch(sizes, b))
    corners = {"i_low": i0, "i_high": i0 + ni - 1, "j_low": j0, "j_high": j0 + nj - 1}
    return position_symbols(b, h, i, j, numbers), of_batch(sizes, b) | {"b": b, "h": h} | corners


def by_numpy(bound, sizes, where_, score=None, float_type=np.float32):
    """The value over a tile, (ni, nj)."""
    symbols, _ = tile_symbols(sizes, where_)
    value = evaluate(bound, symbols | {"score": score}, float_type)
    return np.broadcast_to(value, (where_[3], where_[5]))


def exactly(root, sizes, where_, float_type=np.float32):
    """The value of a bound or a tile class, which knows a tile's corners."""
    return evaluate_exactly(root, tile_symbols(sizes, where_)[1], {}, float_type)


REGISTERS = whole_rows(types.float32)

# Kernels of one item: what the real ones do with a tile.


@takes(lambda number: (
    INT, INT, CHANGES, INTS, INT, INT, INTS, INT, vector(number), TABLE, REGISTERS,
))  # fmt: skip
@kernel
def run_mask(first, last, changes, symbols, ni, nj, edges, lanes, s, ri, rf):
    tile.look_at_all(edges, nj)
    tile.apply_mask(changes, symbols, ni, edges, lanes, s, ri, rf)


def _score_arguments(number):
    tiles = vector(number), vector(number)
    return INT, INT, CHANGES, INTS, INT, INT, INTS, INT, *tiles, TABLE, whole_rows(number)


@takes(_score_arguments)
@kernel
def run_score(first, last, changes, symbols, ni, nj, edges, lanes, s, changed, ri, rf):
    pointers, score = changes.pointers, changes.score
    tile.look_at_all(edges, nj)
    tile.apply_score(pointers, score, symbols, ni, edges, lanes, s, changed, ri, rf)


@takes(lambda number: (INT, INT, CHANGES, INTS, INT, INT, INTS, INTS, TABLE, REGISTERS))
@kernel
def run_class(first, last, changes, symbols, ni, nj, edges, found, ri, rf):
    found[0] = tile.class_of_tile(changes, symbols, ni, nj, edges, ri, rf)


def edges():
    """Memory for the edges of a tile's keys."""
    return np.zeros(4, np.int64)


def call(compiled, number, *arguments):
    prepare([(compiled, np.dtype(number))], report=lambda *_: None)
    Bound(compiled, np.dtype(number), *arguments)(0, 1)


def changes_of(number=np.float32, **programs):
    """Programs by their fields in `Changes`, with the kernels that run them."""
    number = np.dtype(number)
    by_array = len(programs.get("mask", program.NO_PROGRAM).strided) > 0
    called = {
        "run_float32": (program.run, np.dtype(np.float32)),
        "run_number": (program.run, number),
        "classify": (tile.classify_by_program, number),
        "score": (tile.score_by_program, number),
        "mask": (array_mask.mask_by_array if by_array else tile.mask_by_program, number),
    }
    prepare(called.values())
    pointers = FunctionPointers(
        *(pointer_of(*called[x]) if x in called else 0 for x in FunctionPointers._fields)
    )
    none = program.NO_PROGRAM
    four = [programs.get(name, none) for name in ("score", "slope", "mask", "tile")]
    lists = no_lists(four[3], 0)
    return Changes(*four, NO_RANGES, pointers, may_mask=0, panel=PANEL, lists=lists)


def machine_symbols(sizes, where_):
    _, numbers = tile_symbols(sizes, where_)
    return np.array([numbers.get(name, 0) for name in program.SYMBOLS], np.int64)


def mask_by_machine(bound, sizes, where_):
    """The mask over a tile, (ni, nj), by the CPU kernels' register machine."""
    ni, nj = where_[3], where_[5]
    lanes = ni + 3
    s = np.ones(nj * lanes, np.float32)
    changes, symbols = changes_of(mask=lower(bound)), machine_symbols(sizes, where_)
    registers = tile.make_registers(changes.mask, lanes, np.dtype(np.float32))
    call(run_mask, np.float32, changes, symbols, ni, nj, edges(), lanes, s, *registers)
    s = s.reshape(nj, lanes)
    assert (s[:, ni:] == 1).all()  # lanes beyond the tile stay as they were
    assert np.isin(s, (1, -np.inf)).all()
    return (s[:, :ni] == 1).T


def score_by_machine(bound, sizes, where_, score):
    """The changed scores over a tile, (ni, nj), in the type of `score`."""
    _, _, _, ni, _, nj = where_
    lanes = ni + 2
    s = np.zeros((nj, lanes), score.dtype)
    s[:, :ni] = score.T
    changed = np.zeros(nj * lanes, score.dtype)
    changes, symbols = changes_of(score.dtype, score=lower(bound)), machine_symbols(sizes, where_)
    registers = tile.make_registers(changes.score, lanes, score.dtype)
    tiles = s.reshape(-1), changed
    call(run_score, score.dtype, changes, symbols, ni, nj, edges(), lanes, *tiles, *registers)
    return changed.reshape(nj, lanes)[:, :ni].T


def class_of_tile(changes, symbols, ni, nj):
    """EMPTY, PARTIAL or FULL of the tile that `symbols` describes."""
    found = np.zeros(1, np.int64)
    registers = tile.make_registers(changes.tile, 1, np.dtype(np.float32))
    call(run_class, np.float32, changes, symbols, ni, nj, edges(), found, *registers)
    return found[0]


def class_by_machine(classes, sizes, where_):
    """EMPTY, PARTIAL or FULL of a tile."""
    changes = changes_of(tile=lower(classes))
    return class_of_tile(changes, machine_symbols(sizes, where_), where_[3], where_[5])
