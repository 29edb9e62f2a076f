"""Arrays of other libraries, taken by DLPack in place, or refused with words that help."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from placement import same_bits

from cupyflash import (
    ArgumentTypeError,
    attention,
    attention_backward,
    attention_varlen,
    attention_vjp,
    combine,
    lookup,
    masks,
    scores,
)
from cupyflash.arrays.interop import array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
UNSIGNED, BFLOAT = 1, 4  # DLDataTypeCode
CPU, CUDA, CUDA_HOST = 1, 2, 3  # DLDeviceType


def filled(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


class Exporter:
    """An array of another library: memory, and DLPack; NumPy's other protocols are not there."""

    def __init__(self, values: np.ndarray, device: int = CPU) -> None:
        self.values, self.device, self.exports = values, device, 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **keywords: Any) -> Any:
        assert self.device == CPU, "somebody reads device memory"
        self.exports += 1
        if self.values.dtype != BFLOAT16:
            return self.values.__dlpack__(**keywords)
        # NumPy exports no bfloat16: its bits are exported as integers, and the capsule's type code
        # is set to what a library that knows bfloat16 writes.
        capsule = self.values.view(np.uint16).__dlpack__()
        assert type_code(capsule)[:] == [UNSIGNED, 16]
        type_code(capsule)[0] = BFLOAT
        return capsule


class SilentExporter(Exporter):
    """One whose array cannot be exported."""

    def __dlpack__(self, **keywords: Any) -> Any:
        raise BufferError("it records gradients, detach it first")


class LostExporter(Exporter):
    """One that does not know where its array is."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise ValueError("a sparse array has no place")


def type_code(capsule: Any) -> Any:
    """Return the code and bits of a capsule's element type, as memory that can be written."""
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    return (ctypes.c_uint8 * 2).from_address(get_pointer(capsule, b"dltensor") + 20)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_arrays_are_taken_in_place(dtype, strided):
    values = filled(2, 5, 3, 8, dtype=dtype)
    if strided:
        values = values[:, ::-1, :, ::2].swapaxes(-3, -2)
    taken = array(Exporter(values), "q")
    assert taken.dtype == values.dtype
    assert taken.strides == values.strides
    assert same_bits(taken, values)
    values[1, 2, 0, 1] = 7  # they share memory
    assert taken[1, 2, 0, 1] == 7


def test_a_bfloat16_export_is_as_it_was_afterwards():
    capsules = []

    class Watched(Exporter):
        def __dlpack__(self, **keywords: Any) -> Any:
            capsules.append(super().__dlpack__(**keywords))
            return capsules[-1]

    taken = array(Watched(filled(3, 4, dtype=BFLOAT16)), "q")
    get_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
        ("PyCapsule_GetName", ctypes.pythonapi)
    )
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    name = get_name(capsules[-1])
    assert name == b"used_dltensor"  # NumPy is its owner now
    code = (ctypes.c_uint8 * 2).from_address(get_pointer(capsules[-1], name) + 20)
    assert code[:] == [BFLOAT, 16]
    assert taken.dtype == BFLOAT16


