"""Random expressions, and the register machine run on them: shared by the tests of `expr`."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from cupyflash import lookup
from cupyflash.errors import ArgumentError
from cupyflash.expr import (
    absolute,
    clip,
    exp,
    floor,
    len_k,
    len_q,
    log,
    maximum,
    minimum,
    tanh,
    where,
)
from cupyflash.expr.bind import bind
from cupyflash.expr.evaluate import evaluate, evaluate_exactly
from cupyflash.expr.functions import POSITIONS, SCORE
from cupyflash.expr.lower import lower
from cupyflash.expr.nodes import as_expr
from cupyflash.masks import flat_sizes, position_symbols
from cupyflash.reference import program, tile
from cupyflash.reference.jit import kernel
from cupyflash.reference.naive import Sizes

INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
HARD_FLOATS = (0.0, -0.0, 1.5, -2.25, 0.1, 3.0e38, -1e30, 1e-40, np.inf, -np.inf, np.nan)
FUNCTIONS = ("exp", "log", "tanh")


# -- random expressions ---------------------------------------------------------------------------


@st.composite
def arrays(draw, kind):
    """Small arrays of every dtype of a kind, also with odd strides."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    count = int(np.prod(shape))
    if kind == "bool":
        values = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    elif kind == "int":
        dtype = np.dtype(draw(st.sampled_from(INTS)))
        low = max(np.iinfo(dtype).min, -9)
        some = st.one_of(st.integers(low, 9), st.just(int(np.iinfo(dtype).max)))
        values = np.array(draw(st.lists(some, min_size=count, max_size=count)), dtype)
    else:
        numbers = st.one_of(st.sampled_from(HARD_FLOATS), st.floats(-4, 4, width=16))
        with np.errstate(over="ignore"):
            values = np.array(draw(st.lists(numbers, min_size=count, max_size=count))).astype(
                draw(st.sampled_from(FLOATS))
            )
    values = values.reshape(shape)
    form = draw(st.sampled_from(["as is", "reversed", "transposed", "spread"]))
    if form == "reversed":
        return values[::-1]
    if form == "transposed":
        return values.T
    if form == "spread":
        wide = np.zeros((*shape[:-1], 3 * shape[-1]), values.dtype)
        wide[..., ::3] = values
        return wide[..., ::3]
    return values


def small(low, high):
    return st.integers(low, high).map(as_expr)


@st.composite
def affine(draw):
    """A number that moves over a tile."""
    _, _, i, j = POSITIONS
    numbers = [draw(st.integers(low, high)) for low, high in ((-3, 3), (-3, 3), (-9, 9))]
    return numbers[0] * i + numbers[1] * j + numbers[2]


