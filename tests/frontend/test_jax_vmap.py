"""jax.vmap over every subset of the operands is a loop: values, gradients, jit, nested."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from halves import mostly_thorough

from cupyflash import masks

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')

import jax.numpy as jnp  # noqa: E402 (after the skip)

from cupyflash.jax import attention, attention_varlen  # noqa: E402 (after the skip)

if jax.default_backend() != "cpu":
    pytest.skip("cupyflash.jax is for JAX's CPU", allow_module_level=True)

SIZE = 3
SHAPES = {  # of one call; leading axes broadcast
    "q": (2, 1, 4, 5, 8),
    "k": (2, 2, 6, 8),
    "v": (1, 2, 2, 6, 8),
    "bias": (2, 4, 1, 6),
    "mask": (2, 1, 1, 5, 6),
    "sink": (4,),
    "seed": (),
}
MATRICES = {"q": (5, 8), "k": (6, 8), "v": (6, 8), "bias": (5, 6), "mask": (6,)}
FLOATS = "q", "k", "v", "bias", "sink"


def drawn(shapes):
    """Return operands that have one more axis, the first."""
    rng = np.random.default_rng(3)
    made = {name: rng.standard_normal((SIZE, *shape)) for name, shape in shapes.items()}
    made = {name: x.astype(np.float32) for name, x in made.items()}
    if "mask" in made:
        made["mask"] = made["mask"] > -1
    if "seed" in made:
        made["seed"] = rng.integers(0, 2**31, SIZE).astype(np.uint32)
    return {name: jnp.asarray(x) for name, x in made.items()}


def subsets(names):
    return [each for n in range(1, len(names) + 1) for each in combinations(names, n)]


def loss(operands):
    """Return a number that depends on out and lse, and these."""
    dropout = {"dropout": 0.4} if "seed" in operands else {}
    out, lse = attention(**operands, **dropout, return_lse=True)
    return (out * jnp.cos(out)).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)


def gradients(operands):
    floats = {name: x for name, x in operands.items() if name in FLOATS}
    others = {name: x for name, x in operands.items() if name not in FLOATS}
    return jax.grad(lambda floats: loss(floats | others), has_aux=True)(floats)


def in_all_ways(operands, mapped, axis=0):
    """Compare vmap over some operands with a loop; the others are those of the first entry."""
    axes = {name: axis if name in mapped else None for name in operands}
    # An array with fewer axes than `axis` is mapped along its last one.
    axes = {n: a if a is None else min(a, operands[n].ndim - 1) for n, a in axes.items()}
    given = {
        name: x[0] if axes[name] is None else jnp.moveaxis(x, 0, axes[name])
        for name, x in operands.items()
    }
    found, (out, lse) = jax.jit(jax.vmap(gradients, in_axes=(axes,)))(given)
    together = jax.grad(
        lambda given: jax.vmap(loss, in_axes=(axes,))(given)[0].sum(), allow_int=True
    )
    sums = together(given)
    added = dict.fromkeys(found, 0.0)
    for n in range(SIZE):
        one = {name: x[n if name in mapped else 0] for name, x in operands.items()}
        wanted, (each, its_lse) = gradients(one)
        assert np.array_equal(out[n], each), "the same bits"
        assert np.array_equal(lse[n], its_lse)
        for name, x in wanted.items():
            assert found[name].dtype == x.dtype
            np.testing.assert_allclose(found[name][n], x, rtol=2e-5, atol=2e-5)
            if name in mapped:
                its_sum = jnp.moveaxis(sums[name], axes[name], 0)[n]
                np.testing.assert_allclose(its_sum, x, rtol=2e-5, atol=2e-5)
            else:
                added[name] += np.asarray(x)
    for name in set(found) - set(mapped):
        np.testing.assert_allclose(sums[name], added[name], rtol=5e-5, atol=5e-5)


QUICK = [("bias",), ("bias", "mask"), ("k", "bias"), ("seed",), ("sink",)]


@mostly_thorough(
    "mapped", subsets(list(SHAPES)), quick=QUICK, why="all subsets of the operands", ids="-".join
)
def test_vmap_over_operands_is_a_loop(mapped):
    names = {*"qkv", "bias", "mask", *mapped}
    in_all_ways(drawn({name: shape for name, shape in SHAPES.items() if name in names}), mapped)


@mostly_thorough(
    "mapped",
    subsets(list(MATRICES)),
    quick=[("bias",)],
    why="all subsets of the operands",
    ids="-".join,
)
def test_vmap_over_operands_of_matrices_is_a_loop(mapped):
    in_all_ways(drawn(MATRICES), mapped, axis=1)


@pytest.mark.parametrize("given", [{"bias"}, {"mask"}])
def test_vmap_over_the_only_option(given):
    """Nothing else has a leading axis."""
    shapes = {"q": (4, 9, 16), "k": (4, 11, 16), "v": (4, 11, 16)}
    shapes |= dict.fromkeys(given, (4, 9, 11))
    in_all_ways(drawn(shapes), given)


NESTED = [(("bias",), ("mask",)), (("mask",), ("bias", "mask")), (("k",), ("bias",))]


@mostly_thorough(
    ("outer", "inner"),
    [(a, b) for a in subsets(["q", "bias", "mask"]) for b in subsets(["k", "bias", "mask"])]
    + NESTED[2:],
    quick=NESTED,
    why="all pairs of their subsets",
)
def test_nested_vmap_is_a_loop_of_loops(outer, inner):
    shapes = {name: SHAPES[name] for name in ("q", "k", "v", "bias", "mask")}
    drawn_twice = {name: (SIZE, *shape) for name, shape in shapes.items()}
    operands = drawn(drawn_twice)  # (SIZE, SIZE, ...)
    given = {name: x if name in outer else x[0] for name, x in operands.items()}
    given = {
        name: x if name in inner else (x[:, 0] if name in outer else x[0])
        for name, x in given.items()
    }
    axes = [{name: 0 if name in mapped else None for name in given} for mapped in (outer, inner)]
    function = jax.vmap(jax.vmap(gradients, in_axes=(axes[1],)), in_axes=(axes[0],))
    found, (out, _) = jax.jit(function)(given)
    for a in range(SIZE):
        for b in range(SIZE):
            one = {name: x[a] if name in outer else x for name, x in given.items()}
            one = {name: x[b] if name in inner else x for name, x in one.items()}
            wanted, (each, _) = gradients(one)
            assert np.array_equal(out[a, b], each)
            for name, x in wanted.items():
                np.testing.assert_allclose(found[name][a, b], x, rtol=2e-5, atol=2e-5)


def test_vmap_over_nothing():
    """An axis of length 0 gives empty results, whoever has it."""
    q, bias = jnp.ones((4, 5, 8)), jnp.ones((0, 4, 5, 5))
    assert jax.vmap(lambda b: attention(q, q, q, bias=b))(bias).shape == (0, 4, 5, 8)
    each = jax.vmap(jax.grad(lambda b: attention(q, q, q, bias=b).sum()))(bias)
    assert each.shape == bias.shape


PACKED = {"q": (4, 7, 8), "k": (2, 9, 8), "bias": (2, 4, 4, 5), "offsets_q": (3,), "sink": (4,)}


@mostly_thorough(
    "mapped",
    subsets(list(PACKED)),
    quick=[("bias", "offsets_q")],
    why="all subsets of the operands",
    ids="-".join,
)
def test_vmap_over_operands_of_packed_calls_is_a_loop(mapped):
    operands = drawn(PACKED)
    operands["offsets_q"] = jnp.array([[0, 3, 7], [0, 4, 7], [0, 4, 7]])

    def gradients(operands):
        floats = {name: x for name, x in operands.items() if name != "offsets_q"}

        def loss(floats):
            k = floats.pop("k")
            out = attention_varlen(
                k=k,
                v=k,
                offsets_q=operands["offsets_q"],
                offsets_k=[0, 5, 9],
                mask=masks.causal(),
                **floats,
            )
            return (out * out).sum()

        return jax.value_and_grad(loss)(floats)

    axes = {name: 0 if name in mapped else None for name in operands}
    given = {name: x if name in mapped else x[1] for name, x in operands.items()}
    if "offsets_q" in mapped:
        given["bias"] = given["bias"][..., :1, :]  # sequences are not equally long
    found = jax.jit(jax.vmap(gradients, in_axes=(axes,)))(given)
    for n in range(SIZE):
        wanted = gradients({name: x[n] if name in mapped else x for name, x in given.items()})
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a[n], b, rtol=2e-5, atol=2e-5)
