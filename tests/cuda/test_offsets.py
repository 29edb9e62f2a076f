"""Offsets of packed sequences in device memory, on the emulator: as int64, and what is reported."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from emulator import build
from emulator.calls import Emulator
from emulator.machine import randomly
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupyflash.arrays import reports
from cupyflash.gpu import launch, offsets
from cupyflash.problem.rows import PackedRows

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
DTYPES = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
GUARD = -7


def run(q, k, totals, longest=(2**40, 2**40), reports_them=True, read=build.read, bounded=False):
    """Return the int64 that were written, by name, and both reports."""
    held = {"offsets_q": q, "offsets_k": k}
    lengths = [np.array([0, n]) for n in longest]
    rows = PackedRows(
        *lengths, None, None, held, unread=True, reports=reports_them, bounded=bounded
    )
    arrays = [SimpleNamespace(shape=(1, total, 16)) for total in totals]
    problem = SimpleNamespace(len_q=lengths[0], len_k=lengths[1])
    call = SimpleNamespace(rows=rows, q=arrays[0], k=arrays[1], problem=problem)
    words = np.zeros(2, np.uint64)
    written = {}

    def work():
        copies = offsets.scratch(call)
        made = offsets._launch(call, offsets._in_device_memory(call), copies)
        places = {name: x.ctypes.data for name, x in held.items()}
        for name, spec in copies.items():
            memory = np.full(spec.shape[0] + 1, GUARD, np.int64)
            written[name] = memory
            places[offsets._copied(name)] = memory.ctypes.data
        for n, name in enumerate(held):
            places[offsets.REPORT + name] = words.ctypes.data + 8 * n
        compiled = launch.CompiledRecipe(
            SimpleNamespace(pointer=lambda: 0), launch.CompiledLaunches((made,), 0), ()
        )
        compiled.forward(places)

    Emulator(schedule=randomly(0), read=read)._run(work)
    assert all(memory[-1] == GUARD for memory in written.values())
    return {name: memory[:-1] for name, memory in written.items()}, words.tolist()


def is_too_long(x, total, longest):
    """Whether a sequence is too long, as kernels hold offsets within the arrays."""
    held = [min(max(int(n), 0), total) for n in x.astype(np.int64)]
    return any(b - a > longest for a, b in itertools.pairwise(held))


def reasons(x, total, longest):
    """Return what is wrong with each entry, as the kernel numbers it."""
    numbers = [int(n) for n in x.astype(np.int64)]
    found = {}
    for n, own in enumerate(numbers):
        if n == 0:
            kind = 1 if own else 0
        elif own < numbers[n - 1]:
            kind = 2
        elif own > total:
            kind = 5
        else:
            kind = 4 if own - max(numbers[n - 1], 0) > longest else 0
        if n == len(numbers) - 1 and kind in (0, 5) and own != total:
            kind = 3
        if kind:
            found[n] = kind
    return found


@st.composite
def arrays(draw):
    """Draw offsets that are right, or nearly, with any step."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    lengths = draw(st.lists(st.integers(0, 20), max_size=5))
    x = np.cumsum([0, *lengths])
    total = int(x[-1]) + draw(st.sampled_from([0, 0, 0, 1]))
    if draw(st.integers(0, 3)) == 0:
        x[draw(st.integers(0, len(x) - 1))] = draw(st.integers(0, 100))
    step = draw(st.sampled_from([1, 1, 2, -1]))
    memory = np.zeros(len(x) * abs(step), dtype)
    view = memory[::step]
    view[:] = x
    return view, total, draw(st.sampled_from([2**40, 20, 7]))


