"""A tiled kernel in NumPy with honest roundings, and with bugs to choose from, before the bound."""

import dataclasses

import numpy as np

from cupyflash.reference.cpu import philox
from cupyflash.reference.spec import naive
from cupyflash.testing import Precision, backward_bound, forward_bound, rho

LOG2E = 1.4426950408889634


class Causal:
    def evaluate(self, b, h, i, j, sizes):
        return j <= i + sizes.len_k - sizes.len_q


class Softcap:
    """A score with a running error bound: t = c tanh(s / c)."""

    def __init__(self, cap):
        self.cap = cap

    def evaluate(self, s, b, h, i, j, sizes):
        t = np.tanh(s / s.dtype.type(self.cap))
        return s.dtype.type(self.cap) * t, 1 - t * t

    def evaluate_with_error(self, s, s_error, b, h, i, j, sizes, unit):
        t, d = self.evaluate(s, b, h, i, j, sizes)
        x, tanh = np.abs(s) / self.cap, np.abs(t) / self.cap
        error = s_error / self.cap + 2 * unit * x  # |tanh'| <= 1
        error = np.minimum(error, 2) + 4 * unit * tanh
        t_error = self.cap * (error + 2 * unit * (tanh + error))
        return t, t_error, d, (2 * tanh + error) * error + 3 * unit


