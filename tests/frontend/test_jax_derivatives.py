"""Derivatives of all modes and orders on JAX's arrays, against JAX's own of the formulas."""

from __future__ import annotations

import numpy as np
import pytest
from halves import mostly_thorough

import cupyflash
from cupyflash import ArgumentError, masks, scores

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')

import jax.numpy as jnp  # noqa: E402 (after the skip)

from cupyflash.jax import attention, attention_varlen, compute, rope  # noqa: E402 (after the skip)

if jax.default_backend() != "cpu":
    pytest.skip("cupyflash.jax is for JAX's CPU", allow_module_level=True)

CAUSAL, CAP = masks.causal(), scores.softcap(2.0)
SHAPES = {"q": (2, 4, 3, 5), "k": (2, 2, 4, 5), "v": (1, 2, 4, 3), "bias": (4, 3, 4), "sink": (4,)}


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape))


def drawn(names, seed=0, mapped=()):
    """Return operands; those that are mapped have one more axis, the first."""
    return {n: draw(*(3,) * (n in mapped), *SHAPES[n], seed=seed + ord(n[0])) for n in names}


def ours(x):
    return attention(**x, mask=CAUSAL, score_mod=CAP, return_lse=True)


def formulas(x):
    """Return out and lse by standard attention."""
    q, k, v = x["q"], *(jnp.repeat(x[name], 2, -3) for name in "kv")
    s = jnp.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5
    s = 2 * jnp.tanh(s / 2) + x.get("bias", 0)
    i, j = jnp.arange(q.shape[-2])[:, None], jnp.arange(k.shape[-2])
    s = jnp.where(j <= i + k.shape[-2] - q.shape[-2], s, -jnp.inf)
    if "sink" in x:
        s = jnp.concatenate([s, jnp.broadcast_to(x["sink"][:, None, None], (*s.shape[:-1], 1))], -1)
        v = jnp.concatenate([v, jnp.zeros_like(v[..., :1, :])], -2)
    return jax.nn.softmax(s, -1) @ v, jax.nn.logsumexp(s, -1)


def loss(function):
    def of(x):
        out, lse = function(x)
        return (out**3).sum() + jnp.sin(lse).sum()

    return of


def dot(x, y):
    return sum(jnp.vdot(x[name], y[name]) for name in x)


def _reverse_over_forward(f, x, t):
    def squares(x):
        return sum(jnp.square(moved).sum() for moved in jax.jvp(f, (x,), (t,))[1])

    return jax.grad(squares)(x)


def _penalty(f, x, t):
    """Return the gradient of a function of gradients by x, through those by do and dlse."""

    def norm(x):
        results, pull = jax.vjp(f, x)
        return dot(pull(jax.tree.map(jnp.cos, results))[0], t)

    return jax.grad(norm)(x)


MODES = {
    "forward": lambda f, x, t: jax.jvp(f, (x,), (t,)),
    "linearized": lambda f, x, t: jax.linearize(f, x)[1](t),
    "reverse": lambda f, x, _: jax.grad(loss(f))(x),
    "forward over reverse": lambda f, x, t: jax.jvp(jax.grad(loss(f)), (x,), (t,)),
    "reverse over reverse": lambda f, x, t: jax.grad(lambda x: dot(jax.grad(loss(f))(x), t))(x),
    "reverse over forward": _reverse_over_forward,
    "penalty": _penalty,
    "of one": lambda f, x, t: jax.jvp(
        lambda k: jax.grad(loss(f))({**x, "k": k})["q"], (x["k"],), (t["k"],)
    ),
    "by do alone": lambda f, x, _: jax.jacrev(jax.vjp(f, x)[1])(f(x)),
    "checkpoint": lambda f, x, t: jax.jvp(
        jax.grad(lambda x: jax.checkpoint(loss(f))(x)), (x,), (t,)
    ),
    "scan": lambda f, x, t: jax.jvp(
        jax.grad(
            lambda x: jax.lax.scan(
                lambda c, _: (c + loss(f)({**x, "q": x["q"] * c}), ()), 1.0, None, 2
            )[0]
        ),
        (x,),
        (t,),
    ),
}


def agree(mode, x, t, wrap=lambda f: f, jit=False):
    def of(f):
        def made(x, t):
            return MODES[mode](wrap(f), x, t)

        return (jax.jit(made) if jit else made)(x, t)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-11), of(ours), of(formulas)
    )


