"""A cache in JAX: append gives new arrays, attention over it has NumPy's bits, rope a gradient."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from halves import mostly_thorough

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, Rotary, masks, scores

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')

import jax.numpy as jnp  # noqa: E402 (after the skip)

from cupyflash.jax import append, attention_cached, rope  # noqa: E402 (after the skip)

if jax.default_backend() != "cpu":
    pytest.skip("cupyflash.jax is for JAX's CPU", allow_module_level=True)

ANGLES = np.outer(np.arange(40), 0.5 ** np.arange(4)).astype(np.float32)
ROTARY = Rotary(np.cos(ANGLES), np.sin(ANGLES))
B, HEADS, HEADS_KV, D, D_V = 2, 4, 2, 32, 64
CODES_OF = "int8", "float8_e5m2", "int4"


def draw(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}")


def same(found, wanted):
    """Compare bits; those of an array that `append` did not touch are compared, too."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert np.array_equal(bits(found), bits(wanted))


def new_rows(count, packed, dtype):
    def rows(heads, columns, seed):
        x = draw(B, heads, count, columns, seed=seed, dtype=dtype)
        return x.swapaxes(0, 1).reshape(heads, -1, columns) if packed else x

    return rows(HEADS_KV, D, 1), rows(HEADS_KV, D_V, 2), rows(HEADS, D, 3)


def cache_of(paged, dtype, codes=None):
    """Return the arrays of a cache with noise in every row, and where its pages are."""
    rng = np.random.default_rng(5)
    shape = (7, HEADS_KV, 4) if paged else (B, HEADS_KV, 12)
    table = rng.permutation(7)[:6].reshape(B, 3).astype(np.int32) if paged else None
    if codes is None:
        return {
            "k": draw(*shape, D, seed=6, dtype=dtype), "v": draw(*shape, D_V, seed=7, dtype=dtype),
        }, table  # fmt: skip
    made = {}
    for name, columns in (("k", D), ("v", D_V)):
        x, made[f"{name}_scale"] = cupyflash.quantize(draw(*shape, columns), codes, group=columns)
        made[name] = x if codes == "int8" else x.view(np.uint8)
    return made, table


FORMS = ["plain", "packed", "paged", "packed and paged"]


TYPES = [
    (np.float32, None),
    (np.float16, None),
    (ml_dtypes.bfloat16, None),
    (np.float32, "int8"),
    (ml_dtypes.bfloat16, "float8_e5m2"),
    (np.float16, "int4"),
]


@mostly_thorough(
    ("form", "dtype", "codes", "rotary"),
    [(form, *each, rotary) for form in FORMS for each in TYPES for rotary in (None, ROTARY)],
    quick=[
        ("plain", np.float32, None, None),
        ("packed and paged", ml_dtypes.bfloat16, None, ROTARY),
        ("paged", np.float32, "int8", ROTARY),
        ("packed", np.float16, "int4", None),
    ],
    why="every form with every type",
)
def test_append_is_that_of_numpy_on_a_copy(form, dtype, codes, rotary):
    packed, paged = "packed" in form, "paged" in form
    k_new, v_new, q = new_rows(3, packed, dtype)
    held, table = cache_of(paged, dtype, codes)
    lengths = np.array([3, 9], np.int32)
    arrays = {"lengths": lengths}
    if packed:
        lengths[:] = 5, 1
        arrays["offsets"] = np.array([0, 5, 6], np.int32)
    if paged:
        arrays["table"] = table
    if rotary is not None:
        arrays["q"] = q
    options = {"rotary": rotary}
    if codes not in (None, "int8"):
        options["kv_dtype"] = codes
    wanted = {name: x.copy() for name, x in held.items()}
    rotated = cupyflash.append(k_new, v_new, **wanted, **arrays, **options)

    given = {"k_new": k_new, "v_new": v_new} | held | arrays
    given = {name: jnp.asarray(x) for name, x in given.items()}
    for call in (partial(append, **options), jax.jit(partial(append, **options))):
        found = call(**given)
        for name, x in wanted.items():
            same(getattr(found, name), x)
        assert (found.k_scale is None) == (codes is None)
        if rotary is None:
            assert found.q is None
        else:
            same(found.q, rotated)
    for name, x in held.items():
        assert np.array_equal(bits(given[name]), bits(x)), "JAX's arrays do not change"


def test_append_copies_bits():
    """XLA's CPU would turn some NaNs of bfloat16 into others."""
    rng = np.random.default_rng(0)
    new = rng.integers(0, 2**16, (1, 1, 300, 8)).astype(np.uint16).view(ml_dtypes.bfloat16)
    empty = jnp.zeros((1, 1, 300, 8), jnp.bfloat16)
    same(jax.jit(append)(jnp.asarray(new), jnp.asarray(new), empty, empty, 300).k, new)


