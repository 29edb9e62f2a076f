"""Calls of attention as models make them, beside PyTorch's kernels: the suite `models`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import api, cached, masks, varlen
from ..testing.options import float_type
from . import model_peers, model_rows, runtime_peers
from .contenders import Array
from .measure import Gpu, Meter, Work
from .model_rows import Cached, Model, Packed
from .tasks import OURS, SDPA, Maker, TaskSuite, Works, calls, repeated
from .torch_peers import from_torch

# Contenders drop other pairs: results are as far apart as two such draws are.
DROPPED = 0.7
PEERS = {
    "cpu": (OURS, SDPA, runtime_peers.ONNX, runtime_peers.OPENVINO),
    "gpu": (
        OURS, "torch-cudnn", "torch-flash", "torch-efficient", "torch-flex", "torch-varlen",
    ),
}  # fmt: skip


def normal(meter: Meter, dtype: str, *shape: int, seed: int) -> Array:
    """Return standard normal numbers, always the same, drawn where they are used."""
    wide = np.float64 if dtype == "float64" else np.float32
    drawn = meter.xp.random.default_rng(seed).standard_normal(shape, dtype=wide)
    return drawn.astype(float_type(dtype), copy=False)


def by_tokens(meter: Meter, dtype: str, *shape: int, seed: int) -> Array:
    """Return (B, H, L, D); on a GPU as models have it, the heads of a token side by side."""
    b, h, length, d = shape
    if not isinstance(meter, Gpu):
        return normal(meter, dtype, *shape, seed=seed)
    return normal(meter, dtype, b, length, h, d, seed=seed).swapaxes(1, 2)


def works(
    meter: Meter,
    dtype: str,
    flops: float,
    ours: Callable[[], Work],
    peers: dict[str, Callable[[], Work]],
    shapes: list[tuple[int, ...]],
    tolerance: float | None = None,
) -> Works:
    """Return how contenders do a task, whose results have these shapes."""
    count = calls(meter, flops)

    def arrays(found: Any) -> list[Array]:
        several = found if isinstance(found, tuple) else (found,)
        return [
            summed(from_torch(meter.xp, x, dtype) if hasattr(x, "detach") else x, shape)
            for x, shape in zip(several, shapes, strict=False)
        ]

    def run(make: Callable[[], Work]) -> Callable[[], Work]:
        return lambda: repeated(make(), count)

    made = {name: run(make) for name, make in {OURS: ours, **peers}.items()}
    return Works(made, arrays, count, tolerance=tolerance)


def summed(x: Array, shape: tuple[int, ...]) -> Array:
    """Add the gradients of key heads that were repeated for a peer."""
    if x.shape == shape:
        return x
    return x.reshape(shape[0], -1, *shape[1:]).sum(axis=1)


def dense(meter: Meter, dtype: str, model: Model, backward: bool) -> Works:
    """Compute attention of whole arrays, or its gradients."""
    xp, (b, lq, lk) = meter.xp, (model.batch, model.len_q, model.keys)
    d_v, h_k = model.d_v or model.d, model.key_heads
    q = by_tokens(meter, dtype, b, model.heads, lq, model.d, seed=0)
    k = by_tokens(meter, dtype, b, h_k, lk, model.d, seed=1)
    v = by_tokens(meter, dtype, b, h_k, lk, d_v, seed=2)
    do = by_tokens(meter, dtype, b, model.heads, lq, d_v, seed=3) if backward else None
    inputs, lengths = [q, k, v], None
    options: dict[str, Any] = {}
    if model.causal:
        options["mask"] = masks.causal()
    if model.lengths:
        lengths = np.random.default_rng(0).integers(lk // 4, lk + 1, b, np.int32)
        options["mask"] = masks.lengths(xp.asarray(lengths))
    if model.bias:
        inputs.append(normal(meter, dtype, *model.bias_shape, seed=4))
        options["bias"] = inputs[-1]
    if model.dropout:
        options |= {"dropout": model.dropout, "seed": 7}
    if model.precision:
        options["precision"] = model.precision
    if model.special:
        options |= model.special.ours(xp, model)

    def ours() -> Work:
        if do is None:
            return lambda: api.attention(q, k, v, **options)
        o, lse = api.attention(q, k, v, return_lse=True, **options)
        return lambda: tuple(api.attention_backward(do, q, k, v, o, lse, **options))

    shapes = [x.shape for x in inputs] if backward else [(*q.shape[:-1], d_v)]
    peers = model_peers.of_dense(meter, model, inputs, do, lengths)
    if do is None and not isinstance(meter, Gpu):
        peers |= runtime_peers.of_dense(model, inputs, lengths)
    flops = (2.5 if backward else 1) * model.flops
    return works(meter, dtype, flops, ours, peers, shapes, DROPPED if model.dropout else None)


def over_cache(meter: Meter, dtype: str, model: Cached) -> Works:
    """Compute attention of queries over a full cache, whose lengths are an array."""
    xp, (b, h_k, length, d) = meter.xp, (model.batch, model.key_heads, model.keys, model.d)
    q = normal(meter, dtype, b, model.heads, model.len_q, d, seed=0)
    k, v = (normal(meter, dtype, b, h_k, length, d, seed=seed) for seed in (1, 2))
    options: dict[str, Any] = {"mask": masks.causal()}
    held_k, held_v = k, v
    if model.page:
        pages = b * length // model.page
        options["table"] = xp.arange(pages, dtype=np.int32).reshape(b, -1)

        def paged(x: Array) -> Array:
            parts = x.reshape(b, h_k, -1, model.page, d).swapaxes(1, 2)
            return xp.ascontiguousarray(parts).reshape(pages, h_k, model.page, d)

        held_k, held_v = paged(k), paged(v)
    lengths = xp.full(b, length, np.int32)

    def ours() -> Work:
        return lambda: cached.attention_cached(q, held_k, held_v, lengths, **options)

    flops = 4.0 * b * model.heads * model.len_q * length * d
    peers = model_peers.of_cached(meter, model, [q, k, v])
    return works(meter, dtype, flops, ours, peers, [q.shape])


def packed(meter: Meter, dtype: str, model: Packed, backward: bool) -> Works:
    """Compute attention within packed sequences, or its gradients."""
    offsets = model.offsets
    heads = (model.heads, model.key_heads, model.key_heads, model.heads)
    q, k, v, do = (
        normal(meter, dtype, int(offsets[-1]), h, model.d, seed=seed).swapaxes(0, 1)
        for seed, h in enumerate(heads)
    )
    options: dict[str, Any] = {"mask": masks.causal()} if model.causal else {}

    def ours() -> Work:
        if not backward:
            return lambda: varlen.attention_varlen(q, k, v, offsets, offsets, **options)
        _, vjp = varlen.attention_varlen_vjp(q, k, v, offsets, offsets, **options)
        return lambda: tuple(vjp(do))

    lengths = np.diff(offsets).astype(float)
    flops = 4 * model.heads * model.d * float((lengths**2).sum()) / (2 if model.causal else 1)
    peers = model_peers.of_packed(meter, model, [q, k, v], do if backward else None)
    shapes = [x.shape for x in (q, k, v)] if backward else [q.shape]
    return works(meter, dtype, (2.5 if backward else 1) * flops, ours, peers, shapes)


def _named(rows: dict[str, tuple[Model, ...]]) -> tuple[dict[str, Maker], dict[str, str]]:
    """Return makers and dtypes by the tasks' names."""
    makers: dict[str, Maker] = {}
    dtypes: dict[str, str] = {}
    for dtype, models in rows.items():
        for model in models:
            for backward in (False, True)[: 1 + model.backward]:
                name = f"{model.title}, {dtype}, {'backward' if backward else 'forward'}"
                makers[name] = functools.partial(dense, model=model, backward=backward)
                dtypes[name] = dtype
    return makers, dtypes


def _on_gpu() -> tuple[dict[str, Maker], dict[str, str]]:
    makers, dtypes = _named(model_rows.ON_GPU)
    for model in model_rows.CACHED:
        makers[f"{model.title}, bfloat16, forward"] = functools.partial(over_cache, model=model)
    for packs in model_rows.PACKED:
        for direction in ("forward", "backward"):
            makers[f"{packs.title}, bfloat16, {direction}"] = functools.partial(
                packed, model=packs, backward=direction == "backward"
            )
    return makers, dtypes


SUITES = {
    kind: TaskSuite(
        "shapes that models run, beside PyTorch's kernels",
        "models", makers, "bfloat16", {}, PEERS[kind], dtypes,
    )
    for kind, (makers, dtypes) in (("cpu", _named(model_rows.ON_CPU)), ("gpu", _on_gpu()))
}  # fmt: skip
