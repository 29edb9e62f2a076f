"""Results do not depend on the floating-point modes of the thread that calls."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_threads import equal, set_threads

import cupyflash
from cupyflash import attention, attention_vjp, streamed
from cupyflash.reference.cpu import amx, float_modes, threads
from cupyflash.testing.bound import Precision, backward_bound, forward_bound, rho

__all__ = ["set_threads"]  # a fixture

# What is changed in MXCSR and in FPCR.
MODES = {
    "x86": {"subnormal numbers are 0": 0x8040, "up": 0x4000, "towards 0": 0x6000},
    "arm": {"subnormal numbers are 0": 1 << 24, "up": 1 << 22, "towards 0": 3 << 22},
}
KIND = "arm" if platform.machine().lower() in ("aarch64", "arm64") else "x86"
HAS_MODES = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"),
    reason="modes are set on x86-64 and AArch64",
)


def modes() -> int:
    """The modes of this thread, without the flags that say what happened."""
    begin, end = float_modes._functions()
    word = ctypes.c_uint64()
    begin(ctypes.addressof(word))
    found = word.value
    end(ctypes.addressof(word))
    return found & ~0x3F if KIND == "x86" else found


@contextlib.contextmanager
def changed(bits: int) -> Iterator[None]:
    """Change the modes of this thread."""
    begin, end = float_modes._functions()
    word = ctypes.c_uint64()
    begin(ctypes.addressof(word))
    before = word.value
    word.value |= bits
    end(ctypes.addressof(word))
    try:
        yield
    finally:
        word.value = before
        end(ctypes.addressof(word))


def filled(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


SMALL = np.float32(3e-40)


def entries() -> dict[str, Callable[[], Any]]:
    """Every function that computes on the CPU, with numbers below the normal range."""
    q, k = filled(2, 4, 90, 16), filled(2, 2, 70, 16)
    v, do = filled(2, 2, 70, 16) * SMALL, filled(2, 4, 90, 16) * SMALL
    halves = [x.astype(np.float16) for x in (q, k, filled(2, 2, 70, 16) * np.float32(1e-6))]
    few, long_k, long_v = filled(2, 4, 1, 16), filled(2, 2, 700, 16), filled(2, 2, 700, 16) * SMALL
    (codes, scale), (v_codes, v_scale) = (cupyflash.quantize(x, "int8") for x in (k, v))
    new = filled(2, 2, 3, 16), filled(2, 2, 3, 16) * SMALL
    parts = [(filled(8, 90, 16) * SMALL, filled(8, 90)), (filled(8, 90, 16), filled(8, 90) - 90)]
    rotary = cupyflash.Rotary(*(filled(100, 8) for _ in range(2)))

    def backward() -> Any:
        out, lse, vjp = attention_vjp(q, k, v, return_lse=True)
        return out, lse, *vjp(do)[:3]

    def streamed_backward() -> Any:
        out, lse = streamed.attention(q, k, v, return_lse=True, chunk=40)
        return streamed.attention_backward(do, q, k, v, out, lse, chunk=40)[:3]

    def append() -> Any:
        cache = [x.copy() for x in (codes, v_codes)]
        scales = {"k_scale": scale.copy(), "v_scale": v_scale.copy()}
        cupyflash.append(*new, *cache, [9, 9], **scales)
        return *cache, *scales.values()

    return {
        "attention": lambda: [attention(q, k, v)],
        "float16": lambda: [attention(*halves)],
        "backward": backward,
        "cached": lambda: [cupyflash.attention_cached(few, long_k, long_v, 700)],
        "codes": lambda: [
            cupyflash.attention_cached(few, codes, v_codes, 70, k_scale=scale, v_scale=v_scale)
        ],
        "append": append,
        "combine": lambda: cupyflash.combine(parts),
        "quantize": lambda: cupyflash.quantize(v, "int8"),
        "hadamard": lambda: [cupyflash.hadamard(v, 3)],
        "rope": lambda: [cupyflash.rope(v, np.arange(70), rotary)],
        "streamed": lambda: [streamed.attention(q, k, v, chunk=40)],
        "streamed backward": streamed_backward,
    }


@HAS_MODES
@pytest.mark.parametrize("mode", MODES[KIND])
def test_bits_do_not_follow_the_modes_of_the_caller(set_threads, monkeypatch, mode):
    """Neither on the thread that calls nor on one that is started by it."""
    set_threads(1)
    calls = entries()
    usual, before = {name: call() for name, call in calls.items()}, modes()
    set_threads(3)
    monkeypatch.setattr(threads, "_pool", threads._Pool())
    tiny = np.full(5, SMALL)
    with changed(MODES[KIND][mode]):
        inside = modes()
        other = (tiny * np.float32(1)).view(np.uint32), (np.float32(1) / filled(50)).tobytes()
        for name, call in calls.items():
            for _ in range(3):
                assert equal(call(), usual[name]), name
        assert modes() == inside != before  # the caller's own arithmetic is as it was
    assert modes() == before
    mine = (tiny * np.float32(1)).view(np.uint32), (np.float32(1) / filled(50)).tobytes()
    assert not np.array_equal(other[0], mine[0]) or other[1] != mine[1]  # the modes do something


@HAS_MODES
def test_modes_are_restored_after_an_error(set_threads):
    set_threads(2)

    @float_modes.own_arithmetic
    def fails() -> None:
        raise KeyError

    with changed(MODES[KIND]["up"]):
        inside = modes()
        with pytest.raises(KeyError):
            fails()
        assert modes() == inside


def test_threads_of_the_pool_compute_in_the_usual_modes(set_threads, monkeypatch):
    set_threads(3)
    monkeypatch.setattr(threads, "_pool", threads._Pool())
    together, found = threading.Barrier(3, timeout=60), []

    def run(first: int, last: int) -> None:
        together.wait()
        found.append(modes())

    usual = modes()
    with changed(MODES[KIND]["towards 0"]):
        threads.parallel(run, 3)
    assert sorted(found).count(usual) == 2


def test_other_processors_have_no_modes_here():
    for triple, name in (
        ("x86_64-unknown-linux-gnu", "ldmxcsr"),
        ("arm64-apple-darwin", "fpcr"),
        ("riscv64-unknown-linux-gnu", None),
    ):
        text = str(float_modes._written(triple))
        assert "cupyflash_float_modes_begin" in text
        assert (name in text) if name else ("call" not in text)


@pytest.mark.parametrize("unit", [amx.EMULATED, amx.NONE])
def test_tiles_take_values_below_the_normal_range_as_0_within_the_bound(monkeypatch, unit):
    """In products with weights, as `numerics.md` says."""
    monkeypatch.setenv(amx.VARIABLE, unit)
    kind = ml_dtypes.bfloat16
    q, k, v, do = (filled(2, n, 20, dtype=kind) for n in (50, 60, 60, 50))
    v, do = (np.clip(x.astype(np.float32), -1, 1) for x in (v, do))
    v, do = ((x * np.float32(1e-38)).astype(kind) for x in (v, do))
    out, lse = attention(q, k, v, return_lse=True)
    grads = cupyflash.attention_backward(do, q, k, v, out, lse)
    precision = Precision.of(kind)
    forward = forward_bound(q, k, v, precision=precision)
    backward = backward_bound(do, q, k, v, precision=precision)
    assert rho(out, *forward.out).value <= 1
    for name in ("dq", "dk", "dv"):
        assert rho(getattr(grads, name), *getattr(backward, name)).value <= 1
    for found in out, grads.dv:
        assert bool(found.astype(np.float64).any()) == (unit == amx.NONE)
