"""What calls over caches of codes refuse, with the remedy; and what the device is told."""

from __future__ import annotations

import re

import numpy as np
import pytest
from recognised import draw, fields

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, append, attention_cached
from cupyflash.arrays import device_arrays
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
    "bytes of two codes without a type": (
        {name: np.zeros((2, 2, 10, 32), np.uint8) for name in "kv"}, A, ("Say kv_dtype='int4'",),
    ),
    "a type that is not the array's": (
        {"kv_dtype": "float8_e5m2"}, T,
        ("kv_dtype: got float8_e5m2 with k of int8", "view(np.uint8)"),
    ),
    "no type of codes": ({"kv_dtype": "float16"}, T, ("kv_dtype: got float16", "int8, float8")),
    "scales of numbers beside codes": (
        {"v": FLOATS["v"]}, A, ("v_scale: got scales with v of float32", "Leave v_scale out"),
    ),
    "numbers of another type beside codes": (
        {"k": FLOATS["k"].astype(np.float16), "k_scale": None}, T, ("k float16", "one dtype"),
    ),
    "one type of codes and of numbers": (
        {"k": FLOATS["k"], "k_scale": None, "v": BYTES["v"], "kv_dtype": "int8"}, A,
        ("kv_dtype: got 'int8' with k of float32", "expected None for k", "(None, 'int8')"),
    ),
    "bytes beside a type": (
        {"v": BYTES["v"]}, A, ("kv_dtype: got None with v of uint8", "Say kv_dtype=(None, 'int4')"),
    ),
    "three types": (
        {"kv_dtype": ("int8", "int8", None)}, A, ("expected one type, or two", "('int8', 'int4')"),
    ),
    "scales that are text": ({"k_scale": "a"}, T, ("k_scale: got 'a'; expected a number",)),
    "complex scales": ({"v_scale": 1j}, T, ("v_scale: got 1j; expected a number", "quantize")),
    "scales of another type": (
        {"k_scale": ones(2, 2, 10, 1, dtype=np.float16)}, T,
        ("k_scale: got dtype float16", "float32 that broadcasts to (2, 2, 10)", "np.asarray("),
    ),
    "a scale that is true": ({"k_scale": True}, T, ("k_scale: got bool", "expected a number")),
    "a scale that float32 cannot hold": ({"v_scale": 1e-60}, A, ("v_scale: got 1e-60", "1.2e-38")),
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
    "scales that are numbers": (
        {"k_scale": 0.5}, A,
        ("k_scale: got 0.5", "every row", "np.empty((2, 2, 10, 1), np.float32)"),
    ),
    "values in keys as codes of another type": (
        {"k": SHARED, "v": SHARED[..., :32].view(np.uint8), "v_new": None,
         "kv_dtype": (None, "float8_e5m2")}, A,
        ("kv_dtype: got int8 keys and float8_e5m2 values", "v is the first columns of k"),
    ),
    "new rows of codes": (
        {"k_new": ones(2, 2, 3, 64, dtype=np.int8)}, T, ("k_new: got dtype int8", "float32"),
    ),
    "scales that rows share": (
        {"k_scale": ones(2, 1, 1)}, A,
        ("k_scale: got shape (2, 1, 1)", "of shape (2, 2, 10, 1)", "every row"),
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


def remedied(function, named, wanted):
    """Do what each error says, as it says it, until there is none; return how many there were.

    `wanted` maps how a remedy begins to how it is applied.
    """
    for count in range(4):
        try:
            function(**named)
        except (ArgumentError, ArgumentTypeError) as error:
            message = str(error)
            found = next(re.search(x, message) for x in wanted if re.search(x, message))
            name, code = found.group("name"), found.group("code")
            named = named | {name: eval(code, {"np": np, name: named.get(name)})}
        else:
            return count
    raise AssertionError(message)


SAID = r"Say (?P<name>kv_dtype)=(?P<code>\(.*?\)|'\w+')[,.]"
MADE = r"^(?P<name>\w+): .* (?:Convert it with|Pass) (?P<code>np\.(?:asarray|empty)\(.*?float32\))"
REMEDIES = {
    "a list": (read, {"k_scale": [[0.5]]}),
    "float64": (read, {"k_scale": np.full((1, 1), 0.5)}),
    "true": (read, {"k_scale": True}),
    "a number to write": (write, {"k_scale": 0.5}),
    "an array of one number to write": (write, {"k_scale": np.full((), 0.5, np.float32)}),
    "scales to write that rows share": (write, {"v_scale": ones(2, 1, 1)}),
    "bytes": (read, BYTES),
    "bytes beside codes": (read, {"v": BYTES["v"]}),
    "bytes beside numbers": (read, {"k": FLOATS["k"], "k_scale": None, "v": BYTES["v"]}),
    "numbers with the type of bytes": (
        read, {"k": FLOATS["k"], "k_scale": None, "v": BYTES["v"], "kv_dtype": "float8_e5m2"},
    ),
    "codes with the type of bytes": (read, {"v": BYTES["v"], "kv_dtype": "float8_e5m2"}),
    "numbers with a type": (
        read, {"k": BYTES["k"], "v": FLOATS["v"], "v_scale": None, "kv_dtype": ("int8", "int8")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_that_is_applied_raises_no_other_error(name):
    function, changed = REMEDIES[name]
    assert remedied(function, changed, [SAID, MADE]) == 1


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

    forms = ["int8", "float8_e4m3fn", ("int8", "float8_e4m3fn"), ("float8_e4m3fn", "int8")]
    for form in forms:
        step(form)
    checked = cached_calls.call
    monkeypatch.setattr(cached_calls, "call", None)
    for form in forms:
        step(form)
    monkeypatch.setattr(cached_calls, "call", checked)
    launches = [x for x in cupy.launches if "decode_combine" not in x.kernel]
    kernels = [x.kernel for x in launches]
    assert len(set(kernels)) == 4
    assert kernels[:4] == kernels[4:]
    assert "keys_int8_values_float8_e4m3fn" in kernels[2]
    assert "keys_float8_e4m3fn_values_int8" in kernels[3]
    found = fields(launches[2], params.params(0, 0, 0))
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        assert found[name]["data"] == scale.data.ptr
        assert found[f"{name}_page"] == 32
        assert (found[name]["head"], found[name]["row"], found[name]["col"]) == (16, 1, 0)


def test_keys_or_values_may_be_numbers_on_a_gpu(cupy, monkeypatch):
    """Then they have no scales, and their strides count elements."""
    (q,) = draw(cupy, (2, 4, 1, 64), count=1)
    numbers = cupy.asarray(np.zeros((6, 2, 16, 64), q.dtype))
    codes = cupy.asarray(np.zeros((6, 2, 16, 64), np.int8))
    scale = cupy.asarray(np.zeros((6, 2, 16, 1), np.float32))
    table, lengths = cupy.asarray(np.zeros((2, 3), "i4")), cupy.asarray(np.full(2, 7, "i4"))
    for n in range(2):
        cupyflash.attention_cached(q, numbers, codes, lengths, table=table, v_scale=scale)
        cupyflash.attention_cached(q, codes, numbers, lengths, table=table, k_scale=scale)
        if n == 0:
            monkeypatch.setattr(cached_calls, "call", None)
    launches = [x for x in cupy.launches if "decode_combine" not in x.kernel]
    assert len(launches) == 4
    for launch, coded, plain in zip(launches, "vkvk", "kvkv", strict=True):
        found = fields(launch, params.params(0, 0, 0))
        assert f"{'keys' if coded == 'k' else 'values'}_int8" in launch.kernel
        assert found[f"{coded}_scale"]["data"] == scale.data.ptr
        assert found[f"{plain}_scale"]["data"] == 0
        assert found[coded]["data"] == codes.data.ptr
        assert found[plain]["data"] == numbers.data.ptr
        assert found["k_page"] == found["v_page"] == 2048


def test_a_scale_that_is_a_number_is_copied_to_a_gpu_once(cupy, monkeypatch):
    (q,) = draw(cupy, (2, 4, 1, 64), count=1)
    codes = cupy.asarray(np.zeros((2, 2, 16, 64), np.int8))
    lengths, checked = cupy.asarray(np.full(2, 7, "i4")), cached_calls.call
    for n, number in enumerate((0.0217, np.float32(0.0217), np.array(0.0217))):
        cupyflash.attention_cached(q, codes, codes, lengths, k_scale=number, v_scale=0.0329)
        if n == 0:
            monkeypatch.setattr(cached_calls, "call", None)
    launches = [x for x in cupy.launches if "decode_combine" not in x.kernel]
    found = [fields(x, params.params(0, 0, 0)) for x in launches]
    for name in ("k_scale", "v_scale"):
        assert len({x[name]["data"] for x in found}) == 1
    assert found[0]["k_scale"]["data"] != found[0]["v_scale"]["data"]
    monkeypatch.setattr(cached_calls, "call", checked)
    monkeypatch.setattr(device_arrays, "is_capturing", lambda: True)
    cupyflash.attention_cached(q, codes, codes, lengths, k_scale=0.0217, v_scale=0.0329)
    with pytest.raises(ArgumentError, match=r"k_scale: got a number that .* cupy.asarray\(\[\[0.7"):
        cupyflash.attention_cached(q, codes, codes, lengths, k_scale=0.7501, v_scale=0.0329)


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
    found = fields(cupy.launches[1], params.rowwise("append"))
    assert found["k_scale"]["data"] == scales[0].data.ptr
    assert found["v_scale"]["lead"][-1] == 12
    assert (found["columns"], found["columns_v"]) == (8, 16)
