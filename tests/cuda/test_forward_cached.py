"""Many queries over a cache of keys and values, by the forward kernels on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
from caches import hidden, in_pages, results
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE, Fault, randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.gpu.kernels import sm90
from cupyflash.problem import cached
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, forward_bound, rho

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
SM80, SM90 = Blocks(), Blocks(hopper=True)
KERNELS = {"sm80": (F16, SM80), "sm80-f64": (F64, SM80), "sm90": (BF16, SM90)}
BOTH_KERNELS = [KERNELS["sm80"], KERNELS["sm90"]]
BOTH = pytest.mark.parametrize(("dtype", "blocks"), BOTH_KERNELS, ids=["sm80", "sm90"])


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Let the kernel for long sequences serve those that the emulator has time for."""
    monkeypatch.setattr(sm90, "_slower", lambda *_: None)


def draw(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(q, k, v, lengths, blocks, table=None, offsets_q=None, schedule=REVERSE, **options):
    """Return out, lse, and the kernels that ran."""
    call = cached.call(q, k, v, lengths, table, offsets_q, Options(**options))
    out, lse = results(call)
    names = []
    emulator = Emulator(blocks, schedule, runs=lambda special: names.append(special.kernel) or True)
    emulator.forward(call, out, lse)
    return out, lse, set(names) - {"decode_combine"}


def within_the_bound(q, k, v, lengths, out, lse, entry_options=lambda b: {}):
    for b, length in enumerate(lengths):
        own = q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length]
        precision = Precision.of(q.dtype, True)
        bound = forward_bound(*own, precision=precision, block_kv=16, **entry_options(b))
        assert rho(out[b : b + 1], *bound.out).value <= 1
        assert rho(lse[b : b + 1], *bound.lse).value <= 1


OPTIONS = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "softcap": {"score_mod": scores.softcap(2.0)},
    "not a range": {"mask": masks.mask(lambda b, h, i, j: (i + j + h) % 3 != 0)},
    "window and sink": {"mask": masks.window(40, 0), "sink": np.array([0.5, -1.0], np.float32)},
}


@pytest.mark.parametrize(("dtype", "blocks"), KERNELS.values(), ids=KERNELS)
@mostly_thorough("name", OPTIONS, quick=["causal"], why="other masks and scores, a build each")
@mostly_thorough("paged", [False, True], quick=[True], why="memory without pages is simpler")
def test_every_entry_is_attention_over_what_it_holds(dtype, blocks, name, paged):
    lengths, options = np.array([150, 77, 0]), OPTIONS[name]
    q, k, v = draw(dtype, (3, 2, 70, 24), (3, 1, 160, 24), (3, 1, 160, 64), seed=len(name))
    held_k, held_v = hidden(k, lengths), hidden(v, lengths)
    table = None
    if paged:
        pages, table = in_pages(np.concatenate([held_k, held_v], -1), 16, np.random.default_rng(1))
        held_k, held_v = (np.ascontiguousarray(x) for x in (pages[..., :24], pages[..., 24:]))
    out, lse, names = run(q, held_k, held_v, lengths, blocks, table, **options)
    assert names == {"forward_sm90" if blocks.hopper else "forward_sm80"}
    within_the_bound(q, k, v, lengths, out, lse, lambda b: options)


