"""Kernels that take turns over the same items: their order, their scratch, and errors."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from placement import same_bits

import cupyflash
from cupyflash.reference.cpu import backward_call, calls, chain, checksum, team, threads
from cupyflash.reference.cpu.jit import prepare

ITEMS = 23


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "2")


def sums_of(array: np.ndarray, found: np.ndarray) -> calls.Bound:
    """Return a kernel whose item n sums the n-th row of an array of words."""
    prepare([(checksum.checksum, checksum.NUMBER)])
    rows = array.ctypes.data + np.arange(len(array)) * array.strides[0]
    pieces = np.zeros((len(array), 5), np.int64)
    pieces[:, 0], pieces[:, 1], pieces[:, 3] = rows, 1, array.strides[0]
    return calls.Bound(checksum.checksum, checksum.NUMBER, pieces, found)


@pytest.mark.parametrize("every", [1, 4, ITEMS, 100])
@pytest.mark.parametrize("by_team", [False, True])
def test_later_kernels_read_what_earlier_ones_wrote(every, by_team):
    """The second one sums what the first one found."""
    if by_team and not team.IS_POSSIBLE:
        pytest.skip("this system has no team")
    words = np.random.default_rng(0).integers(0, 2**62, (ITEMS, 40))
    first, second, third = np.zeros((3, ITEMS), np.int64)
    one = sums_of(words, first)
    two, three = (sums_of(a[:, None], b) for a, b in ((first, second), (second, third)))
    made = chain.Chain(one, two, three, every=every)
    wanted = [checksum.checksums([row])[0] for row in words]
    twice = [checksum.checksums([np.array([x])])[0] for x in wanted]
    for n in range(3):
        first[:] = second[:] = third[:] = n
        if by_team:
            assert team.compute(made, ITEMS, 2, 5)
        else:
            threads.parallel(made, ITEMS)
        assert first.tolist() == wanted
        assert second.tolist() == twice
        assert third.tolist() == [checksum.checksums([np.array([x])])[0] for x in twice]


@pytest.mark.skipif(not team.IS_POSSIBLE, reason="this system has no team")
def test_a_kernel_that_fails_ends_its_chain(monkeypatch):
    words, found = np.ones((ITEMS, 4), np.int64), np.zeros((2, ITEMS), np.int64)
    first, second = (sums_of(words, x) for x in found)
    failing = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(lambda _: 5)
    of_blocks = calls.Bound.blocks

    def blocks(self, count):
        caller, *rest = of_blocks(self, count)
        is_first = self is first
        return (ctypes.cast(failing, ctypes.c_void_p).value if is_first else caller), *rest

    monkeypatch.setattr(calls.Bound, "blocks", blocks)
    made = chain.Chain(first, second, every=2)
    with pytest.raises(RuntimeError, match="kernels checksum, checksum stopped with status 5"):
        team.compute(made, ITEMS, 2, ITEMS)
    assert not found.any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("rows", [5, 49, 300])
def test_bits_do_not_depend_on_turns(dtype, rows, monkeypatch):
    """Not on how many items a turn has, nor on whether q, k, v and out are summed beside."""
    rng = np.random.default_rng(rows)
    q, k, v, do = (
        rng.standard_normal((3, heads, rows, 16), np.float32).astype(dtype)
        for heads in (4, 2, 2, 4)
    )
    for cached in (1, 1 << 14, 1 << 30):
        options = {"scale": 0.3 + cached / 2**40}  # which is planned anew
        monkeypatch.setattr(backward_call, "CACHED", cached)
        vjps = [cupyflash.attention_vjp(q, k, v, check=x, **options)[-1] for x in (True, False)]
        made = [vjp(do) for vjp in vjps for _ in range(3)]
        monkeypatch.undo()
        wanted = cupyflash.attention_vjp(q, k, v, check=False, **options)[-1](do)
        for each in made:
            assert all(map(same_bits, each[:3], wanted[:3]))
