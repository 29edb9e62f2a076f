"""Packed calls on a GPU, without one: what is recognised, read, launched, copied and reported."""

from __future__ import annotations

import ctypes
import threading

import gpu_host
import numpy as np
import pytest
from host_cupy import HostCupy
from recognised import draw, fields

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, masks
from cupyflash.arrays import cuda_device, per_stream, reports
from cupyflash.gpu import params, tma, uploads
from cupyflash.problem import arguments, cached, validate

TOTAL = 40
ENDS = [0, 11, TOTAL]
HOST = {
    "int64": np.array(ENDS),
    "int32": np.array(ENDS, np.int32),
    "uint8": np.array(ENDS, np.uint8),
    "steps": np.array([0, 9, 11, 9, TOTAL])[::2],
    "list": ENDS,
    "tuple": tuple(ENDS),
}
IN_PLACE = ["int64"]


def arrays(cupy, dtype=np.float32):
    return draw(cupy, (4, TOTAL, 16), dtype)


def moved(cupy, offsets):
    """Return offsets in device memory; those that run in steps do there, too."""
    held = np.asarray(offsets)
    if held.strides[0] == held.itemsize:
        return cupy.asarray(held)
    return cupy.asarray(np.repeat(held, 2))[::2]


def names(cupy):
    return [x.kernel.partition("__")[0] for x in cupy.launches]


def checked(launch):
    """Return what a kernel that checks offsets was told."""
    assert launch.kernel.startswith("offsets__")
    return fields(launch, params.rowwise("offsets"))


def told(launch):
    """Return the addresses of the offsets that a kernel of attention reads."""
    it = fields(launch, params.params(0, 0, 0))
    return int(it["offsets_q"]), int(it["offsets_k"])


def held_at(address):
    return list((ctypes.c_int64 * len(ENDS)).from_address(address))


def everything(q, k, v, *offsets, **options):
    """Make a forward, a backward and a function of gradients."""
    cupyflash.attention_varlen(q, k, v, *offsets, **options)
    out, lse = cupyflash.attention_varlen(q, k, v, *offsets, return_lse=True, **options)
    cupyflash.attention_varlen_backward(out, q, k, v, out, lse, *offsets, **options)
    cupyflash.attention_varlen_vjp(q, k, v, *offsets, **options)[1](out)


@pytest.fixture
def unchecked(monkeypatch, cupy):
    """Make every check, every wait and every copy to the device an error."""

    def refuse(*_, **__):
        raise AssertionError("the call was checked, waited or copied")

    def forbid():
        monkeypatch.setattr(validate, "varlen_call", refuse)
        monkeypatch.setattr(cupy.ndarray, "get", refuse)
        monkeypatch.setattr(cupy, "ascontiguousarray", refuse)

    return forbid


@pytest.mark.parametrize("kind", HOST)
def test_offsets_in_host_memory_are_recognised_by_what_they_hold(cupy, unchecked, kind):
    offsets = HOST[kind]
    everything(*arrays(cupy), offsets, offsets)
    unchecked()
    again = [*offsets] if isinstance(offsets, list) else np.copy(offsets)
    again = tuple(again) if isinstance(offsets, tuple) else again
    cupy.launches.clear()
    everything(*arrays(cupy), offsets, again)
    found = [x for x in cupy.launches if not x.kernel.startswith("checksum")]
    assert len(found) == 7
    for launch in found:
        if not launch.kernel.startswith("backward_delta"):
            assert [held_at(place) for place in told(launch)] == [ENDS, ENDS]
    with pytest.raises(AssertionError, match="was checked"):
        cupyflash.attention_varlen(*arrays(cupy), offsets, [0, 12, TOTAL])