def test_a_donated_cache_is_written_in_place():
    step = jax.jit(append, donate_argnums=(2, 3))
    new = jnp.ones((1, 2, 1, 8))
    k, v = jnp.zeros((1, 2, 16, 8)), jnp.zeros((1, 2, 16, 8))
    for length in (1, 2, 3):
        places = k.unsafe_buffer_pointer(), v.unsafe_buffer_pointer()
        k, v, *_ = step(new, new, k, v, length)
        assert places == (k.unsafe_buffer_pointer(), v.unsafe_buffer_pointer())
    assert np.array_equal(np.asarray(k)[0, 0, :, 0], np.arange(16) < 3)


@mostly_thorough(
    ("form", "codes"),
    [(form, codes) for form in FORMS for codes in (None, *CODES_OF)],
    quick=[("plain", None), ("packed and paged", "int8")],
    why="every form with every type of codes",
)
def test_attention_cached_is_that_of_numpy(form, codes):
    packed, paged = "packed" in form, "paged" in form
    q = new_rows(3, packed, np.float32)[2]
    held, table = cache_of(paged, np.float32, codes)
    arrays = {"lengths": np.array([5, 12], np.int32)}
    if packed:
        arrays["offsets_q"] = np.array([0, 4, 6], np.int32)
    if paged:
        arrays["table"] = table
    arrays["bias"] = draw(B, 1, 4 if packed else 3, 12)
    arrays["sink"] = draw(HEADS)
    options = {"mask": masks.causal(), "score_mod": scores.softcap(3.0), "return_lse": True}
    if codes not in (None, "int8"):
        options["kv_dtype"] = codes
    wanted = cupyflash.attention_cached(q, **held, **arrays, **options)
    given = {name: jnp.asarray(x) for name, x in ({"q": q} | held | arrays).items()}
    for call in (
        partial(attention_cached, **options),
        jax.jit(partial(attention_cached, **options)),
    ):
        for found, wished in zip(call(**given), wanted, strict=True):
            same(found, wished)


def test_a_loop_of_steps_in_one_program():
    """Decoding by lax.scan gives the rows of causal attention."""
    x = jnp.asarray(draw(6, 1, 2, 1, 8))

    def step(carry, x):
        k, v, length = carry
        k, v, *_ = append(x, x, k, v, length + 1)
        return (k, v, length + 1), attention_cached(x, k, v, length + 1, mask=masks.causal())

    empty = jnp.zeros((1, 2, 6, 8))
    _, rows = jax.jit(lambda x: jax.lax.scan(step, (empty, empty, 0), x))(x)
    whole = np.moveaxis(np.asarray(x)[:, 0, :, 0], 0, 1)[None]
    wanted = cupyflash.attention(whole, whole, whole, mask=masks.causal())
    np.testing.assert_allclose(np.asarray(rows)[:, 0, :, 0], wanted[0].swapaxes(0, 1), atol=1e-6)


def test_vmap_of_a_cache_is_a_loop():
    q, k = jnp.asarray(draw(3, 2, 4, 1, 8)), jnp.asarray(draw(3, 2, 2, 5, 8))
    lengths = jnp.array([[1, 2], [3, 4], [5, 5]])
    new = jnp.asarray(draw(3, 2, 2, 1, 8))

    def step(q, new, k, lengths):
        k, v, *_, q = append(new, new, k, k, lengths, rotary=ROTARY, q=q)
        return attention_cached(q, k, v, lengths), k

    for axes in ((0, 0, 0, 0), (None, 0, None, None), (None, None, None, 0)):
        given = [
            x if axis == 0 else x[0] for x, axis in zip((q, new, k, lengths), axes, strict=True)
        ]
        found = jax.jit(jax.vmap(step, in_axes=axes))(*given)
        for n in range(3):
            wanted = step(*(x[n] if a == 0 else x for x, a in zip(given, axes, strict=True)))
            for a, b in zip(found, wanted, strict=True):
                same(a[n], np.asarray(b))


def test_gradients_through_append():
    """They are those of writing rotated rows, and none reaches the rows that were overwritten."""
    k, new = jnp.asarray(draw(1, 2, 5, 8)), jnp.asarray(draw(1, 2, 2, 8, seed=1))
    weight = jnp.asarray(draw(1, 2, 5, 8, seed=2))

    def loss(new, k):
        made = append(new, new, k, k, 4, rotary=ROTARY, q=new)
        return (made.k * weight).sum() + (made.v * weight).sum() + made.q.sum()

    for function in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
        d_new, d_k = function(new, k)
        back = partial(cupyflash.rope, positions=np.array([2, 3]), rotary=ROTARY, inverse=True)
        rows = np.asarray(weight)[:, :, 2:4]
        wanted = back(np.ascontiguousarray(rows)) + back(np.ones_like(rows)) + rows
        np.testing.assert_allclose(d_new, wanted, atol=1e-6)
        wanted = 2 * np.asarray(weight)
        wanted[:, :, 2:4] = 0
        assert np.array_equal(d_k, wanted)


