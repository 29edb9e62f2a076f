"""Gradients of learned look-ups by the portable kernel, on the emulator, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from cuda_specialisations import BFLOAT16
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE
from halves import mostly_thorough
from placement import same_bits

from cupyflash import ArgumentError, lookup, masks, scores
from cupyflash.arrays import cuda_device
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import launch, lookups, route, workspace
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.lookups import of_call
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, lookup_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


def learned(rng, *shape, low=-1.0, high=1.0, dtype=np.float32):
    return lookup(rng.uniform(low, high, shape).astype(dtype), learned=True)


def changes_of(rng):
    """Score changes with learned look-ups of every kind that the kernel serves, by name."""
    cap, slopes = learned(rng, low=1, high=2), learned(rng, 2, 4, dtype=np.float64)
    temperature, gate = learned(rng, 4, dtype=np.float16), learned(rng, 21, 2)
    keys, pairs = learned(rng, 1, 4, 26), learned(rng, 26, 21)
    return {
        "one number": scores.softcap(cap),
        "entries and heads": scores.alibi(slopes),
        "heads": scores.score(lambda s, b, h, i, j: s * temperature[h]),
        "queries": scores.score(lambda s, b, h, i, j: s + s * gate[i, b]),
        "keys": scores.score(lambda s, b, h, i, j: s + keys[0, h, j]),
        "pairs": scores.score(lambda s, b, h, i, j: s + pairs[j, i]),
    }


def problem(name, dtype, packed=False):
    rng = np.random.default_rng(0)
    change = changes_of(rng)[name]
    shapes = [(2, 4, 21, 6), (2, 4, 21, 8), (1, 2, 26, 8), (2, 2, 26, 6)]
    if packed:
        shapes = [(4, 40, 6), (4, 40, 8), (2, 45, 8), (2, 45, 6)]
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    options = {"score_mod": change, "mask": masks.window(9, 5), "dropout": 0.2, "seed": 5}
    return arrays, options, ([0, 19, 40], [0, 26, 45]) if packed else None


def computed(arrays, options, offsets, blocks, schedule=REVERSE):
    """Gradients on the emulator, in memory that holds NaN, and their bounds."""
    do, q, k, v = arrays
    if offsets is None:
        call = validate.call(q, k, v, Options(**options))
    else:
        call = validate.varlen_call(q, k, v, *offsets, True, Options(**options))
    emulator = Emulator(blocks, schedule)
    out, lse = np.empty(do.shape, do.dtype), np.empty(do.shape[:-1], call.problem.accumulator)
    emulator.forward(call, out, lse)
    rows = {"do": do, "out": out, "lse": lse}
    made = {x: np.full(x.array.shape, np.nan, x.array.dtype) for x in of_call(call)}
    emulator.backward_lookups(call, rows, made)
    bound = lookup_bound(
        do, q, k, v, offsets=offsets, precision=Precision.of(do.dtype), block_kv=16, **options
    )
    assert set(made) == set(bound.dlookups)
    return made, bound.dlookups


@emulated
@mostly_thorough(
    "name",
    list(changes_of(np.random.default_rng(0))),
    quick=["one number", "queries"],
    why="other axes along which sums run",
)
def test_gradients_are_within_the_bound(name):
    dtypes = np.dtype(np.float32), BFLOAT16, np.dtype(np.float64)
    for dtype in dtypes[: 1 if name == "one number" else 3]:
        made, bounds = computed(*problem(name, dtype), Blocks(16, 16, 64))
        for table, gradient in made.items():
            assert rho(gradient, *bounds[table]).value <= 1, (dtype, gradient)


@pytest.fixture(name="small_parts")
def _small_parts(monkeypatch):
    """Let blocks have parts of a sum that are as short as they can be."""
    for name, value in {"TILE_Q": 16, "TILE_K": 16, "FEWEST_TILES": 1}.items():
        monkeypatch.setattr(workspace, name, value)


def parts_of(arrays, options):
    """How many blocks share the scores of each look-up."""
    _, q, k, v = arrays
    call = validate.call(q, k, v, Options(**options))
    made = {x: np.zeros(x.array.shape, x.array.dtype) for x in of_call(call)}
    served = lookups.served(call, made)
    return [workspace.parts_of_bias(call, x.gradient.shape) for x in served]


@emulated
@mostly_thorough(
    "name, parts",
    {"one number": 16, "entries and heads": 2, "heads": 4, "queries": 4, "keys": 4}.items(),
    quick=(("one number", 16),),
    why="other axes along which sums run",
)
def test_parts_of_sums(name, parts, small_parts):
    arrays, options, offsets = problem(name, np.float32)
    assert parts_of(arrays, options) == [parts]
    found = [
        computed(arrays, options, offsets, Blocks(16, 16, 64), schedule)
        for schedule in (REVERSE, Emulator().schedule)
    ]
    for table, gradient in found[0][0].items():
        assert rho(gradient, *found[0][1][table]).value <= 1
        assert same_bits(gradient, found[1][0][table])


@emulated
@pytest.mark.thorough("another way of adding up the same parts")
def test_parts_of_an_entry_do_not_depend_on_the_batch(small_parts):
    (do, q, k, v), options, _ = problem("heads", np.float32)
    del options["dropout"], options["seed"]
    rng = np.random.default_rng(1)
    both = rng.uniform(0, 1, (2, 4))

    def gradient(slopes, *arrays):
        table = lookup(slopes, learned=True)
        changed = {**options, "score_mod": scores.alibi(table)}
        return computed(arrays, changed, None, Blocks(16, 16, 64))[0][table]

    alone = gradient(both[1:], do[1:], q[1:], k, v[1:])
    assert same_bits(gradient(both, do, q, k, v)[1:], alone)


@emulated
@pytest.mark.parametrize("name", ["one number", "heads"])
def test_packed_sequences(name, small_parts):
    made, bounds = computed(*problem(name, np.float32, packed=True), Blocks(16, 16, 64))
    for table, gradient in made.items():
        assert rho(gradient, *bounds[table]).value <= 1


@emulated
@pytest.mark.thorough("the same kernel again")
def test_bits_depend_on_no_schedule():
    found = [
        list(computed(*problem("heads", np.float32), Blocks(16, 16, 64), schedule)[0].values())
        for schedule in (REVERSE, Emulator().schedule)
    ]
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_other_indices_are_refused_by_their_kind():
    rng = np.random.default_rng(0)
    bucket = lookup(rng.integers(0, 3, 26))
    table, pairs, square = learned(rng, 3), learned(rng, 3, 3), learned(rng, 21, 21)
    x = np.zeros((1, 4, 21, 8), np.float32)

    def kind(function):
        call = validate.call(x, x, x, Options(score_mod=scores.score(function)))
        with pytest.raises(ArgumentError, match="no kernel of a GPU") as caught:
            lookups.check(call)
        return str(caught.value)

    buckets = kind(lambda s, b, h, i, j: s + table[bucket[abs(i - j)]])
    assert "pairs of positions or of their distances" in buckets
    assert "pairs of positions" in kind(lambda s, b, h, i, j: s + pairs[bucket[i], bucket[j]])
    assert "made of positions" in kind(lambda s, b, h, i, j: s + table[h % 3])
    assert "two different indices" in kind(lambda s, b, h, i, j: s * square[i, j] + square[j, i])


def test_a_route_has_the_kernel_and_its_parts():
    x = np.zeros((64, 4, 21, 8), np.float32)
    slopes = lookup(np.ones(4, np.float32), learned=True)
    call = validate.call(x, x, x, Options(score_mod=scores.alibi(slopes)))
    made = {slopes: np.zeros(4, np.float32)}
    (served,) = lookups.served(call, made)
    assert served.gradient.shape == (1, 4, 1, 1)
    assert np.shares_memory(served.gradient, made[slopes])
    target = Target(0, "a GPU", (8, 0), 108, 166912)
    rows = x, x, x[..., 0], None
    how = {"gradients": Gradients(x, x, x), "deterministic": True}
    found = route.backward(call, target, *rows, **how, served=[served])
    alone = route.backward(call, target, *rows, **how)
    kernels = [step.kernel for step in found.steps]
    assert kernels == [step.kernel for step in alone.steps] + ["backward_lookup", "backward_sums"]
    more = found.recipe.scratch.keys() - alone.recipe.scratch.keys()
    assert more == {workspace.parts_of("dlookup 0")}
    assert "dlookup 0" in {name for _, name in found.steps[-1].launch.slots}
    wanted = sum(-(-x.nbytes // 256) * 256 for x in found.recipe.scratch.values())
    with mock.patch.object(cuda_device, "of", return_value=target):
        assert launch.workspace_size(replace(call, device=0)) >= wanted
