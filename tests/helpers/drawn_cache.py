"""Drawn caches of keys and values, for tests of attention over a cache on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from placement import same_bits
from strategies import DTYPES

from cupyflash import attention_cached, masks, scores
from cupyflash.testing import Precision, forward_bound, rho

BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FLOAT32 = np.dtype(np.float32)
LENGTHS = [0, 1, 2, 63, 64, 65, 127, 129, 511, 512, 513, 600]


class Case:
    """A drawn cache, with NaN behind each entry's keys, queries, and options by entry."""

    def __init__(self, rng, dtype, lengths, *, group=1, heads_kv=1, len_q=1, d=16, d_v=16, room=0):
        self.rng, self.lengths = rng, np.asarray(lengths)
        batch, most = len(lengths), max(lengths) + room
        self.q = self._random((batch, heads_kv * group, len_q, d), dtype)
        self.k = self._random((batch, heads_kv, most, d), dtype)
        self.v = self._random((batch, heads_kv, most, d_v), dtype)
        for b, n in enumerate(lengths):
            self.k[b, :, n:] = self.v[b, :, n:] = np.nan
        self.options = {}

    def _random(self, shape, dtype):
        return self.rng.standard_normal(shape, np.float32).astype(dtype)

    def with_options(self, mask=None, score=None, bias=False, sink=False):
        (batch, heads, len_q, _), most = self.q.shape, self.k.shape[2]
        if mask == "dense":
            mask = self.rng.random((batch, heads, len_q, most)) < 0.6
        elif mask == "tree":
            mask = self.rng.random((batch, len_q, len_q)) < 0.5
        self.options = {"mask": mask, "score_mod": score}
        if bias:
            self.options["bias"] = self._random((batch, heads, len_q, most), np.float32)
        if sink:
            self.options["sink"] = self._random((heads,), np.float32)
        return self

    def arguments(self, b=None):
        """The options of the call, or those of attention over the keys of one entry."""
        made = dict(self.options)
        mask, n = made["mask"] if made else None, None if b is None else self.lengths[b]
        is_tree = isinstance(mask, np.ndarray) and mask.ndim == 3
        if b is not None and isinstance(mask, np.ndarray):
            made["mask"] = mask[b] if is_tree else mask[b, ..., :n]
        if is_tree:
            made["mask"] = masks.tree(made["mask"])
        if b is not None and "bias" in made:
            made["bias"] = made["bias"][b, ..., :n]
        return made

    def run(self, lengths=None, **changes):
        arrays = {"q": self.q, "k": self.k, "v": self.v}
        arrays = [changes.pop(name, value) for name, value in arrays.items()]
        lengths = self.lengths if lengths is None else lengths
        options = self.arguments() | changes
        return attention_cached(*arrays, lengths, return_lse=True, **options)

    def check(self, out, lse):
        """Hold results to the bound of each entry by itself."""
        for b, n in enumerate(self.lengths):
            arrays = self.q[b], self.k[b, :, :n], self.v[b, :, :n]
            precision = Precision.of(self.q.dtype)
            expected = forward_bound(*arrays, precision=precision, **self.arguments(b))
            assert not expected.ill_conditioned
            for ours, bounded in ((out[b], expected.out), (lse[b], expected.lse)):
                assert rho(ours, *bounded).value <= 1

    def paged(self, page, dtype=np.int32):
        """The cache in pages that lie anywhere, with others of NaN, and its table."""
        batch, heads, most, _ = self.k.shape
        each = -(-most // page) + 1
        pages = batch * each + 3
        places = self.rng.permutation(pages)[: batch * each].reshape(batch, each)
        table = np.full((batch, each), -1, dtype)
        made = []
        for x in (self.k, self.v):
            rows = np.full((pages, heads, page, x.shape[-1]), np.nan, x.dtype)
            for b, n in enumerate(self.lengths):
                for number in range(-(-n // page)):
                    held = x[b, :, number * page : min((number + 1) * page, n)]
                    rows[places[b, number], :, : held.shape[1]] = held
                    table[b, number] = places[b, number]
            made.append(rows)
        return {"k": made[0], "v": made[1], "table": table}


MASKS = [
    None,
    masks.causal(),
    masks.window(20, 0),
    masks.window(5, 3) | masks.prefix(2),
    masks.mask(lambda b, h, i, j: (i + j + h) % 3 > 0),
    "dense",
    "tree",
]


@st.composite
def cases(draw, dtype, options=True):
    made = Case(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        dtype,
        draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3)),
        group=draw(st.integers(1, 5)),
        heads_kv=draw(st.integers(1, 2)),
        len_q=draw(st.sampled_from([1, 1, 2, 5, 9])),
        d=draw(st.sampled_from([1, 8, 16, 33])),
        d_v=draw(st.sampled_from([1, 16, 20, 48, 80])),
        room=draw(st.sampled_from([0, 1, 70])),
    )
    if not options:
        return made.with_options()
    return made.with_options(
        draw(st.sampled_from(MASKS)),
        draw(st.sampled_from([None, None, scores.softcap(2.0)])),
        draw(st.booleans()),
        draw(st.booleans()),
    )


WIDE = [(128, 128), (512, 512), (96, 130)]


def same(ours, expected):
    return all(same_bits(a, b) for a, b in zip(ours, expected, strict=True))


# The bound
