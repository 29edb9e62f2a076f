"""Short ones of packed sequences whose lengths the device alone knows: their tiles on Hopper.

Kernels for sequences of any length have tiles that are mostly empty where all are short. So short
ones have launches of their own, and others are listed for the usual kernels. No bit depends on it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...problem.call import Problem
from .sm90 import DKDV, FORWARD, WIDTHS, choose_packed, register_class
from .sm90_dkdv import FEW_KEYS_HEAD, fit_few_keys
from .spec import Grid, KernelSpec, Request, Tiles

# Queries, and keys, of a short sequence: the twin of common/long_sequences.cuh. If the mean of all
# lengths is at most ON_AVERAGE, many are short.
SHORT_ROWS, ON_AVERAGE = 64, 80
# Parts of which kernels are for listed sequences, and their blocks of an SM if these take turns.
OF_LISTED = {"forward": 1, "delta": 0, "dkdv": 1, "dq_rows": 8}


def are_short(request: Request) -> bool:
    """Whether short sequences of a call are to have launches of their own."""
    call, problem = request.call, request.problem
    if call is None or call.bias is not None or request.blocks is not None:
        return False
    if not problem.rows.adjoin or not problem.rows.unread or problem.whole is not None:
        return False
    if request.has_cache or problem.rows.bounded:
        return False  # the caller says how long they are: all have such tiles
    if int(np.max(problem.len_k, initial=0)) <= SHORT_ROWS:
        return False  # no sequence has more keys than there are
    return bool(max(call.q.shape[-2], call.k.shape[-2]) <= ON_AVERAGE * problem.batch)


def tiles_of_short(spec: KernelSpec, request: Request) -> Tiles | None:
    """Return the tiles of a kernel for short sequences, if they are to have a launch of their own.

    The request has arrays.
    """
    call, problem = request.call, request.problem
    largest = max(problem.d, problem.d_v)
    if call is None or not are_short(request):
        return None
    if spec is DKDV:
        return fit_few_keys(problem.d, problem.d_v) if largest <= FEW_KEYS_HEAD else None
    if spec is not FORWARD or largest > max(WIDTHS):
        return None
    tiles = choose_packed(_short(problem), register_class(call))
    return tiles if tiles.one_tile else None


def in_turns(part: str, grid: Grid, resident: int) -> Grid:
    """Return the grid of a part that is for listed sequences.

    `resident` is how many blocks of the part a device has at a time.
    """
    most = OF_LISTED[part] * resident
    return grid._replace(size=min(grid.size, most)) if most else grid


def _short(problem: Problem) -> Problem:
    """Return a problem of sequences that are short."""
    lengths = np.array([SHORT_ROWS])
    return replace(problem, rows=problem.rows.sized(lengths, lengths).known())