def test_memory_is_given_back():
    values = filled(64, 64, dtype=BFLOAT16)
    before = sys.getrefcount(values)
    for _ in range(10):
        exporter = Exporter(values)
        taken = array(exporter, "q")
        del taken, exporter
    assert sys.getrefcount(values) == before
    readable = filled(4, dtype=np.float32)
    before = sys.getrefcount(readable)
    array(Exporter(readable), "q")
    assert sys.getrefcount(readable) == before


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
def test_every_argument(dtype):
    q, k, v, do = (filled(2, h, n, 8, dtype=dtype) for h, n in ((4, 5), (2, 6), (2, 6), (4, 5)))
    bias, sink = filled(5, 6, dtype=dtype), filled(4, dtype=dtype)
    allowed = filled(5, 6) > -1
    out, lse = attention(q, k, v, mask=allowed, bias=bias, sink=sink, return_lse=True)
    grads = attention_backward(do, q, k, v, out, lse, dlse=lse, mask=allowed, bias=bias, sink=sink)
    other = {"mask": Exporter(allowed), "bias": Exporter(bias), "sink": Exporter(sink)}
    operands = [Exporter(x) for x in (q, k, v)]
    again, lse_again = attention(*operands, return_lse=True, **other)
    assert isinstance(again, np.ndarray)
    assert same_bits(again, out)
    assert same_bits(lse_again, lse)
    rows = [Exporter(x) for x in (do, out, lse)]
    grads_again = attention_backward(
        rows[0], *operands, rows[1], rows[2], dlse=Exporter(lse), **other
    )
    for mine, wanted in zip(grads_again, grads, strict=True):
        assert same_bits(mine, wanted)
    # Some arrays of NumPy and some of another library in one call are fine.
    assert same_bits(attention(q, Exporter(k), v, **(other | {"bias": bias})), out)


def test_other_functions():
    q, k = filled(2, 7, 8), filled(2, 9, 8)
    offsets = np.array([0, 3, 7]), np.array([0, 2, 9])
    expected, lse = attention_varlen(q, k, k, *offsets, return_lse=True)
    exported = [Exporter(x) for x in (q, k, k, *offsets)]
    assert same_bits(attention_varlen(*exported), expected)
    pairs = [(expected, lse), (expected, lse)]
    joined = combine([(Exporter(out), Exporter(row)) for out, row in pairs])
    assert same_bits(joined[0], combine(pairs)[0])
    out, vjp = attention_vjp(*(Exporter(x) for x in (q, k, k)))
    assert same_bits(vjp(Exporter(out)).dq, attention_vjp(q, k, k)[1](out).dq)


def test_masks_and_scores_take_them():
    q, lengths, ids = filled(3, 1, 6, 4), np.array([1, 4, 6]), np.array([0, 0, 1, 1, 1, 2])
    table, slopes = filled(5), filled(1)
    documents = lookup(Exporter(ids))
    for mine, theirs in (
        ({"mask": masks.lengths(Exporter(lengths))}, {"mask": masks.lengths(lengths)}),
        ({"mask": masks.causal(Exporter(lengths))}, {"mask": masks.causal(lengths)}),
        ({"mask": masks.segments(Exporter(ids))}, {"mask": masks.segments(ids)}),
        ({"mask": masks.dense(Exporter(np.tri(6) > 0))}, {"mask": masks.dense(np.tri(6) > 0)}),
        (
            {"mask": masks.mask(lambda b, h, i, j: documents[i] == documents[j])},
            {"mask": masks.segments(ids)},
        ),
        (
            {"score_mod": scores.relative_bias(Exporter(table))},
            {"score_mod": scores.relative_bias(table)},
        ),
        ({"score_mod": scores.alibi(Exporter(slopes))}, {"score_mod": scores.alibi(slopes)}),
    ):
        assert same_bits(attention(q, q, q, **mine), attention(q, q, q, **theirs))


def test_arrays_in_device_memory():
    x = filled(2, 5, 8)
    for device in (CUDA, 7, 10, 14):
        exporter = Exporter(x, device)
        with pytest.raises(ArgumentTypeError, match="k: got Exporter in device memory") as caught:
            attention(x, exporter, x)
        assert f"device type {device}" in str(caught.value)
        assert "host memory" in str(caught.value)
        assert "copy it to the CPU" in str(caught.value).replace("Copy", "copy")
        if device != CUDA:
            assert exporter.exports == 0  # nobody has touched it


def test_pinned_memory_is_host_memory():
    class Pinned(Exporter):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (CUDA_HOST, 0)

    x = filled(2, 5, 8)
    assert same_bits(array(Pinned(x), "q"), x)


