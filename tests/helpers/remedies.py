"""Errors that hold code: what fails, the code in the message, and what a user does with it."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cupyflash
import cupyflash.figures
from cupyflash import attention, distributed, foreign, masks, quantize, scores

X = np.random.default_rng(0).standard_normal((1, 2, 4, 8)).astype(np.float32)
ANGLES = np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)
BYTES = np.zeros(3, np.uint8)
LARGEST = np.full((2, 32), 240, ml_dtypes.float8_e4m3fnuz)


class Case(NamedTuple):
    """What fails, the words of the remedy in the file's error, and what is then done.

    `remedy` takes the code that the message holds, as `found` finds it there.
    """

    file: str
    fragment: str
    fails: Callable[[], Any]
    found: str
    remedy: Callable[[str], Any]


def run(code: str, **names: Any) -> Any:
    """Return the value of code, as a user who copies it out of the message has it."""
    return eval(code, {"np": np, "cupyflash": cupyflash, "masks": masks, "scores": scores, **names})


def keywords(code: str, **names: Any) -> Any:
    """Return the keywords that code such as `seed=number` writes."""
    return run(f"dict({code})", **names)


def matrix() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.matrix(X[0, 0])


def masked(function: Callable[..., Any]) -> Any:
    return attention(X, X, X, mask=masks.mask(function))


def cache(**options: Any) -> Any:
    k = np.zeros((1, 2, 8, 8), np.float32)
    return cupyflash.append(X, X, k, k.copy(), np.array([4]), **options)


def codes_append(name: str, scale: Any) -> Any:
    k, v = (np.zeros((1, 2, 8, 8), ml_dtypes.float8_e4m3fn) for _ in "kv")
    both = {f"{n}_scale": np.ones((1, 2, 8, 1), np.float32) for n in "kv"} | {name: scale}
    return cupyflash.append(X, X, k, v, np.array([4]), **both)


def backward(**options: Any) -> Any:
    out, lse = attention(X, X, X, return_lse=True)
    return cupyflash.attention_backward(X, X, X, X, out, lse, **options)


def packed_int4(x: Any) -> Any:
    codes = x.astype(np.uint8)
    return (codes[..., ::2] & 15) | (codes[..., 1::2] << 4)


def over_int4(change: Callable[[Any], Any], **options: Any) -> Any:
    """Attention over int4 of ml_dtypes, which `change` takes."""
    k, scale = np.ones((1, 2, 4, 32), ml_dtypes.int4), np.ones((1, 2, 4, 1), np.float32)
    q = np.ones((1, 2, 1, 32), np.float32)
    scales = {"k_scale": scale, "v_scale": scale}
    return cupyflash.attention_cached(q, change(k), change(k), 4, **scales, **options)


def coded(change: Callable[[Any], Any], **options: Any) -> Any:
    """Attention over codes that `change` takes, with their scales."""
    codes, scale = quantize(X, "float8_e4m3fn")
    scales = {f"{name}_scale": scale for name in "qkv"}
    return attention(*[change(codes)] * 3, **scales, **options)


def shared_codes(v_scale: Callable[[Any], Any]) -> Any:
    """Append to a cache of codes whose values are columns of its keys."""
    k = np.zeros((1, 2, 8, 8), ml_dtypes.float8_e4m3fn)
    scale = np.ones((1, 2, 8, 1), np.float32)
    return cupyflash.append(
        X, X[..., :4], k, k[..., :4], np.array([4]), k_scale=scale, v_scale=v_scale(scale)
    )


def shared_columns(k_new: Any, v_new: Any) -> Any:
    k = np.zeros((1, 2, 8, 8), np.float32)
    return cupyflash.append(k_new, v_new, k, k[..., :4], np.array([4]))


def over_codes(q: Any, kv_dtype: str, change: Callable[[Any], Any] = lambda k: k) -> Any:
    """Attention over a cache of codes that `change` takes, with their scales."""
    codes, scale = quantize(X, "float8_e4m3fn")
    scales = {f"{name}_scale": scale for name in "kv"}
    return cupyflash.attention_cached(
        q, *[change(codes)] * 2, np.array([4]), kv_dtype=kv_dtype, **scales
    )


def of_length_first() -> list[Any]:
    """Return q of 3 positions, and k and v of 4, of shape (B, L, H, D)."""
    return [np.zeros((1, n, 2, 8), np.float32) for n in (3, 4, 4)]


def codes_scaled(k_scale: Any) -> Any:
    codes, scale = quantize(X, "float8_e4m3fn")
    return cupyflash.attention_cached(
        X, codes, codes, np.array([4]), k_scale=k_scale, v_scale=scale
    )


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    return cupyflash.rope(x, np.arange(4), cupyflash.Rotary(cos, sin))


FOREIGN = (
    Case("foreign/angles.py", "interleaved=True", lambda: foreign.rotary(ANGLES, ANGLES),
         r"interleaved=True", lambda code: cupyflash.Rotary(ANGLES, ANGLES, **keywords(code))),
    Case("foreign/blocks.py", "gguf_numbers(blocks, 'MXFP4')",
         lambda: foreign.gguf(np.zeros((2, 17), np.uint8), "MXFP4"), r"gguf_numbers\(.*?\)",
         lambda code: run("foreign." + code, foreign=foreign, blocks=np.zeros((2, 17), np.uint8))),
    Case("foreign/blocks.py", "gguf_numbers(blocks, 'Q8_0')",
         lambda: foreign.gguf(np.zeros((2, 68), np.uint8), "Q8_0"), r"gguf_numbers\(.*?\)",
         lambda code: run("foreign." + code, foreign=foreign, blocks=np.zeros((2, 68), np.uint8))),
    Case("foreign/blocks.py", ".view(np.uint8)",
         lambda: foreign.gguf(np.zeros((2, 34), np.int8), "Q8_0"), r"\.view\(np\.uint8\)",
         lambda code: foreign.gguf(run("x" + code, x=np.zeros((2, 34), np.int8)), "Q8_0")),
    Case("foreign/eight_bits.py", ".view(ml_dtypes.{})",
         lambda: foreign.fnuz(BYTES, 1.0), r"\.view\(ml_dtypes\.\w+\)",
         lambda code: foreign.fnuz(run("x" + code, x=BYTES, ml_dtypes=ml_dtypes), 1.0)),
    Case("problem/quantize.py", "per='head'",
         lambda: quantize(X, "float8_e4m3fn", per=None), r"per='head'",
         lambda code: run(f"quantize(x, 'float8_e4m3fn', {code})", quantize=quantize, x=X)),
    Case("problem/quantize.py", "per='row'",
         lambda: quantize(X, "float8_e4m3fn", per="block"), r"per='row'",
         lambda code: run(f"quantize(x, 'float8_e4m3fn', {code})", quantize=quantize, x=X)),
    Case("foreign/eight_bits.py", "quantize(codes.astype(np.float32) * scale, kind)",
         lambda: foreign.fnuz(LARGEST, 2.0), r"quantize\(.*\)",
         lambda code: run(code, quantize=quantize, codes=LARGEST, scale=2.0, kind="float8_e4m3fn")),
)  # fmt: skip
CASES = (
    Case(
        "arrays/interop.py",
        "x.reshape(-1, *x.shape[-3:])",
        lambda: attention(*[X.reshape((1,) * 30 + X.shape)] * 3),
        r"x\.reshape\(.*\)\)?(?=\.)",
        lambda code: attention(*[run(code, x=X.reshape((1,) * 30 + X.shape))] * 3),
    ),
    Case(
        "arrays/interop.py",
        "np.asarray",
        lambda: attention(matrix(), X[0, 0], X[0, 0]),
        r"np\.asarray",
        lambda code: attention(run(code)(matrix()), X[0, 0], X[0, 0]),
    ),
    Case(
        "arrays/interop.py",
        "np.empty({}, {})",
        lambda: attention(X, X, X, out=np.empty((3,), np.float32)),
        r"np\.empty\(.*\)",
        lambda code: attention(X, X, X, out=run(code, float32="float32")),
    ),
    Case(
        "arrays/interop.py",
        ".astype(...)",
        lambda: attention(X.astype(np.int32), X, X),
        r"\.astype",
        lambda code: attention(run(f"x{code}(np.float32)", x=X.astype(np.int32)), X, X),
    ),
    Case(
        "arrays/interop.py",
        "qkv_dtype='float8_e4m3fn'",
        lambda: attention(*[quantize(X, "float8_e4m3fn")[0].view(np.uint8)] * 3),
        r"qkv_dtype='float8_e4m3fn'",
        lambda code: coded(lambda q: q.view(np.uint8), **keywords(code)),
    ),
    Case(
        "problem/codes.py",
        ".astype(...)",
        lambda: attention(X.astype(np.float64), X, X),
        r"\.astype",
        lambda code: attention(run(f"x{code}(np.float32)", x=X.astype(np.float64)), X, X),
    ),
    Case(
        "problem/validate.py",
        "np.empty({}, np.uint8)",
        lambda: backward(workspace=np.empty((0, 2), np.uint8)),
        r"np\.empty\(.*\)",
        lambda code: backward(workspace=run(code)),
    ),
    Case(
        "problem/validate.py",
        "masks.causal()",
        lambda: attention(X, X, X, mask=masks.causal),
        r"masks\.causal\(\)",
        lambda code: attention(X, X, X, mask=run(code)),
    ),
    Case(
        "problem/validate.py",
        "masks.mask(function)",
        lambda: attention(X, X, X, mask=lambda b, h, i, j: i > j),
        r"masks\.mask\(function\)",
        lambda code: attention(X, X, X, mask=run(code, function=lambda b, h, i, j: i >= j)),
    ),
    Case(
        "problem/validate.py",
        "np.asarray(list)",
        lambda: attention(X, X, X, mask=np.tri(4, dtype=bool).tolist()),
        r"np\.asarray\(list\)",
        lambda code: attention(X, X, X, mask=run(code, list=np.tri(4, dtype=bool).tolist())),
    ),
    Case(
        "masks.py",
        "masks.dense(array)",
        lambda: masks.causal() & np.ones((4, 4), bool),
        r"masks\.dense\(array\)",
        lambda code: masks.causal() & run(code, array=np.ones((4, 4), bool)),
    ),
    Case(
        "masks.py",
        "masks.mask(function)",
        lambda: masks.causal() & (lambda b, h, i, j: i > j),
        r"masks\.mask\(function\)",
        lambda code: masks.causal() & run(code, function=lambda b, h, i, j: i > j),
    ),
    Case(
        "scores.py",
        "scores.score(function)",
        lambda: attention(X, X, X, score_mod=lambda s, b, h, i, j: 2 * s),
        r"scores\.score\(function\)",
        lambda code: attention(X, X, X, score_mod=run(code, function=lambda s, b, h, i, j: 2 * s)),
    ),
    Case(
        "problem/scalars.py",
        "seed=number",
        lambda: attention(X, X, X, dropout=0.5),
        r"seed=number",
        lambda code: attention(X, X, X, dropout=0.5, **keywords(code, number=3)),
    ),
    Case(
        "expr/nodes.py",
        "cupyflash.lookup(array)",
        lambda: masked(lambda b, h, i, j: (i + np.arange(4)) > j),
        r"cupyflash\.lookup\(array\)",
        lambda code: masked(lambda b, h, i, j: i + run(code, array=np.arange(4))[j] > j),
    ),
    Case(
        "expr/nodes.py",
        "cupyflash.expr.where(condition, a, b)",
        lambda: masked(lambda b, h, i, j: i > j if h > 0 else i >= j),
        r"cupyflash\.expr\.where\(condition, a, b\)",
        lambda code: masked(lambda b, h, i, j: run(code, condition=h > 0, a=i, b=i + 1) >= j),
    ),
    Case(
        "expr/nodes.py",
        "lookup(array)",
        lambda: masked(lambda b, h, i, j: cupyflash.lookup(np.arange(2)) + i > j),
        r"lookup\(array\)\[h\]",
        lambda code: masked(
            lambda b, h, i, j: run(code, lookup=cupyflash.lookup, array=np.arange(2), h=h) + i >= j
        ),
    ),
    Case(
        "expr/nodes.py",
        ".astype()",
        lambda: cupyflash.lookup(np.arange(4, dtype=">i4")),
        r"\.astype(?=\()",
        lambda code: cupyflash.lookup(run(f"x{code}(np.int32)", x=np.arange(4, dtype=">i4"))),
    ),
    Case(
        "expr/bind.py",
        "cupyflash.expr.maximum(..., 1)",
        lambda: masked(lambda b, h, i, j: i // j >= 0),
        r"cupyflash\.expr\.maximum\(\.\.\., 1\)",
        lambda code: masked(lambda b, h, i, j: i // run(code.replace("...", "j"), j=j) >= 0),
    ),
    Case(
        "expr/bind.py",
        "cupyflash.expr.maximum(..., 0)",
        lambda: masked(lambda b, h, i, j: (i >> (j - 1)) >= 0),
        r"cupyflash\.expr\.maximum\(\.\.\., 0\)",
        lambda code: masked(lambda b, h, i, j: (i >> run(code.replace("...", "j - 1"), j=j)) >= 0),
    ),
    Case(
        "expr/bind.py",
        "cupyflash.expr.clip",
        lambda: masked(lambda b, h, i, j: cupyflash.lookup(np.arange(2))[j] >= 0),
        r"cupyflash\.expr\.clip",
        lambda code: masked(
            lambda b, h, i, j: cupyflash.lookup(np.arange(2))[run(code)(j, 0, 1)] >= 0
        ),
    ),
    Case(
        "problem/rotary.py",
        "cupyflash.Rotary(cos, sin)",
        lambda: cupyflash.rope(X, np.arange(4), (ANGLES, ANGLES)),
        r"cupyflash\.Rotary\(cos, sin\)",
        lambda code: cupyflash.rope(X, np.arange(4), run(code, cos=ANGLES, sin=ANGLES)),
    ),
    Case(
        "problem/rotary.py",
        ".astype(np.float32)",
        lambda: rotated(X, *[ANGLES.astype(np.float64)] * 2),
        r"\.astype\(np\.float32\)",
        lambda code: rotated(X, *[run("x" + code, x=ANGLES.astype(np.float64))] * 2),
    ),
    Case(
        "problem/rotary.py",
        ".astype(...)",
        lambda: cupyflash.Rotary(ANGLES, ANGLES.astype(np.float64)),
        r"\.astype",
        lambda code: cupyflash.Rotary(
            ANGLES, run(f"x{code}(np.float32)", x=ANGLES.astype(np.float64))
        ),
    ),
    Case(
        "problem/append.py",
        "rotary=Rotary",
        lambda: cache(q=X),
        r"rotary=Rotary\(cos, sin\)",
        lambda code: cache(q=X, **keywords(code, Rotary=cupyflash.Rotary, cos=ANGLES, sin=ANGLES)),
    ),
    Case(
        "problem/append.py",
        "x.swapaxes(-3, -2)",
        lambda: cupyflash.append(
            *[X.swapaxes(1, 2)] * 2, *np.zeros((2, 1, 2, 8, 8), np.float32), np.array([4])
        ),
        r"x\.swapaxes\(-3, -2\)",
        lambda code: cupyflash.append(
            *[run(code, x=X.swapaxes(1, 2))] * 2,
            *np.zeros((2, 1, 2, 8, 8), np.float32),
            np.array([4]),
        ),
    ),
    Case(
        "problem/codes.py",
        ".empty({}, {}.float32)",
        lambda: codes_append("k_scale", 1.0),
        r"np\.empty\(.*?np\.float32\)",
        lambda code: codes_append("k_scale", run(code)),
    ),
    Case(
        "problem/coded.py",
        ".view(np.uint8)",
        lambda: coded(lambda q: q, qkv_dtype="float8_e5m2"),
        r"q\.view\(np\.uint8\)",
        lambda code: coded(lambda q: run(code, q=q), qkv_dtype="float8_e5m2"),
    ),
    Case(
        "problem/coded.py",
        "qkv_dtype='",
        lambda: coded(lambda q: q.view(np.uint8)),
        r"qkv_dtype='\w+'",
        lambda code: coded(lambda q: q.view(np.uint8), **keywords(code)),
    ),
    Case(
        "costs/figures/mask.py",
        "masks.dense(array)",
        lambda: cupyflash.figures.mask_tiles(np.ones((4, 4), bool), 4, 4),
        r"masks\.dense\(array\)",
        lambda code: cupyflash.figures.mask_tiles(run(code, array=np.ones((4, 4), bool)), 4, 4),
    ),
    Case(
        "distributed/transport/connect.py",
        "distributed.Threads(n)",
        lambda: distributed.communicator(3),
        r"distributed\.Threads\(n\)\.ranks",
        lambda code: [
            distributed.communicator(each) for each in run(code, distributed=distributed, n=1)
        ],
    ),
    Case(
        "costs/figures/mask.py",
        "masks.causal()",
        lambda: cupyflash.figures.mask_tiles(masks.causal, 4, 4),
        r"masks\.causal\(\)",
        lambda code: cupyflash.figures.mask_tiles(run(code), 4, 4),
    ),
    Case(
        "expr/arguments.py",
        "bias=.",
        lambda: masks.dense(np.zeros((4, 4), np.float32)),
        r"bias=",
        lambda code: attention(X, X, X, **keywords(f"{code}array", array=X[0, 0, :, :4])),
    ),
    Case(
        "costs/explanation/arguments.py",
        ".astype(...)",
        lambda: cupyflash.explain(X, X.astype(np.float64), X, device="H100"),
        r"\.astype",
        lambda code: cupyflash.explain(
            X, run(f"x{code}(np.float32)", x=X.astype(np.float64)), X, device="H100"
        ),
    ),
    Case(
        "costs/explanation/arguments.py",
        "dtype='",
        lambda: cupyflash.explain(*[X.astype(np.uint8)] * 3, device="H100"),
        r"dtype='\w+'",
        lambda code: cupyflash.explain(*[X.astype(np.uint8)] * 3, device="H100", **keywords(code)),
    ),
    Case(
        "problem/append.py",
        "v_new=k_new",
        lambda: shared_columns(X, X[..., :4].copy()),
        r"v_new=k_new\[.*?\](?=\.)",
        lambda code: shared_columns(X, keywords(code, k_new=X)["v_new"]),
    ),
    Case(
        "problem/encoding.py",
        ".astype(np.float32)",
        lambda: over_codes(X.astype(np.float64), "float8_e4m3fn"),
        r"\.astype\(np\.float32\)",
        lambda code: over_codes(run("x" + code, x=X.astype(np.float64)), "float8_e4m3fn"),
    ),
    *FOREIGN,
    Case(
        "problem/codes.py",
        ".astype(np.uint8)",
        lambda: over_int4(lambda k: k),
        r"\(k\[.*<< 4\)",
        lambda code: over_int4(lambda k: run(code, k=k), kv_dtype="int4"),
    ),
    Case(
        "problem/codes.py",
        "kv_dtype='int4'",
        lambda: over_int4(lambda k: k),
        r"kv_dtype='int4'",
        lambda code: over_int4(packed_int4, **keywords(code)),
    ),
    Case(
        "problem/codes.py",
        ".view(np.uint8)",
        lambda: over_codes(X, "float8_e5m2"),
        r"k\.view\(np\.uint8\)",
        lambda code: over_codes(X, "float8_e5m2", lambda k: run(code, k=k)),
    ),
    Case(
        "problem/append.py",
        "v_scale=k_scale",
        lambda: shared_codes(np.copy),
        r"v_scale=k_scale",
        lambda code: shared_codes(lambda scale: keywords(code, k_scale=scale)["v_scale"]),
    ),
    Case(
        "execute.py",
        "return_lse=True",
        lambda: pickle.dumps(cupyflash.attention_vjp(X, X, X)[1]),
        r"return_lse=True",
        lambda code: cupyflash.attention_backward(*[X] * 4, *attention(X, X, X, **keywords(code))),
    ),
    Case(
        "problem/validate.py",
        "x.swapaxes(-3, -2)",
        lambda: attention(*of_length_first()),
        r"x\.swapaxes\(-3, -2\)",
        lambda code: attention(*[run(code, x=x) for x in of_length_first()]),
    ),
    Case(
        "problem/codes.py",
        ".asarray({}, {}.float32)",
        lambda: codes_scaled([1.0]),
        r"np\.asarray\(.*float32\)",
        lambda code: codes_scaled(run(code, k_scale=[1.0])),
    ),
    Case(
        "expr/nodes.py",
        "floor(x / y)",
        lambda: masked(lambda b, h, i, j: (i * 0.5) // 2 >= 0),
        r"cupyflash\.expr\.floor\(x / y\)",
        lambda code: masked(lambda b, h, i, j: run(code, x=i * 0.5, y=2) >= 0),
    ),
    Case(
        "expr/nodes.py",
        "floor(x)",
        lambda: masked(lambda b, h, i, j: (i << (h * 0.5)) >= 0),
        r"cupyflash\.expr\.floor\(x\)",
        lambda code: masked(lambda b, h, i, j: (i << run(code, x=h * 0.5)) >= 0),
    ),
)
