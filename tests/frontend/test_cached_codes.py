"""What calls over caches of codes refuse, with the remedy; and what the device is told."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from recognised import draw, fields

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, append, attention_cached
from cupyflash.gpu import params
from cupyflash.problem import cached as cached_calls

A, T = ArgumentError, ArgumentTypeError
F32 = np.dtype(np.float32)


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def read(**changed):
    named = {
        "q": ones(2, 4, 1, 64),
        "k": ones(2, 2, 10, 64, dtype=np.int8),
        "v": ones(2, 2, 10, 32, dtype=np.int8),
        "lengths": 10,
        "k_scale": ones(2, 2, 10, 1),
        "v_scale": ones(2, 2, 10, 1),
    } | changed
    arrays = [named.pop(x) for x in ("q", "k", "v", "lengths")]
    return attention_cached(*arrays, **named)


def read_int4(**changed):
    codes = {"k": ones(2, 2, 10, 32, dtype=np.uint8), "v": ones(2, 2, 10, 16, dtype=np.uint8)}
    return read(**({"kv_dtype": "int4"} | codes | changed))


def write(**changed):
    names = "k_new", "v_new", "k", "v", "lengths"
    named = {
        "k_new": ones(2, 2, 3, 64),
        "v_new": ones(2, 2, 3, 32),
        "k": np.zeros((2, 2, 10, 64), np.int8),
        "v": np.zeros((2, 2, 10, 32), np.int8),
        "lengths": 3,
        "k_scale": ones(2, 2, 10, 1),
        "v_scale": ones(2, 2, 10, 1),
    } | changed
    arrays = [named.pop(x) for x in names]
    return append(*arrays, **named)


BYTES = {"k": ones(2, 2, 10, 64, dtype=np.uint8), "v": ones(2, 2, 10, 32, dtype=np.uint8)}
FLOATS = {"k": ones(2, 2, 10, 64), "v": ones(2, 2, 10, 32)}
NO_SCALES = {"k_scale": None, "v_scale": None}
FP8 = ones(2, 2, 10, 32).astype(ml_dtypes.float8_e4m3fn)
SHARED = np.zeros((2, 2, 10, 64), np.int8)
REFUSED = {
    "codes without scales": (NO_SCALES, A, ("k_scale: got None with k of int8", "quantize")),
    "one scale": ({"v_scale": None}, A, ("v_scale: got None with v of int8", "(..., 1)")),
    "scales without codes": (
        FLOATS, A, ("k_scale: got scales with k of float32", "Leave k_scale out", "quantize"),
    ),
    "a scale of values without codes": (
        FLOATS | {"k_scale": None}, A, ("v_scale: got scales with v of float32",),
    ),
    "a type of codes without codes": (
        FLOATS | NO_SCALES | {"kv_dtype": "int8"}, A,
        ("kv_dtype: got 'int8' with k of float32", "Leave kv_dtype out"),
    ),
    "bytes without a type": (
        BYTES, A, ("kv_dtype: got None with k of uint8", "float8_e4m3fn", "Say kv_dtype='int8'"),
    ),
    "a type that is not the array's": (
        {"kv_dtype": "float8_e5m2"}, T,
        ("kv_dtype: got float8_e5m2 with k of int8", "view(np.uint8)"),
    ),
    "no type of codes": ({"kv_dtype": "float16"}, T, ("kv_dtype: got float16", "int8, float8")),
    "codes of two types": ({"v": FP8}, T, ("got k int8, v float8_e4m3fn", "one type")),
    "codes and numbers": ({"v": FLOATS["v"]}, T, ("v: got float32 with k of int8", "in both")),
    "numbers and codes": ({"k": FLOATS["k"]}, T, ("k: got float32 with v of int8", "in both")),
    "scales of another type": (
        {"k_scale": ones(2, 2, 10, 1, dtype=np.float16)}, T,
        ("k_scale: got dtype float16", "float32 that broadcasts to (2, 2, 10)", "astype"),
    ),
    "a scale that is a number": ({"k_scale": 0.5}, T, ("k_scale: got float", "NumPy array")),
    "scales of other heads": (
        {"v_scale": ones(4, 1, 1)}, A, ("v_scale: got shape (4, 1, 1) with v of", "each head"),
    ),
    "scales of heads without axes": (
        {"k_scale": ones(2)}, A, ("k_scale: got shape (2,)", "a last axis of 1", "scale[:, None"),
    ),
    "scales of too many axes": (
        {"k_scale": ones(1, 2, 2, 10, 1)}, A, ("k_scale: got shape (1, 2, 2, 10, 1)",),
    ),
    "groups of int8": ({"k_scale": ones(2, 2, 10, 2)}, A, ("k_scale: got shape (2, 2, 10, 2)",)),
}  # fmt: skip
OF_READING = {
    "columns": (read, {"q": ones(2, 4, 1, 32)}, A, ("k: got shape (2, 2, 10, 64) with q",)),
    "queries in float64": (
        read, {"q": ones(2, 4, 1, 64, dtype=np.float64)}, T,
        ("q: got float64 with a cache of int8", "float16, bfloat16 or float32", "astype"),
    ),
    "columns of int4": (
        read_int4, {"q": ones(2, 4, 1, 32)}, A,
        ("k: got shape (2, 2, 10, 32) of int4", "two codes in a byte", "32 / 2 bytes"),
    ),
    "groups of int4": (
        read_int4, {"v_scale": ones(2, 2, 10, 2)}, A,
        ("v_scale: got shape (2, 2, 10, 2)", "a last axis of 1:"),
    ),
    "more groups of int4": (
        read_int4, {"k_scale": ones(2, 2, 10, 4)}, A, ("a last axis of 1 or 2",),
    ),
}  # fmt: skip
OF_WRITING = {
    "new rows in float64": (
        {name: ones(2, 2, 3, n, dtype=np.float64) for name, n in (("k_new", 64), ("v_new", 32))}, T,
        ("k_new: got float64 with a cache of int8",),
    ),
    "new rows of codes": (
        {"k_new": ones(2, 2, 3, 64, dtype=np.int8)}, T, ("k_new: got dtype int8", "float32"),
    ),
    "scales that rows share": (
        {"k_scale": ones(2, 1, 1)}, A,
        ("k_scale: got shape (2, 1, 1)", "expected (2, 2, 10, 1)", "every row"),
    ),
    "scales at one address": (
        {"v_scale": np.broadcast_to(ones(1), (2, 2, 10, 1))}, A, ("v_scale: got",),
    ),
    "scales that are the keys'": (
        dict.fromkeys(("k_scale", "v_scale"), ones(2, 2, 10, 1)), A,
        ("v_scale and k_scale share memory",),
    ),
    "values in keys with other scales": (
        {"k": SHARED, "v": SHARED[..., :32], "v_new": None}, A,
        ("v_scale: got a separate array", "v_scale=k_scale"),
    ),
}  # fmt: skip


def refused(function, changed, error, words):
    with pytest.raises(error) as caught:
        function(**changed)
    for word in words:
        assert word in str(caught.value), word


@pytest.mark.parametrize("function", [read, write])
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_call_takes(function, name):
    refused(function, *REFUSED[name])


@pytest.mark.parametrize("name", OF_READING)
def test_what_attention_does_not_take(name):
    refused(*OF_READING[name])


@pytest.mark.parametrize("name", OF_WRITING)
def test_what_append_does_not_take(name):
    changed, *rest = OF_WRITING[name]
    if "v_new" in changed and changed["v_new"] is None:
        k_new = ones(2, 2, 3, 64)
        changed = changed | {"k_new": k_new, "v_new": k_new[..., :32]}
    refused(write, changed, *rest)


def test_the_workspace_of_a_cache_of_codes():
    call = {"k_scale": ones(1), "v_scale": ones(1), "kv_dtype": "int8"}
    assert cupyflash.workspace_size_cached(ones(2, 4, 1, 64), *BYTES.values(), **call) == 0
    with pytest.raises(ArgumentError, match="kv_dtype: got None"):
        cupyflash.workspace_size_cached(ones(2, 4, 1, 64), *BYTES.values())


def test_a_step_is_recognised_by_what_its_bytes_are(cupy, monkeypatch):
    """The same bytes as codes of another type are another call."""
    (q,) = draw(cupy, (2, 4, 1, 64), count=1)
    k, v = (cupy.asarray(np.zeros((6, 2, 16, 64), np.uint8)) for _ in range(2))
    scales = [cupy.asarray(np.zeros((6, 2, 16, 1), np.float32)) for _ in range(2)]
    table, lengths = cupy.asarray(np.zeros((2, 3), "i4")), cupy.asarray(np.full(2, 7, "i4"))

    def step(form):
        named = {"k_scale": scales[0], "v_scale": scales[1], "kv_dtype": form}
        cupyflash.attention_cached(q, k, v, lengths, table=table, **named)

    step("int8")
    step("float8_e4m3fn")
    checked = cached_calls.call
    monkeypatch.setattr(cached_calls, "call", None)
    step("int8")
    monkeypatch.setattr(cached_calls, "call", checked)
    kernels = [x.kernel for x in cupy.launches[::2]]
    assert ["int8" in x for x in kernels] == [True, False, True]
    assert "float8_e4m3fn" in kernels[1]
    found = fields(cupy.launches[4], params.params(0, 0, 0))
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        assert found[name]["data"] == scale.data.ptr
        assert found[f"{name}_page"] == 32
        assert (found[name]["head"], found[name]["row"], found[name]["col"]) == (16, 1, 0)


def test_new_codes_are_recognised_and_written_where_they_belong(cupy, monkeypatch):
    k_new, v_new = (cupy.asarray(np.zeros((2, 3, 1, n), np.float16)) for n in (8, 16))
    k, v = (cupy.asarray(np.zeros((2, 3, 4, n), np.uint8)) for n in (8, 16))
    scales = [cupy.asarray(np.zeros((2, 3, 4, 1), np.float32)) for _ in range(2)]
    named = {"k_scale": scales[0], "v_scale": scales[1], "kv_dtype": "int8"}
    lengths = cupy.asarray(np.array([1, 2]))
    for n in range(2):
        cupyflash.append(k_new, v_new, k, v, lengths, **named)
        if n == 0:
            monkeypatch.setattr(cupyflash.cache_update, "checked_append", None)
    print([(x.kernel, x.by_driver) for x in cupy.launches])
    assert [x.by_driver for x in cupy.launches] == [False, True]
    found = fields(cupy.launches[1], params.append())
    assert found["k_scale"]["data"] == scales[0].data.ptr
    assert found["v_scale"]["lead"][-1] == 12
    assert (found["columns"], found["columns_v"]) == (8, 16)