@pytest.mark.parametrize(
    ("exporter", "words"),
    [
        (Exporter(np.ones((2, 5, 8), np.complex64)), "dtype complex64"),
        (Exporter(np.ones((2, 5, 8), np.int16)), "dtype int16"),
        (SilentExporter(np.ones((2, 5, 8), np.float32)), "it records gradients, detach it first"),
        (LostExporter(np.ones((2, 5, 8), np.float32)), "a sparse array has no place"),
    ],
)
def test_what_cannot_be_taken(exporter, words):
    x = filled(2, 5, 8)
    with pytest.raises(ArgumentTypeError) as caught:
        attention(x, x, exporter)
    message = str(caught.value)
    assert message.startswith("v: ")
    assert words in message
    assert "expected float16, bfloat16" in message


def test_an_unknown_type_code():
    class Float8(Exporter):
        def __dlpack__(self, **keywords: Any) -> Any:
            capsule = self.values.__dlpack__()
            type_code(capsule)[0] = 14  # kDLFloat8_e8m0fnu
            return capsule

    x = filled(2, 5, 8)
    values = np.zeros((2, 5, 8), np.uint8)
    with pytest.raises(ArgumentTypeError, match=r"q: got Float8.*8-bit elements of type code 14"):
        attention(Float8(values), x, x)


def test_bfloat16_without_ml_dtypes(monkeypatch):
    exporter = Exporter(filled(2, 5, 8, dtype=BFLOAT16))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ArgumentTypeError, match=r"q: got bfloat16, .*pip install ml_dtypes"):
        attention(exporter, exporter, exporter)


def test_results_are_written_to_numpy_arrays_only():
    x = filled(2, 5, 8)
    target = Exporter(np.full((2, 5, 8), 3, np.float32))
    with pytest.raises(ArgumentTypeError, match=r"out: got Exporter.*np\.from_dlpack"):
        attention(x, x, x, out=target)
    assert (target.values == 3).all()


# PyTorch, where it is installed


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip(
        "torch", reason="PyTorch is not installed: its tensors are not tried"
    )


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors(torch, name):
    dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
    q, k, v = (filled(2, n, h, 8, dtype=np.float64) for n, h in ((5, 4), (6, 2), (6, 2)))
    tensors = [torch.from_numpy(x).to(getattr(torch, name)).transpose(1, 2) for x in (q, k, v)]
    arrays = [x.astype(dtype).swapaxes(1, 2) for x in (q, k, v)]
    out, lse, vjp = attention_vjp(*tensors, mask=torch.ones(5, 6).tril() > 0, return_lse=True)
    expected = attention_vjp(*arrays, mask=np.tri(5, 6) > 0, return_lse=True)
    assert out.swapaxes(1, 2).flags.c_contiguous  # the memory order of q
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])
    for mine, wanted in zip(vjp(tensors[0])[:3], expected[2](arrays[0])[:3], strict=True):
        assert same_bits(mine, wanted)


def test_torch_outputs(torch):
    x = filled(2, 5, 8)
    target = torch.zeros(2, 5, 8)
    with pytest.raises(ArgumentTypeError, match="out: got Tensor"):
        attention(x, x, x, out=target)
    attention(x, x, x, out=np.from_dlpack(target))
    assert same_bits(target.numpy(), attention(x, x, x))


def test_torch_tensors_that_cannot_be_taken(torch):
    x = filled(2, 5, 8)
    recorded = torch.ones(2, 5, 8, requires_grad=True)
    with pytest.raises(ArgumentTypeError, match=r"q: got a tensor .*detach"):
        attention(recorded, x, x)
    nowhere = torch.ones(2, 5, 8, device="meta")
    with pytest.raises(ArgumentTypeError, match="k: got Tensor"):
        attention(x, nowhere, x)
    small = torch.ones(2, 5, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ArgumentTypeError, match=r"v: .* float8_e4m3fn"):
        attention(x, x, small)