@settings(max_examples=25)
@given(arrays(), arrays())
@example((np.array([0, 2**63 + 5, 4], np.uint64), 4, 9), (np.array([0, -5, 2**62], np.int64), 4, 9))
@example((np.array([0, 5, 4], np.int32), 4, 9), (np.array([0, 7, 9, 9], np.int64), 4, 9))
@example((np.array([-1, 2, 4], np.int16), 4, 9), (np.array([0, 3, 9], np.int64), 4, 9))
def test_offsets_become_int64_and_wrong_ones_are_reported(q, k):
    count = min(len(q[0]), len(k[0]))
    held = [x[:count] for x in (q[0], k[0])]
    totals, longest = (q[1], k[1]), (q[2], k[2])
    written, words = run(*held, totals, longest)
    limited = any(limit < total for limit, total in zip(longest, totals, strict=True))
    rows = list(zip(held, totals, longest, strict=True))
    empty = limited and any(is_too_long(*row) for row in rows)
    for name, x, total, limit, word in zip(
        reports.OF_OFFSETS, held, totals, longest, words, strict=True
    ):
        if limited or x.dtype != np.int64 or not x.flags.c_contiguous:
            assert (written[name] == (0 if empty else x.astype(np.int64))).all()
        else:
            assert name not in written
        wrong = reasons(x, total, limit)
        bits = reports.KIND_BITS
        assert (word % 2**bits == wrong[word >> bits]) if wrong else (word == 0)


def test_several_blocks_read_many_offsets():
    x = np.arange(700, dtype=np.int32)
    written, words = run(x, x[::1], (699, 699))
    assert (written["offsets_q"] == x).all()
    assert (written["offsets_k"] == x).all()
    assert words == [0, 0]
    x[600] = 3
    assert run(x, x, (699, 699))[1] == [600 << 3 | 2] * 2


def test_the_same_array_is_converted_once():
    x = np.array([0, 3, 5], np.int32)
    written, words = run(x, x, (5, 6))
    assert list(written) == ["offsets_q"]
    assert words == [0, 2 << 3 | 3]


def test_trusted_offsets_are_converted_and_not_checked():
    x = np.array([4, 3, 9], np.int32)
    written, words = run(x, x, (5, 5), reports_them=False)
    assert (written["offsets_q"] == x).all()
    assert words == [0, 0]


@pytest.mark.parametrize("reports_them", [True, False])
@pytest.mark.parametrize("count", [3, 700])
def test_no_sequence_is_longer_than_bias_and_mask(reports_them, count):
    x = np.arange(count, dtype=np.int64)
    total = count - 1
    written, words = run(x, x.copy(), (total, total), (total - 1, total), reports_them)
    assert all((written[name] == x).all() for name in reports.OF_OFFSETS)
    assert words == [0, 0]
    long = x.copy()
    long[1:-1] = 0  # the last sequence has all keys
    written, words = run(x, long, (total, total), (total, total - 1), reports_them)
    assert not any(made.any() for made in written.values())
    assert words == ([0, total << 3 | 4] if reports_them else [0, 0])


@pytest.mark.thorough("mutants; what the kernel writes is quick")
def test_without_its_barrier_some_sequences_are_not_empty():
    def read(name):
        text = build.read(name)
        return text.replace("ptx::barrier_or", "") if name == "rowwise/offsets.cu" else text

    offsets = np.arange(0, 120, 3, dtype=np.int32)
    offsets[-1] += 5  # this one is too long, as one thread sees
    written, _ = run(offsets, offsets.copy(), (122, 122), (4, 4), read=read)
    assert any(x.any() for x in written.values())
    written, _ = run(offsets, offsets.copy(), (122, 122), (4, 4))
    assert not any(x.any() for x in written.values())


def test_of_trusted_offsets_longer_sequences_alone_are_reported():
    """Rows behind the last sequence, as padding has them, are nothing wrong."""
    x = np.array([1, 3, 2, 9], np.int32)  # it does not begin with 0, decreases, and ends early
    trusted = {"reports_them": False, "bounded": True}
    written, words = run(x, x, (20, 20), (7, 7), **trusted)
    assert (written["offsets_q"] == x).all()
    assert words == [0, 0]
    written, words = run(x, x[::1], (20, 20), (7, 6), **trusted)
    assert not written["offsets_q"].any()
    assert not written["offsets_k"].any()
    assert words == [0, 3 << 3 | 4]
    written, words = run(x.astype(np.int64), x.astype(np.int64), (9, 9), (9, 9), **trusted)
    assert (written, words) == ({}, [0, 0])  # nobody relies on lengths
