"""Calls over ranks, as functions of whole arrays: each rank takes its part and puts its results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from harness import small_tiles
from placement import same_bits

from cupyflash import distributed
from cupyflash.distributed.partition import divisions, layouts
from cupyflash.problem.call import Gradients
from cupyflash.testing import (
    Subject,
    backward_bound,
    backward_bound_varlen,
    forward_bound,
    forward_bound_varlen,
)

TIMEOUT = 60.0
# Keywords of codes, which ranks do not take.
OF_CODES = {"q_scale", "k_scale", "v_scale", "qkv_dtype", "out_dtype"}


@contextlib.contextmanager
def blocks_of(block: int, chunks: int = 2) -> Iterator[None]:
    """Layouts of short blocks and of few chunks, so that short sequences have many of them."""
    with (
        mock.patch.object(layouts, "BLOCK", block),
        mock.patch.object(divisions, "CHUNKS", chunks),
    ):
        yield


def judge(p: Any, over: OverRanks, block: int) -> None:
    """Judge the forward and the backward of a problem, a term of the bound for each merge."""
    with small_tiles(p) as whole, blocks_of(block):
        functions = over.attention, over.attention_backward
        subject = Subject(
            *functions, varlen=functions[0], varlen_backward=functions[1], tiles=whole.tiles
        )
        rows = subject.attend_problem(p)
        finite = np.isfinite(rows.out).all()  # the backward reads what float16 made of O
        gradients = subject.gradients_problem(p, rows) if finite else Gradients(None, None, None)
        how = {"block_kv": min(whole.tiles[1], block), "splits": over.merges(p.k.shape[-2])}
    how |= {"precision": subject.precision(p.dtype), **p.options}
    arrays, packed = (p.q, p.k, p.v, *(p.offsets or ())), p.offsets is not None
    bound = (forward_bound_varlen if packed else forward_bound)(*arrays, **how)
    subject.judge("out", rows.out, *bound.out)
    subject.judge("lse", rows.lse, *bound.lse)
    bounds = (backward_bound_varlen if packed else backward_bound)(
        p.do, *arrays, dlse=p.dlse, **how
    )
    for name, gradient in zip(Gradients._fields, gradients, strict=True):
        if gradient is not None:
            subject.judge(name, gradient, *getattr(bounds, name))


def served(p: Any, size: int, scheme: str) -> tuple[int, str]:
    """Return a number of ranks and a scheme that can serve a problem."""
    heads = p.k.shape[-3] if p.k.ndim > 2 else 1
    if scheme == "heads":
        return max(1, min(size, heads)), scheme
    if scheme == "nodes":
        return 2 * max(2, size // 2), scheme
    if scheme == "heads x rounds":
        return (4 if heads == 3 else 2 * heads, scheme) if heads > 1 else (size, "rounds")
    return size, scheme


class OverRanks:
    """The public functions on threads.

    Parameters
    ----------
    size : int
        The number of ranks.
    kind, kind_k : str
        The layouts of queries and of keys; that of keys is "same" if it is that of queries.
    more : keywords
        Further arguments of every call, as scheme. With "nodes", every other rank begins a node.
    """

    def __init__(
        self, size: int, kind: str = "contiguous", kind_k: str = "contiguous", **more: Any
    ) -> None:
        self.threads = distributed.Threads(size, size // 2 if more.get("scheme") == "nodes" else 1)
        self.kinds = kind, kind_k
        self.more = {"timeout": TIMEOUT, **more}

    def layouts(
        self, comm: Any, q: Any, k: Any, v: Any, mask: Any = None, offsets: Any = ()
    ) -> tuple[Any, Any]:
        """Return the layouts of queries and of keys."""
        heads = q.shape[-3] if q.ndim > 2 else 1
        lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        options = {"kind": self.kinds[0], "lead": lead, "heads": heads}
        if self.kinds[1] == "same":
            layout = distributed.layout(comm, q.shape[-2], mask=mask, **options)
            return layout, layout
        layout_k = distributed.layout(comm, k.shape[-2], kind=self.kinds[1])
        options["layout_k"] = layout_k
        options |= dict(zip(("offsets_q", "offsets_k"), offsets, strict=False))
        if not all(q.shape[-2:] + lead):
            mask = None
        return distributed.layout(comm, q.shape[-2], mask=mask, **options), layout_k

    def merges(self, length: int) -> int:
        """Return how many runs of keys there are at most, each of which is a piece."""
        kind = "cyclic" if self.kinds[1] == "same" else self.kinds[1]
        made = distributed.layout(self.threads.ranks[0], length, kind=kind)
        return max(1, sum(len(runs.ranges) for runs in made.runs))

    def attention(
        self, q: Any, k: Any, v: Any, *offsets: Any, return_lse: bool = False, **options: Any
    ) -> Any:
        """Compute what `cupyflash.attention` computes; with offsets, what the packed one does."""
        function = distributed.attention_varlen if offsets else distributed.attention
        lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        matrices = q.ndim == k.ndim == v.ndim == 2
        heads = () if matrices else (*lead, q.shape[-3] if q.ndim > 2 else 1)
        out = np.full((*heads, q.shape[-2], v.shape[-1]), np.nan, q.dtype)
        results = []

        def work(comm: Any) -> None:
            layout, layout_k = self.layouts(comm, q, k, v, options.get("mask"), offsets)
            arrays = layout.take(q), layout_k.take(k), layout_k.take(v)
            ours, lse = function(
                *arrays, *offsets, comm=comm, layout=layout, layout_k=layout_k, return_lse=True,
                **(options if offsets else self._own(options, layout)), **self.more,
            )  # fmt: skip
            layout.put(ours, out)
            results.append((layout, lse))

        self.threads.run(work)
        whole = np.full(out.shape[:-1], np.nan, results[0][1].dtype)
        for layout, lse in results:
            layout.put(lse, whole, axis=-1)
        return (out, whole) if return_lse else out

    def attention_backward(
        self, do: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *offsets: Any,
        dlse: Any = None, **options: Any,
    ) -> Gradients:  # fmt: skip
        """Compute what `cupyflash.attention_backward`, or the packed one, computes."""
        function = distributed.attention_varlen_backward if offsets else (
            distributed.attention_backward
        )  # fmt: skip
        named = {"q": q, "k": k, "v": v}
        whole = {name: np.full(x.shape, np.nan, x.dtype) for name, x in named.items()}
        bias = options.get("bias")
        own_rows = bias is not None and not offsets and self._has_rows(bias)
        if own_rows:
            whole["bias"] = np.full(bias.shape, np.nan, bias.dtype)

        def work(comm: Any) -> Gradients:
            layout, layout_k = self.layouts(comm, q, k, v, options.get("mask"), offsets)
            arrays = (
                layout.take(do), layout.take(q), layout_k.take(k), layout_k.take(v),
                layout.take(out), layout.take(lse, axis=-1),
            )  # fmt: skip
            made = function(
                *arrays, *offsets, comm=comm, layout=layout, layout_k=layout_k,
                dlse=None if dlse is None else layout.take(dlse, axis=-1),
                **(options if offsets else self._own(options, layout)), **self.more,
            )  # fmt: skip
            for name, gradient in zip(("q", "k", "v"), made, strict=False):
                (layout if name == "q" else layout_k).put(gradient, whole[name])
            if own_rows:
                layout.put(made.dbias, whole["bias"])
            return made

        made = self.threads.run(work)
        for other in made[1:]:  # sums over all ranks
            assert options.get("sink") is None or same_bits(other.dsink, made[0].dsink)
            assert bias is None or own_rows or same_bits(other.dbias, made[0].dbias)
        dbias = whole.get("bias", made[0].dbias)
        return Gradients(whole["q"], whole["k"], whole["v"], dbias, made[0].dsink)

    def _own(self, options: dict[str, Any], layout: Any) -> dict[str, Any]:
        """Return the options with the rows of the bias that a rank has."""
        bias = options.get("bias")
        if bias is None or not self._has_rows(bias):
            return options
        return options | {"bias": layout.take(bias)}

    @staticmethod
    def _has_rows(bias: Any) -> bool:
        return bias.ndim > 1 and bias.shape[-2] != 1