@pytest.mark.parametrize("jit", [False, True])
def test_rope_and_its_gradient(jit):
    x, positions = draw(2, 3, 4, 10), np.array([[3, 1, 4, 1], [5, 9, 2, 6]], np.int32)
    wrap = jax.jit if jit else (lambda function: function)
    for at in (positions, positions[0]):
        wanted = cupyflash.rope(x, at, ROTARY)
        same(wrap(lambda x, at: rope(x, at, ROTARY))(jnp.asarray(x), jnp.asarray(at)), wanted)
    weight = draw(2, 3, 4, 10, seed=1)
    function = jax.grad(lambda x: (rope(x, positions, ROTARY) * weight).sum())
    same(wrap(function)(jnp.asarray(x)), cupyflash.rope(weight, positions, ROTARY, inverse=True))
    again = jax.grad(lambda x: (function(x) * x).sum())  # linear: a second derivative exists
    same(wrap(again)(jnp.asarray(x)), np.asarray(function(x)))


@mostly_thorough(
    ("axes", "in_axes"),
    [(axes, in_axes) for axes in (3, 4) for in_axes in ((0, 0), (0, None), (None, 0), (1, 1))],
    quick=[(4, (0, None)), (3, (None, 0)), (4, (1, 1))],
    why="all ways to map positions",
)
def test_vmap_of_rope_is_a_loop(axes, in_axes):
    shape, at_shape = [(3, 5, 8), (5,)] if axes == 3 else [(2, 3, 5, 8), (2, 5)]
    x, at = draw(4, *shape), np.random.default_rng(0).integers(0, 40, (4, *at_shape))
    function = jax.grad(lambda x, at: (rope(x, at, ROTARY) ** 2 * x).sum())
    both = [(x, in_axes[0]), (at, in_axes[1])]
    given = [jnp.asarray(x[0] if a is None else np.moveaxis(x, 0, a)) for x, a in both]
    found = jax.jit(jax.vmap(function, in_axes=in_axes))(*given)
    for n in range(4):
        wanted = function(*(jnp.asarray(x[0 if a is None else n]) for x, a in both))
        np.testing.assert_allclose(found[n], wanted, rtol=1e-6, atol=1e-6)