@mostly_thorough(
    ("mode", "jit"),
    [(mode, jit) for mode in MODES for jit in (False, True)],
    quick=[
        ("reverse over reverse", False),
        ("forward over reverse", True),
        ("reverse over forward", True),
    ],
    why="others are made of the same rules",
)
def test_modes_agree_with_the_formulas(mode, jit):
    names = ("q", "k", "v", "bias") + (("sink",) if jit else ())
    agree(mode, drawn(names), drawn(names, seed=9), jit=jit)


MAPPED = [("q",), ("k", "v"), ("bias",), ("v", "bias"), ("q", "k", "v", "bias")]


@mostly_thorough(  # with a sink, calls are made one by one
    ("mode", "mapped", "has_sink"),
    [
        (mode, mapped, has_sink)
        for mode in ("forward", *(name for name in MODES if " over " in name))
        for mapped in MAPPED
        for has_sink in (False, True)
    ],
    quick=[("forward over reverse", ("bias",), False), ("reverse over reverse", ("k", "v"), True)],
    why="the same sums",
)
def test_vmap_is_inside_and_outside(mode, mapped, has_sink):
    names = ("q", "k", "v", "bias") + (("sink",) if has_sink else ())
    axes = {name: 0 if name in mapped else None for name in names}
    x, t = drawn(names, mapped=mapped), drawn(names, seed=9, mapped=mapped)
    agree(mode, x, t, lambda f: jax.vmap(f, (axes,)), jit=True)

    def each(f):
        return jax.jit(jax.vmap(lambda x, t: MODES[mode](f, x, t), (axes, axes)))(x, t)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-11),
        each(ours),
        each(formulas),
    )


@pytest.mark.thorough("compiles much; the modes that these are made of are tested one by one")
def test_hessians_and_jacobians():
    x = {"q": draw(1, 2, 2, 2), "k": draw(1, 1, 3, 2), "v": draw(1, 1, 3, 2)}
    for derivative in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
        made, wanted = derivative(loss(ours))(x), derivative(loss(formulas))(x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), made, wanted)
    made, wanted = jax.jacfwd(ours)(x), jax.jacrev(ours)(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-13), made, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_mode_has_the_bits_of_arrays(dtype):
    x = {n: a.astype(dtype) for n, a in drawn("qkv").items()}
    t = {n: a.astype(dtype) for n, a in drawn("qk", seed=1).items()}
    arrays = [np.asarray(a) for a in (*x.values(), *t.values())]
    out, tout = cupyflash.attention_jvp(*arrays, mask=CAUSAL, dropout=0.2, seed=5)

    def of(q, k):
        return attention(q, k, x["v"], mask=CAUSAL, dropout=0.2, seed=5)

    for function in (of, jax.jit(of)):
        made = jax.jvp(function, (x["q"], x["k"]), (t["q"], t["k"]))
        assert np.array_equal(made[1], tout)
        assert np.array_equal(made[0], out if function is of else of(x["q"], x["k"]))


def test_forward_mode_alone_is_one_call(monkeypatch):
    """Results come with their tangents; a program that is traced computes both on their own."""
    x, t = drawn("qkv"), drawn("qkv", seed=1)
    called = []

    def counted(name):
        function = getattr(compute.DENSE, name)

        def call(**named):
            called.append((name, sorted(n for n in named if n in ("tq", "tk", "tv"))))
            return function(**named)

        return call

    names = compute.DENSE._fields
    monkeypatch.setattr(compute, "DENSE", compute.DENSE._replace(**{n: counted(n) for n in names}))
    jax.jvp(lambda k: attention(x["q"], k, x["v"]), (x["k"],), (t["k"],))
    assert called == [("jvp", ["tk"])]
    called.clear()
    jax.block_until_ready(jax.jit(lambda x, t: jax.jvp(ours, (x,), (t,)))(x, t))
    assert [name for name, _ in called] == ["forward", "jvp"]
    called.clear()
    jax.block_until_ready(jax.jit(jax.grad(loss(ours)))(x))
    assert [name for name, _ in called] == ["forward", "backward"]


def test_packed_sequences_have_all_modes():
    q, k, v = draw(2, 9, 4), draw(2, 9, 4, seed=1), draw(2, 9, 3, seed=2)
    t = draw(2, 9, 4, seed=3)
    bounds = jnp.array([0, 4, 9])

    def packed(q):
        return attention_varlen(q, k, v, bounds, bounds, mask=CAUSAL, return_lse=True)

    def each(q):
        rows = [attention(*(x[:, a:b] for x in (q, k, v)), mask=CAUSAL, return_lse=True)
                for a, b in ((0, 4), (4, 9))]  # fmt: skip
        return tuple(jnp.concatenate(x, 1) for x in zip(*rows, strict=True))

    for mode in ("forward", "forward over reverse", "reverse over reverse"):

        def of(f, mode=mode):
            return jax.jit(lambda x, t: MODES[mode](lambda x: f(x["q"]), x, t))({"q": q}, {"q": t})

        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-13), of(packed), of(each)
        )


