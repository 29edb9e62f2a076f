"""What is made of the longest lengths that callers of packed functions name beside offsets."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import tensors

_MOST_KEYS = 128  # those of the widest tile whose result depends on no tile
_STEP = 16  # so that few numbers have launches of their own


def known(most_q: Any, most_k: Any) -> tuple[int, int] | None:
    """Return bounds of the queries and keys of a sequence, or None where no kernel is chosen by it.

    Where a sequence is longer, all results of the call are wrong, and a later call on the device
    raises the error.
    """
    if tensors.is_traced():
        return None
    if type(most_q) is not int or type(most_k) is not int:
        kinds = {type(most) for most in (most_q, most_k)}
        if not all(kind is int or issubclass(kind, np.integer) for kind in kinds):
            return None  # a tensor would have to be waited for
        most_q, most_k = int(most_q), int(most_k)
    if not (0 < most_k <= _MOST_KEYS and most_q > 0):
        return None
    if most_q > _MOST_KEYS:
        return 1 << (most_q - 1).bit_length(), _up(most_k)
    return _up(most_q), _up(most_k)


def _up(rows: int) -> int:
    return -(-rows // _STEP) * _STEP
