"""Rows that programs for a GPU write to a cache: where they go is computed there, and not checked.

No GPU is needed: that branch of programs is run on the CPU, and codes are written by a stand-in.
"""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.arrays import device_arrays

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')

import jax.numpy as jnp  # noqa: E402 (after the skip)

from cupyflash import Rotary  # noqa: E402
from cupyflash.jax import append  # noqa: E402

if jax.default_backend() != "cpu":
    pytest.skip("programs for the CPU are tried here", allow_module_level=True)

TURNS = np.outer(np.arange(40), [1.0, 0.1]).astype(np.float32)
ROTARY = Rotary(np.cos(TURNS), np.sin(TURNS))


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


@pytest.fixture
def on_gpu(monkeypatch):
    """Take the branches that programs have for a GPU."""

    def platform_dependent(*operands, default, cuda):
        return cuda(*operands)

    return lambda: monkeypatch.setattr(jax.lax, "platform_dependent", platform_dependent)


TABLE = jnp.array([[5, 0, 3], [1, 4, 2]], jnp.int32)
CASES = {
    "one row": (1, [3, 12], {}),
    "several rows": (4, [4, 12], {}),
    "one length": (2, 7, {}),
    "pages": (5, [5, 12], {"table": TABLE}),
    "no rows": (0, [0, 12], {}),
}


@pytest.mark.parametrize("rotary", [None, ROTARY])
@pytest.mark.parametrize("name", CASES)
def test_rows_go_where_a_program_for_the_cpu_writes_them(name, rotary, on_gpu):
    count, lengths, options = CASES[name]
    new, held = draw(2, 3, count, 8), draw(2, 3, 12, 8)
    if "table" in options:
        held = draw(6, 3, 4, 8)
    queries = {} if rotary is None else {"q": draw(2, 6, count, 8), "rotary": rotary}

    def made():
        program = jax.jit(lambda k, n: append(new, new + 1, k, k + 2, n, **options, **queries))
        return program(held, jnp.asarray(lengths))

    wanted = made()
    on_gpu()
    for x, y in zip(jax.tree.leaves(made()), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize("ends", [[0, 3, 7], [0, 0, 7], [0, 7, 7]])
def test_packed_rows_likewise(ends, on_gpu):
    new, held = draw(3, 7, 8), draw(2, 3, 12, 8)

    def made():
        program = jax.jit(lambda k, n, at: append(new, new, k, k, n, offsets=at))
        return program(held, jnp.array([9, 12]), jnp.asarray(ends, jnp.int32))

    wanted = made()
    on_gpu()
    for x, y in zip(jax.tree.leaves(made()), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(x, y)


def test_gradients_and_vmap_likewise(on_gpu):
    new, held = draw(3, 2, 3, 4, 8), draw(2, 3, 12, 8)

    def loss(new, held, lengths):
        k, v, *_ = append(new, 2 * new, held, held, lengths)
        return (k**2 + v**3).sum()

    def made():
        of_one = jax.grad(loss, argnums=(0, 1))
        return jax.jit(jax.vmap(of_one, (0, None, 0)))(new, held, jnp.array([[4, 12]] * 3))

    wanted = made()
    on_gpu()
    for x, y in zip(made(), wanted, strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([2, 13], {}),
        ([-1, 0], {}),
        ([2, 13], {"table": TABLE}),
        ([4, 8], {"table": TABLE + 6}),
        ([4, 8], {"table": -TABLE - 1}),
    ],
)
def test_what_is_out_of_range_is_written_nowhere(lengths, options, on_gpu):
    """Row i of 3 goes to position lengths - 3 + i."""
    on_gpu()
    new = draw(2, 3, 3, 8)
    held = draw(6, 3, 4, 8) if options else draw(2, 3, 12, 8)
    made = jax.jit(lambda k, n: append(new, new, k, k, n, **options))(held, jnp.asarray(lengths))
    flat = held.swapaxes(1, 2).reshape(-1, 3, 8)
    found = made.k.swapaxes(1, 2).reshape(-1, 3, 8)
    wanted = np.array(flat)
    for b, length in enumerate(lengths):
        for i in range(3):
            at = length - 3 + i
            if not 0 <= at < 12:
                continue
            if options:
                page = int(options["table"][b, at // 4])
                if 0 <= page < 6:
                    wanted[4 * page + at % 4] = new[b, :, i]
            else:
                wanted[12 * b + at] = new[b, :, i]
    assert np.array_equal(found, wanted)


def test_programs_for_a_gpu_have_no_check():
    new, held = draw(1, 2, 1, 8), draw(1, 2, 12, 8)
    traced = jax.jit(lambda k, n: append(new, new, k, k, n)).trace(held, jnp.array([3]))
    assert "custom_call" in traced.lower().as_text()
    assert "custom_call" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_codes_are_written_to_xlas_memory(as_on_a_gpu, cupy, monkeypatch, dtype):
    lent = []
    borrowed = device_arrays.borrowed

    def watched(place, shape, *how):
        lent.append((place, shape))
        return borrowed(place, shape, *how)

    monkeypatch.setattr(device_arrays, "borrowed", watched)
    new, held = draw(1, 2, 3, 8), jnp.zeros((1, 2, 12, 8), dtype)
    scale = jnp.ones((1, 2, 12, 1), jnp.float32)
    made = jax.jit(lambda k, s: append(new, new, k, k, 3, k_scale=s, v_scale=s))(held, scale)
    jax.block_until_ready(made)
    assert made.k.dtype == held.dtype
    words = np.concatenate([launch.words for launch in cupy.launches])
    assert [shape for _, shape in lent].count((1, 2, 3, 8)) == 4
    for place, shape in lent:
        assert place in words, shape
