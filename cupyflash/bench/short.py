"""Few heads and short rows, where NumPy's lines may be faster: the suite `short`."""

from __future__ import annotations

import functools
from typing import Any

from .. import api
from .host import drawn, kept, standard, standard_gradients
from .measure import Meter, Work
from .tasks import OURS, STANDARD, Maker, TaskSuite, Works, calls, repeated

HEADS, TOKENS, COLUMNS = (3, 12, 96), (8, 16, 32, 64, 128, 256), 64


def short(meter: Meter, dtype: str, heads: int, tokens: int, backward: bool) -> Works:
    """Compute attention, or its gradients where the forward's results are there."""
    xp, (q, k, v, do) = meter.xp, drawn(meter, dtype, 1, heads, tokens, COLUMNS, number=4)

    def ours() -> Work:
        if not backward:
            return lambda: api.attention(q, k, v)
        o, lse = api.attention(q, k, v, return_lse=True)
        return lambda: api.attention_backward(do, q, k, v, o, lse)[:3]

    def theirs() -> Work:
        if not backward:
            return lambda: standard(xp, q, k, v)
        o, p = kept(xp, q, k, v)
        return lambda: standard_gradients(q, k, v, do, o, p)

    def arrays(found: Any) -> list[Any]:
        return list(found) if isinstance(found, tuple) else [found]

    count = calls(meter, (2.5 if backward else 1) * 4.0 * heads * tokens**2 * COLUMNS)
    works = {OURS: lambda: repeated(ours(), count), STANDARD: lambda: repeated(theirs(), count)}
    return Works(works, arrays, count)


MAKERS: dict[str, Maker] = {
    f"{heads} heads, {tokens} tokens, {'backward' if backward else 'forward'}": functools.partial(
        short, heads=heads, tokens=tokens, backward=backward
    )
    for backward in (False, True)
    for heads in HEADS
    for tokens in TOKENS
}
SUITE = TaskSuite(
    f"{HEADS[0]} to {HEADS[-1]} heads of {COLUMNS} and {TOKENS[0]} to {TOKENS[-1]} tokens, beside "
    "NumPy's lines",
    "short", MAKERS, "float32", {}, (OURS, STANDARD),
)  # fmt: skip
