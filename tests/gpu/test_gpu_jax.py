"""Attention on JAX's arrays on a GPU: the bits of CuPy's arrays, gradients, vmap, streams, memory.

They are the tests of `tests/frontend/test_jax*.py`, with CuPy in place of NumPy.
"""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import cupyflash
from cupyflash import Rotary, masks, scores

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes share the GPU
jax = pytest.importorskip("jax", reason="needs JAX, compiled for CUDA")

import jax.numpy as jnp  # noqa: E402 (after the skip)

from cupyflash.jax import append, attention, attention_cached, attention_varlen, rope  # noqa: E402

pytestmark = pytest.mark.gpu
CAUSAL = masks.causal()
TYPES = ["float16", "bfloat16", "float32"]


@pytest.fixture
def cupy(gpu):
    import cupy

    if jax.default_backend() != "gpu":
        pytest.skip("JAX finds no GPU: needs jax[cuda12] or jax[cuda13], compiled for CUDA")
    return cupy


def draw(*shape, dtype="float32", seed=0):
    key = jax.random.key(seed + sum(shape))
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def qkv(dtype="float32", length=100):
    return [draw(2, 4, length, 64, dtype=dtype, seed=n) for n in range(3)]


def same(found, wanted):
    found = np.asarray(found.astype(jnp.float32))
    assert np.array_equal(found, wanted.astype("float32").get())


def of_cupy(cupy, arrays):
    return [cupy.from_dlpack(x) for x in arrays]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_arrays_give_the_bits_of_cupy(cupy, dtype, jit):
    arrays = [*qkv(dtype), draw(4, 100, 100), draw(4, dtype=dtype)]
    options = {"mask": CAUSAL, "score_mod": scores.softcap(3.0), "dropout": 0.25, "seed": 7}

    def loss(q, k, v, bias, sink):
        out, lse = attention(q, k, v, bias=bias, sink=sink, return_lse=True, **options)
        return (3 * out.astype(jnp.float32)).sum() + (2 * lse).sum(), (out, lse)

    function = jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)
    for _ in range(2):  # the second one is recognised
        gradients, (out, lse) = (jax.jit(function) if jit else function)(*arrays)
    q, k, v, bias, sink = of_cupy(cupy, arrays)
    options |= {"bias": bias, "sink": sink}
    wanted, wanted_lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
    same(out, wanted)
    same(lse, wanted_lse)
    do, dlse = cupy.full_like(wanted, 3), cupy.full_like(wanted_lse, 2)
    for found, wished in zip(gradients, vjp(do, dlse), strict=True):
        same(found, wished)


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 0, 0), (1, 2, 0)])
def test_vmap_gives_what_a_loop_gives(cupy, mapped):
    arrays = [draw(2, 2, 40, 32, seed=n) for n in range(3)]
    arrays = [
        x if axis is None else jnp.moveaxis(jnp.stack([x, 2 * x, -x]), 0, axis)
        for x, axis in zip(arrays, mapped, strict=True)
    ]
    found = jax.jit(jax.vmap(lambda q, k, v: attention(q, k, v, mask=CAUSAL), mapped))(*arrays)
    for n in range(3):
        each = [
            x if axis is None else jnp.take(x, n, axis)
            for x, axis in zip(arrays, mapped, strict=True)
        ]
        assert np.array_equal(found[n], attention(*each, mask=CAUSAL))


