"""One head's arrays, and every algorithm of the papers' family as one call, for tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from cupyflash import analysis
from cupyflash.reference.algorithms import (
    block_sparse,
    flash_attention,
    flash_attention_2,
    flash_attention_3,
    flash_attention_backward,
    one_pass,
    rabe_staats,
    split_kv,
    standard,
)
from cupyflash.reference.algorithms.hbm import Memory
from cupyflash.reference.spec import naive

Array = np.ndarray[Any, Any]


class Case(NamedTuple):
    """Sizes, and what is drawn from `seed`."""

    n_q: int
    n_k: int
    d: int
    d_v: int
    block_q: int
    block_kv: int
    causal: bool = False
    padded: bool = False
    dropout: float = 0.0
    seed: int = 0
    splits: int = 2

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.n_q, self.n_k, self.d, self.d_v

    @property
    def blocks(self) -> dict[str, int]:
        return {"block_q": self.block_q, "block_kv": self.block_kv}


def arrays(case: Case, dtype: Any = np.float64) -> tuple[Array, Array, Array, Array]:
    """q, k, v and do."""
    rng = np.random.default_rng(case.seed)
    sizes = (
        (case.n_q, case.d),
        (case.n_k, case.d),
        (case.n_k, case.d_v),
        (case.n_q, case.d_v),
    )
    return tuple(rng.standard_normal(size).astype(dtype) for size in sizes)


def padding(case: Case) -> Array | None:
    rng = np.random.default_rng([case.seed, 1])
    return rng.random(case.n_k) < 0.7 if case.padded else None


def layout(case: Case) -> Array:
    rng = np.random.default_rng([case.seed, 2])
    return rng.random((-(-case.n_q // case.block_q), -(-case.n_k // case.block_kv))) < 0.5


def allowed(case: Case, blocks: bool = False) -> Array:
    """Which pairs attend, (Lq, Lk)."""
    pairs = np.ones((case.n_q, case.n_k), bool)
    if case.causal:
        pairs &= np.tri(case.n_q, case.n_k, case.n_k - case.n_q, dtype=bool)
    if case.padded:
        pairs &= padding(case)
    if blocks:
        whole = np.kron(layout(case), np.ones((case.block_q, case.block_kv), bool))
        pairs &= whole[: case.n_q, : case.n_k]
    return pairs


def options(case: Case) -> dict[str, Any]:
    """Everything that the algorithms with masks and dropout know."""
    return {
        "causal": case.causal,
        "padding": padding(case),
        "dropout": case.dropout,
        "seed": case.seed if case.dropout else None,
        **case.blocks,
    }


def expected(case: Case, blocks: bool = False) -> tuple[naive.Naive, naive.Gradients]:
    """The specification's results."""
    q, k, v, do = arrays(case)
    given = {"mask": allowed(case, blocks), "dropout": case.dropout, "seed": case.seed}
    return naive.attention(q, k, v, **given), naive.attention_backward(do, q, k, v, **given)


# name -> (what the algorithm knows, run it on a memory, its traffic in closed form)
def _standard(case: Case, hbm: Memory) -> Any:
    return standard.forward(*arrays(case)[:3], **options(case), hbm=hbm)


def _standard_backward(case: Case, hbm: Memory) -> Any:
    q, k, v, do = arrays(case)
    p = standard.forward(q, k, v, **options(case)).p
    given = {name: options(case)[name] for name in ("dropout", "seed")}
    return standard.backward(do, q, k, v, p, **given, **case.blocks, hbm=hbm)


def _one_pass(case: Case, hbm: Memory) -> Any:
    return one_pass.forward(*arrays(case)[:3], causal=case.causal, hbm=hbm)


def _flash(case: Case, hbm: Memory) -> Any:
    return flash_attention.forward(*arrays(case)[:3], **options(case), hbm=hbm)


def _flash_backward(case: Case, hbm: Memory) -> Any:
    q, k, v, do = arrays(case)
    saved = flash_attention.forward(q, k, v, **options(case))
    given = options(case)
    del given["seed"]  # it comes with what the forward saved
    return flash_attention_backward.backward(do, q, k, v, saved, **given, hbm=hbm)


