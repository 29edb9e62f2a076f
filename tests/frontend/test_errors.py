"""Bad input: the error names the argument, what it got and expected, and the remedy.

Every case also shows that every array is bit for bit as it was.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import (
    ArgumentError,
    ArgumentTypeError,
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_vjp,
    combine,
    lookup,
    masks,
    plan,
    scores,
    workspace_size,
)

B, H, HKV, LQ, LK, D, DV = 2, 4, 2, 5, 6, 8, 3
F32 = np.float32


class FakeCuPyArray:
    """What a CuPy array shows of itself before anybody touches the device."""

    def __init__(self, shape: tuple[int, ...] = (B, H, LQ, D), dtype: Any = F32) -> None:
        self.shape, self.dtype, self.ndim = shape, np.dtype(dtype), len(shape)
        like = np.empty(shape, dtype)
        self.strides, self.size, self.itemsize = like.strides, like.size, like.itemsize
        self.data, self.device = SimpleNamespace(ptr=1 << 32, device_id=0), SimpleNamespace(id=0)


@pytest.fixture(autouse=True)
def fake_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=FakeCuPyArray))


def filled(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def operands() -> dict[str, Any]:
    return {"q": filled(B, H, LQ, D), "k": filled(B, HKV, LK, D), "v": filled(B, HKV, LK, DV)}


def packed() -> dict[str, Any]:
    return {
        "q": filled(H, 7, D), "k": filled(HKV, 9, D), "v": filled(HKV, 9, DV),
        "offsets_q": np.array([0, 3, 7]), "offsets_k": np.array([0, 4, 9]),
    }  # fmt: skip


def backward_operands() -> dict[str, Any]:
    made = operands()
    out, lse = filled(B, H, LQ, DV), filled(B, H, LQ)
    return {"do": filled(B, H, LQ, DV), **made, "out": out, "lse": lse}


class Case(NamedTuple):
    """A call that is refused, and words that its message has."""

    change: Any  # keywords that replace those of the good call, or a function of them
    error: type[Exception]
    words: tuple[str, ...]


def case(error: type[Exception], *words: str, change: Any = None, **changes: Any) -> Case:
    return Case(change or changes, error, words)


T, V = ArgumentTypeError, ArgumentError
x = operands()
BOOL = np.ones((LQ, LK), np.bool_)
TABLE = lookup(np.ones(4, F32))

FORWARD = {
    # kinds of array
    "cupy k": case(T, "k: got an array in the memory of GPU 0", "cupy.asnumpy",
                   k=FakeCuPyArray((B, HKV, LK, D))),
    "cupy q": case(T, "k: got an array in host memory", "q is in the memory of GPU 0", "asarray",
                   q=FakeCuPyArray()),
    "cupy mask": case(T, "of mask: got an array in the memory of GPU 0",
                      mask=FakeCuPyArray((LQ, LK), np.bool_)),
    "cupy bias": case(T, "bias: got an array in the memory of GPU 0", bias=FakeCuPyArray((LQ, LK))),
    "list": case(T, "v: got list", "np.asarray", v=x["v"].tolist()),
    "None": case(T, "k: got NoneType", "expected a NumPy array", k=None),
    "scalar": case(T, "q: got float", q=1.0),
    "masked array": case(T, "q: got a masked array", ".data", "mask=", q=np.ma.array(x["q"])),
    "matrix": case(T, "k: got a numpy.matrix", "np.asarray", k=x["k"][0, 0].view(np.matrix)),
    # dtypes
    "int": case(T, "q: got dtype int64", "float32", ".astype", q=x["q"].astype(int)),
    "complex": case(T, "v: got dtype complex64", "float32", v=x["v"].astype(np.complex64)),
    "long double": case(T, "v: got dtype", "float64", v=x["v"].astype(np.longdouble)),
    "object": case(T, "q: got dtype object", q=x["q"].astype(object)),
    "other small float": case(T, "k: got dtype float8", k=x["k"].astype(ml_dtypes.float8_e4m3fn)),
    "foreign byte order": case(T, "k: got dtype >f4", "byte order", k=x["k"].astype(">f4")),
    "two dtypes": case(T, "q float32, k float64, v float32", "one dtype", k=x["k"].astype(float)),
    "bfloat16 and float16": case(T, "bfloat16", "float16", "one dtype", change=lambda a: {
        n: a[n].astype(ml_dtypes.bfloat16 if n == "q" else np.float16) for n in "qkv"}),
    # shapes
    "one axis": case(V, "q: got shape (8,)", "(..., H, L, D)", q=filled(D)),
    "no axis": case(V, "v: got shape ()", v=np.ones((), F32)),
    "NumPy scalar": case(T, "v: got a scalar of float32", v=F32(1)),
    "head sizes": case(V, "k: got shape (2, 2, 6, 7)", "7 is not 8", k=filled(B, 2, LK, 7)),
    "keys and values": case(V, "v: got shape (2, 2, 4, 3)", "4 is not 6", v=filled(B, 2, 4, DV)),
    "heads of v": case(V, "v: got shape (2, 4, 6, 3)", "4 is not 2", v=filled(B, H, LK, DV)),
    "not a multiple": case(V, "q: got shape (2, 3, 5, 8)", "swapaxes", q=filled(B, 3, LQ, D)),
    "one query head": case(V, "1 query heads for 2", "multiple", q=filled(B, 1, LQ, D)),
    "matrix q, two heads": case(V, "q: got shape (5, 8)", "multiple", q=filled(LQ, D)),
    "no kv heads": case(V, "4 query heads for 0", change=lambda a: {
        "k": a["k"][:, :0], "v": a["v"][:, :0]}),
    "no query heads": case(V, "0 query heads for 2", q=filled(B, 0, LQ, D)),
    "batch": case(V, "q, k, v: got leading axes", "(3,)", "do not broadcast", "or 1", q=filled(3,
        H, LQ, D)),
    "batch of v": case(V, "got leading axes (2,), (2,) and (5, 3)", v=filled(5, 3, HKV, LK, DV)),
    "D of 0": case(V, "q: its last axis", "length 0", "1 to 512", change=lambda a: {
        "q": a["q"][..., :0], "k": a["k"][..., :0]}),
    "D of 513": case(V, "q: its last axis", "length 513", "1 to 512", change=lambda a: {
        "q": filled(1, 1, 513), "k": filled(1, 1, 513), "v": filled(1, 1, 4)}),
    "Dv of 0": case(V, "v: its last axis", "length 0", v=filled(B, HKV, LK, 0)),
    "Dv of 513": case(V, "v: its last axis", "length 513", v=filled(B, HKV, LK, 513)),
    # options
    "scale NaN": case(V, "scale: got nan", "finite", scale=float("nan")),
    "scale inf": case(V, "scale: got -inf", "finite", scale=-np.inf),
    "scale beyond float32": case(V, "scale: got 1e+39", "float32", scale=1e39),
    "scale beyond floats": case(V, "scale", "larger than every float", scale=10**400),
    "scale str": case(T, "scale: got str", "number", scale="auto"),
    "scale bool": case(T, "scale: got bool", scale=True),
    "scale array": case(T, "scale: got ndarray", scale=np.ones(H, F32)),
    "p of 1": case(V, "dropout: got 1.0", "less than 1", dropout=1, seed=1),
    "p negative": case(V, "dropout: got -0.1", dropout=-0.1, seed=1),
    "p NaN": case(V, "dropout: got nan", dropout=float("nan"), seed=1),
    "p rounds to 1": case(V, "dropout: got 0.99999", "rounds to 1", dropout=1 - 2**-17, seed=1),
    "p without seed": case(V, "dropout: got 0.5 without a seed", "expected seed=", dropout=0.5),
    "p None": case(T, "dropout: got NoneType", dropout=None),
    "seed negative": case(V, "seed: got -1", "2**64 - 1", seed=-1),
    "seed too large": case(V, f"seed: got {2**64}", "2**64 - 1", dropout=0.5, seed=2**64),
    "seed float": case(T, "seed: got float", "integer", dropout=0.5, seed=1.0),
    "seed float array": case(T, "seed: got float64", seed=np.array(1.0)),
    "seed array": case(T, "seed: got ndarray", "0-d", seed=np.array([1, 2], np.uint64)),
    "precision word": case(V, "precision: got 'tf32'",
                           'expected "tf32x3", or None for full float32', precision="tf32"),
    "precision number": case(T, "precision: got int", 'expected "tf32x3"', precision=3),
    "seed bool": case(T, "seed: got bool", seed=True),
    "return_lse": case(T, "return_lse: got 1", "True or False", return_lse=1),
    # masks, scores, bias, sink
    "mask function": case(T, "mask: got function", "masks.mask(", mask=lambda b, h, i, j: i == j),
    "mask constructor": case(T, "mask: got function", "cupyflash.masks", mask=masks.causal),
    "mask str": case(T, "mask: got str", mask="causal"),
    "mask bool": case(T, "mask: got bool", mask=True),
    "mask list": case(T, "mask: got list", "np.asarray", mask=BOOL.tolist()),
    "mask score": case(T, "mask: got Score", mask=scores.softcap(1.0)),
    "mask lookup": case(T, "mask: got LookupTable", mask=lookup(BOOL)),
    "mask int": case(T, "mask: got an array of dtype int64", "bool", "bias=",
        mask=BOOL.astype(int)),
    "mask float": case(T, "mask: got an array of dtype float32", "bool", mask=BOOL.astype(F32)),
    "mask shape": case(V, "mask: got an array of shape (6, 5)", "to (2, 4, 5, 6)", mask=BOOL.T),
    "mask axes": case(V, "mask: got an array of shape", "broadcasts to", mask=BOOL[None, None,
        None]),
    "masked mask": case(T, "mask: got a masked array", mask=np.ma.array(BOOL)),
    "causal per batch": case(V, "causal: offset", "(3,)", mask=masks.causal(np.zeros(3, int))),
    "score function": case(T, "score_mod: got function", "scores.score", score_mod=lambda s: s),
    "score list": case(T, "score_mod: got Mask", score_mod=[scores.softcap(1.0), masks.causal()]),
    "score str": case(T, "score_mod: got str", score_mod="alibi"),
    "score slopes": case(V, "alibi: slopes", "(3,)", score_mod=scores.alibi(np.ones(3, F32))),
    "lookup out of range": case(V, "lookup", "between 0 and 5", "clip",
                                score_mod=scores.score(lambda s, b, h, i, j: s + TABLE[j])),
    "bias shape": case(V, "bias: got shape (4,)", "(2, 4, 5, 6)", bias=filled(4)),
    "bias axes": case(V, "bias: got shape (1, 1, 1, 5, 6)", "(2, 4,", bias=filled(1, 1, 1, LQ, LK)),
    "bias dtype": case(T, "bias: got dtype int32", "float32", bias=np.ones((LQ, LK), np.int32)),
    "bias bool": case(T, "bias: got dtype bool", "float32", bias=BOOL),
    "bias list": case(T, "bias: got list", bias=[[0.0]]),
    "sink shape": case(V, "sink: got shape (2,)", "(4,)", "query head", sink=filled(2)),
    "sink scalar": case(T, "sink: got float", "expected a NumPy array", sink=0.5),
    "sink dtype": case(T, "sink: got dtype int64", sink=np.zeros(H, int)),
    # names of other libraries
    "causal": case(T, "causal", "mask=masks.causal()", causal=True),
    "is_causal": case(T, "is_causal", "mask=masks.causal()", is_causal=True),
    "attn_mask": case(T, "attn_mask", "mask=array", "bias=array", attn_mask=BOOL),
    "dropout_p": case(T, "dropout_p", "dropout=p", "seed=", dropout_p=0.1),
    "softmax_scale": case(T, "softmax_scale", "scale=", softmax_scale=1.0),
    "sm_scale": case(T, "sm_scale", "scale=", sm_scale=1.0),
    "window_size": case(T, "window_size", "masks.window(left, right)", window_size=(4, 0)),
    "alibi_slopes": case(T, "alibi_slopes", "scores.alibi(slopes)", alibi_slopes=filled(H)),
    "softcap": case(T, "softcap", "scores.softcap(c)", softcap=30.0),
    "enable_gqa": case(T, "enable_gqa", "shapes", enable_gqa=True),
    "key_padding_mask": case(T, "key_padding_mask", "masks.lengths", key_padding_mask=BOOL[0]),
    "misspelt": case(T, "dropuot", "did you mean dropout", "the options are mask", dropuot=0.1),
}  # fmt: skip

VARLEN = {
    "one sequence less": case(V, "offsets_k: got 1 sequences", "2 in offsets_q", offsets_k=[0, 9]),
    "decreasing": case(V, "offsets_q: entry 2 is 3, smaller than 5", offsets_q=[0, 5, 3, 7]),
    "wraps": case(V, "offsets_q: entry 2", "smaller", offsets_q=[0, 2**63 - 1, -(2**63), -1, 7]),
    "unsigned wraps": case(V, "offsets_q: entry 2 is 7", offsets_q=np.array([0, 2**63, 7], "u8")),
    "not from 0": case(V, "offsets_q: runs from 1 to 7", "0 to 7", offsets_q=[1, 3, 7]),
    "negative": case(V, "offsets_k: runs from -1", offsets_k=[-1, 4, 9]),
    "not to the total": case(V, "offsets_k: runs from 0 to 8", "0 to 9", offsets_k=[0, 4, 8]),
    "beyond the total": case(V, "offsets_k: runs from 0 to 10", offsets_k=[0, 4, 10]),
    "floats": case(T, "offsets_q", "float64", "integers", offsets_q=np.array([0.0, 3, 7])),
    "list of floats": case(T, "offsets_q", "float64", "integers", offsets_q=[0, 3.5, 7]),
    "list of text": case(T, "offsets_q", "integers", offsets_q=["0", "7"]),
    "ragged": case(T, "offsets_q", "integers", offsets_q=[0, [3], 7]),
    "bools": case(T, "offsets_q", "dtype bool", offsets_q=[False, True]),
    "empty": case(T, "offsets_q: got shape (0,)", "one more than", offsets_q=[]),
    "two axes": case(T, "offsets_q: got shape (1, 3)", "one axis", offsets_q=np.array([[0, 3, 7]])),
    "a number": case(T, "offsets_q: got int", "NumPy array", offsets_q=7),
    "check": case(T, "check: got 1", "True or False", check=1),
    "four axes": case(V, "q: got shape (1, 4, 7, 8)", "(H, total, D)", q=filled(1, H, 7, D)),
    "matrix": case(V, "k: got shape (9, 8)", "(H, total, D)", k=filled(9, D)),
    "bias": case(V, "bias: got shape (2, 4, 4, 4)", "(2, 4, 4, 5)", bias=filled(2, 4, 4, 4)),
    "mask": case(V, "mask: got an array of shape (4, 4)", "(2, 4, 4, 5)", mask=BOOL[:4, :4]),
    "segments": case(V, "segments: q_ids", "(5,)", mask=masks.segments(np.zeros(5, int))),
    "causal": case(T, "causal", "mask=masks.causal()", causal=True),
}  # fmt: skip

BACKWARD = {
    "do shape": case(V, "do: got shape (2, 4, 5, 8)", "(2, 4, 5, 3)", do=filled(B, H, LQ, D)),
    "do dtype": case(V, "do: got shape", "dtype float64;", do=filled(B, H, LQ, DV, dtype=float)),
    "do foreign": case(V, "do: got shape", ">f4", do=filled(B, H, LQ, DV, dtype=">f4")),
    "do list": case(T, "do: got list", do=[1.0]),
    "out shape": case(V, "out: got shape", "that the forward returned", out=filled(B, H, LQ, D)),
    "lse dtype": case(V, "lse: got shape", "dtype float64;", "return_lse", lse=np.zeros((B, H,
        LQ))),
    "lse axes": case(V, "lse: got shape (2, 4, 5, 1)", "(2, 4, 5)", lse=filled(B, H, LQ, 1)),
    "lse None": case(T, "lse: got NoneType", lse=None),
    "dlse shape": case(V, "dlse: got shape (4, 5)", "dtype of lse", dlse=filled(H, LQ)),
    "cupy do": case(T, "do: got an array in the memory of GPU 0", do=FakeCuPyArray((B, H, LQ, DV))),
    "deterministic": case(T, "deterministic: got None", "True or False", deterministic=None),
    "return_lse": case(T, "return_lse", "attention_vjp", return_lse=True),
    "grads array": case(T, "grads_out: got ndarray", "Gradients", grads_out=x["q"]),
    "grads of two": case(T, "grads_out: got tuple of length 2", "dq, dk, dv", grads_out=(None,
        None)),
    "grads of six": case(T, "grads_out: got list of length 6", grads_out=[None] * 6),
    "dbias without bias": case(
        V, "grads_out.dbias", "no bias", "None", grads_out=(None, None, None, filled(LQ, LK))),
    "dsink without sink": case(
        V, "grads_out.dsink", "no sink", grads_out=(None, None, None, None, filled(H))),
    "workspace list": case(T, "workspace: got list", "uint8", "np.empty(", workspace=[0]),
    "workspace dtype": case(T, "workspace: got shape (9,), dtype int8", workspace=np.zeros(9,
        "i1")),
    "workspace axes": case(T, "workspace: got shape (3, 3)", workspace=np.zeros((3, 3), "u1")),
    "workspace strided": case(T, "workspace", "contiguous", workspace=np.zeros(99, "u1")[::2]),
    "workspace small": case(V, "workspace: got 8 bytes", "workspace_size", workspace=np.zeros(8,
        "u1")),
}  # fmt: skip


def arrays_of(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [value]
    if isinstance(value, (tuple, list)):
        return [found for entry in value for found in arrays_of(entry)]
    return []


def refused(function: Callable[..., Any], arguments: dict[str, Any], wanted: Case) -> str:
    """Call, and check the error, its message, and that no array has changed."""
    arrays = [found for value in arguments.values() for found in arrays_of(value)]
    before = [found.tobytes() for found in arrays]
    with pytest.raises(wanted.error) as caught:
        function(**arguments)
    message = str(caught.value)
    for word in wanted.words:
        assert word in message, message
    assert message.endswith("."), message
    assert len(message) < 400, message
    assert isinstance(caught.value, TypeError if wanted.error is T else ValueError)
    assert [found.tobytes() for found in arrays] == before
    return message


def with_change(good: dict[str, Any], change: Any) -> dict[str, Any]:
    return good | (change(good) if callable(change) else change)


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name):
    bad = FORWARD[name]
    arguments = with_change(operands(), bad.change)
    message = refused(attention, arguments, bad)
    # With outputs that must not be touched, and in the functions that take the same arguments.
    results = {"out": filled(B, H, LQ, DV), "lse_out": filled(B, H, LQ)}
    assert refused(attention, arguments | results, bad) == message
    assert refused(attention_vjp, arguments, bad) == message


@pytest.mark.parametrize("name", [n for n in FORWARD if n != "return_lse"])
def test_backward_refuses_what_the_forward_refuses(name):
    bad = FORWARD[name]
    good = backward_operands()
    arguments = with_change({n: good[n] for n in "qkv"}, bad.change)
    refused(attention_backward, good | arguments, bad)


@pytest.mark.parametrize("name", VARLEN)
def test_varlen(name):
    bad = VARLEN[name]
    arguments = with_change(packed(), bad.change)
    message = refused(attention_varlen, arguments, bad)
    rows = {"do": filled(H, 7, DV), "out": filled(H, 7, DV), "lse": filled(H, 7)}
    assert refused(attention_varlen_backward, arguments | rows, bad) == message
    if "check" not in arguments:
        assert refused(attention_varlen, arguments | {"check": False}, bad) == message


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name):
    bad = BACKWARD[name]
    refused(attention_backward, with_change(backward_operands(), bad.change), bad)


@pytest.mark.parametrize("function", [plan, workspace_size])
@pytest.mark.parametrize("name", ["cupy k", "two dtypes", "D of 513", "one query head", "causal"])
def test_plan_and_workspace_size(function, name):
    refused(function, with_change(operands(), FORWARD[name].change), FORWARD[name])


@pytest.mark.parametrize("function", [plan, workspace_size])
def test_offsets_belong_together(function):
    one = {n: value for n, value in packed().items() if n != "offsets_k"}
    refused(function, one, case(V, "offsets_q, offsets_k: got one without the other"))


def broadcast(*shape: int) -> np.ndarray:
    return np.ndarray(shape, F32, buffer=np.zeros(1, F32), strides=(0,) * len(shape))


def read_only(*shape: int) -> np.ndarray:
    made = filled(*shape)
    made.flags.writeable = False
    return made


TARGETS = {
    "list": case(T, "{name}: got list", "np.from_dlpack", change=lambda *shape: [0.0]),
    "cupy": case(T, "{name}: got an array in the memory of GPU 0",
                 change=lambda *shape: FakeCuPyArray(shape)),
    "masked": case(T, "{name}: got MaskedArray", change=lambda *shape: np.ma.zeros(shape)),
    "shape": case(V, "{name}: got shape (1, 2", "np.empty(", change=lambda *shape: filled(1,
        *shape)),
    "dtype": case(V, "{name}: got shape", "dtype float64;", change=lambda *shape: np.empty(shape)),
    "foreign": case(V, "{name}: got shape", "dtype >f4;", change=lambda *shape: np.empty(shape,
        ">f4")),
    "read-only": case(V, "{name}: got a read-only", "written", change=read_only),
    "broadcast": case(V, "{name}: got an array with several elements at one address", "np.empty",
        change=broadcast),
}  # fmt: skip


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("name", ["out", "lse_out", "grads_out.dq", "grads_out.dk", "grads_out.dv"])
def test_targets(name, kind):
    good = operands()
    outer, _, inner = name.partition(".")
    shape = {"out": (B, H, LQ, DV), "lse_out": (B, H, LQ)}.get(name)
    target = TARGETS[kind].change(*(shape or good[inner[1:]].shape))
    words = tuple(word.format(name=name) for word in TARGETS[kind].words)
    wanted = Case(None, TARGETS[kind].error, words)
    if shape:
        refused(attention, good | {name: target}, wanted)
    else:
        grads = [target if inner == entry else None for entry in ("dq", "dk", "dv")]
        refused(attention_backward, backward_operands() | {outer: grads}, wanted)


@pytest.mark.parametrize("other", ["q", "k", "v", "bias", "sink", "mask", "score_mod", "lse_out"])
def test_out_that_shares_an_element(other):
    size = B * H * LQ * DV
    memory = np.zeros(size + 999, F32)
    arguments = operands() | {"out": memory[:size].reshape(B, H, LQ, DV)}
    shapes = {n: arguments[n].shape for n in "qkv"}
    shapes |= {"bias": (LQ, LK), "sink": (H,), "lse_out": (B, H, LQ), "score_mod": (H,)}
    if other == "mask":
        shared = memory.view(np.bool_)[4 * size - 1 :][: LQ * LK].reshape(LQ, LK)
    else:
        shape = shapes[other]
        shared = memory[size - 1 :][: int(np.prod(shape))].reshape(shape)
    # One element is shared; without it the call is good.
    named = {"score_mod": "array 0 of score_mod", "mask": "array 0 of mask"}.get(other, other)
    both = ("lse_out", "out") if other == "lse_out" else ("out", named)
    wanted = case(V, "{} and {} share memory".format(*both), "fresh array")
    arguments[other] = scores.alibi(shared) if other == "score_mod" else shared
    refused(attention, arguments, wanted)
    arguments["out"] = np.empty((B, H, LQ, DV), F32)
    attention(**arguments)


BACKWARD_NAMES = ["do", "q", "k", "v", "out", "lse", "dlse", "grads_out.dq", "workspace"]


@pytest.mark.parametrize("other", BACKWARD_NAMES)
def test_gradients_that_share_an_element(other):
    arguments = backward_operands()
    size = arguments["v"].size
    needed = workspace_size(*(arguments[n] for n in "qkv"))
    memory = np.zeros(size + needed, F32)
    dv = memory[:size].reshape(arguments["v"].shape)
    name = {"grads_out.dq": "q", "dlse": "lse"}.get(other, other)
    if other == "workspace":
        shared = memory[size - 1 :].view(np.uint8)
    else:
        shape = arguments[name].shape
        shared = memory[size - 1 :][: int(np.prod(shape))].reshape(shape)
    grads = [shared if other == "grads_out.dq" else None, None, dv]
    arguments["grads_out"] = grads
    if not other.startswith("grads"):
        arguments[other] = shared
    both = ["grads_out.dv", other]
    if other == "workspace":
        both.reverse()
    refused(attention_backward, arguments, case(V, f"{both[0]} and {both[1]} share memory"))


@pytest.mark.parametrize("name", ["do", "q", "k", "v", "out", "lse"])
def test_a_workspace_that_shares_an_element(name):
    arguments = backward_operands()
    needed = workspace_size(*(arguments[n] for n in "qkv"))
    memory = np.zeros(needed + 9999, np.uint8)
    shape = arguments[name].shape
    place = needed - needed % 4
    shared = memory[place - 4 :][: 4 * int(np.prod(shape))].view(F32).reshape(shape)
    arguments |= {name: shared, "workspace": memory[: needed + 4]}
    refused(attention_backward, arguments, case(V, f"workspace and {name} share memory"))


COMBINE = {
    "nothing": case(T, "combine", "got an empty list", "non-empty", parts=[]),
    "an array": case(T, "combine", "got ndarray", "list of (out, lse)", parts=filled(2, 3)),
    "not pairs": case(T, "combine: entry 0 is ndarray", "(out, lse)", parts=[filled(2, 3)]),
    "shapes": case(V, "out of entry 1", "(3, 3)", "(2, 3)", parts=[
        (filled(2, 3), filled(2)), (filled(3, 3), filled(3))]),
    "dtypes": case(V, "out of entry 1", "float64", parts=[
        (filled(2, 3), filled(2)), (filled(2, 3, dtype=float), filled(2, dtype=float))]),
    "lse": case(V, "lse of entry 0", "(2, 3)", "expected shape (2,)", parts=[(filled(2, 3),
        filled(2, 3))]),
    "lse dtype": case(V, "lse of entry 0", "float16", "float32", parts=[
        (filled(2, 3, dtype="f2"), filled(2, dtype="f2"))]),
    "int": case(T, "out of entry 0", "int64", parts=[(np.ones((2, 3), int), filled(2))]),
    "cupy": case(T, "lse of entry 0", "GPU 0", parts=[(FakeCuPyArray((2, 3)), filled(2))]),
    "no axis": case(V, "out of entry 0", "no axis", parts=[(np.ones((), F32), np.ones((), F32))]),
}  # fmt: skip


@pytest.mark.parametrize("name", COMBINE)
def test_combine(name):
    refused(combine, COMBINE[name].change, COMBINE[name])


LOOKUP = {
    "a number": case(T, "lookup: got int", array=3),
    "complex": case(T, "lookup", "complex128", ".astype", array=np.ones(3, complex)),
    "uint64": case(T, "lookup", "uint64", "uint32", array=np.ones(3, np.uint64)),
    "foreign": case(T, "lookup", "byte order", array=np.ones(3, ">i4")),
    "text": case(T, "lookup", "bool", array=["a", "b"]),
}


@pytest.mark.parametrize("name", LOOKUP)
def test_lookup(name):
    refused(lookup, LOOKUP[name].change, LOOKUP[name])


def test_the_kinds_of_errors():
    assert issubclass(cupyflash.ArgumentError, ValueError)
    assert issubclass(cupyflash.ArgumentTypeError, TypeError)


@pytest.mark.parametrize("name", sorted(FORWARD | VARLEN | BACKWARD))
def test_cases_name_their_argument(name):
    """The cases above ask for the argument's name, not only for some words."""
    bad = (FORWARD | VARLEN | BACKWARD)[name]
    names = set(bad.change) if isinstance(bad.change, dict) else {"q", "k", "v"}
    if not isinstance(bad.change, dict) or set(bad.change) <= {"q", "k", "v"}:
        names |= {"query heads", "leading axes", "bfloat16"}
    names |= {"causal", "alibi", "lookup", "segments"}
    assert any(re.search(rf"\b{re.escape(n)}\b", " ".join(bad.words)) for n in names)


def test_a_precision_is_one_of_float32():
    for dtype in (np.float64, np.float16):
        q = filled(B, H, LQ, D).astype(dtype)
        with pytest.raises(V, match=f"precision: .*arrays of {q.dtype}; expected float32 arrays"):
            attention(q, q, q, precision="tf32x3")