def test_other_offsets_in_host_memory_are_checked(cupy):
    q, k, v = arrays(cupy)
    cupyflash.attention_varlen(q, k, v, ENDS, ENDS)
    with pytest.raises(ArgumentError, match="offsets_k: entry 2 is 40, smaller than 41"):
        cupyflash.attention_varlen(q, k, v, [0, 0, TOTAL], [0, 41, TOTAL])
    with pytest.raises(ArgumentTypeError, match=r"offsets_q: got shape .* dtype float64"):
        cupyflash.attention_varlen(q, k, v, [0.0, 11.0, 40.0], ENDS)
    with pytest.raises(ArgumentTypeError, match=r"offsets_k: got shape .* dtype bool"):
        cupyflash.attention_varlen(q[:, :1], k[:, :1], v[:, :1], [0, 1], [False, True])
    with pytest.raises(ArgumentTypeError, match="offsets_q: got a list that NumPy cannot"):
        cupyflash.attention_varlen(q, k, v, [[0], [11, 40]], ENDS)
    for offsets, wanted in (([0, 12, TOTAL], "forward"), (ENDS, "forward")):
        cupy.launches.clear()
        cupyflash.attention_varlen(q, k, v, offsets, ENDS)
        assert names(cupy)[0].startswith(wanted)
        assert held_at(told(cupy.launches[-1])[0]) == offsets


def test_many_offsets_in_host_memory_are_checked_each_time(cupy, monkeypatch):
    monkeypatch.setattr(arguments, "MOST_CONTENTS", 16)
    cupyflash.attention_varlen(*arrays(cupy), ENDS, ENDS)
    monkeypatch.setattr(validate, "varlen_call", lambda *_, **__: pytest.fail("it is checked"))
    with pytest.raises(pytest.fail.Exception):
        cupyflash.attention_varlen(*arrays(cupy), ENDS, ENDS)


@pytest.mark.parametrize("kind", ["int64", "int32", "uint8", "steps"])
@pytest.mark.parametrize("check", [None, False])
@pytest.mark.parametrize("alike", [True, False])
def test_offsets_in_device_memory_are_not_looked_at(cupy, unchecked, kind, check, alike):
    def pair():
        first = moved(cupy, HOST[kind])
        return first, first if alike else moved(cupy, HOST[kind])

    everything(*arrays(cupy), *pair(), check=check)
    unchecked()
    q, k, v = arrays(cupy)
    offsets = pair()
    cupy.launches.clear()
    out = cupyflash.attention_varlen(q, k, v, *offsets, check=check)
    *first, main = cupy.launches
    places = [x.data.ptr for x in offsets]
    if check is False and kind in IN_PLACE:
        assert not first
        assert list(told(main)) == places
        return
    it = checked(*first)
    assert (first[0].grid, it["count"], it["blocks"]) == (2, 3, 1)
    assert it["inputs"].tolist() == places
    assert it["totals"].tolist() == [TOTAL, TOTAL]
    if check is None:
        words = [reports.address(0, word) for word in (reports.OFFSETS_Q, reports.OFFSETS_K)]
        assert it["reports"].tolist() == words
    else:
        assert it["reports"].tolist() == [0, 0]
    copies = it["results"].tolist()
    if kind in IN_PLACE:
        assert copies == [0, 0]
        assert list(told(main)) == places
    else:
        assert list(told(main)) == [copies[0], copies[0] if alike else copies[1]]
        assert (copies[1] == 0) == alike
    cupy.launches.clear()
    everything(q, k, v, *offsets, check=check)
    assert names(cupy).count("offsets") == 5  # of three forwards and two backwards
    assert out.shape == q.shape


def test_arrays_that_are_one_are_told_from_two(cupy):
    q, k, v = arrays(cupy)
    one, other = moved(cupy, HOST["int32"]), moved(cupy, [0, 5, TOTAL])
    for pair in ((one, one), (one, other), (other, one), (one, one)):
        cupy.launches.clear()
        cupyflash.attention_varlen(q, k, v, *pair)
        assert checked(cupy.launches[0])["inputs"].tolist() == [x.data.ptr for x in pair]


def test_offsets_may_be_here_and_there(cupy, unchecked):
    there = moved(cupy, HOST["int64"])
    for _ in range(2):
        cupy.launches.clear()
        cupyflash.attention_varlen(*arrays(cupy), ENDS, there)
        it = checked(cupy.launches[0])
        assert it["inputs"][0] == there.data.ptr
        assert cupy.launches[0].grid == 1
        first, second = told(cupy.launches[1])
        assert (held_at(first), second) == (ENDS, there.data.ptr)
        unchecked()


