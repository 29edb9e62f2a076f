"""A tiled attention in NumPy, forward and backward, and a catalogue of faults for it to have.

Without a fault it is right: `verify` passes it. With one it is what a slip in a kernel would be,
and `verify` has to find it.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
from strategies import BFLOAT16

from cupyflash.expr.bind import bind
from cupyflash.expr.derivative import derivative
from cupyflash.expr.evaluate import evaluate
from cupyflash.masks import flat_sizes, position_symbols
from cupyflash.problem.call import Gradients
from cupyflash.reference.cpu import philox
from cupyflash.reference.spec import naive
from cupyflash.reference.spec.naive_formulas import score_chain, select_matmul
from cupyflash.testing import FEATURES

# NumPy's matrix products differ with an array's place, and there are neither out= nor codes.
KNOWN = [name for name in FEATURES if name not in ("bitwise", "out", "codes", "mixed", "float8")]
TILES = (16, 16)
LOG2E = 1.4426950408889634

FORWARD_FAULTS = {
    # keys, rows and tiles
    "a key is dropped": "one key of the middle is masked",
    "tiles lose their last key": "j < end - 1 in every full tile",
    "tiles lose their first key": "j > start in every tile but the first",
    "the last tile is lost": "Lk // block tiles are visited",
    "the last rows are lost": "Lq // block tiles of rows are computed",
    "a tile is seen twice": "the second tile is visited again at the end",
    "an odd head loses its tail": "D - 1 products of an odd D",
    "an odd last column is its neighbour": "the vectorised store of an odd Dv",
    # softmax
    "log2 e has four digits": "1.443",
    "row sums are bfloat16": "l",
    "O is accumulated in float16": "the accumulator of P V",
    "O is not rescaled": "by exp(m_old - m_new)",
    "l is not rescaled": "by exp(m_old - m_new)",
    "the first tile's maximum stays": "overflows where later scores are larger",
    "the rescaling is stale": "by the maximum of one tile before",
    "l has an epsilon of 1e-5": "against division by 0",
    "l has an epsilon of 1e-12": "against division by 0",
    "scores are rounded to bfloat16": "before the softmax",
    "P is rounded to bfloat16": "before P V, unsaid",
    "O is truncated": "toward 0 instead of rounded",
    "empty rows are NaN": "exp(-inf + inf)",
    "masked scores are -1e4": "so that rows without keys are means",
    "a masked NaN arrives": "0 * NaN in P V",
    # options
    "causal is aligned at the start": "j <= i",
    "causal is off by one": "j < i + Lk - Lq",
    "the scale is forgotten": "1",
    "the scale is rounded to bfloat16": "1/sqrt(D)",
    "the bias is scaled": "scale * (q.k + bias)",
    "the bias comes before the scores": "softcap(s + bias)",
    "the bias is the first batch entry's": "bias[0] for all",
    "scores are applied in reverse": "the last change first",
    "score positions count from the tile": "j - start of the tile",
    "the sink is forgotten in the LSE": "ln of the keys' sum",
    "the sink is scaled": "scale * sink",
    "the LSE is in base 2": "log2",
    "the LSE has lost its maximum": "ln l",
    "the LSE is stored in float16": "in float32 arrays",
    "query heads read other key heads": "h % Hkv",
    "batch entries share keys": "k[0] for all",
    "strides are ignored": "memory order is taken for C order",
    "q is scaled in place": "the caller's array changes",
    "results differ from run to run": "in the last bit, by chance",
    # dropout
    "dropout is shifted": "by one key",
    "dropout forgets the batch": "h instead of b Hq + h",
    "survivors are not divided": "by 1 - p",
    "dropout is half as often": "kept by p / 2, divided by 1 - p",
    "dropout comes before the row sum": "l of the survivors",
}
GRADIENT_FAULTS = {  # the forward is right
    "delta has the wrong sign": "dP + delta",
    "delta is forgotten": "dS = P dP",
    "dQ lacks the scale": "dS K",
    "dK lacks the scale": "dS^T Q",
    "dQ is the last tile's": "= instead of +=",
    "dK loses the last rows": "Lq // block tiles of rows",
    "dK is one head's of its group": "= instead of +=",
    "dV is without dropout": "P^T dO",
    "dP is without dropout": "dO V^T",
    "the backward draws anew": "seed + 1",
    "the backward forgets the mask": "P of hidden pairs",
    "the backward reads the LSE in base 2": "exp2(s - lse)",
    "dLSE is forgotten": "dS = P (dP - delta)",
    "dLSE has the wrong sign": "delta + dLSE",
    "the scores' derivative is forgotten": "dS = dT",
    "dbias has the scores' derivative": "dbias = dS",
    "dbias is one batch entry's": "not summed over the batch",
    "dsink has the wrong sign": "P_sink (delta - dLSE)",
    "delta is rounded to bfloat16": "rowsum(dO o O)",
    "gradients of nothing are not written": "an empty batch leaves what was in memory",
    "gradients are means over the batch": "of what was broadcast",
}
FAULTS = FORWARD_FAULTS | GRADIENT_FAULTS


class Change:
    """A score change on a problem of known sizes, as `Score.evaluate`: bound once for all tiles."""

    def __init__(self, score, sizes):
        self.sizes, bound = sizes, bind(score.expr, flat_sizes(sizes))
        self.trees = bound, derivative(bound)

    def __call__(self, s, b, h, i, j):
        if not s.size:
            return s.copy(), np.ones_like(s)
        symbols = position_symbols(b, h, i, j, self.sizes) | {"score": s}
        found = (evaluate(tree, symbols, s.dtype.type) for tree in self.trees)
        return tuple(np.broadcast_to(value, s.shape) for value in found)


class Attention:
    """`attention` and `attention_backward` with a fault."""

    def __init__(self, fault: str = "") -> None:
        assert fault in FAULTS or not fault
        self.fault = fault
        self._rng = np.random.default_rng(0)

    def has(self, fault: str) -> bool:
        assert fault in FAULTS
        return fault == self.fault

    def prepare(self, q, k, v, *, mask=None, score_mod=None, bias=None, sink=None, scale=None,
                dropout=0.0, seed=None):  # fmt: skip
        """Everything that both passes read, as (B, Hq, L, D) in the accumulator's type."""
        x = SimpleNamespace(t=np.float64 if q.dtype == np.float64 else np.float32)
        if self.has("strides are ignored"):
            q = q.ravel(order="K").reshape(q.shape)
        if self.has("q is scaled in place") and q.size and q.flags.c_contiguous:
            q *= q.dtype.type(1.5)
        x.lead = naive.lead_of(q, k, v)
        x.q, x.k, x.v = (naive.per_query_head(y, x.lead, x.t) for y in (q, k, v))
        if self.has("query heads read other key heads") and k.ndim > 2:
            order = np.argsort(np.arange(x.q.shape[1]) % max(k.shape[-3], 1), kind="stable")
            x.k, x.v = x.k[:, np.argsort(order)], x.v[:, np.argsort(order)]
        if self.has("batch entries share keys") and x.lead.batch:
            x.k = np.broadcast_to(x.k[:1], x.k.shape)
        if self.has("an odd head loses its tail") and q.shape[-1] % 2 and q.shape[-1] > 1:
            x.q = np.concatenate([x.q[..., :-1], 0 * x.q[..., -1:]], axis=-1)
        shape = x.shape = (*x.q.shape[:3], x.k.shape[2])
        x.sizes = naive.Sizes(x.lead.axes, *shape[1:])
        x.at = np.ogrid[: shape[0], : shape[1], : shape[2], : shape[3]]
        x.scale = x.t(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if self.has("the scale is forgotten"):
            x.scale = x.t(1)
        if self.has("the scale is rounded to bfloat16"):
            x.scale = x.t(BFLOAT16.type(x.scale))
        full = x.lead.axes + shape[1:]
        seen = True
        if mask is not None:
            seen = mask.evaluate(*x.at, x.sizes) if hasattr(mask, "evaluate") else (
                np.broadcast_to(mask, full).reshape(shape))  # fmt: skip
            if "len_k - len_q" in repr(mask) and "|" not in repr(mask):  # causal, or with it
                i, j = x.at[2:]
                if self.has("causal is aligned at the start"):
                    seen = j <= i
                if self.has("causal is off by one"):
                    seen = seen & (j < i + shape[3] - shape[2])
        x.seen = np.array(np.broadcast_to(seen, shape))
        if self.has("a key is dropped") and shape[3] > 1:
            x.seen[..., shape[3] // 2] = False
        if self.has("tiles lose their last key"):
            x.seen[..., TILES[1] - 1 :: TILES[1]] = False
        if self.has("tiles lose their first key"):
            x.seen[..., TILES[1] :: TILES[1]] = False
        x.bias = None if bias is None else np.broadcast_to(bias.astype(x.t), full).reshape(shape)
        if bias is not None:
            x.seen &= x.bias != -np.inf
            if self.has("the bias is the first batch entry's"):
                x.bias = np.broadcast_to(x.bias[:1], shape)
        x.changes = [Change(each, x.sizes) for each in score_chain(score_mod)]
        if self.has("scores are applied in reverse"):
            x.changes = x.changes[::-1]
        x.sink = None if sink is None else sink.astype(x.t)[None, :, None]
        if sink is not None and self.has("the sink is scaled"):
            x.sink = x.sink * x.scale
        x.z, x.dropout, x.seed = self.weights(x, dropout, seed), dropout, seed
        return x

    def weights(self, x, dropout, seed):
        """What dropout multiplies P by."""
        if not dropout:
            return np.ones(x.shape, x.t)
        b, h, i, j = x.at
        row = h + 0 * b if self.has("dropout forgets the batch") else b * x.shape[1] + h
        rate = dropout / 2 if self.has("dropout is half as often") else dropout
        kept = philox.keep(seed, rate, row, i, j + self.has("dropout is shifted"))
        divisor = 1 if self.has("survivors are not divided") else philox.keep_probability(dropout)
        return np.where(kept, x.t(1 / divisor), x.t(0))

    def logits(self, x, rows, keys):
        """Logits, slope and visible pairs of a tile."""
        b, h, i, j = x.at
        i, j = i[:, :, rows], j[..., keys]
        if self.has("score positions count from the tile"):
            j = j - keys.start
        s = x.scale * (x.q[:, :, rows] @ x.k[:, :, keys].swapaxes(-1, -2))
        if self.has("scores are rounded to bfloat16"):
            s = s.astype(BFLOAT16).astype(x.t)
        bias = None if x.bias is None else x.bias[:, :, rows, keys]
        if bias is not None and self.has("the bias comes before the scores"):
            s, bias = s + bias, None
        slope = np.ones_like(s)
        for change in x.changes:
            s, d = change(s, b, h, i, j)
            slope = slope * d
        if bias is not None:
            s = s + (x.scale * bias if self.has("the bias is scaled") else bias)
        seen = x.seen[:, :, rows, keys] & (s != -np.inf)
        if self.has("masked scores are -1e4"):
            s, seen = np.where(seen, s, x.t(-1e4)), np.ones_like(seen)
        return s, slope, seen

    def tiles(self, length, block, lost=False):
        """Slices of tiles, the last one short."""
        last = length // block * block if lost and length > block else length
        return [slice(n, min(n + block, length)) for n in range(0, last, block)]

    @np.errstate(all="ignore")
    def forward(self, q, k, v, *, return_lse=True, **options):
        """(out, lse)."""
        x = self.prepare(q, k, v, **options)
        t, log2e = x.t, x.t(1.443 if self.has("log2 e has four digits") else LOG2E)
        out = np.zeros((*x.shape[:3], x.v.shape[-1]), t)
        lse = np.full(x.shape[:3], -np.inf, t)
        for rows in self.tiles(x.shape[2], TILES[0], self.has("the last rows are lost")):
            m = np.full(lse[:, :, rows].shape, -np.inf, t)
            l, o = np.zeros_like(m), np.zeros_like(out[:, :, rows])
            if x.sink is not None:
                m = np.broadcast_to(x.sink, m.shape)
                l = np.where(np.isneginf(m), l, 1)
            before = m
            visits = self.tiles(x.shape[3], TILES[1], self.has("the last tile is lost"))
            if self.has("a tile is seen twice"):
                visits += visits[1:2]
            for n, keys in enumerate(visits):
                s, _, seen = self.logits(x, rows, keys)
                new = np.maximum(m, np.where(seen, s, -np.inf).max(axis=-1, initial=-np.inf))
                if n and self.has("the first tile's maximum stays"):
                    new = np.where(np.isneginf(m), new, m)
                safe = new if self.has("empty rows are NaN") else np.where(np.isneginf(new), 0, new)
                stale = before if n > 1 and self.has("the rescaling is stale") else m
                alpha = np.where(m == safe, 1, np.exp2((stale - safe) * log2e)).astype(t)
                p = np.where(seen, np.exp2((s - safe[..., None]) * log2e), 0).astype(t)
                z = x.z[:, :, rows, keys]
                summed = p * (z != 0) if self.has("dropout comes before the row sum") else p
                l = l * (1 if self.has("l is not rescaled") else alpha) + summed.sum(axis=-1)
                if self.has("row sums are bfloat16"):
                    l = l.astype(BFLOAT16).astype(t)
                if self.has("P is rounded to bfloat16"):
                    p = p.astype(BFLOAT16).astype(t)
                if self.has("a masked NaN arrives"):
                    added = (p * z) @ x.v[:, :, keys]
                else:
                    added = select_matmul(p * z, seen, x.v[:, :, keys])
                o = o * (1 if self.has("O is not rescaled") else alpha[..., None]) + added
                if self.has("O is accumulated in float16"):
                    o = o.astype(np.float16).astype(t)
                before, m = m, new
            l = l + t(1e-5 if self.has("l has an epsilon of 1e-5") else 0)
            l = l + t(1e-12 if self.has("l has an epsilon of 1e-12") else 0)
            divisor = l if self.has("empty rows are NaN") else np.where(l == 0, 1, l)
            out[:, :, rows] = o / divisor[..., None]
            top = np.where(np.isneginf(m), 0, m)
            if self.has("the LSE has lost its maximum"):
                top = 0 * top
            total = l
            if x.sink is not None and self.has("the sink is forgotten in the LSE"):
                total = l - np.exp(x.sink - top)
            lse[:, :, rows] = np.where(l == 0, -np.inf, top + np.log(total))
        if self.has("the LSE is in base 2"):
            lse = lse * t(LOG2E)
        if self.has("the LSE is stored in float16"):
            lse = lse.astype(np.float16).astype(t)
        if self.has("an odd last column is its neighbour") and out.shape[-1] % 2:
            out[..., -1] = out[..., -min(2, out.shape[-1])]
        if self.has("results differ from run to run"):
            out *= 1 + self._rng.integers(0, 2, out.shape).astype(t) * np.finfo(t).eps
        stored = out.astype(q.dtype)
        if self.has("O is truncated"):
            over = np.abs(stored.astype(t)) > np.abs(out)
            stored = np.where(over, np.nextafter(stored, q.dtype.type(0)), stored)
        shape = x.shape[2:3] if x.lead.flat else x.lead.axes + x.shape[1:3]
        return stored.reshape(*shape, out.shape[-1]), lse.reshape(shape)

    @np.errstate(all="ignore")
    def backward(self, do, q, k, v, out, lse, *, dlse=None, **options):
        """Gradients."""
        x = self.prepare(q, k, v, **options)
        if self.has("the backward draws anew") and x.dropout:
            x.z = self.weights(x, x.dropout, (x.seed + 1) % 2**64)
        if self.has("the backward forgets the mask"):
            x.seen[...] = True
        t, sizes = x.t, (*x.shape[:3], x.v.shape[-1])
        do, out = (y.astype(t).reshape(sizes) for y in (do, out))
        lse = lse.astype(t).reshape(x.shape[:3])
        dlse = 0 * lse if dlse is None else dlse.astype(t).reshape(lse.shape)
        dlse = np.where(np.isneginf(lse), 0, dlse)
        if self.has("dLSE is forgotten"):
            dlse = 0 * dlse
        if self.has("dLSE has the wrong sign"):
            dlse = -dlse
        delta = np.where(np.isneginf(lse), 0, (do * out).sum(axis=-1))
        delta = np.where(x.seen.any(axis=-1), delta, 0)
        if self.has("delta is rounded to bfloat16"):
            delta = delta.astype(BFLOAT16).astype(t)
        if self.has("delta has the wrong sign"):
            delta = -delta
        if self.has("delta is forgotten"):
            delta = 0 * delta
        shift = delta - dlse
        finite = np.where(np.isneginf(lse), 0, lse)
        base = 1 if self.has("the backward reads the LSE in base 2") else x.t(LOG2E)
        dq, dk, dv, dt = (np.zeros(y, t) for y in (x.q.shape, x.k.shape, x.v.shape, x.shape))
        lost = self.has("dK loses the last rows")
        for rows in self.tiles(x.shape[2], TILES[0]):
            for keys in self.tiles(x.shape[3], TILES[1]):
                s, slope, seen = self.logits(x, rows, keys)
                z, d = x.z[:, :, rows, keys], do[:, :, rows]
                p = np.where(seen, np.exp2((s - finite[:, :, rows, None]) * base), 0).astype(t)
                weights = p if self.has("dV is without dropout") else p * z
                seen_t = seen.swapaxes(-1, -2)
                dv[:, :, keys] += select_matmul(weights.swapaxes(-1, -2), seen_t, d)
                dp = d @ x.v[:, :, keys].swapaxes(-1, -2)
                dp = dp if self.has("dP is without dropout") else dp * z
                ds = np.where(seen, p * (dp - shift[:, :, rows, None]), 0)
                dt[:, :, rows, keys] = ds
                if not self.has("the scores' derivative is forgotten"):
                    ds = np.where(seen, ds * slope, 0)
                if self.has("dbias has the scores' derivative"):
                    dt[:, :, rows, keys] = ds
                if self.has("dQ is the last tile's"):
                    dq[:, :, rows] = 0
                dq[:, :, rows] += select_matmul(ds, seen, x.k[:, :, keys])
                if not (lost and rows.start and rows.stop - rows.start < TILES[0]):
                    dk[:, :, keys] += select_matmul(ds.swapaxes(-1, -2), seen_t, x.q[:, :, rows])
        dq = dq if self.has("dQ lacks the scale") else dq * x.scale
        dk = dk if self.has("dK lacks the scale") else dk * x.scale
        if self.has("dK is one head's of its group") and k.ndim > 2 and k.shape[-3]:
            group = dk.shape[1] // k.shape[-3]
            dk = dk * ((np.arange(dk.shape[1]) + 1) % group == 0)[:, None, None]
        made = [self.summed(x, y, owner) for y, owner in ((dq, q), (dk, k), (dv, v))]
        bias, sink = options.get("bias"), options.get("sink")
        if bias is not None and self.has("dbias is one batch entry's"):
            dt[1:] = 0
        made.append(None if bias is None else self.summed(x, dt, bias))
        dsink = None
        if sink is not None:
            p = np.exp(x.sink - finite)
            row = p * np.where(x.sink == -np.inf, 0, dlse - delta)
            row = -row if self.has("dsink has the wrong sign") else row
            dsink = row.sum(axis=(0, 2)).astype(sink.dtype)
        return Gradients(*made, dsink)

    def summed(self, x, gradient, owner):
        """Sum over what was broadcast, in the owner's type."""
        total = naive.sum_to_shape(gradient, x.lead, owner.shape)
        if self.has("gradients are means over the batch") and total.size:
            lead = owner.shape[:-3] if owner.ndim > 2 else ()
            total = total * x.t(math.prod(lead) / max(x.lead.batch, 1))
        if self.has("gradients of nothing are not written") and not x.lead.batch:
            total = total + np.nan
        return total.astype(owner.dtype)