def _block_sparse(case: Case, hbm: Memory) -> Any:
    return block_sparse.forward(*arrays(case)[:3], layout(case), **options(case), hbm=hbm)


def _flash_2(case: Case, hbm: Memory) -> Any:
    given = options(case)
    del given["padding"]
    return flash_attention_2.forward(*arrays(case)[:3], **given, hbm=hbm)


def _flash_3(case: Case, hbm: Memory) -> Any:
    q, k, v, _ = arrays(case)
    return flash_attention_3.forward(q, k, v, causal=case.causal, **case.blocks, hbm=hbm)


def _rabe(case: Case, hbm: Memory) -> Any:
    return rabe_staats.forward(*arrays(case)[:3], **case.blocks, hbm=hbm)


def _rabe_backward(case: Case, hbm: Memory) -> Any:
    q, k, v, do = arrays(case)
    saved = rabe_staats.forward(q, k, v, **case.blocks)
    return rabe_staats.backward(do, q, k, v, saved, **case.blocks, hbm=hbm)


def _split(case: Case, hbm: Memory) -> Any:
    q, k, v, _ = arrays(case)
    given = {"splits": case.splits, "causal": case.causal, **case.blocks}
    return split_kv.forward(q, k, v, **given, hbm=hbm)


def _extras(case: Case) -> dict[str, bool]:
    return {"padding": case.padded, "dropout": case.dropout > 0}


class Member(NamedTuple):
    knows: set[str]
    run: Any
    traffic: Any


ALL = {"causal", "padded", "dropout"}
FORWARD = {
    "standard": Member(
        ALL,
        _standard,
        lambda c: analysis.standard_attention(*c.shape, **c.blocks, padding=c.padded),
    ),
    "one_pass": Member(
        {"causal"},
        _one_pass,
        lambda c: analysis.one_pass_attention(*c.shape, causal=c.causal),
    ),
    "flash_attention": Member(
        ALL,
        _flash,
        lambda c: analysis.flash_attention(*c.shape, **c.blocks, **_extras(c)),
    ),
    "block_sparse": Member(
        ALL,
        _block_sparse,
        lambda c: analysis.block_sparse_attention(layout(c), *c.shape, **c.blocks, **_extras(c)),
    ),
    "flash_attention_2": Member(
        {"causal", "dropout"},
        _flash_2,
        lambda c: analysis.flash_attention_2(*c.shape, **c.blocks, causal=c.causal),
    ),
    "flash_attention_3": Member(
        {"causal"},
        _flash_3,
        lambda c: analysis.flash_attention_3(*c.shape, **c.blocks, causal=c.causal),
    ),
    "rabe_staats": Member(set(), _rabe, lambda c: analysis.rabe_staats(*c.shape, **c.blocks)),
    "split_kv": Member(
        {"causal"},
        _split,
        lambda c: analysis.split_kv(*c.shape, splits=c.splits, **c.blocks, causal=c.causal),
    ),
}
BACKWARD = {
    "standard_backward": Member(
        ALL,
        _standard_backward,
        lambda c: analysis.standard_attention_backward(*c.shape, **c.blocks),
    ),
    "flash_attention_backward": Member(
        ALL,
        _flash_backward,
        lambda c: analysis.flash_attention_backward(*c.shape, **c.blocks, **_extras(c)),
    ),
    "rabe_staats_backward": Member(
        set(), _rabe_backward, lambda c: analysis.rabe_staats_backward(*c.shape, **c.blocks)
    ),
}


@st.composite
def cases(draw: Any, knows: set[str]) -> Case:
    """Sizes at the edges of blocks: a row less than whole blocks, whole ones, a row more."""
    block_q, block_kv = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    n_q, n_k = (
        max(1, block * draw(st.integers(1, 3)) + draw(st.integers(-1, 1)))
        for block in (block_q, block_kv)
    )
    return Case(
        n_q=n_q,
        n_k=n_k,
        d=draw(st.integers(1, 5)),
        d_v=draw(st.integers(1, 5)),
        block_q=block_q,
        block_kv=block_kv,
        causal="causal" in knows and draw(st.booleans()),
        padded="padded" in knows and draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.3])) if "dropout" in knows else 0.0,
        seed=draw(st.integers(0, 1000)),
        splits=draw(st.integers(1, 5)),
    )
