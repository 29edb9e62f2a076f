"""A server's life over a paged cache, held to lists of rows: a state machine of Hypothesis.

Sequences start, grow, fork, are cut short and end, in any order. Forks have pages in common, and
the last of them is copied before one of its owners writes to it. Whatever comes, the cache holds
the rows of the lists, and attention to it is bit for bit attention to a contiguous copy of them.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from placement import same_bits

from cupyflash import append, attention_cached, masks
from cupyflash.testing import Precision, forward_bound, rho

SLOTS, MOST = 4, 150  # sequences, and positions of each
HEADS, HEADS_KV, D, D_V = 4, 2, 8, 5
CHUNKS = [1, 1, 2, 15, 16, 17, 66]


class CacheMachine(RuleBasedStateMachine):
    xp = np
    append = staticmethod(append)
    attend = staticmethod(attention_cached)

    @initialize(
        page=st.sampled_from([1, 3, 16, 64]),
        dtype=st.sampled_from([np.float16, np.float32]),
        seed=st.integers(0, 2**32 - 1),
        prompts=st.lists(st.sampled_from(CHUNKS), min_size=SLOTS, max_size=SLOTS),
    )
    def begin(self, page, dtype, seed, prompts):
        self.page, self.dtype, self.rng = page, np.dtype(dtype), np.random.default_rng(seed)
        most = -(-MOST // page)
        self.free_pages = list(self.rng.permutation(SLOTS * (most + 1)))
        self.owners = np.zeros(len(self.free_pages), int)
        shape = (len(self.free_pages), HEADS_KV, page)
        self.k = self.xp.full((*shape, D), np.nan, dtype)
        self.v = self.xp.full((*shape, D_V), np.nan, dtype)
        self.table = np.full((SLOTS, most), -1, np.int32)
        self.rows = {}  # of each sequence that lives: keys and values, (Hkv, n, D)
        self.start()
        self.start()
        self.grow(prompts)

    # Pages

    def take(self):
        page = self.free_pages.pop()
        self.owners[page] = 1
        return page

    def give_back(self, slot, first):
        """Give back a sequence's pages from this one on."""
        held = slice(first, self.pages_of(slot))
        for page in self.table[slot, held]:
            self.owners[page] -= 1
            if not self.owners[page]:
                self.free_pages.append(page)
                self.k[int(page)] = self.v[int(page)] = np.nan
        self.table[slot, held] = -1

    def pages_of(self, slot):
        return -(-self.length(slot) // self.page)

    def length(self, slot):
        return self.rows[slot][0].shape[1]

    def some(self, *shape):
        return self.rng.standard_normal(shape).astype(self.dtype)

    def slot(self, choice):
        return sorted(self.rows)[choice % len(self.rows)]

    def host(self, array):
        return array if self.xp is np else array.get()

    # Rules

    @precondition(lambda self: len(self.rows) < SLOTS)
    @rule()
    def start(self):
        slot = min(set(range(SLOTS)) - set(self.rows))
        self.rows[slot] = (self.some(HEADS_KV, 0, D), self.some(HEADS_KV, 0, D_V))

    @precondition(lambda self: 0 < len(self.rows) < SLOTS)
    @rule(choice=st.integers(0, SLOTS))
    def fork(self, choice):
        slot, other = self.slot(choice), min(set(range(SLOTS)) - set(self.rows))
        self.rows[other] = self.rows[slot]
        self.table[other] = self.table[slot]
        self.owners[self.table[slot, : self.pages_of(slot)]] += 1

    @precondition(lambda self: self.rows)
    @rule(choice=st.integers(0, SLOTS), keep=st.floats(0, 1))
    def truncate(self, choice, keep):
        slot = self.slot(choice)
        kept = int(keep * self.length(slot))
        self.give_back(slot, -(-kept // self.page))
        self.rows[slot] = tuple(x[:, :kept] for x in self.rows[slot])

    @precondition(lambda self: self.rows)
    @rule(choice=st.integers(0, SLOTS))
    def end(self, choice):
        slot = self.slot(choice)
        self.give_back(slot, 0)
        del self.rows[slot]

    @precondition(lambda self: self.rows)
    @rule(wanted=st.lists(st.sampled_from([0, *CHUNKS]), min_size=SLOTS, max_size=SLOTS))
    def grow(self, wanted):
        """Append to all sequences in one call: packed rows, or as many to each."""
        slots = sorted(self.rows)
        counts = [min(wanted[slot], MOST - self.length(slot)) for slot in slots]
        for slot, count in zip(slots, counts, strict=True):
            self.make_room(slot, count)
        new = [(self.some(HEADS_KV, n, D), self.some(HEADS_KV, n, D_V)) for n in counts]
        lengths = np.array([self.length(x) + n for x, n in zip(slots, counts, strict=True)])
        options, join = {"offsets": [0, *np.cumsum(counts).tolist()]}, np.concatenate
        if len(set(counts)) == 1:
            options, join = {}, lambda x, axis: np.stack(x)
        k_new, v_new = (join([x[n] for x in new], axis=1) for n in range(2))
        asarray = self.xp.asarray
        arrays = [asarray(x) for x in (k_new, v_new)]
        self.append(
            *arrays, self.k, self.v, asarray(lengths), table=asarray(self.table[slots]), **options
        )
        for slot, rows in zip(slots, new, strict=True):
            pairs = zip(self.rows[slot], rows, strict=True)
            self.rows[slot] = tuple(np.concatenate(pair, axis=1) for pair in pairs)

    def make_room(self, slot, count):
        length, held = self.length(slot), self.pages_of(slot)
        if count and length % self.page:
            last = self.table[slot, held - 1]
            if self.owners[last] > 1:  # copy on write
                self.owners[last] -= 1
                self.table[slot, held - 1] = page = self.take()
                for x in (self.k, self.v):
                    x[int(page)] = x[int(last)]
        for n in range(held, -(-(length + count) // self.page)):
            self.table[slot, n] = self.take()

    @precondition(lambda self: self.rows)
    @rule(
        queries=st.sampled_from([1, 1, 2, 7]),
        mask=st.sampled_from([None, masks.causal(), masks.window(20, 0)]),
        sink=st.booleans(),
    )
    def attend_to_all(self, queries, mask, sink):
        slots = sorted(self.rows)
        q = self.some(len(slots), HEADS, queries, D)
        asarray, options = self.xp.asarray, {"mask": mask}
        if sink:
            options["sink"] = self.some(HEADS)
        given = {x: asarray(y) if isinstance(y, np.ndarray) else y for x, y in options.items()}
        lengths = np.array([self.length(slot) for slot in slots], np.int32)
        results = self.attend(
            asarray(q), self.k, self.v, asarray(lengths), table=asarray(self.table[slots]),
            return_lse=True, **given,
        )  # fmt: skip
        out, lse = (self.host(x) for x in results)
        for b, slot in enumerate(slots):
            one, arrays = slice(b, b + 1), [x[None] for x in self.rows[slot]]
            alone = self.attend(
                *map(asarray, (q[one], *arrays)), int(lengths[b]), return_lse=True, **given
            )
            assert same_bits(out[one], self.host(alone[0]))
            assert same_bits(lse[one], self.host(alone[1]))
            precision = Precision.of(self.dtype, self.xp is not np)
            bound = forward_bound(q[one], *arrays, precision=precision, **options)
            assert rho(out[one], *bound.out).value <= 1
            assert rho(lse[one], *bound.lse).value <= 1

    # What always holds

    @invariant()
    def the_cache_holds_the_rows(self):
        k, v = (self.host(x) for x in (self.k, self.v))
        for slot, rows in self.rows.items():
            at = np.arange(self.length(slot))
            pages = self.table[slot, at // self.page]
            for x, expected in zip((k, v), rows, strict=True):
                held = x[pages, :, at % self.page].swapaxes(0, 1)
                assert same_bits(np.ascontiguousarray(held), np.ascontiguousarray(expected))

    @invariant()
    def no_page_is_lost(self):
        named = [self.table[slot, : self.pages_of(slot)] for slot in self.rows]
        counts = np.bincount(np.concatenate(named or [[]]).astype(int), minlength=len(self.owners))
        assert counts.tolist() == self.owners.tolist()
        assert sorted(self.free_pages) == np.flatnonzero(counts == 0).tolist()
        for x in (self.k, self.v):  # nothing is written to a page that nobody has
            assert np.isnan(self.host(x)[self.free_pages].astype(np.float32)).all()
