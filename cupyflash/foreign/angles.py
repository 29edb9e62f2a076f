"""Tables of angles and columns of pairs, as other libraries have them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.interop import array
from ..errors import ArgumentError
from ..problem.rotary import Rotary

Array = np.ndarray[Any, Any]


def rotary(cos: Any, sin: Any) -> Rotary:
    """Make a `cupyflash.Rotary` of tables that have each angle twice, as transformers has them.

    Parameters
    ----------
    cos, sin : array of float32 or float64, shape (..., S, R)
        Cosines and sines; axes before the last two have length 1. The angle of a pair stands in
        both of its columns: m and m + R / 2 (Llama), or 2 m and 2 m + 1 (GPT-J, Cohere).

    Returns
    -------
    Rotary
        Tables of R / 2 columns, and which columns are pairs.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The angles are not there twice in one of these two ways, or in both.
    """
    tables = [array(each, name) for each, name in ((cos, "cos"), (sin, "sin"))]
    for name, table in zip(("cos", "sin"), tables, strict=True):
        if table.ndim < 2 or set(table.shape[:-2]) - {1} or table.shape[-1] % 2:
            raise ArgumentError(
                f"{name}: got shape {table.shape}; expected (S, R) with an even R, and axes of "
                "length 1 before. Tables of R / 2 columns are for cupyflash.Rotary itself."
            )
    cos, sin = (table.reshape(table.shape[-2:]) for table in tables)
    half = cos.shape[1] // 2
    halves = all(np.array_equal(x[:, :half], x[:, half:]) for x in (cos, sin))
    neighbours = all(np.array_equal(x[:, ::2], x[:, 1::2]) for x in (cos, sin))
    if halves == neighbours and half > 1:
        came = "both ways" if halves else "neither way"
        raise ArgumentError(
            f"cos, sin: each angle should be there twice, in halves (columns m and m + R / 2) or "
            f"in neighbours (2 m and 2 m + 1); these tables are so in {came}. Pass the R / 2 "
            "columns to cupyflash.Rotary, with interleaved=True for pairs of neighbours."
        )
    if halves:
        return Rotary(cos[:, :half].copy(), sin[:, :half].copy())
    return Rotary(cos[:, ::2].copy(), sin[:, ::2].copy(), interleaved=True)


def interleave(x: Any, *, pairs: int | None = None, inverse: bool = False) -> Array:
    """Move columns whose pairs are halves apart beside each other, as llama.cpp moves weights.

    Rotating by halves (the default of `cupyflash.Rotary`: Llama in transformers, GPT-NeoX, MLX) and
    then moving columns gives the same as moving them and then rotating neighbours (GPT-J,
    llama.cpp's Llama, MLX's ``traditional=True``). Scores do not change if queries and keys are
    moved alike.

    Parameters
    ----------
    x : array, shape (..., D)
        Rows of queries or keys, or the rows of their weights.
    pairs : int, optional
        How many pairs are rotated; other columns stay. Default: D / 2.
    inverse : bool
        Move neighbours to halves.

    Returns
    -------
    array, shape (..., D)
        A copy with its columns moved.

    Raises
    ------
    ArgumentError
        The row has fewer columns.
    """
    x = array(x, "x")
    columns = x.shape[-1] if x.ndim else 0
    pairs = columns // 2 if pairs is None else pairs
    if pairs < 0 or 2 * pairs > columns or not x.ndim:
        raise ArgumentError(
            f"pairs: got {pairs} with x of shape {x.shape}; expected 0 to {columns // 2}."
        )
    order = np.arange(columns)
    halves = np.arange(2 * pairs).reshape(2, pairs)
    order[: 2 * pairs] = halves.T.ravel()
    return np.take(x, np.argsort(order) if inverse else order, axis=-1)
