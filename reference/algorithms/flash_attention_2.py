"""FlashAttention-2, forward: Dao 2023, Algorithm 1, as `reference/cpu/forward.py` runs it.

Queries are in the outer loop, so that O, l and m never leave the chip and each block of queries is
independent. O is divided by l once, at the end, and the log-sum-exp replaces l and m. (In line 10,
the paper prints the factor with an exponent -1; the right factor is e^(m_old - m_new), as in line
9.)

There is no second copy of the algorithm: `forward` runs the package's own CPU kernel, goes through
the tiles that it must have visited to count what they move, and fails if the kernel visited a
different number. Steps are numbered as in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..cpu.launch import forward as run_kernel
from ..cpu.layout import Programs
from ..cpu.program import NO_PROGRAM, SYMBOLS, Op, Program
from ..cpu.tables import TABLE_WORDS
from .blocks import (
    Dropout,
    blocks,
    default_scale,
    dropout_of,
    mask_of,
    size_of,
)
from .causal_tiles import seen
from .hbm import Array, Memory


class Forward(NamedTuple):
    """O, the log-sum-exp L, and how many tiles the kernel visited."""

    o: Array
    lse: Array
    visited: int


@dataclass(frozen=True)
class OneHead:
    """One head of one batch entry, as `reference.layout.Problem` describes problems."""

    len_q: int
    len_k: int
    d: int
    d_v: int
    accumulator: np.dtype[Any]
    scale: float
    dropout: float
    seed: int
    lead: tuple[int, ...] = ()
    heads: int = 1
    heads_kv: int = 1
    start_q: int = 0
    start_k: int = 0
    origin_q: int = 0
    origin_k: int = 0
    origin_b_h: int = 0
    heads_of_entry: int = 1
    packed: bool = False


def _program(constant: int, per_tile: list[list[int]], per_key: list[list[int]]) -> Program:
    """Return the program of these instructions, whose result is the last one's."""
    code = np.array(per_tile + per_key, np.int64)
    none = np.empty(0, np.int64)
    return Program(
        code=code,
        once_per_tile=len(per_tile),
        result=int(code[-1, 2]),
        int_registers=len(code),
        float_registers=0,
        operands=none,
        ints=np.array([constant], np.int64),
        floats=np.empty(0, np.float64),
        tables=none.reshape(0, TABLE_WORDS),
    )


def causal_programs(offset: int) -> Programs:
    """Write "key j <= query i + offset", for pairs and for whole tiles, as the kernel reads it."""

    def symbol(name: str, target: int) -> list[int]:
        return [Op.SYMBOL, 0, target, SYMBOLS.index(name), 0, 0]

    pairs = _program(
        offset,
        [
            [Op.I, 1, 0, 0, 0, 0],
            [Op.CONSTANT_INT, 0, 1, 0, 0, 0],
            [Op.SPREAD_INT, 1, 2, 1, 0, 0],
            [Op.ADD_INT, 1, 3, 0, 2, 0],  # i + offset
        ],
        [
            symbol("j", 4),
            [Op.SPREAD_INT, 1, 5, 4, 0, 0],
            [Op.LESS_EQUAL_INT, 1, 6, 5, 3, 0],
        ],
    )
    tiles = _program(
        offset,
        [
            [Op.CONSTANT_INT, 0, 0, 0, 0, 0],
            symbol("i_low", 1),
            symbol("i_high", 2),
            symbol("j_low", 3),
            symbol("j_high", 4),
            [Op.ADD_INT, 0, 5, 1, 0, 0],
            [Op.ADD_INT, 0, 6, 2, 0, 0],
            [Op.LESS_EQUAL_INT, 0, 7, 3, 6, 0],  # some pair: j_low <= i_high + offset
            [Op.LESS_EQUAL_INT, 0, 8, 4, 5, 0],  # every pair: j_high <= i_low + offset
            [Op.ADD_INT, 0, 9, 7, 8, 0],  # EMPTY, PARTIAL or FULL
        ],
        [],
    )
    return Programs(score=NO_PROGRAM, slope=NO_PROGRAM, mask=pairs, tile=tiles)


def kernel(
    q: Array, k: Array, v: Array, scale: float, offset: int | None, drop: Dropout, tiles: Any
) -> Forward:
    """Run `reference/cpu/forward.py` on one head."""
    if min(tiles) < 1:
        raise ValueError(f"a block has at least one row, not {min(tiles)}")
    problem = OneHead(
        len(q), len(k), q.shape[1], v.shape[1], q.dtype, scale, drop.p, drop.seed or 0
    )
    empty = NO_PROGRAM
    none = Programs(empty, empty, empty, empty)
    programs = none if offset is None else causal_programs(offset)
    out, lse = np.empty((1, len(q), v.shape[1]), q.dtype), np.empty((1, len(q)), q.dtype)
    call = run_kernel(problem, programs, q[None], k[None], v[None], None, out, lse, *tiles)
    return Forward(out[0], lse[0], call.visited)


def walk(
    hbm: Memory,
    made: Forward,
    block_q: int,
    tiles_of: Callable[[slice], list[slice]],
    store: Callable[[Array, Array, slice], None],
) -> None:
    """Move what the kernel's tiles move, and compute nothing; `store` takes O_i, L_i, rows."""
    tiles = 0
    d_v = made.o.shape[1]
    for rows in blocks(len(made.o), block_q):
        n = size_of(rows)
        # 1 load q
        hbm.load("q", rows)
        hbm.reserve("acc", n * d_v)
        for name in ("m", "l", "m_new"):
            hbm.reserve(name, n)
        for cols in tiles_of(rows):
            tiles += 1
            # 2 scores
            hbm.load("k", cols)
            hbm.reserve("s", n * size_of(cols))
            # 3 score mod
            # 4 mask
            # 5 row max
            # 6 rescale
            # 7 accumulate p v
            hbm.load("v", cols)
        # 8 normalise
        # 9 store lse
        store(made.o[rows], made.lse[rows], rows)
        hbm.release()
    if tiles != made.visited:
        raise RuntimeError(f"the kernel visited {made.visited} tiles, and {tiles} were counted")


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    seed: int | None = None,
    block_q: int = 64,
    block_kv: int = 64,
    hbm: Memory | None = None,
) -> Forward:
    """FlashAttention-2 of one head; with `causal`, tiles with nothing to see are skipped."""
    hbm = hbm or Memory()
    offset, drop = mask_of(q, k, v, causal, None).offset, dropout_of(dropout, seed)
    made = kernel(q, k, v, float(default_scale(q, scale)), offset, drop, (block_q, block_kv))
    hbm.place(q=q, k=k, v=v)
    hbm.make("o", made.o.shape, q.dtype)
    hbm.make("lse", made.lse.shape, q.dtype)

    def store(o_i: Array, lse_i: Array, rows: slice) -> None:
        hbm.store("o", o_i, rows)
        hbm.store("lse", lse_i, rows)

    walk(hbm, made, block_q, lambda rows: seen(rows, len(k), block_kv, offset), store)
    return Forward(hbm.result("o"), hbm.result("lse"), made.visited)