@mostly_thorough(
    ("dtype", "blocks"),
    BOTH_KERNELS,
    quick=BOTH_KERNELS[:1],
    why="what pages hold is quick in both kernels",
    ids=["sm80", "sm90"],
)
@mostly_thorough("page", [1, 8, 48, 64, 256], quick=[64], why="other sizes of pages")
def test_pages_change_no_bit(dtype, blocks, page):
    lengths, rng = np.array([300, 131]), np.random.default_rng(page)
    q, k, v = draw(dtype, (2, 2, 70, 64), (2, 1, 320, 64), (2, 1, 320, 64), seed=5)
    k, v = hidden(k, lengths), hidden(v, lengths)
    want = run(q, k, v, lengths, blocks, mask=masks.causal())
    paged, table = in_pages(np.concatenate([k, v], -1), page, rng)
    held = np.arange(table.shape[1]) < -(-lengths[:, None] // page)
    table = np.where(held, table, 2**31 - 1)  # what is not held may be anything
    split = [np.ascontiguousarray(x) for x in (paged[..., :64], paged[..., 64:])]
    got = run(q, *split, lengths, blocks, table, schedule=randomly(page), mask=masks.causal())
    if got[2] != want[2]:  # small pages go to the older kernel, whose tiles are others
        assert blocks.hopper
        assert page < 8
        want = run(q, k, v, lengths, SM80, mask=masks.causal())
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@mostly_thorough(
    ("dtype", "blocks"),
    BOTH_KERNELS,
    quick=BOTH_KERNELS[:1],
    why="the entries are dealt out alike; several builds each",
    ids=["sm80", "sm90"],
)
@mostly_thorough("paged", [False, True], quick=[True], why="memory without pages is simpler")
def test_each_entry_has_the_kernel_for_its_own_queries(dtype, blocks, paged, monkeypatch):
    """Packed queries of different number: no bit depends on what else is in the batch."""
    monkeypatch.setattr(cached, "CHECKS_ALL", False)
    counts, lengths = [3, 0, 80, 1, 32, 33], np.array([200, 300, 170, 5, 40, 40])
    offsets = np.cumsum([0, *counts])
    q, k, v = draw(dtype, (2, offsets[-1], 16), (6, 1, 320, 16), (6, 1, 320, 64), seed=10)
    cache, table = (k, v), None
    if paged:
        pages, table = in_pages(np.concatenate(cache, -1), 16, np.random.default_rng(2))
        cache = [np.ascontiguousarray(x) for x in (pages[..., :16], pages[..., 16:])]
    out, lse, names = run(q, *cache, lengths, blocks, table, offsets, mask=masks.causal())
    assert len(names) == 2
    for b, (first, last) in enumerate(itertools.pairwise(offsets)):
        if first == last:
            continue
        own = (k[b : b + 1], v[b : b + 1]) if table is None else cache
        own_table = None if table is None else table[b : b + 1]
        alone = np.array([0, last - first])
        call = q[:, first:last], *own, lengths[b : b + 1], blocks, own_table, alone
        want = run(*call, mask=masks.causal())
        assert same_bits(out[:, first:last], want[0])
        assert same_bits(lse[:, first:last], want[1])
        assert len(want[2]) == 1


@BOTH
def test_what_is_not_finite_reaches_only_those_who_see_it(dtype, blocks):
    q, k, v = draw(dtype, (1, 2, 70, 64), (1, 1, 300, 64), (1, 1, 300, 64), seed=3)
    v[0, 0, 250, 7] = np.inf
    out, _, _ = run(q, k, v, 280, blocks, mask=masks.causal())
    sees = np.arange(70) + 210 >= 250
    assert np.isfinite(out[0, :, ~sees]).all()
    assert not np.isfinite(out[0, :, sees, 7]).any()


@pytest.mark.thorough(
    "two builds for one barrier; the others have a test in test_forward_sm90_masks"
)
@pytest.mark.parametrize("is_there", [True, False])
def test_lanes_that_load_pages_meet_before_a_work_tile_is_left(is_there):
    """All of them read it. A block has several only where all entries have the same length."""

    def read(name):
        text = build.read(name)
        if name != "sm90/forward_producer.cuh" or is_there:
            return text
        assert text.count("if constexpr (PAGED) __syncwarp();") == 1
        return text.replace("if constexpr (PAGED) __syncwarp();", "")

    q, k, v = draw(BF16, (6, 2, 70, 64), (6, 1, 200, 64), (6, 1, 200, 64), seed=18)
    pages, table = in_pages(np.concatenate([k, v], -1), 16, np.random.default_rng(1))
    split = [np.ascontiguousarray(x) for x in (pages[..., :64], pages[..., 64:])]
    call = cached.call(q, *split, 200, table, None, Options(mask=masks.causal()))
    out, lse = results(call)
    blocks = dataclasses.replace(SM90, multiprocessors=1)
    with contextlib.nullcontext() if is_there else pytest.raises(Fault, match="with no barrier"):
        Emulator(blocks, read=read).forward(call, out, lse)


def test_types_without_such_a_kernel_have_decode():
    q, k, v = draw(F32, (1, 2, 70, 16), (1, 1, 100, 16), (1, 1, 100, 16))
    assert run(q, k, v, 90, SM80)[2] == {"decode_simt"}
