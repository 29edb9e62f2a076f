"""Calls of arrays and a mask on a GPU, recognised before they are a request, without a GPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from host_cupy import TOO_MANY_RESOURCES, HostCupy, OutOfMemoryError
from recognised import told

import cupyflash
from cupyflash import execute, masks
from cupyflash.arrays import reports
from cupyflash.backends import host_recent
from cupyflash.errors import ArgumentError, ArgumentTypeError
from cupyflash.problem import replay

LENGTHS, ENDS = np.array([5, 9], np.int32), np.array([0, 11, 40], np.int64)
SHAPES = {
    "dense": ((2, 4, 40, 16),) * 3,
    "cached": ((2, 4, 1, 16), *((2, 2, 64, 16),) * 2),
    "one length": ((2, 4, 1, 16), *((2, 2, 64, 16),) * 2),
    "packed": ((4, 40, 16),) * 3,
    "packed, two": ((4, 40, 16),) * 3,
    "packed, int32": ((4, 40, 16),) * 3,
    "packed, host": ((4, 40, 16),) * 3,
    "packed, trusted": ((4, 40, 16),) * 3,
}


def arrays(cupy, kind, dtype=np.float16):
    """Return new arrays of a call, with its other operands behind them."""
    made = [cupy.asarray(np.ones(shape, dtype)) for shape in SHAPES[kind]]
    if kind == "cached":
        return [*made, cupy.asarray(LENGTHS)]
    if kind == "one length":
        return [*made, 9]
    if kind == "packed, host":
        return [*made, ENDS, ENDS]
    if kind == "dense":
        return made
    ends = cupy.asarray(ENDS.astype(np.int32) if "int32" in kind else ENDS)
    return [*made, ends, cupy.asarray(ENDS) if kind == "packed, two" else ends]


def function(kind):
    if kind.startswith("packed"):
        check = {"check": False} if "trusted" in kind else {}
        return lambda *x, **options: cupyflash.attention_varlen(*x, **check, **options)
    return cupyflash.attention if kind == "dense" else cupyflash.attention_cached


@pytest.fixture
def alone(monkeypatch):
    """Return a function: from then on, a call that is made a request is an error."""

    def refuse(*_, **__):
        raise AssertionError("the call was made a request")

    return lambda: monkeypatch.setattr(execute, "forward", refuse)


@pytest.fixture
def requests(monkeypatch):
    """Return the list of calls that are made a request from now on."""
    seen, forward = [], execute.forward

    def count(request, *rest):
        seen.append(request)
        return forward(request, *rest)

    monkeypatch.setattr(execute, "forward", count)
    return seen


@pytest.mark.parametrize("options", [{}, {"mask": masks.causal()}], ids=["", "causal"])
@pytest.mark.parametrize("kind", SHAPES)
def test_kernels_are_told_what_a_request_tells_them(cupy, alone, monkeypatch, kind, options):
    call, operands = function(kind), arrays(cupy, kind)
    call(*arrays(cupy, kind), **options)
    begin = len(cupy.launches)
    with monkeypatch.context() as patch:
        patch.setattr(host_recent, "again", lambda *_: None)
        by_request = call(*operands, **options)
    middle = len(cupy.launches)
    alone()
    made = call(*operands, **options)
    before, after = cupy.launches[begin:middle], cupy.launches[middle:]
    assert len(before) == len(after) > 0
    known = {x.data.ptr for x in operands if isinstance(x, cupy.ndarray)}
    assert known | {made.data.ptr} <= told(after)
    assert (made.shape, made.dtype) == (by_request.shape, by_request.dtype)
    for one, other in zip(before, after, strict=True):
        assert one[:6] == other[:6]  # all but the words
        differ = {(int(a), int(b)) for a, b in zip(one.words, other.words, strict=True) if a != b}
        outputs = by_request.data.ptr, made.data.ptr
        assert {outputs} >= differ or len(differ - {outputs}) == 1  # and scratch
        assert not known & {a for pair in differ for a in pair}


def test_what_tells_calls_apart_is_looked_at(cupy, requests):
    """Of every operand its type, shape, strides, device and alignment; and the mask."""

    def like(shape, dtype=np.float16, turned=False, offset=0):
        size = int(np.prod(shape)) + 16
        flat = cupy.asarray(np.ones(size, dtype))[offset : offset + size - 16]
        if turned:
            return flat.reshape(*shape[:-2], shape[-1], shape[-2]).transpose(0, 1, 3, 2)
        return flat.reshape(*shape)

    shape = 2, 4, 40, 16
    plain = [like(shape) for _ in range(3)]
    kinds = [
        (plain, {}),
        (plain, {"mask": masks.causal()}),
        (plain, {"mask": masks.window(3, 0)}),
        ([like(shape, np.float32) for _ in range(3)], {}),
        ([like((2, 4, 48, 16)), *plain[1:]], {}),
        ([plain[0], *(like((2, 2, 40, 16)) for _ in range(2))], {}),
        ([plain[0], *(like((2, 4, 56, 16)) for _ in range(2))], {}),
        ([*plain[:2], like((2, 4, 40, 32))], {}),
        *(([like(shape, turned=n == place) for n in range(3)], {}) for place in range(3)),
    ]
    for operands, options in kinds:
        cupyflash.attention(*operands, **options)
    assert len(requests) == len(kinds)
    for operands, options in kinds:
        out = cupyflash.attention(*operands, **options)
        assert {x.data.ptr for x in (*operands, out)} <= told(cupy.launches[-1:])
        assert out.dtype == operands[0].dtype
        assert out.shape == (*operands[0].shape[:3], operands[2].shape[3])
    assert len(requests) == len(kinds)
    for place in range(3):
        operands = [like(shape, offset=n == place) for n in range(3)]
        cupyflash.attention(*operands)
        assert len(requests) == len(kinds) + place + 1


def test_a_new_mask_that_says_the_same_is_the_same(cupy, alone):
    cupyflash.attention(*arrays(cupy, "dense"), mask=masks.window(3, 0))
    alone()
    cupyflash.attention(*arrays(cupy, "dense"), mask=masks.window(3, 0))


def test_a_call_that_says_more_is_a_request(cupy, requests):
    """Also one whose mask reads an array, which is one of the operands."""
    operands = arrays(cupy, "dense")
    allowed = cupy.asarray(np.ones((40, 40), bool))
    more = [
        {"scale": 0.5}, {"sink": cupy.asarray(np.ones(4, np.float32))}, {"return_lse": True},
        {"dropout": 0.5, "seed": 1}, {"mask": allowed}, {"out": cupy.ndarray((2, 4, 40, 16), "e")},
    ]  # fmt: skip
    cupyflash.attention(*operands)
    for options in more:
        requests.clear()
        for n in range(3):
            cupyflash.attention(*operands, **options)
            cupyflash.attention(*operands)
            assert len(requests) == n + 1


@pytest.mark.parametrize("number", [-1, 65, True, np.int64(9)])
def test_a_length_that_is_wrong_or_of_another_type_is_checked(cupy, requests, number):
    operands = arrays(cupy, "one length")
    cupyflash.attention_cached(*operands)
    cupyflash.attention_cached(*operands)
    if number in (-1, 65) or number is True:
        with pytest.raises((ArgumentError, ArgumentTypeError), match=r"^lengths"):
            cupyflash.attention_cached(*operands[:3], number)
    else:
        cupyflash.attention_cached(*operands[:3], number)
    assert len(requests) == 2


def test_a_cache_without_axes_is_refused_as_before(cupy):
    operands = arrays(cupy, "one length")
    for keys in (operands[1][0], operands[1][0, 0, :, 0], cupy.asarray(np.float16(1))):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            cupyflash.attention_cached(operands[0], keys, operands[2], 9)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_operand_of_another_library_is_refused_as_before(cupy, place):
    operands = arrays(cupy, "cached")
    cupyflash.attention_cached(*operands)
    operands[place] = operands[place].host
    with pytest.raises((ArgumentError, ArgumentTypeError)):
        cupyflash.attention_cached(*operands)


def test_offsets_on_the_host_count_by_what_they_hold(cupy, requests):
    q, k, v, *_ = arrays(cupy, "packed, host")
    ends, others = ENDS.copy(), np.array([0, 30, 40])
    for offsets in ((ends, ends), (others, others), (ends, others), (ends.astype(np.int32),) * 2):
        if (offsets[0] != offsets[1]).any():
            cupyflash.attention_varlen(q, k, v, *offsets)
        cupyflash.attention_varlen(q, k, v, *offsets)
    assert len(requests) == 4
    ends[1] = 30  # what was kept is a copy
    cupyflash.attention_varlen(q, k, v, ends, ends)
    assert len(requests) == 4
    ends[2] = 41
    with pytest.raises(ArgumentError, match="offsets_q: runs from 0 to 41"):
        cupyflash.attention_varlen(q, k, v, ends, ends)


@pytest.mark.parametrize("kind", ["packed, int32", "packed, host"])
def test_a_graph_has_memory_of_its_own(cupy, monkeypatch, requests, kind):
    """A call that asks for memory is checked while a graph is captured.

    The legacy default stream captures none, so that it is not asked.
    """
    call = function(kind)
    call(*arrays(cupy, kind))
    capturing = type("Stream", (), {"ptr": 5, "is_capturing": lambda _: True})()
    monkeypatch.setattr(cupyflash.gpu.driver.queue(0), "current_stream", lambda: capturing)
    monkeypatch.setattr(cupyflash.arrays.cuda_device, "is_capturing", lambda: True)
    if kind == "packed, host":
        with pytest.raises(ArgumentError, match="captured"):
            call(*arrays(cupy, kind))
    else:
        call(*arrays(cupy, kind))
    assert len(requests) == 2
    cupyflash.attention(*arrays(cupy, "dense"))
    cupyflash.attention(*arrays(cupy, "dense"))  # this needs no such memory
    assert len(requests) == 3


def test_a_call_where_another_device_is_current_is_computed_where_its_arrays_are(install):
    cupy = install(HostCupy(devices=2))
    with cupy.Device(1):
        operands = arrays(cupy, "dense")
    for _ in range(3):
        assert cupyflash.attention(*operands).data.device_id == 1
    assert cupyflash.attention(*arrays(cupy, "dense")).data.device_id == 0


def test_a_thread_without_a_context_launches_by_cupy_first(cupy):
    cupyflash.attention(*arrays(cupy, "dense"))
    cupyflash.attention(*arrays(cupy, "dense"))

    def run():
        for _ in range(2):
            cupyflash.attention(*arrays(cupy, "dense"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [x.by_driver for x in cupy.launches] == [False, True, False, True]


def test_launches_are_where_the_current_stream_is(cupy, alone):
    call = function("cached")
    call(*arrays(cupy, "cached"))
    alone()
    for pointer in (7, 0, 8):
        before = len(cupy.launches)
        with cupy.stream(pointer):
            call(*arrays(cupy, "cached"))
        assert {x.stream for x in cupy.launches[before:]} == {pointer}


def test_an_error_of_the_driver_names_the_kernel(cupy, alone):
    call = function("dense")
    call(*arrays(cupy, "dense"))
    alone()
    cupy.during_launch = lambda: TOO_MANY_RESOURCES
    with pytest.raises(RuntimeError, match="OUT_OF_RESOURCES") as raised:
        call(*arrays(cupy, "dense"))
    assert "while running the kernel forward" in raised.value.__notes__[0]
    cupy.during_launch = lambda: None
    call(*arrays(cupy, "dense"))


def test_an_error_for_want_of_memory_says_for_what(cupy, monkeypatch):
    call, operands = function("dense"), arrays(cupy, "dense")
    call(*operands)

    def none(size):
        raise OutOfMemoryError

    monkeypatch.setattr(cupy, "alloc", none)
    with pytest.raises(OutOfMemoryError) as raised:
        call(*operands)
    assert "while cupyflash asked for" in raised.value.__notes__[0]


def test_a_report_of_wrong_offsets_is_raised(cupy, requests):
    call, operands = function("packed"), arrays(cupy, "packed")
    call(*operands)
    call(*operands)
    reports.words(0)[reports.OFFSETS_Q] = 2 + (1 << reports.KIND_BITS)
    with pytest.raises(ArgumentError, match="offsets_q: an earlier call"):
        call(*operands)
    call(*operands)
    assert len(requests) == 1


def test_what_is_kept_is_bounded_and_forgotten(cupy, monkeypatch, requests):
    monkeypatch.setattr(replay, "MOST", 4)
    shapes = [(1, 1, 16 * n, 16) for n in range(1, 6)]
    for shape in shapes:
        operands = [cupy.asarray(np.ones(shape, np.float16)) for _ in range(3)]
        cupyflash.attention(*operands)
        cupyflash.attention(*operands)
        assert len(replay._entries) <= 4
    assert len(requests) == 5
