"""Recognised steps over a cache, without a GPU: what kernels are told, also of new rows."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from host_cupy import TOO_MANY_RESOURCES
from recognised import draw, fields

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, cache_update, quantization
from cupyflash.arrays import device_arrays
from cupyflash.gpu import driver, params, tma
from cupyflash.problem import cached as cached_calls
from cupyflash.problem.hadamard import matrix_of

MAPS = bytes(range(tma.BYTES)), bytes(range(tma.BYTES))[::-1]


@pytest.mark.parametrize("paged", [False, True])
def test_a_length_of_all_entries_is_told_anew_and_recognised(cupy, monkeypatch, paged):
    (q,) = draw(cupy, (2, 4, 1, 16), count=1)
    k, v = draw(cupy, (8, 2, 16, 16) if paged else (2, 2, 64, 16), count=2)
    table = {"table": cupy.asarray(np.arange(8).reshape(2, 4))} if paged else {}
    with monkeypatch.context() as patch:
        for n in (7, 8, np.int64(64), np.uint8(9), 0):
            cupyflash.attention_cached(q, k, v, n, **table)
            patch.setattr(
                cached_calls, "call", lambda *_: pytest.fail("the call was checked again")
            )
    told = [fields(x, params.params(0, 0, 0))["len_k"] for x in cupy.launches]
    assert told == [7, 8, 64, 9, 0]
    for n in (65, -1):
        with pytest.raises(ArgumentError, match=f"lengths: entry 0 is {n}; expected 0 to 64"):
            cupyflash.attention_cached(q, k, v, n, **table)
    with pytest.raises(ArgumentTypeError, match="lengths: got True"):
        cupyflash.attention_cached(q, k, v, True, **table)
    cupy.launches.clear()
    lengths = cupy.asarray(np.array([3, 4]))
    cupyflash.attention_cached(q, k, v, lengths, **table)  # which is another call
    assert {fields(x, params.params(0, 0, 0))["lengths"] for x in cupy.launches} == {
        lengths.data.ptr
    }


def test_values_in_keys_are_told_from_others_like_them(cupy, monkeypatch):
    """A kernel relies on it: it is not launched again where the values lie elsewhere."""
    monkeypatch.setattr(tma, "encode", lambda *_: bytes(128))
    (q,) = draw(cupy, (2, 16, 1, 576), np.float16, count=1)
    k, other = draw(cupy, (2, 1, 64, 576), np.float16, count=2)
    lengths = cupy.asarray(np.full(2, 7, np.int32))
    for held in (k, other, k):
        cupyflash.attention_cached(q, k, held[..., :512], lengths)
    kernels = [launch.kernel.partition("__")[0] for launch in cupy.launches]
    kernels = [name for name in kernels if name != "decode_combine"]
    assert kernels == ["decode_sm90", "decode_simt", "decode_sm90"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_cache_is_written_by_what_device_memory_holds_then(cupy, packed):
    lead, total = ((), 5) if packed else ((2,), 3)
    k_new, v_new = (cupy.asarray(np.zeros((*lead, 3, total, n), np.float16)) for n in (8, 16))
    k, v = (cupy.asarray(np.zeros((5, 3, 4, n), np.float16)) for n in (8, 16))
    q = cupy.asarray(np.zeros((*lead, 6, total, 8), np.float16))
    cos, sin = draw(cupy, (40, 2), count=2)
    # What reads them finds no such method of these arrays, and numbers that would be refused.
    lengths, table = cupy.asarray(np.array([-7, 10**9])), cupy.asarray(np.full((2, 6), 99, "i4"))
    positions = cupy.asarray(np.full((*lead, total), 10**12))
    offsets = cupy.asarray(np.array([4, 0, -9])) if packed else None
    rotary = cupyflash.Rotary(cos, sin, interleaved=True)
    out = cupyflash.append(
        k_new, v_new, k, v, lengths,
        table=table, offsets=offsets, q=q, rotary=rotary, positions=positions,
    )  # fmt: skip
    assert (out.shape, out.dtype, out.strides) == (q.shape, q.dtype, q.strides)
    (launch,) = cupy.launches
    assert launch.kernel == "append__f16"
    warps = (5 if packed else 6) * (3 + 3 + 6)
    assert (launch.threads, launch.grid) == (256, -(-warps // 8))
    told = fields(launch, params.rowwise("append"))
    arrays = {
        "k_new": k_new,
        "v_new": v_new,
        "k": k,
        "v": v,
        "q": q,
        "out": out,
        "cos": cos,
        "sin": sin,
    }
    for name, array in (
        arrays | {"lengths": lengths, "table": table, "positions": positions}
    ).items():
        assert told[name]["data"] == array.data.ptr, name
    assert told["offsets"] == (offsets.data.ptr if packed else 0)
    sizes = {
        "batch": 2,
        "rows": total,
        "capacity": 24,
        "pages": 5,
        "page_size": 4,
        "rotary_rows": 40,
    }
    sizes |= {
        "heads": 6,
        "heads_kv": 3,
        "columns": 8,
        "columns_v": 16,
        "pairs": 2,
        "interleaved": 1,
    }
    assert {name: told[name] for name in sizes} == sizes


def test_a_length_of_all_entries_is_no_part_of_a_write(cupy, monkeypatch):
    k, v = draw(cupy, (6, 3, 4, 8), count=2)
    rotary = cupyflash.Rotary(*draw(cupy, (10, 2), count=2))
    table = cupy.asarray(np.zeros((2, 3), np.int32))
    k_new, v_new = draw(cupy, (2, 3, 2, 8), count=2)

    def step(lengths, **more):
        cupyflash.append(k_new, v_new, k, v, lengths, table=table, **more)

    step(5)
    step(5, rotary=rotary)
    with monkeypatch.context() as patch:
        patch.setattr(cache_update, "checked_append", None)
        step(2)
        step(12)
        step(10, rotary=rotary)
    told = [fields(x, params.rowwise("append")) for x in cupy.launches]
    assert [int(x["length"]) for x in told] == [5, 5, 2, 12, 10]
    assert all(x["lengths"]["data"] == 0 for x in told)
    for lengths, more, words in (
        (1, {}, "lengths: entry 0 is 1 with 2 new rows"),
        (13, {}, "lengths: entry 0 is 13; expected 0 to 12"),
        (11, {"rotary": rotary}, "lengths: .*10"),
        (None, {}, "lengths: got None"),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
            step(lengths, **more)
    with pytest.raises(ArgumentTypeError, match="table: got an array in host memory"):
        cupyflash.append(k_new, v_new, k, v, 5, table=np.zeros((2, 3), np.int32))


def test_a_write_that_overlaps_is_checked_again(cupy):
    k, v, others, values = draw(cupy, (2, 3, 20, 8), count=4)
    lengths = cupy.asarray(np.full(2, 3, np.int64))
    cupyflash.append(others[:, :, :1], values[:, :, :1], k, v, lengths)
    with pytest.raises(ArgumentError, match="k and k_new share memory"):
        cupyflash.append(k[:, :, :1], v[:, :, :1], k, v, lengths)


def test_transforms_are_recognised_with_their_seeds(cupy, monkeypatch):
    (x,), (out,) = draw(cupy, (2, 5, 96), count=1), draw(cupy, (2, 5, 96), count=1)
    made = []
    for n, (seed, inverse, into) in enumerate([
        (3, False, None), (2**64 - 1, False, None), (4, True, None), (5, False, out),
        (6, False, out), (7, True, out),
    ]):  # fmt: skip
        with monkeypatch.context() as patch:
            if n in (1, 4):
                patch.setattr(quantization, "transform", None)
            made.append((seed, inverse, cupyflash.hadamard(x, seed, inverse=inverse, out=into)))
    for (seed, inverse, result), launch in zip(made, cupy.launches, strict=True):
        told = fields(launch, params.rowwise("hadamard"))
        assert (told["x"]["data"], told["out"]["data"]) == (x.data.ptr, result.data.ptr)
        assert (told["seed"], told["inverse"], told["rows"]) == (seed, inverse, 10)
        assert told["scale"] == 1 / np.sqrt(96)
        assert told["factor"][12:].tolist() == [0] * 24
        rows = np.array([[word >> n & 1 for n in range(12)] for word in told["factor"][:12]])
        small = 1 - 2 * rows.astype(int)
        assert (small == (matrix_of(12).T if inverse else matrix_of(12))).all()
    for wrong in (None, 1.0, True, cupy.asarray(np.uint64(3))):
        with pytest.raises(ArgumentTypeError, match="seed: got"):
            cupyflash.hadamard(x, wrong)


def test_codes_on_a_gpu_are_bytes(cupy):
    x = cupy.asarray(np.zeros((2, 5, 3, 96), np.float32)).transpose(0, 2, 1, 3)
    for n, (form, dtype, group) in enumerate([
        ("int8", np.int8, None), ("float8_e4m3fn", np.uint8, 96), ("int4", np.uint8, None),
    ]):  # fmt: skip
        codes, scale = cupyflash.quantize(x, form, group=group)
        columns = group or (32 if form == "int4" else 96)
        assert codes.shape == (2, 3, 5, 96 if n < 2 else 48)
        assert (codes.dtype, scale.dtype) == (dtype, np.float32)
        assert scale.shape == (2, 3, 5, 96 // columns)
        assert codes.strides[1] < codes.strides[2]  # the memory order of x
        told = fields(cupy.launches[n], params.rowwise("quantize"))
        for name, array in {"x": x, "codes": codes, "scale": scale}.items():
            assert told[name]["data"] == array.data.ptr
        assert (told["rows"], told["columns"]) == (scale.size, columns)
        assert told["format"] == [0, 1, 3][n]
    assert cupyflash.quantize(x[:, :0], "int8")[0].shape == (2, 0, 5, 96)
    assert len(cupy.launches) == 3


def test_a_step_without_queries_and_a_length_of_all(cupy):
    k_new, v_new = draw(cupy, (2, 3, 1, 8), count=2)
    k, v = draw(cupy, (2, 3, 20, 8), count=2)
    assert cupyflash.append(k_new, v_new, k, v, 7) is None
    told = fields(cupy.launches[0], params.rowwise("append"))
    for name in ("q", "out", "cos", "sin", "lengths", "table", "positions"):
        assert told[name]["data"] == 0, name
    assert (told["length"], told["capacity"], told["page_size"]) == (7, 20, 20)
    assert (told["heads"], told["pairs"]) == (0, 0)
    cupyflash.append(*draw(cupy, (0, 3, 1, 8), count=2), *draw(cupy, (0, 3, 9, 8), count=2), 7)
    assert len(cupy.launches) == 1


def test_rows_are_rotated_by_what_device_memory_holds_then(cupy):
    (x,), (cos, sin) = draw(cupy, (2, 4, 5, 16), count=1), draw(cupy, (9, 8), count=2)
    positions = cupy.asarray(np.full(5, 99, "i4"))
    out = cupyflash.rope(x, positions, cupyflash.Rotary(cos, sin), inverse=True)
    told = fields(cupy.launches[0], params.rowwise("rope"))
    for name, array in {"x": x, "out": out, "cos": cos, "sin": sin, "positions": positions}.items():
        assert told[name]["data"] == array.data.ptr, name
    assert told["positions"]["lead"].tolist() == [0, 0, 0, 0]
    assert (told["inverse"], told["interleaved"], told["pairs"]) == (1, 0, 8)


@pytest.mark.parametrize("name", ["lengths", "table", "positions"])
def test_everything_is_checked_where_that_is_asked_for(cupy, name, monkeypatch):
    monkeypatch.setattr(cached_calls, "CHECKS_ALL", True)
    monkeypatch.setattr(device_arrays, "read_back", lambda array: array.host.copy())
    k_new, v_new = draw(cupy, (2, 3, 1, 8), count=2)
    k, v = draw(cupy, (5, 3, 4, 8), count=2)
    cos, sin = draw(cupy, (40, 2), count=2)
    right = {
        "lengths": np.array([1, 8]),
        "table": np.array([[0, -1], [1, 4]]),
        "positions": np.array([[0], [39]]),
    }
    wrong = {"lengths": [0, 8], "table": [[0, -1], [1, 5]], "positions": [[0], [40]]}
    rotary = cupyflash.Rotary(cos, sin)

    def call(integers):
        keywords = {each: cupy.asarray(np.array(values)) for each, values in integers.items()}
        return cupyflash.append(k_new, v_new, k, v, rotary=rotary, **keywords)

    call(right)
    with pytest.raises(ArgumentError, match=f"{name}: "):
        call(right | {name: wrong[name]})


def test_what_entries_share_is_part_of_what_is_recognised(cupy, monkeypatch):
    checked, check = [], cached_calls.call
    monkeypatch.setattr(cached_calls, "call", lambda *x: checked.append(x[-1]) or check(*x))
    (q,) = draw(cupy, (2, 4, 1, 16), count=1)
    k, v = draw(cupy, (6, 2, 16, 16), count=2)
    table = cupy.asarray(np.zeros((2, 3), np.int32))
    lengths = cupy.asarray(np.full(2, 7, np.int32))

    def call(**options):
        return cupyflash.attention_cached(q, k, v, lengths, table=table, **options)

    for shared in (0, 0, 16, 16, 0, np.int64(16), np.int64(16)):
        call(shared=shared)
    assert checked == [0, 16, 16, 16]  # numbers of NumPy are looked at every time
    for shared, error in ((49, ArgumentError), (-1, ArgumentError), (True, ArgumentTypeError)):
        with pytest.raises(error, match="shared: got"):
            call(shared=shared)
    plan = cupyflash.plan_cached(q, k, v, lengths, table=table, shared=16)
    assert "each entry reads the first 16 positions by itself" in plan.reason


@pytest.mark.parametrize("driver", [12030, 12020])
def test_a_step_may_begin_while_the_one_before_ends(cupy, driver):
    """Where the driver keeps that in graphs; attention of whole sequences never does."""
    cupy.driver_version = driver
    (q,) = draw(cupy, (2, 4, 1, 16), count=1)
    k, v = draw(cupy, (2, 2, 513, 16), count=2)
    for n in range(3):
        with cupy.stream(7000 + n):
            cupyflash.attention_cached(q, k, v, 9)
    for _ in range(2):
        cupyflash.attention(q, k[:, :, :64], v[:, :, :64])
    first, steps, others = cupy.launches[:2], cupy.launches[2:6], cupy.launches[6:]
    assert [x.stream for x in steps] == [7001, 7001, 7002, 7002]
    for launch, like in zip(steps, first * 2, strict=True):
        assert (launch.by_driver, like.by_driver) == (True, False)
        assert launch.early == (driver >= 12030)
        assert (launch.kernel, *launch[2:5]) == (like.kernel, *like[2:5])
    assert not any(x.early for x in others)


def test_what_the_driver_is_told_lies_as_in_cuda_h(cupy):
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for overlaps in (False, True):
        sizes = {"grid": 7, "threads": 96, "shared_memory": 5000}
        kernels = [driver.Kernel("one", None, 1234, **sizes, template=bytes(20), maps=MAPS,
                                 overlaps=overlaps)] * 2  # fmt: skip
        buffer = driver.Buffer(kernels, driver.Functions(), driver.Told())
        driver.queue(0).launch(buffer.early, 4321)
        start = np.frombuffer(buffer.words, np.uint64).ctypes.data
        for n, (place, function, pointers) in enumerate(buffer.launches):
            assert function == 1234
            config = bindings.CUlaunchConfig(place)
            assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (7, 1, 1)
            assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (96, 1, 1)
            assert (config.sharedMemBytes, int(config.hStream)) == (5000, 4321)
            assert config.numAttrs == overlaps
            attributes = ctypes.c_uint64.from_address(place + 40).value
            attribute = bindings.CUlaunchAttribute(attributes)
            kinds = bindings.CUlaunchAttributeID
            assert attribute.id == kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            assert attribute.value.programmaticStreamSerializationAllowed == 1
            first = start + 8 * n * kernels[0].words
            listed = (ctypes.c_uint64 * 3).from_address(pointers)
            assert list(listed) == [first, first + 64, first + 64 + 128]
            held = tuple(ctypes.string_at(x, tma.BYTES) for x in listed[1:])
            assert (first % 64, held) == (0, MAPS)


def test_a_refused_launch_names_the_kernel(cupy):
    (q,) = draw(cupy, (2, 4, 1, 16), count=1)
    k, v = draw(cupy, (2, 2, 513, 16), count=2)
    cupyflash.attention_cached(q, k, v, 9)
    refusals = [None, TOO_MANY_RESOURCES]  # of the second launch
    cupy.during_launch = lambda: refusals.pop(0)
    with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx: .*OUT_OF_RESOURCES") as caught:
        cupyflash.attention_cached(q, k, v, 9)
    assert any("decode_combine" in note for note in caught.value.__notes__)