@pytest.mark.parametrize("check", [None, False])
def test_no_kernel_reads_beyond_a_bias(cupy, unchecked, check):
    """Sequences that nobody has looked at are empty if they are too long for it."""
    offsets = moved(cupy, HOST["int64"])
    bias = draw(cupy, (4, 30, 29), count=1)[0]
    for shape, limited in (((4, 30, 29), True), ((4, 1, TOTAL), False), ((4, 1, 29), True)):
        bias = draw(cupy, shape, count=1)[0]
        for _ in range(2):
            cupy.launches.clear()
            cupyflash.attention_varlen(*arrays(cupy), offsets, offsets, bias=bias, check=check)
            *first, main = cupy.launches
            if not limited:
                assert len(first) == (check is None)
                continue
            it = checked(*first)
            limits = [shape[1] if shape[1] > 1 else TOTAL, shape[2]]
            assert it["limits"].tolist() == limits
            assert (first[0].grid, it["limited"], it["arrays"]) == (1, 1, 2)
            assert told(main) == (it["results"][0],) * 2
            assert it["results"][0] != offsets.data.ptr
    with pytest.raises(ArgumentError, match="bias: got shape"):
        cupyflash.attention_varlen(*arrays(cupy), ENDS, ENDS, bias=draw(cupy, (4, 30, 28))[0])
    unchecked()
    cupyflash.attention_varlen(*arrays(cupy), offsets, offsets, bias=bias, check=check)


def report(word, entry, kind):
    """Leave word as the kernel does."""
    place = ctypes.c_uint64.from_address(reports.address(0, word))
    place.value = entry << reports.KIND_BITS | kind


def test_wrong_offsets_are_an_error_of_the_next_call(cupy):
    q, k, v = arrays(cupy)
    offsets = moved(cupy, HOST["int64"])
    out, lse, vjp = cupyflash.attention_varlen_vjp(q, k, v, offsets, offsets, return_lse=True)
    vjp(out)
    cupyflash.attention_varlen_backward(out, q, k, v, out, lse, offsets, offsets)
    words = {1: "entry 2 is not 0", 2: "smaller than", 3: "the last one", 4: "longer than bias"}
    calls = [
        lambda: cupyflash.attention_varlen(q, k, v, offsets, offsets),
        lambda: cupyflash.attention_varlen_backward(out, q, k, v, out, lse, offsets, offsets),
        lambda: vjp(out),
        lambda: cupyflash.attention_varlen(q, k, v, offsets, offsets, check=True),
        lambda: cupyflash.attention_vjp(q, k, v),
    ]
    for n, call in enumerate(calls):
        report(reports.OFFSETS_K, 2, n % 4 + 1)
        with pytest.raises(ArgumentError, match=rf"^offsets_k: an earlier .*{words[n % 4 + 1]}"):
            call()
        call()  # it is told once
    report(reports.OFFSETS_K, 2, 3)
    report(reports.OFFSETS_Q, 0, 1)
    with pytest.raises(ArgumentError, match=r"^offsets_q, offsets_k: .*entry 0 is not 0 and offs"):
        calls[0]()
    for other in (lambda: cupyflash.attention(q, k, v), lambda: calls[0]()):
        other()


def test_offsets_that_are_read_are_checked_at_once(cupy, monkeypatch):
    q, k, v = arrays(cupy)
    offsets = moved(cupy, HOST["int32"])
    read = []
    get = cupy.ndarray.get
    monkeypatch.setattr(cupy.ndarray, "get", lambda x: read.append(x) or get(x))
    everything(q, k, v, offsets, offsets, check=True)
    assert len(read) == 4  # once for each call, and not again for gradients of one
    with monkeypatch.context() as patch:
        patch.setattr(validate, "varlen_call", lambda *_, **__: pytest.fail("it is checked"))
        cupyflash.attention_varlen(*arrays(cupy), offsets, offsets, check=True)
    assert "offsets" not in names(cupy)
    offsets[2] = 39
    with pytest.raises(ArgumentError, match="offsets_q: runs from 0 to 39; expected 0 to 40"):
        cupyflash.attention_varlen(q, k, v, offsets, offsets, check=True)
    cupyflash.attention_varlen(q, k, v, offsets, offsets)  # a kernel will say so


