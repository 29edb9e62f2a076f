"""Trees that keep their value at other positions, compared with their values there."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import lookup, masks, scores
from cupyflash.expr.functions import POSITIONS, maximum, where
from cupyflash.expr.shift import unchanged

_B, H, I, J = POSITIONS
SAME = {"i": 40, "j": 40, "len_q": 70, "len_k": 70}
END = {"i": 60, "j": 20, "len_q": 80, "len_k": 40}  # as far from the last key


@pytest.mark.parametrize("moved", [SAME, END, {}], ids=["alike", "from the end", "not"])
@pytest.mark.parametrize(
    "mask",
    [masks.causal(), masks.window(5, 3), masks.causal() & ~masks.window(9, 0)],
    ids=["causal", "window", "joined"],
)
def test_masks_of_distances_are_the_same_there(mask, moved):
    assert unchanged(mask.expr, moved)


@pytest.mark.parametrize(
    ("mask", "moved"),
    [
        (masks.causal(), {"i": 40, "j": 40, "len_q": 70}),
        (masks.causal(offset=0), END),
        (masks.prefix(8) | masks.causal(), SAME),
        (masks.mask(lambda b, h, i, j: (i + j) % 2 == 0), SAME),
        (masks.mask(lambda b, h, i, j: i * j < 9), SAME),
        (masks.segments(np.arange(90)), {}),
    ],
    ids=["lengths", "from the beginning", "prefix", "remainder", "product", "an element each"],
)
def test_other_masks_are_not(mask, moved):
    assert not unchanged(mask.expr, moved)


def test_integers_of_distances_may_be_compared_chosen_and_read():
    far = maximum(I - J, J - I)
    assert unchanged(lookup(np.arange(99))[far] + H, SAME)
    assert unchanged(where(I < J, far, -far) * far, SAME)
    assert unchanged((maximum(I, J) <= J), SAME)
    assert not unchanged(maximum(I, 3) <= J, SAME)
    assert not unchanged(where(I < J, I, J), SAME)  # it moves with them


def test_scores_of_distances_are_the_same_there_if_no_position_is_a_float():
    slopes = np.ones(4, np.float32)
    assert unchanged(scores.alibi(slopes).expr, SAME)
    assert unchanged(scores.alibi(slopes).expr, END)
    assert unchanged(scores.softcap(9.0).expr, {"i": 1})
    by_floats = scores.score(lambda s, b, h, i, j: s + 0.5 * i - 0.5 * j)
    assert not unchanged(by_floats.expr, SAME)
