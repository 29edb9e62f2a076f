"""`shared` of `attention_cached` by the CUDA kernels: same bits, and shared keys are read once."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from caches import results
from coded_caches import Coded, words
from cuda_specialisations import target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, randomly
from halves import mostly_thorough
from hypothesis import example, given, settings
from hypothesis import strategies as st
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.gpu import route
from cupyflash.gpu.kernels import decode, sm80
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import cached
from cupyflash.problem.codes import NONE, CacheCodes
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, forward_bound, rho

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
SHARED = "decode_sm80_shared"
MASKS = {
    "all": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(700, 0)},
    "short window": {"mask": masks.window(100, 0)},
    "by entry": {"mask": masks.mask(lambda b, h, i, j: (j // 64 + b) % 3 != 0)},
    "softcap": {"score_mod": scores.softcap(2.0)},
    "scores by entry": {"score_mod": scores.score(lambda s, b, h, i, j: s + 0.1 * b - 0.01 * h)},
    "negative": {"scale": -0.3},
}


@pytest.fixture(autouse=True)
def _small_arrays(monkeypatch):
    monkeypatch.setattr(decode, "FEWEST_SHARED_BYTES", 0)


@dataclasses.dataclass
class Entries:
    """Entries whose first `n` positions are in the same pages."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    table: np.ndarray
    lengths: np.ndarray
    n: int

    @classmethod
    def draw(cls, lengths, n, *, page=16, heads_kv=1, group=2, len_q=1, d=16, dtype=F16, seed=0):
        rng, batch = np.random.default_rng(seed), len(lengths)
        each = -(-max(*lengths, n, 1) // page)
        n = n // page * page
        table = rng.permutation(batch * each + 2)[: batch * each].reshape(batch, each)
        table[1:, : n // page] = table[0, : n // page]
        q, k, v = (
            rng.standard_normal(shape).astype(dtype)
            for shape in (
                (batch, group * heads_kv, len_q, d),
                *[(batch * each + 2, heads_kv, page, d)] * 2,
            )
        )
        return cls(q, k, v, table.astype(np.int32), np.array(lengths), n)

    def poisoned(self):
        """The same, where entries that share know only pages that they have alone."""
        whole = self.n // decode.NODE * decode.NODE
        table, page = self.table.copy(), self.k.shape[2]
        for b in range(1, len(table)):
            if self.lengths[b] > whole:
                table[b, : whole // page] = np.setdiff1d(np.arange(len(self.k)), self.table)[0]
        k, v = self.k.copy(), self.v.copy()
        for x in (k, v):
            x[np.setdiff1d(np.arange(len(x)), self.table)] = np.nan
        return dataclasses.replace(self, k=k, v=v, table=table)

    def run(self, shared=0, blocks=None, schedule=REVERSE, codes=NONE, names=None, **options):
        """Compute out and lse, into memory that holds NaN."""
        arrays = self.q, self.k, self.v, self.lengths, self.table
        call = cached.call(*arrays, None, Options(**options), codes, shared)
        out, lse = results(call)

        def runs(special):
            if names is not None:
                names.append(special.kernel)
            return True

        blocks = blocks or Blocks(multiprocessors=3)
        Emulator(blocks, schedule, runs=runs).forward(call, out, lse)
        return out, lse

    def rows_of(self, b):
        """The keys and the values of an entry."""
        place = np.arange(self.lengths[b])
        at = self.table[b, place // self.k.shape[2]], slice(None), place % self.k.shape[2]
        return [x[at].swapaxes(0, 1)[None] for x in (self.k, self.v)]


def same(ours, theirs):
    return all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@mostly_thorough(
    "mask", MASKS, quick=["all", "by entry", "short window"], why="other masks and scores"
)
def test_no_bit_depends_on_what_is_shared(mask):
    """Entries that are shorter, as long and longer; four entries are the rows of a warp."""
    lengths = [1100, 1024, 1025, 300, 0, 1111, 1700, 1023, 1130]
    case = Entries.draw(lengths, 1100, group=4, page=50)
    expected = case.run(**MASKS[mask])
    names = []
    assert same(case.poisoned().run(case.n, names=names, **MASKS[mask]), expected)
    assert SHARED in names
    assert same(case.run(600, **MASKS[mask]), expected)
    # Hopper's blocks are smaller, and an SM has two of them.
    hopper = Blocks(hopper=True, multiprocessors=3)
    assert same(case.poisoned().run(case.n, hopper, **MASKS[mask]), expected)
    # Teams of one block, with a unit each.
    assert same(case.poisoned().run(case.n, Blocks(multiprocessors=1), **MASKS[mask]), expected)


@mostly_thorough(
    ("batch", "group", "len_q", "team"),
    [(2, 1, 1, 1), (5, 4, 1, 2), (3, 2, 8, 4), (9, 16, 1, 4), (20, 5, 2, 4), (3, 20, 2, 4)],
    quick=[(5, 4, 1, 2), (9, 16, 1, 4)],
    why="teams of other sizes, a build each",
)
def test_teams_of_any_size(batch, group, len_q, team):
    """Of their warps some have no rows; rows of the last warp are those of fewer entries."""
    rng = np.random.default_rng(batch)
    lengths = rng.integers(513, 700, batch)
    case = Entries.draw(lengths, 512, group=group, len_q=len_q, heads_kv=2)
    call = cached.call(case.q, case.k, case.v, lengths, case.table, shared=512)
    assert route.of(call, target_of("sm_90")).shared.team == team
    expected = case.run()
    assert same(case.poisoned().run(512), expected)
    precision = Precision.of(F16, True)
    for b in (0, batch - 1):
        bound = forward_bound(case.q[b : b + 1], *case.rows_of(b), precision=precision, block_kv=64)
        assert rho(expected[0][b : b + 1], *bound.out).value <= 1


@pytest.mark.thorough("draws of what the other tests are for")
@settings(max_examples=settings().max_examples)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(512, 1700),
    page=st.sampled_from([1, 3, 16, 64, 100]),
    batch=st.integers(2, 11),
    group=st.sampled_from([1, 2, 4, 7, 16]),
    len_q=st.sampled_from([1, 1, 2, 3]),
    mask=st.sampled_from(["all", "causal", "by entry"]),
    multiprocessors=st.integers(1, 5),
    hopper=st.booleans(),
)
@example(0, 1024, 16, 3, 2, 1, "all", 60, False)
@example(0, 512, 1, 2, 1, 1, "all", 2, False)
def test_draws(seed, n, page, batch, group, len_q, mask, multiprocessors, hopper):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, n + 300, batch)
    case = Entries.draw(lengths, n, page=page, group=group, len_q=len_q, seed=seed)
    blocks, options = Blocks(hopper=hopper, multiprocessors=multiprocessors), MASKS[mask]
    expected = case.run(blocks=blocks, **options)
    names = []
    assert same(case.run(case.n, blocks=blocks, names=names, **options), expected)
    if SHARED in names:  # a small cache is served by one kernel, which reads all rows
        case = case.poisoned()
    for schedule in (FORWARD, randomly(seed)):
        ours = case.run(case.n, blocks=blocks, schedule=schedule, **options)
        assert same(ours, expected)


@pytest.mark.thorough("many keys; nodes of one level are quick")
@pytest.mark.parametrize("n", [512, 4096, 4608, 8704])
def test_units_of_every_level(n):
    """A block has units of 4096 keys, and many have leaves; shared keys end within or with one."""
    lengths = [n + 100, n + 4200, n + 40, 100]
    case = Entries.draw(lengths, n, group=1, d=8, page=64)
    expected = case.run()
    for multiprocessors in (1, 3, 60):
        assert same(case.run(n, Blocks(multiprocessors=multiprocessors)), expected)


@pytest.mark.thorough("many keys; nodes of one level are quick")
def test_own_units_are_larger_than_shared_nodes():
    """So many that they are nodes of 4096 keys: shared ones become such nodes, or are not used."""
    case = Entries.draw([8800] * 8 + [8000, 100], 4700, group=1, d=8, page=64)
    blocks = Blocks(multiprocessors=1)
    assert same(case.run(case.n, blocks), case.run(blocks=Blocks(multiprocessors=60)))


@pytest.mark.thorough("many keys; nodes that have room are quick")
def test_more_nodes_than_have_room_in_shared_memory():
    n = 33_280
    case = Entries.draw([n + 100, n + 700], n, group=1, d=8, page=64)
    for multiprocessors in (2, 60):
        blocks = Blocks(multiprocessors=multiprocessors)
        assert same(case.run(n, blocks), case.run(blocks=blocks))


@mostly_thorough("masked", [True, False], quick=[True], why="nothing is masked, so nothing looks")
def test_values_that_are_not_finite_stay_where_they_are_seen(masked):
    """One of the warps of a team sees them, and another one does not."""
    case = Entries.draw([600, 580, 590, 600], 512, group=16)
    case.v[case.table[0, 3], :, 3, 2] = np.inf
    case.v[case.table[0, 9], :, 4] = np.nan
    hides = masks.mask(lambda b, h, i, j: (b != 2) | (j < 80) | (j > 150))
    options = {"mask": hides} if masked else {}
    out, lse = case.run(512, **options)
    assert same((out, lse), case.run(**options))
    assert np.isfinite(out[2, :, :, 3]).all() == masked
    assert np.isinf(out[2, :, :, 2]).all() == masked  # NaN otherwise
    assert np.isnan(out[0]).all()


@mostly_thorough(
    "form",
    ["int8", "float8_e4m3fn", "int4", ("int8", "int4"), ("int4", None), (None, "float8_e5m2")],
    quick=["int8", (None, "float8_e5m2")],
    why="codes of others",
    ids=words,
)
def test_caches_of_codes(form):
    rng = np.random.default_rng(7)
    k, v = rng.standard_normal((2, 1, 2, 700, 32), np.float32)
    held = Coded.of(form, *(np.repeat(x, 5, axis=0) for x in (k, v)), dtype=BF16)
    q = rng.standard_normal((5, 4, 1, 32)).astype(BF16)
    lengths = [700, 600, 513, 64, 699]
    given = CacheCodes(held.k_scale, held.v_scale, form)
    case = Entries(q, held.k, held.v, None, np.array(lengths), 0)
    expected = case.run(codes=given)
    for name in held.names:
        for b in (1, 2, 4):
            getattr(held, name)[b, :, :512] = 77
    names = []
    assert same(case.run(640, codes=given, names=names), expected)
    assert SHARED in names


def test_rows_of_arrays_without_a_table():
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((2, 1, 2, 800, 16)).astype(F16)
    q = rng.standard_normal((6, 8, 1, 16)).astype(F16)
    lengths = np.array([800, 800, 640, 3, 0, 700])
    expected = Entries(q, *(np.repeat(x, 6, axis=0) for x in (k, v)), None, lengths, 0).run()
    of_one = (np.broadcast_to(x, (6, *x.shape[1:])) for x in (k, v))  # a stride of 0
    assert same(Entries(q, *of_one, None, lengths, 0).run(800), expected)
    # Queries whose rows do not begin where they can be read as vectors, and any strides.
    wide = np.zeros((6, 1, 8, 17), F16)
    wide[..., 1:] = q.swapaxes(1, 2)
    strided = wide[..., 1:].swapaxes(1, 2)
    assert same(Entries(strided, k[..., ::1], v, None, lengths, 0).run(800), expected)


# -- who serves ------------------------------------------------------------------------------------


def planned(q, k, v=None, shared=4096, arch="sm_90", **options):
    made = (np.zeros(shape, F16) for shape in (q, k, v or k))
    lengths = options.pop("lengths", k[2])
    offsets = options.pop("offsets_q", None)
    call = cached.call(*made, lengths, None, offsets, Options(**options), shared=shared)
    made = route.of(call, target_of(arch))
    plan, launches = made.plan, made.recipe.launches
    assert (launches[0].special.kernel == SHARED) == (SHARED in plan.reason)
    assert all(x.special.shared == (SHARED in plan.reason) for x in launches[-2:])
    return plan.reason


def test_a_plan_says_how_many_positions_are_read_once():
    few = (4, 4, 1, 64), (4, 2, 5000, 64)
    assert f"{SHARED} reads the first 4096 positions once for all entries" in planned(*few)
    assert f"{SHARED} reads the first 1024 positions" in planned(*few, shared=1535)
    alone = "each entry reads the first {} positions by itself"
    assert alone.format(511) in planned(*few, shared=511)
    assert alone.format(4096) in planned((1, 4, 1, 64), (1, 2, 5000, 64))
    assert alone.format(4096) in planned(*few, arch="sm_75")
    assert alone.format(4096) in planned((2, 4, 1, 300), (2, 2, 5000, 300))
    packed = (4, 4, 64), (4, 2, 5000, 64)
    assert alone.format(4096) in planned(*packed, offsets_q=[0, 1, 2, 3, 4])


def test_little_is_not_shared(monkeypatch):
    monkeypatch.undo()
    assert "by itself" in planned((33, 4, 1, 64), (33, 2, 20_000, 64), shared=16_383)
    assert SHARED in planned((33, 4, 1, 64), (33, 2, 20_000, 64), shared=16_384)


@pytest.mark.parametrize(("warps", "team"), [(1, 1), (2, 2), (3, 4), (4, 4), (8, 4), (100, 4)])
def test_a_team_has_as_many_warps_as_share_keys(warps, team):
    call = cached.call(*(np.zeros((2, 2, 512, 64), F16),) * 3, 512, shared=512)
    tiles = sm80.SHARED.configure(Request.of(call, target_of("sm_90")))
    assert decode.team_of(tiles, warps) == team
    six = dataclasses.replace(tiles, threads=192)
    assert decode.team_of(six, warps) == {1: 1, 2: 2}.get(warps, 3)