def test_offsets_are_read_where_everything_is_checked(cupy, monkeypatch):
    q, k, v = arrays(cupy)
    offsets = moved(cupy, [0, 11, TOTAL + 1])
    cupyflash.attention_varlen(q, k, v, offsets, offsets)
    monkeypatch.setattr(cached, "CHECKS_ALL", True)
    with pytest.raises(ArgumentError, match="offsets_q: runs from 0 to 41"):
        cupyflash.attention_varlen(q, k, v, offsets, offsets)
    cupyflash.attention_varlen(q, k, v, offsets, offsets, check=False)
    monkeypatch.setattr(cuda_device, "is_capturing", lambda: True)
    cupyflash.attention_varlen(q, k, v, offsets, offsets)


def test_check_is_none_or_a_boolean(cupy):
    q, k, v = arrays(cupy)
    offsets = moved(cupy, HOST["int64"])
    for check in (1, "yes"):
        with pytest.raises(
            ArgumentTypeError, match=r"^check: got .*; expected None, True or False"
        ):
            cupyflash.attention_varlen(q, k, v, offsets, offsets, check=check)
    cupyflash.attention_varlen(q, k, v, offsets, offsets, check=np.bool_(False))
    assert "offsets" not in names(cupy)


def test_each_stream_has_its_copy_of_offsets_from_the_host(cupy):
    q, k, v = arrays(cupy)
    found = {}
    for _ in range(2):
        for stream in (0, 71, 72):
            with cupy.stream(stream):
                cupy.launches.clear()
                cupyflash.attention_varlen(q, k, v, ENDS, ENDS)
                places = told(cupy.launches[-1])
                assert held_at(places[0]) == ENDS
                assert found.setdefault(stream, places) == places
    assert len(set(found.values())) == 3
    for stream in range(80, 80 + per_stream.MOST_STREAMS):  # the first ones are forgotten
        with cupy.stream(stream):
            cupyflash.attention_varlen(q, k, v, ENDS, ENDS)
            assert held_at(told(cupy.launches[-1])[1]) == ENDS


def test_default_streams_of_threads_are_told_apart(cupy):
    made = uploads.Uploads({"offsets_q": np.array(ENDS)})
    found = []

    def work():
        found.append(made.of(2))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found[0].addresses != made.of(2).addresses
    assert made.of(2) is made.of(2)


def test_graphs_read_offsets_in_device_memory_only(cupy, monkeypatch):
    q, k, v = arrays(cupy)
    offsets, narrow = moved(cupy, HOST["int64"]), moved(cupy, HOST["int32"])
    for each in (ENDS, offsets, narrow):  # they are known
        everything(q, k, v, each, each)
    out, lse = cupyflash.attention_varlen(q, k, v, ENDS, ENDS, return_lse=True)
    stream = cupy.current_stream()
    stream.is_capturing = lambda: True
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    from cupyflash.gpu import driver

    monkeypatch.setattr(driver.queue(0), "current_stream", lambda: stream)
    size = cupyflash.workspace_size(q, k, v, offsets_q=narrow, offsets_k=narrow)
    workspace = cupy.ndarray((size,), np.uint8)
    for each in (offsets, narrow):
        cupy.launches.clear()
        cupyflash.attention_varlen(q, k, v, each, each)
        assert names(cupy)[0] == "offsets"
        cupyflash.attention_varlen_backward(out, q, k, v, out, lse, each, each, workspace=workspace)
        assert names(cupy)[2] == "offsets"
    with pytest.raises(ArgumentError, match=r"offsets_q: got int64 .* in host memory while a CUDA"):
        cupyflash.attention_varlen(q, k, v, ENDS, ENDS)
    with pytest.raises(ArgumentError, match=r"offsets_q: got int64 .* in host memory while a CUDA"):
        cupyflash.attention_varlen_backward(out, q, k, v, out, lse, ENDS, ENDS, workspace=workspace)
    with pytest.raises(ArgumentError, match=r"^check: got True while .* expected None"):
        cupyflash.attention_varlen(q, k, v, offsets, offsets, check=True)