def test_gradients_under_vmap(cupy):
    q, k, v = [draw(3, 2, 2, 40, 32, seed=n) for n in range(3)]
    of_one = jax.grad(lambda q, k, v: (attention(q, k, v, mask=CAUSAL) ** 2).sum(), (0, 1, 2))
    found = jax.jit(jax.vmap(of_one))(q, k, v)
    for n in range(3):
        for x, wanted in zip(found, jax.jit(of_one)(q[n], k[n], v[n]), strict=True):
            assert np.allclose(x[n], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_keys_are_seeds_on_the_gpu(cupy, kind):
    q, k, v = qkv()
    key = jax.random.key(7, impl=kind)

    def dropped(key):
        return attention(q, k, v, dropout=0.4, seed=key)

    found = jax.jit(dropped)(key)
    assert np.array_equal(found, dropped(key))
    assert not np.array_equal(found, dropped(jax.random.key(8, impl=kind)))
    if kind == "threefry2x32":
        arrays = of_cupy(cupy, (q, k, v))
        same(found, cupyflash.attention(*arrays, dropout=0.4, seed=7))
        same(
            jax.jit(dropped)(jnp.int32(-3)),
            cupyflash.attention(*arrays, dropout=0.4, seed=2**64 - 3),
        )


def test_packed_sequences_with_traced_offsets(cupy):
    q, k, v = [draw(4, 100, 64, seed=n) for n in range(3)]
    ends = jnp.array([0, 20, 20, 100], jnp.int32)
    found, gradients = jax.jit(
        jax.value_and_grad(
            lambda q, k, v, at: (attention_varlen(q, k, v, at, at, mask=CAUSAL) ** 2).sum(),
            argnums=(0, 1, 2),
        )
    )(q, k, v, ends)
    arrays = of_cupy(cupy, (q, k, v))
    at = cupy.asarray([0, 20, 20, 100], np.int32)
    out, vjp = cupyflash.attention_varlen_vjp(*arrays, at, at, mask=CAUSAL)
    assert np.allclose(float(found), float((out**2).sum()), rtol=1e-5)
    for x, wanted in zip(gradients, vjp(2 * out), strict=False):
        assert np.allclose(x, wanted.get(), atol=1e-5)


def test_a_cache_and_rope(cupy):
    q, k, v = draw(2, 8, 3, 64), draw(2, 2, 300, 64, seed=1), draw(2, 2, 300, 64, seed=2)
    lengths = jnp.array([300, 17], jnp.int32)
    found = jax.jit(lambda n: attention_cached(q, k, v, n, mask=CAUSAL))(lengths)
    arrays = of_cupy(cupy, (q, k, v, lengths))
    same(found, cupyflash.attention_cached(*arrays, mask=CAUSAL))
    angles = np.outer(np.arange(400), 100.0 ** -np.arange(0, 1, 1 / 32)).astype(np.float32)
    rotary = Rotary(np.cos(angles), np.sin(angles))
    at = jnp.arange(300, dtype=jnp.int32)
    found = jax.jit(lambda x, at: rope(x, at, rotary))(k, at)
    of_gpu = Rotary(cupy.asarray(rotary.cos), cupy.asarray(rotary.sin))
    same(found, cupyflash.rope(cupy.from_dlpack(k), cupy.from_dlpack(at), of_gpu))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("codes", [None, "int8", "float8_e4m3fn"])
def test_rows_are_written_as_cupy_writes_them(cupy, codes, jit):
    k_new, v_new, q = (draw(2, heads, 3, 64, seed=heads) for heads in (2, 2, 8))
    table, lengths = jnp.array([[3, 0], [1, 4]], jnp.int32), jnp.array([17, 3], jnp.int32)
    angles = np.outer(np.arange(40), 100.0 ** -np.arange(0, 1, 1 / 32)).astype(np.float32)
    rotary = Rotary(np.cos(angles), np.sin(angles))
    held = [jnp.zeros((5, 2, 16, 64), codes or "float32") for _ in range(2)]
    scales = {}
    if codes is not None:
        scales = {name: jnp.ones((5, 2, 16, 1), jnp.float32) for name in ("k_scale", "v_scale")}

    def write(k, v, lengths, scales):
        options = {"table": table, "rotary": rotary, "q": q, **scales}
        return append(k_new, v_new, k, v, lengths, **options)

    made = (jax.jit(write) if jit else write)(*held, lengths, scales)
    as_bytes = [jax.lax.bitcast_convert_type(x, jnp.uint8) if codes else x for x in held]
    k, v, *rest = [cupy.array(x) for x in of_cupy(cupy, [*as_bytes, *scales.values()])]
    options = dict(zip(scales, rest, strict=True))
    if codes is not None:
        options["kv_dtype"] = codes
    arrays = of_cupy(cupy, (k_new, v_new))
    turned = cupyflash.append(
        *arrays,
        k,
        v,
        cupy.from_dlpack(lengths),
        table=cupy.from_dlpack(table),
        q=cupy.from_dlpack(q),
        rotary=Rotary(cupy.asarray(rotary.cos), cupy.asarray(rotary.sin)),
        **options,
    )
    same(made.q, turned)
    for x, wanted in zip(made[:2], (k, v), strict=True):
        found = jax.lax.bitcast_convert_type(x, jnp.uint8) if codes else x
        assert np.array_equal(np.asarray(found), wanted.get())
    for x, wanted in zip(made[2:4], rest, strict=False):
        assert np.array_equal(x, wanted.get())


def test_a_generation_with_a_donated_cache(cupy):
    """No step copies the cache or waits, and the rows are those of one call."""
    q, k, v = [draw(1, 4, 20, 64, seed=n) for n in range(3)]

    def step(k, v, q_new, k_new, v_new, n):
        k, v, *_ = append(k_new, v_new, k, v, n)
        return k, v, attention_cached(q_new, k, v, n, mask=CAUSAL)

    step = jax.jit(step, donate_argnums=(0, 1))
    held = [jnp.zeros((1, 4, 32, 64)) for _ in range(2)]
    rows = []
    for n in range(20):
        new = [x[:, :, n : n + 1] for x in (q, k, v)]
        *held, row = step(*held, *new, jnp.array([n + 1], jnp.int32))
        rows.append(row)
    found = jnp.concatenate(rows, axis=2)
    assert np.allclose(found, attention(q, k, v, mask=CAUSAL), atol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_arrays_in_masks_and_scores_come_from_any_memory(cupy, place, jit):
    q, k, v = qkv("bfloat16")
    slopes, shifts = np.array([0.5, 0.25, 0.125, 0.0625], np.float32), np.array([0, -7])

    def options(place):
        return {
            "score_mod": scores.alibi(place(slopes)),
            "mask": masks.causal(offset=place(shifts)),
        }

    placed = options(place)

    def loss(q, k, v):
        out = attention(q, k, v, **placed)
        return out.astype(jnp.float32).sum(), out

    function = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    function = jax.jit(function) if jit else function
    arrays = of_cupy(cupy, (q, k, v))
    wanted, vjp = cupyflash.attention_vjp(*arrays, **options(cupy.asarray))
    for _ in range(3):  # copies are kept
        gradients, out = function(q, k, v)
        same(out, wanted)
        for found, wished in zip(gradients, vjp(cupy.ones_like(wanted)), strict=False):
            same(found, wished)


def test_nothing_is_read_back_outside_of_programs(cupy):
    q, k, v = [draw(4, 100, 64, seed=n) for n in range(3)]
    ends, lengths = jnp.array([0, 20, 100], jnp.int32), jnp.array([100], jnp.int32)
    at = jnp.arange(100, dtype=jnp.int32)
    angles = np.outer(np.arange(100), 100.0 ** -np.arange(0, 1, 1 / 32)).astype(np.float32)
    rotary = Rotary(jnp.cos(angles), jnp.sin(angles))

    def made():
        out = attention_varlen(q, k, v, ends, ends, mask=CAUSAL)
        rows = attention_cached(q[None, :, -1:], k[None], v[None], lengths, mask=CAUSAL)
        return out, rows, rope(q, at, rotary), attention(q, k, v, seed=at[3], dropout=0.1)

    wanted = jax.block_until_ready(made())
    with jax.transfer_guard_device_to_host("disallow"):
        found = made()
    for x, y in zip(found, wanted, strict=True):
        assert np.array_equal(x, y)


def test_donation_shard_map_and_arrays_of_no_elements(cupy):
    q, k, v = qkv()
    wanted = attention(q, k, v)
    mesh = jax.make_mesh(
        (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    P = jax.sharding.PartitionSpec
    mapped = jax.shard_map(attention, mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"))
    assert np.array_equal(jax.jit(mapped)(q, k, v), wanted)
    assert jax.jit(attention)(q[:, :, :0], k, v).shape == (2, 4, 0, 64)
    assert not jax.jit(attention)(q, k[:, :, :0], v[:, :, :0]).any()
    donated = jax.jit(attention, donate_argnums=0)(jnp.array(q), k, v)
    assert np.array_equal(donated, wanted)


def test_nothing_is_copied_to_the_host_and_nothing_waits(cupy):
    """Programs return while a long kernel before them still runs."""
    q, k, v = [draw(4, 16, 16384, 128, dtype="bfloat16", seed=n) for n in range(3)]
    small = qkv()
    long, short = jax.jit(attention), jax.jit(lambda q, k, v: attention(q, k, v, mask=CAUSAL))
    jax.block_until_ready((long(q, k, v), short(*small)))
    shares = []
    for _ in range(3):  # other processes may have the cores
        with jax.transfer_guard("disallow"):
            begin = time.perf_counter()
            made = [long(q, k, v) for _ in range(10)]
            made.append(short(*small))
            queued = time.perf_counter() - begin
            jax.block_until_ready(made)
        shares.append(queued / (time.perf_counter() - begin))
    assert min(shares) < 0.25, shares


def test_programs_with_command_buffers(cupy):
    """XLA records only targets that allow it; this one is launched between two recordings."""
    q, k, v = qkv()
    found = jax.jit(lambda q, k, v: attention(q + 1, k * 2, v, mask=CAUSAL) * 3 + 1).lower(q, k, v)
    flags = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUSTOM_CALL"}
    program = found.compile(compiler_options=flags)
    wanted = attention(q + 1, k * 2, v, mask=CAUSAL) * 3 + 1
    for _ in range(3):
        assert np.array_equal(program(q, k, v), wanted)


def test_memory_of_one_program_is_written_in_order(cupy):
    """XLA gives memory out again in the order of its stream, and scratch memory is CuPy's."""
    q, k, v = qkv("bfloat16", 1000)

    def deep(x):
        for _ in range(12):
            x = attention(x, k, v, mask=CAUSAL) * 1.01 + x
        return x

    wanted = q
    for _ in range(12):
        wanted = attention(wanted, k, v, mask=CAUSAL) * 1.01 + wanted
    program = jax.jit(deep)
    first = program(q)
    for _ in range(20):
        assert np.array_equal(program(q).astype(jnp.float32), first.astype(jnp.float32))
    assert np.allclose(first.astype(jnp.float32), wanted.astype(jnp.float32), rtol=0.05, atol=0.05)
