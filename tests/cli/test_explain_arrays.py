"""`explain` of arrays instead of shapes, and which axis of them is which."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentTypeError, masks


def test_arrays_are_as_good_as_their_shapes():
    q, k = np.zeros((2, 8, 300, 64), np.float32), np.zeros((2, 2, 40, 64), np.float32)
    options = {"mask": masks.causal(), "compile": False}
    made = cupyflash.explain(q, k, k, **options)
    assert (
        made.to_dict()
        == cupyflash.explain(q.shape, k.shape, dtype="float32", device="cpu", **options).to_dict()
    )
    assert cupyflash.explain(q, k, (2, 2, 40, 32), device="H200", **options).to_dict() == (
        cupyflash.explain(
            q.shape, k.shape, (2, 2, 40, 32), dtype="float32", device="H200", **options
        ).to_dict()
    )
    assert made.axes == (
        "q: batch 2, heads 8, queries 300, head size 64; "
        "k and v: batch 2, heads 2, keys 40, head size 64"
    )
    assert made.axes == cupyflash.plan(q, k, k, mask=masks.causal()).axes


def test_axes():
    x = np.zeros((8, 6, 4), np.float32)
    packed = cupyflash.plan(x, x, x[..., :2], offsets_q=[0, 1, 6], offsets_k=[0, 2, 6])
    assert packed.axes == (
        "q: heads 8, queries 6 in 2 sequences, head size 4; k: heads 8, keys 6 in 2 sequences, "
        "head size 4; v: heads 8, keys 6 in 2 sequences, head size 2"
    )
    assert cupyflash.plan(x[0], x[0], x[0]).axes == (
        "q: heads 1, queries 6, head size 4; k and v: heads 1, keys 6, head size 4"
    )
    made = cupyflash.explain((3, 2, 8, 6, 4), device="cpu", compile=False)
    assert made.axes.startswith("q: batch 3 x 2, heads 8, queries 6, head size")


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (((8, 64),), {"score": None}, "score: this function has no such argument; say score_mod="),
        (
            ((8, 64),),
            {"bias": None},
            "bias: this function has no .*; it takes q, k, v, dtype,",
        ),
        (
            ((8, 64),),
            {"weights": None},
            "weights: this function has no .*; it takes q, k, v, dtype",
        ),
        (
            ((8, 64), (8, 64), (8, 64), "causal"),
            {},
            "got 4 arguments by position; expected 3",
        ),
        (
            (np.ones((8, 64)), np.ones((8, 64), np.float32)),
            {},
            "got q float64, k float32; expected one dtype",
        ),
    ],
)
def test_what_it_does_not_take(shapes, options, words):
    with pytest.raises(ArgumentTypeError, match=words):
        cupyflash.explain(*shapes, **options)