def kernel(q, k, v, do, *, dlse=None, mask=None, score_mod=None, bias=None, sink=None, scale=None,
           dropout=0.0, seed=None, block_kv=32, lag=0, bug="", rng=None):  # fmt: skip
    """An honest tiled kernel in NumPy, with bugs to choose from: (out, lse, delta, gradients).

    A maximum stays while no weight exceeds 2**lag.
    """
    rng = rng or np.random.default_rng(0)
    stored = q.dtype
    t = np.float64 if stored == np.float64 else np.float32
    ulp = 2.0**-50 if t is np.float64 else 2.0**-22
    log2e = t({"log2e": 1.443}.get(bug, LOG2E))
    lead = naive.lead_of(q, k, v)
    qq, kk, vv = (naive.per_query_head(x, lead, t) for x in (q, k, v))
    batch, heads, rows, depth = qq.shape
    keys = kk.shape[2]
    full = (batch, heads, rows, keys)
    sizes = naive.Sizes(lead.axes, heads, rows, keys)
    b, h, i, j = np.ogrid[:batch, :heads, :rows, :keys]
    factor = t(1 / np.sqrt(depth) if scale is None else scale) * t(1.001 if bug == "scale" else 1)
    allowed = np.ones(full, bool) if mask is None else np.broadcast_to(
        mask.evaluate(b, h, i, j, sizes), full)  # fmt: skip
    if bug == "key":
        allowed = allowed & (j != keys // 2)
    z = np.ones(full, t)
    if dropout:
        kept = philox.keep(seed, dropout, b * heads + h, i, j)
        z = np.where(kept, t(1 / philox.keep_probability(dropout)), t(0))

    def exp2(x):
        exact = np.exp2(x.astype(np.longdouble))
        return (exact * (1 + rng.uniform(-1, 1, exact.shape) * (0.9 * ulp))).astype(t)

    def logits(tile):
        s = factor * (qq @ kk[:, :, tile].swapaxes(-1, -2))
        slope = np.ones_like(s)
        if score_mod is not None:
            s, slope = score_mod.evaluate(s, b, h, i, j[..., tile], sizes)
        if bias is not None:
            s = s + np.broadcast_to(bias.astype(t), full)[..., tile]
        return s, slope, allowed[..., tile]

    tiles = [slice(n, n + block_kv) for n in range(0, keys, block_kv)]
    m = np.full(full[:3], -np.inf, t)
    l, o = np.zeros(full[:3], t), np.zeros((*full[:3], vv.shape[-1]), t)
    if sink is not None:
        m, l = np.broadcast_to(sink.astype(t)[:, None], full[:3]).copy(), np.ones(full[:3], t)
    for n, tile in enumerate(tiles):
        s, _, seen = logits(tile)
        new = np.maximum(m, np.where(seen, s, -np.inf).max(axis=-1))
        new = np.where((new - m) * log2e <= lag, m, new)
        safe = np.where(np.isinf(new), 0, new).astype(t)
        alpha = np.where(m == safe, 1, exp2((m - safe) * log2e)).astype(t)
        if bug == "rescale" and n == 1:
            alpha = np.ones_like(alpha)
        p = np.where(seen, exp2(np.where(seen, s - safe[..., None], 0) * log2e), t(0))
        l = l * alpha + p.sum(axis=-1)
        o = o * alpha[..., None] + (p * z[..., tile]) @ vv[:, :, tile]
        m = new
    l = l + t(1e-5 if bug == "epsilon" else 0)
    divisor = np.where(l > 0, l, 1).astype(t)
    out = (o * (t(1) / divisor)[..., None]).astype(stored)
    lse = np.where(l > 0, np.where(np.isinf(m), 0, m) + np.log(divisor), -np.inf).astype(t)

    g = do.astype(t).reshape(o.shape)
    delta = (g * out.astype(t)).sum(axis=-1)
    if bug == "delta":
        delta = delta * t(1.001)
    shift = delta if dlse is None else delta - dlse.astype(t).reshape(delta.shape)
    finite = np.where(np.isinf(lse), 0, lse)
    dq, dk, dv, dt = (np.zeros(x, t) for x in (qq.shape, kk.shape, vv.shape, full))
    for tile in tiles:
        s, slope, seen = logits(tile)
        p = np.where(seen, exp2(np.where(seen, s - finite[..., None], 0) * log2e), t(0))
        dv[:, :, tile] = (p * z[..., tile]).swapaxes(-1, -2) @ g
        dp = z[..., tile] * (g @ vv[:, :, tile].swapaxes(-1, -2))
        dt[..., tile] = p * (dp - shift[..., None])
        ds = dt[..., tile] * (np.ones_like(slope) if bug == "slope" else slope)
        dq += ds @ kk[:, :, tile]
        dk[:, :, tile] = ds.swapaxes(-1, -2) @ qq
    dq, dk = dq * factor, dk * factor
    if bug == "group":
        dk[:, -1] = 0
    gradients = [
        naive.sum_to_shape(x, lead, y.shape).astype(stored) for x, y in ((dq, q), (dk, k), (dv, v))
    ]
    gradients.append(None if bias is None else naive.sum_to_shape(dt, lead, bias.shape))
    dsink = None
    if sink is not None:
        p = exp2((sink.astype(t)[:, None] - finite) * log2e)
        dsink = -(p * shift).sum(axis=(0, 2))
    gradients.append(dsink)
    shape = lead.axes + full[1:3]
    return out.reshape(*shape, -1), lse.reshape(shape), delta.reshape(shape), gradients


def judge(q, k, v, do, *, dlse=None, bug="", block_kv=32, lag=0, rng=None, **options):
    out, lse, delta, gradients = kernel(
        q, k, v, do, dlse=dlse, bug=bug, block_kv=block_kv, lag=lag, rng=rng, **options
    )
    precision = dataclasses.replace(Precision.of(q.dtype), lag=lag * np.log(2))
    forward = forward_bound(q, k, v, precision=precision, block_kv=block_kv, **options)
    backward = backward_bound(
        do, q, k, v, dlse=dlse, precision=precision, block_kv=block_kv, **options
    )
    assert forward.ill_conditioned == backward.ill_conditioned == 0
    result = {"out": rho(out, *forward.out).value, "lse": rho(lse, *forward.lse).value}
    result["delta"] = rho(delta, *backward.delta).value
    names = ("dq", "dk", "dv", "dbias", "dsink")
    for name, ours, bounded in zip(names, gradients, backward[:5], strict=True):
        if bounded is not None:
            result[name] = rho(ours, *bounded).value
    return result


def problem(dtype=np.float32, rows=24, keys=100, depth=16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((2, 4, rows, depth), (2, keys, depth), (2, 2, keys, 8), (2, 4, rows, 8))
    return [rng.standard_normal(x).astype(np.float32).astype(dtype) for x in shapes]


def options_of(name, seed=0):
    rng = np.random.default_rng(seed)
    full = {
        "mask": {"mask": Causal()},
        "score": {"score_mod": Softcap(3.0)},
        "bias": {"bias": rng.standard_normal((4, 1, 100)).astype(np.float32)},
        "sink": {"sink": rng.standard_normal(4).astype(np.float32)},
        "dropout": {"dropout": 0.3, "seed": 7},
        "dlse": {"dlse": rng.standard_normal((2, 4, 24)).astype(np.float32)},
        "scale": {"scale": -0.4},
    }
    if name == "all":
        return {key: value for part in full.values() for key, value in part.items()}
    return full.get(name, {})
