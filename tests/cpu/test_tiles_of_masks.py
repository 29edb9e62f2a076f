"""Tiles of the CPU by kind of mask: small ones where a program says which pairs are seen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from placement import same_bits

from cupyflash import attention, attention_backward, attention_varlen, masks, plan
from cupyflash.backends import cpu_tiles
from cupyflash.testing import Precision, forward_bound, rho

F32 = np.dtype(np.float32)
LENGTH = 300
IDS = np.arange(LENGTH) // 70
WHOLE = cpu_tiles.TILES[0][1]
PROGRAM, BLOCKS = (cpu_tiles.WITH_EDGES,) * 2, (cpu_tiles.OF_BLOCKS,) * 2
MASKS = {
    "causal": (masks.causal(), WHOLE),
    "window of a prefix": (masks.window(9, 0) & masks.prefix(40), WHOLE),
    "lengths": (masks.lengths(np.array([7])), WHOLE),
    "each pair": (masks.dense(np.ones((LENGTH, LENGTH), bool)), WHOLE),
    "dilated": (masks.dilated(3), WHOLE),
    "documents": (masks.segments(IDS), WHOLE),  # however they lie
    "mixed documents": (masks.segments(IDS % 2) & masks.causal(), WHOLE),
    "documents or prefix": (masks.segments(IDS) | masks.prefix(4), PROGRAM),
    "window or prefix": (masks.window(9, 0) | masks.prefix(4), PROGRAM),
    "blocks of 128": (masks.blocks(np.eye(3, dtype=bool), 128, 128), PROGRAM),
    "blocks of 100": (masks.blocks(np.eye(3, dtype=bool), 100, 100), BLOCKS),
    "blocks by positions": (masks.mask(lambda b, h, i, j: i // 20 >= j // 20), BLOCKS),
    "chosen": (masks.chosen(np.zeros((5, 3), int), 64) & masks.causal(), BLOCKS),
}


def drawn(*shape):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for _ in "qkv"]


@pytest.mark.parametrize("name", MASKS)
def test_a_plan_has_them(name):
    mask, tiles = MASKS[name]
    x = drawn(1, 2, LENGTH, 8)
    found = plan(*x, mask=mask)
    assert (found.block_q, found.block_kv) == tiles
    assert ("under a mask" in found.reason) == (tiles != WHOLE)
    wide = plan(*drawn(1, 2, LENGTH, 136), mask=mask)
    assert (wide.block_q, wide.block_kv) == cpu_tiles.TILES[1][1]
    assert "under a mask" not in wide.reason


@pytest.mark.parametrize("name", ["window or prefix", "blocks by positions"])
def test_results_are_within_bounds_and_those_of_sequences_alone(name):
    mask, (_, block_kv) = MASKS[name]
    x = drawn(2, LENGTH + 40, 8)
    offsets = np.array([0, LENGTH, LENGTH + 40])
    made, lse = attention_varlen(*x, offsets, offsets, mask=mask, return_lse=True)
    for a, b in itertools.pairwise(offsets):
        one = [np.ascontiguousarray(each[None, :, a:b]) for each in x]
        out, own = attention(*one, mask=mask, return_lse=True)
        assert same_bits(out[0], made[:, a:b])
        assert same_bits(own[0], lse[:, a:b])
        bound = forward_bound(*one, precision=Precision.of(F32), block_kv=block_kv, mask=mask)
        assert rho(out, *bound.out).value <= 1
        # All entries of a batch, and one of them, have the same bits.
        both = [np.concatenate([each, each]) for each in one]
        assert same_bits(attention(*both, mask=mask)[1], out[0])
        grads = attention_backward(out, *one, out, own, mask=mask)
        twice = [np.concatenate([each, each]) for each in (out, *one, out, own)]
        for each, of_two in zip(grads[:3], attention_backward(*twice, mask=mask)[:3], strict=True):
            assert same_bits(of_two[1], each[0])
