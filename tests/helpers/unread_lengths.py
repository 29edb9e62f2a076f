"""Packed sequences whose lengths the device alone knows, of a call that knows them."""

from __future__ import annotations

import dataclasses

import numpy as np

from cupyflash.problem.call import Call


def unread(call: Call, longest: int = 0) -> Call:
    """Return a call of whose sequences nobody knows lengths, or the longest one alone."""
    rows = call.problem.rows
    most = {
        f"len_{x}": np.array([0, longest or y]) for x, y in zip("qk", _rows_of(call), strict=True)
    }
    starts = {f"start_{x}": np.array([0, 0]) for x in "qk"}
    rows = dataclasses.replace(rows, unread=True, bounded=longest > 0, **most, **starts)
    return dataclasses.replace(call, problem=dataclasses.replace(call.problem, rows=rows))


def _rows_of(call: Call) -> tuple[int, int]:
    return call.q.shape[-2], call.k.shape[-2]
