"""Integers that 32 bits hold, and distances as floats."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import by_numpy, expressions, problems, tiles
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cupyflash import lookup
from cupyflash.expr import (
    absolute,
    clip,
    floor,
    len_k,
    len_q,
    maximum,
    minimum,
    where,
)
from cupyflash.expr.bind import bind
from cupyflash.expr.distance import with_distances
from cupyflash.expr.evaluate import evaluate
from cupyflash.expr.functions import POSITIONS, SCORE
from cupyflash.expr.nodes import as_expr, convert, walk
from cupyflash.expr.width import LIMIT, narrow, spans
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes

B, H, I, J = POSITIONS
SIZES = Sizes((2,), 2, 40, 50)
BYTES, WORDS = (lookup(np.arange(50, dtype=kind)) for kind in (np.int8, np.int32))
LONG = lookup(np.arange(50))


@pytest.mark.parametrize(
    ("root", "span"),
    [
        (I, (0, LIMIT)),
        (as_expr(LIMIT), (-LIMIT, LIMIT)),
        (as_expr(-3), (-LIMIT, LIMIT)),
        (as_expr(LIMIT + 1), None),
        (I - J, (-LIMIT, LIMIT)),
        (I + len_k - len_q - J, (-2 * LIMIT, 2 * LIMIT)),
        (-(I + J), (-2 * LIMIT, 0)),
        (absolute(I - J - 7), (0, 2 * LIMIT)),
        (absolute(I + J), (0, 2 * LIMIT)),
        (I * J, None),
        (BYTES[J] * BYTES[I], (-128 * 127, 128 * 128)),
        (WORDS[J], (-(2**31), 2**31 - 1)),
        (WORDS[J] - 1, None),
        (LONG[J], None),
        (floor(I * 0.5), None),
        (minimum(I, 3), (-LIMIT, LIMIT)),
        (maximum(I, BYTES[J]), (0, LIMIT)),
        (where(I > J, BYTES[J], I), (-128, LIMIT)),
        (where(I > J, LONG[J], I), None),
        (J // 7, (-LIMIT, LIMIT)),
        (BYTES[J] % BYTES[I], (-128, 128)),
        (convert(I > J, "int"), (0, 1)),
        (J >> 7, (0, LIMIT)),
        ((I - J) >> J, (-LIMIT, LIMIT)),
        (J << 1, None),
        (LONG[J] >> 1, None),
        (clip(LONG[J], 0, 3) + I, None),
    ],
    ids=str,
)
def test_spans(root, span):
    assert spans(root)[root] == span
    assert (root in narrow(root)) == (span is not None)


def test_of_what_is_not_narrow_the_parts_may_be():
    root = bind(as_expr((LONG[J] > I) & (I * J > 3)), flat_sizes(SIZES))
    names = {str(node) for node in narrow(root)}
    assert {"i", "j", "3"} <= names
    assert not any("*" in name or "lookup" in name for name in names)


@given(data=st.data())
@settings(suppress_health_check=list(HealthCheck))
def test_no_integer_leaves_its_span(data):
    sizes = data.draw(problems())
    root = data.draw(expressions("int", 3, False, False))
    try:
        bound = bind(root, flat_sizes(sizes))
    except ValueError:
        assume(False)
    where_ = data.draw(tiles(sizes))
    for node, span in spans(bound).items():
        if span is None or node.type != "int" or node.op in ("constant", "symbol"):
            continue
        found = by_numpy(node, sizes, where_)
        assert span[0] <= found.min(), node
        assert found.max() <= span[1], node


LINES = {
    "its own": (I, "distance"),
    "alibi": (absolute(I + len_k - len_q - J), "absolute"),
    "backwards": (-(J - I) + 3, "distance"),
    "key only": (5 - J, "distance"),
    "twice": (I + I - J, "to_float"),
    "neither": (len_k - len_q, "distance is not worth it"),
    "product": (I * 2, "to_float"),
    "looked up": (LONG[J] - I, "to_float"),
    "of heads": (BYTES[H] + I - J, "distance"),
}


@pytest.mark.parametrize("name", LINES)
def test_distances(name):
    integer, op = LINES[name]
    root = bind(SCORE * 0.5 + convert(integer, "float"), flat_sizes(SIZES))
    made = with_distances(root)
    found = {node.op for node in walk(made)}
    assert ("distance" in found) == (op in ("distance", "absolute"))
    assert ("absolute" in found) == (op == "absolute")
    for node in walk(made):
        if node.op == "distance":
            i, j = node.value
            whole = node.args[0] + i * I + j * J
            sites = {"b": 1, "h": 1, "i": np.arange(40)[:, None], "j": np.arange(50)[None]}
            symbols = sites | {"len_q": 40, "len_k": 50, "start_q": 0, "start_k": 0}
            wanted = bind(as_expr(integer), flat_sizes(SIZES))
            ours, theirs = (
                evaluate(x, symbols, np.float32) for x in (bind(whole, flat_sizes(SIZES)), wanted)
            )
            same = np.abs(ours) if op == "absolute" else ours
            np.testing.assert_array_equal(
                np.broadcast_to(same, (40, 50)), np.broadcast_to(theirs, (40, 50))
            )


def test_sums_that_floats_do_not_hold_stay_integers():
    far = I - J + sum((len_k for _ in range(8)), as_expr(0))
    root = bind(SCORE + convert(far, "float"), flat_sizes(SIZES))
    assert "distance" not in {node.op for node in walk(with_distances(root))}