def test_gradients_are_those_of_the_offsets_of_the_forward(cupy):
    q, k, v = arrays(cupy)
    for n in range(2):  # checked, then recognised
        offsets = np.array([0, 11 + n, TOTAL])
        for _ in range(2):
            held = offsets.copy()
            out, vjp = cupyflash.attention_varlen_vjp(q, k, v, held, held)
            held[1] = 30
            cupy.launches.clear()
            vjp(out)
            (launch,) = (x for x in cupy.launches if "dkdv" in x.kernel)
            assert held_at(told(launch)[0]) == offsets.tolist()


def test_a_change_of_offsets_in_device_memory_is_looked_for(cupy):
    q, k, v = arrays(cupy)
    offsets = moved(cupy, HOST["int32"])
    for _ in range(2):
        cupy.launches.clear()
        cupyflash.attention_varlen_vjp(q, k, v, offsets, offsets)
        it = fields(cupy.launches[-1], params.rowwise("checksum"))
        assert offsets.data.ptr in it["arrays"]["data"].tolist()


def test_offsets_of_another_device_are_refused(install):
    cupy = install(HostCupy(devices=2))
    q, k, v = arrays(cupy)
    with cupy.Device(1):
        offsets = moved(cupy, HOST["int64"])
    for check in (None, True, False):
        with pytest.raises(ArgumentTypeError, match="offsets_q: got an array in the memory of GPU"):
            cupyflash.attention_varlen(q, k, v, offsets, offsets, check=check)


@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_a_workspace_has_room_for_offsets(cupy, unchecked, kind):
    q, k, v = arrays(cupy)
    offsets = moved(cupy, HOST[kind])
    out, lse = cupyflash.attention_varlen(q, k, v, offsets, offsets, return_lse=True)
    size = cupyflash.workspace_size(q, k, v, offsets_q=offsets, offsets_k=offsets)
    workspace = cupy.ndarray((size,), np.uint8)
    begin = workspace.data.ptr
    for _ in range(2):
        cupy.launches.clear()
        cupyflash.attention_varlen_backward(
            out, q, k, v, out, lse, offsets, offsets, workspace=workspace
        )
        copy = int(checked(cupy.launches[0])["results"][0])
        assert copy == 0 if kind == "int64" else begin <= copy <= begin + size - 24
        unchecked()


def test_packed_queries_of_a_cache_are_converted_in_the_stream(cupy, monkeypatch):
    (q,) = draw(cupy, (4, 3, 16), count=1)
    k, v = draw(cupy, (2, 2, 64, 16), count=2)
    lengths = cupy.asarray(np.array([9, 20], np.int32))
    offsets = cupy.asarray(np.array([0, 1, 3], np.int32))
    for n in range(2):
        cupy.launches.clear()
        cupyflash.attention_cached(q, k, v, lengths, offsets_q=offsets, mask=masks.causal())
        it = checked(cupy.launches[0])
        assert cupy.launches[0].grid == 1
        assert it["reports"].tolist() == [0, 0]
        assert all(told(x)[0] == it["results"][0] for x in cupy.launches[1:])
        if n == 0:
            monkeypatch.setattr(validate, "with_options", lambda *_, **__: pytest.fail("checked"))


def test_the_parts_of_the_time_of_a_call_are_measured(cupy, monkeypatch):
    monkeypatch.setattr(gpu_host, "CALLS", 1)
    monkeypatch.setattr(tma, "encode", lambda *_: bytes(tma.BYTES))
    rows = gpu_host.table(cupy, 1)
    assert {len(times) for name, times in rows.items() if name.startswith("attention")} == {3}
    assert sum(len(times) == 1 for times in rows.values()) == 17
    early = [x.early for x in cupy.launches if x.by_driver and x.stream == 9000]
    assert (len(early), sum(early)) == (2 * 4 * 4, 4 * 4)  # each kernel alone, and together
