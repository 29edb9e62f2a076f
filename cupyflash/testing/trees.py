"""Random expression trees drawn by hypothesis, with every operation and with hard numbers.

They are for code that reads trees (evaluators, code generators). The masks and scores of attention
problems are the moderate ones in `options`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.expr import (
    absolute,
    clip,
    floor,
    len_k,
    len_q,
    maximum,
    minimum,
    sqrt,
    where,
)
from cupyflash.expr.functions import POSITIONS, SCORE
from cupyflash.expr.nodes import APPROXIMATE, LookupTable, as_expr, operation

from .hypothesis_needed import composite, st
from .options import known_floats

INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
HARD_FLOATS = (0.0, -0.0, 1.5, -2.25, 0.1, 3.0e38, -1e30, 1e-40, np.inf, -np.inf, np.nan)
FUNCTIONS = tuple(sorted(APPROXIMATE))


@composite
def arrays(draw: Any, kind: str) -> Any:
    """Draw a small array of any dtype of a kind ("bool", "int", "float"), also with odd strides."""
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
                draw(st.sampled_from(known_floats()))
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


def small(low: int, high: int) -> Any:
    """Draw a constant."""
    return st.integers(low, high).map(as_expr)


@composite
def affine(draw: Any) -> Any:
    """Draw a whole number that moves over a tile."""
    _, _, i, j = POSITIONS
    numbers = [draw(st.integers(low, high)) for low, high in ((-3, 3), (-3, 3), (-9, 9))]
    return numbers[0] * i + numbers[1] * j + numbers[2]


@composite
def expressions(
    draw: Any, kind: str, depth: int | None = None, score: bool = False, functions: bool = True
) -> Any:
    """Draw an expression.

    Parameters
    ----------
    kind : str
        Its type: "bool", "int" or "float".
    depth : int, optional
        Levels of operations; mostly 1 to 4.
    score : bool
        Whether it may contain the score.
    functions : bool
        Whether it may contain functions whose last bits differ, such as exp.

    Returns
    -------
    Expr
        A tree that is not bound to sizes: look-ups are clipped into range, but `bind` may still
        refuse floors.
    """
    if depth is None:  # small ones find the most
        depth = draw(st.sampled_from([1, 1, 1, 2, 2, 3, 4]))

    deep = depth - 1

    def part(kind: str) -> Any:
        return draw(expressions(kind, deep, score, functions))

    def read() -> Any:
        array = draw(arrays(kind))
        return LookupTable(array)[tuple(clip(part("int"), 0, size - 1) for size in array.shape)]

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
        names += " left_shift right_shift"
        choice = draw(st.sampled_from([*names.split(), "floor", "where", "lookup", "condition"]))
        if choice in ("floor_divide", "remainder"):
            divisor = draw(st.sampled_from(["constant", "positive", "negative", "any"]))
            b = draw(small(1, 9)) if divisor == "constant" else part("int")
            b = b if divisor in ("constant", "any") else maximum(b, 1)
            b = -b if divisor == "negative" or draw(st.booleans()) else b
            return part("int") // b if choice == "floor_divide" else part("int") % b
        if choice in ("left_shift", "right_shift"):
            bits = draw(st.one_of(small(0, 9), small(60, 70), st.none()))
            bits = maximum(part("int"), 0) if bits is None else bits
            return part("int") << bits if choice == "left_shift" else part("int") >> bits
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
        names = "add subtract multiply divide minimum maximum negative absolute to_float where sqrt"
        chosen = [*names.split(), "lookup", *(FUNCTIONS if functions else ())]
        choice = draw(st.sampled_from(chosen))
        if choice == "to_float":
            return part("int") * draw(st.sampled_from([1.0, 0.25, -3.0]))
        if choice == "sqrt":
            return sqrt(part("float"))
        if choice == "power":
            return part("float") ** draw(st.one_of(small(-3, 3), st.just(part("float"))))
        if choice in FUNCTIONS:
            return operation(choice, part("float"))
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
