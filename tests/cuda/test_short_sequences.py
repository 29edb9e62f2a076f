"""Packed sequences of which only the device knows lengths, and of which many are short."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_specialisations import BFLOAT16, target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, randomly
from halves import mostly_thorough
from unread_lengths import unread

from cupyflash import masks
from cupyflash.gpu import route
from cupyflash.gpu.kernels import short_packed
from cupyflash.problem import validate
from cupyflash.problem.call import Call, Gradients
from cupyflash.problem.options import Options

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF = np.dtype(np.float16)
BLOCKS = Blocks(32, 64, 64, hopper=True)
# Short sequences, long ones, and such as lack queries or keys.
QUERIES = [64, 1, 0, 33, 65, 64, 5, 3, 200, 2, 70, 0, 40]
KEYS = [64, 1, 5, 0, 64, 65, 7, 130, 150, 2, 0, 90, 64]


def call_of(
    queries: Any, keys: Any, sizes: tuple[int, int] = (128, 128), dtype: Any = BFLOAT16,
    heads: tuple[int, int] = (2, 2), **options: Any,
) -> tuple[Call, np.ndarray[Any, Any]]:  # fmt: skip
    """Return a call of packed sequences, and do."""
    rng = np.random.default_rng(0)

    def draw(heads: int, rows: Any, columns: int) -> Any:
        return rng.standard_normal((heads, int(np.sum(rows)), columns)).astype(dtype)

    (h, h_kv), (d, d_v) = heads, sizes
    q, do = draw(h, queries, d), draw(h, queries, d_v)
    k, v = draw(h_kv, keys, d), draw(h_kv, keys, d_v)
    ends = (np.r_[0, np.cumsum(x)] for x in (queries, keys))
    return validate.varlen_call(q, k, v, *ends, True, Options(**options)), do


def forward(call: Call, emulator: Emulator) -> tuple[Any, Any]:
    """Return the output and lse, which were written to memory that held NaN."""
    out = np.full((*call.q.shape[:-1], call.v.shape[-1]), np.nan, call.q.dtype)
    lse = np.full(out.shape[:-1], np.nan, np.float32)
    emulator.forward(call, out, lse)
    return out, lse


def backward(call: Call, do: Any, results: Any, emulator: Emulator, **how: Any) -> Gradients:
    """Return the gradients, likewise."""
    made = Gradients(*(np.full_like(x, np.nan) for x in (call.q, call.k, call.v)), None, None)
    emulator.backward(call, do, *results, None, made, deterministic=False, **how)
    return made


# -- where ----------------------------------------------------------------------------------------


def steps(call: Call, is_backward: bool = False, arch: str = "sm_90") -> list[str]:
    """Return the parts of a route, and for which sequences they are."""
    of = route.of_gradients if is_backward else route.of
    made = of(call, target_of(arch)).steps
    of_sequences = [
        "short" * x.launch.special.only_short + "long" * x.launch.special.only_long for x in made
    ]
    return [f"{x.part} {y}".strip() for x, y in zip(made, of_sequences, strict=True)]


def test_launches_of_short_sequences():
    call, _ = call_of(QUERIES, KEYS)
    assert steps(call) == ["forward"]
    assert steps(unread(call)) == ["long", "forward short", "forward long"]
    assert steps(unread(call), True) == [
        "long", "delta long", "dkdv short", "dkdv long", "dq_rows long",
    ]  # fmt: skip
    assert steps(unread(call), arch="sm_80") == ["forward"]
    assert steps(unread(call), True, "sm_80") == ["delta", "dkdv", "dq_rows"]
    # As the caller says how long they are at most.
    assert steps(unread(call, 64)) == steps(unread(call, 80)) == ["forward"]


def test_sequences_that_are_long_on_average():
    for length, made in ((80, 3), (81, 1)):
        call, _ = call_of([length] * 4, [length] * 4, (64, 64))
        assert len(steps(unread(call))) == made
    for keys in ([100] * 4, [0, 0, 0, 400]):  # the larger mean of queries and of keys decides
        call, _ = call_of([64] * 4, keys, (64, 64))
        assert steps(unread(call)) == ["forward"]


def test_heads_beyond_those_of_small_tiles():
    call, _ = call_of([64] * 4, [64] * 4, (136, 64))
    assert steps(unread(call), True) == ["delta", "dkdv", "dq_rows"]


def test_the_list_is_part_of_the_workspace():
    call, _ = call_of(QUERIES, KEYS)
    made = route.of_gradients(unread(call), target_of("sm_90"))
    assert made.recipe.scratch["workspace"].nbytes == 4 * (6 + 3 * len(KEYS))


# -- results --------------------------------------------------------------------------------------

CASES = {
    "causal": {"mask": masks.causal()},
    "plain": {},
    "window": {"mask": masks.window(9, 4)},
}


@emulated
@mostly_thorough(
    ("case", "sizes", "dtype", "heads"),
    [
        (case, sizes, dtype, heads)
        for case in CASES
        for sizes in ((128, 128), (40, 24))
        for dtype in (BFLOAT16, HALF)
        for heads in ((2, 2), (2, 1))
    ],
    quick=[("causal", (128, 128), BFLOAT16, (2, 1)), ("plain", (40, 24), HALF, (2, 2))],
    why="masks, types and heads that other launches share",
)
def test_bits_are_those_of_known_lengths(case, sizes, dtype, heads):
    call, do = call_of(QUERIES, KEYS, sizes, dtype, heads, **CASES[case])
    known, other = Emulator(BLOCKS, FORWARD), Emulator(BLOCKS, randomly(2))
    results = forward(call, known)
    for made, usual in zip(forward(unread(call), other), results, strict=True):
        assert np.array_equal(made, usual)
    usual = backward(call, do, results, known)
    made = backward(unread(call), do, results, other)
    few = np.repeat(np.array(KEYS) <= 128, QUERIES)  # others have sums of dq in any order
    assert np.array_equal(made.dq[:, few], usual.dq[:, few])
    np.testing.assert_allclose(
        made.dq.astype(np.float32), usual.dq.astype(np.float32), rtol=0.02, atol=0.02
    )
    assert np.array_equal(made.dk, usual.dk)
    assert np.array_equal(made.dv, usual.dv)


def take_turns(monkeypatch: Any, blocks: int) -> None:
    """Have so many blocks of an SM share what is listed."""
    turns = {part: blocks if each else 0 for part, each in short_packed.OF_LISTED.items()}
    monkeypatch.setattr(short_packed, "OF_LISTED", turns)


@emulated
@pytest.mark.parametrize("blocks", [1, 3, 100])
def test_blocks_take_turns(blocks, monkeypatch):
    lengths = [130, 2, 300, 1, 0, 70] + [3] * 12
    call, do = call_of(lengths, lengths, (40, 24), HALF, mask=masks.causal())
    known = Emulator(BLOCKS, FORWARD)
    results = forward(call, known)
    usual = backward(call, do, results, known)
    take_turns(monkeypatch, blocks)
    emulator = Emulator(BLOCKS, randomly(blocks))
    for made, wanted in zip(forward(unread(call), emulator), results, strict=True):
        assert np.array_equal(made, wanted)
    made = backward(unread(call), do, results, emulator)
    assert np.isfinite(made.dq.astype(np.float32)).all()
    assert np.array_equal(made.dk, usual.dk)
    assert np.array_equal(made.dv, usual.dv)


@emulated
@pytest.mark.parametrize("blocks", [1, 2])
def test_blocks_whose_first_turn_has_no_keys(blocks, monkeypatch):
    queries, keys = [70, 65, 90, 70] + [1] * 8, [0, 0, 0, 130] + [1] * 8
    call, do = call_of(queries, keys, (40, 24), HALF, mask=masks.causal())
    known = Emulator(BLOCKS, FORWARD)
    results = forward(call, known)
    usual = backward(call, do, results, known)
    take_turns(monkeypatch, blocks)
    made = backward(unread(call), do, results, Emulator(BLOCKS, randomly(blocks)))
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(made, name), getattr(usual, name), rtol=0.01, atol=1e-3)
    assert np.array_equal(made.dk, usual.dk)


@emulated
@pytest.mark.parametrize("blocks", [1, 3])
def test_ds_of_warps_that_outgrows_its_scale(blocks, monkeypatch):
    # In float16 a consumer waits for its own warps, while other threads wait for the next turn.
    lengths = [130, 2, 200] + [3] * 5
    call, do = call_of(lengths, lengths, (128, 128), HALF, mask=masks.causal())
    rows = np.arange(do.shape[-2])[:, None]
    do = (do / 1024 * np.exp2(5.0 * (rows // 64 % 4))).astype(HALF)
    v = (call.v / 128 * np.exp2(3.0 * (rows // 16 % 5))).astype(HALF)
    call = dataclasses.replace(call, v=v)
    known = Emulator(BLOCKS, FORWARD)
    results = forward(call, known)
    usual = backward(call, do, results, known)
    take_turns(monkeypatch, blocks)
    made = backward(unread(call), do, results, Emulator(BLOCKS, randomly(blocks)))
    assert np.array_equal(made.dk, usual.dk)
    assert np.array_equal(made.dv, usual.dv)
    np.testing.assert_allclose(
        made.dq.astype(np.float32), usual.dq.astype(np.float32), rtol=0.01, atol=0.01
    )


@emulated
@pytest.mark.parametrize("length", [1, 64])
def test_nothing_is_listed(length):
    call, do = call_of([length] * 5, [length] * 5, (40, 24), HALF, mask=masks.causal())
    emulator = Emulator(BLOCKS, randomly(1))
    results = forward(call, emulator)
    usual = backward(call, do, results, emulator)
    for made, wanted in zip(forward(unread(call), emulator), results, strict=True):
        assert np.array_equal(made, wanted)
    made = backward(unread(call), do, results, emulator)
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(made, name), getattr(usual, name))


def test_short_means_the_same_everywhere():
    path = Path(__file__).parents[2] / "kernels_cu" / "common" / "long_sequences.cuh"
    text = path.read_text()
    assert f"SHORT_ROWS = {short_packed.SHORT_ROWS};" in text