K, NEW, Q = (jnp.asarray(draw(*shape)) for shape in ((2, 2, 6, 8), (2, 2, 1, 8), (2, 4, 1, 8)))
PAGES, TABLE = jnp.asarray(draw(4, 2, 4, 8)), jnp.array([[0, 1], [2, 3]])
CODES = jnp.zeros((2, 2, 6, 8), jnp.int8)
MANY = jnp.repeat(NEW, 7, 2)
SCALE = jnp.ones((2, 2, 6, 1))
REFUSED = {
    "lengths": (lambda: attention_cached(Q, K, K, 7), "lengths: entry 0 is 7; expected 0 to 6"),
    "lengths of JAX": (lambda: attention_cached(Q, K, K, jnp.array([3, 7])), "entry 1 is 7"),
    "lengths as floats": (lambda: attention_cached(Q, K, K, jnp.ones(2)), "lengths: got shape"),
    "a shape, traced": (
        lambda: jax.jit(attention_cached)(Q[..., :4], K, K, jnp.array([3, 3])), "k: .*8 is not 4",
    ),
    "entries, traced": (
        lambda: jax.jit(attention_cached)(Q, K, K, jnp.array([3, 3, 3])), "lengths: got shape",
    ),
    "a mask, traced": (
        lambda: jax.jit(lambda m: attention_cached(Q, K, K, 3, mask=m))(jnp.ones((1, 5), bool)),
        r"mask: got an array of shape \(1, 5\)",
    ),
    "a traced scale": (
        lambda: jax.jit(lambda s: attention_cached(Q, K, K, 3, scale=s))(0.5), "scale: .*static",
    ),
    "codes without scales": (lambda: attention_cached(Q, CODES, CODES, 3), "k_scale: got None"),
    "a gradient": (
        lambda: jax.grad(lambda q: attention_cached(q, K, K, 3).sum())(Q), r"stop_gradient",
    ),
    "a number": (lambda: attention_cached(Q, K, 3, 3), r"v: got int.*jnp\.asarray"),
    "dropout": (lambda: attention_cached(Q, K, K, 3, dropout=0.5), "no such argument"),
    "no room": (lambda: append(NEW, NEW, K, K, 7), "lengths: entry 0 is 7"),
    "rows before the first": (lambda: append(NEW, NEW, K, K, 0), "entry 0 is 0 with 1 new"),
    "rows of another size": (
        lambda: jax.jit(append)(NEW, NEW[..., :4], K, K, jnp.array([3, 3])), "v_new: got shape",
    ),
    "queries": (lambda: jax.jit(lambda q: append(NEW, NEW, K, K, 3, q=q))(Q), "q: .*rotary"),
    "too many rows": (
        lambda: jax.jit(append)(MANY, MANY, K, K, jnp.array([7, 7])),
        "the cache has room for no more",
    ),
    "a page": (
        lambda: append(NEW, NEW, PAGES, PAGES, jnp.array([1, 5]), table=TABLE + 1), "has 4 pages",
    ),
    "a gradient through codes": (
        lambda: jax.grad(
            lambda x: append(x, x, CODES, CODES, 3, k_scale=SCALE, v_scale=SCALE).k_scale.sum()
        )(NEW),
        "through codes.*stop_gradient",
    ),
    "traced angles": (
        lambda: jax.jit(lambda a: rope(NEW, [1], Rotary(a, a)))(jnp.ones((3, 2))),
        "cos: got .*traced",
    ),
    "positions": (lambda: rope(NEW, [40], ROTARY), "rotary has angles for 0 to 39"),
    "positions as floats": (
        lambda: jax.jit(lambda p: rope(NEW, p, ROTARY))(jnp.ones(1)), "positions: .*float32",
    ),
    "no Rotary": (lambda: rope(NEW, [1], 3), "rotary: got int"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_while_it_is_traced(name):
    call, words = REFUSED[name]
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        call()


RUN = {
    "lengths": (attention_cached, (Q, K, K, [3, 7]), {}, "entry 1 is 7"),
    "table": (attention_cached, (Q, PAGES, PAGES, [3, 7]), {"table": TABLE + 1}, "has 4 pages"),
    "room": (append, (NEW, NEW, K, K, [3, 7]), {}, "entry 1 is 7"),
    "positions": (partial(rope, rotary=ROTARY), (NEW, [40]), {}, "angles for 0 to 39"),
}


@pytest.mark.parametrize("name", RUN)
def test_what_traced_numbers_hold_is_checked_when_the_program_runs(name):
    function, args, options, words = RUN[name]
    args = [jnp.asarray(x) for x in args]
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(jax.jit(function)(*args, **options))


def test_traced_numbers_are_not_refused_for_what_they_may_be():
    """What stands for them while the function is traced fits whatever they may hold."""
    rows = jnp.asarray(draw(2, 6, 8))  # packed
    table = jnp.array([[-1, 0], [2, 3]])  # a page that was freed
    made = jax.jit(append)(NEW, NEW, PAGES, PAGES, jnp.array([8, 7]), table=table)
    assert np.array_equal(np.asarray(made.k)[0, :, 3], np.asarray(NEW)[0, :, 0])
    step = jax.jit(lambda table, offsets, lengths: append(
        rows, rows, PAGES[:3], PAGES[:3], lengths, table=table, offsets=offsets, rotary=ROTARY
    ))  # fmt: skip
    made = step(jnp.array([[0, 1], [2, 2]]), jnp.array([0, 5, 6]), jnp.array([5, 3]))
    assert np.array_equal(np.asarray(made.v)[1, :, 0], np.asarray(rows)[:, 4])
    bias = jnp.asarray(draw(2, 4, 4, 6))
    q = jnp.asarray(draw(4, 5, 8))
    found = jax.jit(lambda offsets: attention_cached(q, K, K, 6, offsets_q=offsets, bias=bias))
    wanted = cupyflash.attention_cached(
        *map(np.asarray, (q, K, K)), 6, offsets_q=[0, 4, 5], bias=np.asarray(bias)
    )
    same(found(jnp.array([0, 4, 5])), wanted)


@pytest.mark.parametrize("jit", [False, True])
def test_entries_may_write_the_same_rows_of_shared_pages(jit):
    prompt = np.repeat(draw(1, HEADS_KV, 6, D), 2, 0)
    table = np.array([[0, 1], [0, 1]], np.int32)
    k = np.zeros((3, HEADS_KV, 4, D), np.float32)
    v, lengths = k.copy(), np.array([6, 6])
    call = partial(append, shared=6)
    found = (jax.jit(call) if jit else call)(prompt, prompt, k + 0, v + 0, lengths, table=table)
    cupyflash.append(prompt, prompt, k, v, lengths, table=table, shared=6)
    same(found.k, k)
    same(found.v, v)
    for shared in (0, 5):
        with pytest.raises(ArgumentError, match="are both row"):
            append(prompt, prompt, k, v, lengths, table=table, shared=shared)
    prompt[1] += 1
    function = jax.jit(call) if jit else call
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="different new rows"):
        jax.block_until_ready(function(prompt, prompt, k + 0, v + 0, lengths, table=table))