ANGLES = np.outer(np.arange(20), 10.0 ** -np.arange(0, 1, 1 / 3))
ROTARY = cupyflash.Rotary(np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32))


@pytest.mark.parametrize("jit", [False, True])
def test_rotations_have_both_modes(jit):
    x, t = draw(2, 3, 6), draw(2, 3, 6, seed=1)
    at = jnp.array([3, 4, 9])

    def of(x, at=at):
        return rope(x, at, ROTARY)

    def along(x, t):
        return jax.jvp(of, (x,), (t,)), jax.jvp(jax.grad(lambda x: (of(x) ** 3).sum()), (x,), (t,))

    (out, moved), (_, second) = (jax.jit(along) if jit else along)(x, t)
    assert np.array_equal(out, of(x))
    assert np.array_equal(moved, of(t))
    back = cupyflash.rope(np.asarray(6 * out * moved), np.asarray(at), ROTARY, inverse=True)
    np.testing.assert_allclose(second, back, rtol=0, atol=1e-12)
    places = jnp.array([[1, 2, 3], [0, 5, 7]])  # mapped, and rows are not: gradients are sums
    summed = jax.grad(lambda x: (jax.vmap(of, (None, 0))(x, places) ** 2 * t).sum())(x)
    wanted = jax.grad(lambda x: sum((of(x, p) ** 2 * t).sum() for p in places))(x)
    np.testing.assert_allclose(summed, wanted, rtol=0, atol=1e-12)


def test_a_model_that_rotates_has_a_hessian_product():
    x, t = draw(1, 2, 4, 6), draw(1, 2, 4, 6, seed=1)

    def energy(x):
        turned = rope(x, jnp.arange(4), ROTARY)
        return (attention(turned, turned, x, mask=CAUSAL) ** 2).sum()

    _, ours_along = jax.jit(lambda: jax.jvp(jax.grad(energy), (x,), (t,)))()
    step = 1e-5
    difference = jax.grad(energy)(x + step * t) - jax.grad(energy)(x - step * t)
    np.testing.assert_allclose(ours_along, difference / (2 * step), atol=1e-6)


def twice_forward(x):
    return jax.jvp(lambda y: jax.jvp(lambda z: attention(z, z, z), (y,), (x,))[1], (x,), (x,))


def third(x):
    return jax.grad(lambda y: jax.hessian(lambda z: attention(z, z, z).sum())(y).sum())(x)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("derivative", "words"), [(third, "third derivative"), (twice_forward, "two .* forward mode")]
)
def test_other_derivatives_are_errors_that_name_the_remedy(derivative, words, jit):
    with pytest.raises(ArgumentError, match=rf"{words}.*jax\.nn\.dot_product_attention"):
        (jax.jit(derivative) if jit else derivative)(draw(1, 1, 2, 2))


def test_masks_seeds_and_lengths_have_no_tangents():
    """A mask or a seed that moves along nothing changes nothing, also under jvp of a program."""
    x = draw(1, 2, 3, 4)
    allowed, seed = jnp.ones((3, 3), bool), jnp.uint32(3)

    @jax.jit
    def of(x, allowed, seed):
        return attention(x, x, x, mask=allowed, dropout=0.1, seed=seed)

    none = np.zeros((3, 3), jax.dtypes.float0), np.zeros((), jax.dtypes.float0)
    _, tout = jax.jvp(of, (x, allowed, seed), (x, *none))
    wanted = jax.jvp(lambda x: of(x, allowed, seed), (x,), (x,))[1]
    assert np.array_equal(tout, wanted)
    out, zeros = jax.jvp(lambda a: attention(x, x, x, mask=a), (allowed,), none[:1])
    assert np.array_equal(out, attention(x, x, x))
    assert not zeros.any()


@pytest.mark.parametrize("jit", [False, True])
def test_devices_of_a_mesh_differentiate_their_parts(jit):
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, all_rows = jax.P("batch"), jax.P()
    x, t = (draw(2, 2, 3, 4, seed=n) for n in range(2))
    k = draw(1, 2, 3, 4, seed=2)

    def of(q, k):
        return attention(q, k, k)

    mapped = jax.shard_map(of, mesh=mesh, in_specs=(rows, all_rows), out_specs=rows)

    def along(f):
        def gradient(q, k):
            return jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1))(q, k)

        def moved():
            return jax.jvp(gradient, (x, k), (t, k))

        return (jax.jit(moved) if jit else moved)()

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-13), along(mapped), along(of)
    )
