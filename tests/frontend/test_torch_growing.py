"""Calls of one query over keys whose number grows, as in a generation, without a GPU.

Tensors in host memory say that they are on a GPU, whose memory is that of `host_cupy`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cupyflash import ArgumentError, execute, masks
from cupyflash.gpu import growing

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash.torch import attention, recognised  # noqa: E402 (after the skip)

NUMBERS = [*range(60, 72), *range(126, 134), *range(510, 516), *range(4094, 4100)]
LEAVES = len({(n - 1) // 64 for n in NUMBERS})
ROOM = 5000  # rows, of which keys and values are the first ones
FEW = 4  # numbers of keys that have other kernels
HIGHEST = 2**44  # of strides and numbers of keys; addresses are higher, but for those of the heap


def tensors(keys, batch=1, heads=4, heads_kv=2, d=16, dtype=torch.float16, layout="contiguous"):
    q = torch.zeros(batch, heads, 1, d, dtype=dtype)
    k, v = (torch.zeros(batch, heads_kv, keys, d, dtype=dtype) for _ in "kv")
    if layout == "rows first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    if "room" in layout:
        first = 1 if "second row" in layout else 0
        rooms = (x.new_zeros(batch, heads_kv, ROOM, d) for x in (k, v))
        k, v = (x[:, :, first : first + keys] for x in rooms)
    return q, k, v


def heap():
    """Return where the heap begins and ends, which is low in programs at a fixed place."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    ends = [int(x, 16) for line in lines if "[heap]" in line for x in line.split()[0].split("-")]
    return (min(ends), max(ends)) if ends else (0, 0)


def numbers_of(words):
    """Return the words that are no addresses."""
    low, high = heap()
    return words[(words < HIGHEST) & ((words < low) | (words >= high))].tolist()


def told(cupy, numbers=NUMBERS, options=None, **sizes):
    """Return what kernels are told for each number of keys, and how many calls were checked."""
    made, checked = [], []
    forward = execute.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "forward", lambda *x: checked.append(1) or forward(*x))
        for keys in numbers:
            cupy.launches.clear()
            attention(*tensors(keys, **sizes), **(options or {}))
            made.append(
                [(x.kernel, *x[2:5], numbers_of(x.words), x.words.size) for x in cupy.launches]
            )
    return made, len(checked)


CASES = {
    "float16": {},
    "lse": {"options": {"return_lse": True}},
    "float32": {"dtype": torch.float32},
    "wide": {"d": 128, "heads": 8, "heads_kv": 1},
    "several": {"batch": 3},
    "a scale": {"options": {"scale": 2.0}},
    "rows that are not aligned": {"d": 20},
    "a room": {"layout": "room", "batch": 2},
    "a room of one head": {"layout": "room", "heads_kv": 1, "batch": 2},
    "a room, lse": {"layout": "room", "options": {"return_lse": True}},
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_told_the_same_as_by_a_checked_call(cupy, gpu_tensors, monkeypatch, case):
    found, checked = told(cupy, **CASES[case])
    jumps = 1 + sum(b - a > 1 for a, b in itertools.pairwise(NUMBERS))
    assert checked <= FEW + LEAVES + jumps
    monkeypatch.setattr(recognised, "keep_growing", lambda *_: None)
    recognised._known.clear()
    recognised._growing.clear()
    wanted, every = told(cupy, **CASES[case])
    assert every == len(NUMBERS)
    assert found == wanted


OTHERS = {
    "a mask": {"options": {"mask": masks.causal()}},
    "a mask of an array": {"options": {"mask": torch.ones(1, 1, dtype=torch.bool)}},
    "another order": {"layout": "rows first"},
    "rows that begin at any address": {"layout": "room, from its second row", "d": 20},
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_calls_are_checked_for_each_number(cupy, gpu_tensors, case):
    numbers = range(100, 110)
    _, checked = told(cupy, numbers, **OTHERS[case])
    assert checked == len(numbers)


@pytest.mark.parametrize(
    "other", [{"heads": 2}, {"d": 32}, {"batch": 2}, {"dtype": torch.bfloat16}], ids=str
)
def test_a_call_that_differs_in_more_is_checked(cupy, gpu_tensors, other):
    told(cupy, range(100, 110))
    assert len(recognised._growing) == 1
    assert told(cupy, [110])[1] == 0
    assert told(cupy, [110], **other)[1] == 1


def test_keys_and_values_of_other_lengths_are_refused(cupy, gpu_tensors):
    told(cupy, range(100, 110))
    q, k, v = tensors(111)
    for wrong in ((q, k[:, :, :110].contiguous(), v), (q, k, v[:, :, :110].contiguous())):
        with pytest.raises(ArgumentError, match="110"):
            attention(*wrong)


def test_a_number_that_was_not_the_next_one_is_no_generation(cupy, gpu_tensors, monkeypatch):
    monkeypatch.setattr(growing, "of", None)
    _, checked = told(cupy, range(100, 140, 2))
    assert checked == 20


def test_old_forms_are_forgotten(cupy, gpu_tensors, monkeypatch):
    monkeypatch.setattr(recognised, "MOST_GROWING", 1)
    for d in (16, 32):
        told(cupy, range(100, 103), d=d)
    assert len(recognised._growing) == len(recognised._last) == 1