@st.composite
def expressions(draw, kind, depth=None, score=False, functions=True):
    """Expressions of type "bool", "int" or "float"; `score` lets them contain the score."""
    if depth is None:  # small ones find most
        depth = draw(st.sampled_from([1, 1, 1, 2, 2, 3, 4]))

    def part(kind, deep=depth - 1):
        return draw(expressions(kind, deep, score, functions))

    def read():
        array = draw(arrays(kind))
        return lookup(array)[tuple(clip(part("int"), 0, size - 1) for size in array.shape)]

    if kind == "bool":
        if depth <= 0:
            return draw(st.one_of(affine().map(lambda x: x < 0), st.booleans().map(as_expr)))
        choice = draw(st.sampled_from("int int float logic logic not where lookup".split()))
        if choice in ("int", "float"):
            a, b = part(choice), part(choice)
            compare = draw(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]))
            return getattr(a, f"__{compare}__")(b)
        if choice == "logic":
            a, b = part("bool"), part("bool")
            return getattr(a, f"__{draw(st.sampled_from(['and', 'or', 'xor']))}__")(b)
        if choice == "not":
            return ~part("bool")
        return where(part("bool"), part("bool"), part("bool")) if choice == "where" else read()
    if kind == "int":
        if depth <= 0:
            symbols = st.sampled_from([*POSITIONS, len_q, len_k])
            constants = st.one_of(small(-9, 9), small(-(2**40), 2**40))
            return draw(st.one_of(affine(), affine(), symbols, constants))
        names = "add subtract multiply minimum maximum negative absolute floor_divide remainder"
        choice = draw(st.sampled_from([*names.split(), "floor", "where", "lookup", "condition"]))
        if choice in ("floor_divide", "remainder"):
            divisor = draw(st.sampled_from(["constant", "positive", "negative", "any"]))
            b = draw(small(1, 9)) if divisor == "constant" else part("int")
            b = b if divisor in ("constant", "any") else maximum(b, 1)
            b = -b if divisor == "negative" or draw(st.booleans()) else b
            return part("int") // b if choice == "floor_divide" else part("int") % b
        if choice == "floor":
            return clip(floor(part("float")), -50, draw(st.integers(-50, 50)))
        if choice == "condition":
            return part("bool") + 0
    else:
        if depth <= 0:
            numbers = st.one_of(st.sampled_from(HARD_FLOATS), st.floats(-8, 8, width=32))
            moving = affine().map(lambda x: x * 0.5)
            leaves = [st.just(SCORE)] * 4 if score else [moving]
            return draw(st.one_of(*leaves, moving, numbers.map(as_expr)))
        names = "add subtract multiply divide minimum maximum negative absolute to_float where"
        if functions:
            names += " exp log tanh"
        choice = draw(st.sampled_from([*names.split(), "lookup"]))
        if choice == "to_float":
            return part("int") * draw(st.sampled_from([1.0, 0.25, -3.0]))
        if choice in FUNCTIONS:
            return {"exp": exp, "log": log, "tanh": tanh}[choice](part("float"))
    if choice == "lookup":
        return read()
    if choice == "where":
        return where(part("bool"), part(kind), part(kind))
    if choice in ("negative", "absolute"):
        return -part(kind) if choice == "negative" else absolute(part(kind))
    a, b = part(kind), part(kind)
    if choice in ("minimum", "maximum"):
        return minimum(a, b) if choice == "minimum" else maximum(a, b)
    operator = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv"}[choice]
    return getattr(a, f"__{operator}__")(b)


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


@kernel
def run_mask(mask, symbols, i0, ni, nj, lanes, s):
    ri, rf = tile.make_registers(mask, lanes, s)
    tile.apply_mask(mask, symbols, i0, ni, nj, lanes, s, ri, rf)


@kernel
def run_score(score, symbols, i0, ni, nj, lanes, s, changed):
    ri, rf = tile.make_registers(score, lanes, s)
    tile.apply_score(score, symbols, i0, ni, nj, lanes, s, changed, ri, rf)


@kernel
def run_class(classes, symbols, like):
    ri, rf = tile.make_registers(classes, 1, like)
    return tile.classify_tile(classes, symbols, ri, rf)


def machine_symbols(sizes, where_):
    _, numbers = tile_symbols(sizes, where_)
    return np.array([numbers.get(name, 0) for name in program.SYMBOLS], np.int64)


def mask_by_machine(bound, sizes, where_):
    """The mask over a tile, (ni, nj), by the CPU kernels' register machine."""
    _, _, i0, ni, _, nj = where_
    lanes = ni + 3
    s = np.ones(nj * lanes, np.float32)
    run_mask(lower(bound), machine_symbols(sizes, where_), i0, ni, nj, lanes, s)
    s = s.reshape(nj, lanes)
    assert (s[:, ni:] == 1).all()  # lanes beyond the tile stay as they were
    assert np.isin(s, (1, -np.inf)).all()
    return (s[:, :ni] == 1).T


def score_by_machine(bound, sizes, where_, score):
    """The changed scores over a tile, (ni, nj), in the type of `score`."""
    _, _, i0, ni, _, nj = where_
    lanes = ni + 2
    s = np.zeros((nj, lanes), score.dtype)
    s[:, :ni] = score.T
    changed = np.zeros(nj * lanes, score.dtype)
    run_score(
        lower(bound), machine_symbols(sizes, where_), i0, ni, nj, lanes, s.reshape(-1), changed
    )
    return changed.reshape(nj, lanes)[:, :ni].T


def class_by_machine(classes, sizes, where_):
    """EMPTY, PARTIAL or FULL of a tile."""
    return run_class(lower(classes), machine_symbols(sizes, where_), np.empty(0, np.float32))
