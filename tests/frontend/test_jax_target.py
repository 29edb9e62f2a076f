"""The target of XLA's FFI: call frames, XLA's memory, life and errors of functions, a GPU's side.

No GPU is needed: calls of programs for the CPU are made as those of a GPU are, with a stand-in for
CuPy. What has to be run on a GPU is in `tests/gpu/test_gpu_jax.py`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, Rotary, masks
from cupyflash.arrays import device_arrays
from cupyflash.gpu import params

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')

import jax.numpy as jnp  # noqa: E402 (after the skip)

from cupyflash.jax import attention, attention_cached, frame, rope, target  # noqa: E402

if jax.default_backend() != "cpu":
    pytest.skip("cupyflash.jax is for JAX's CPU", allow_module_level=True)

CAUSAL = masks.causal()
X = np.random.default_rng(0).standard_normal((2, 2, 9, 8)).astype(np.float32)

FIELDS = """
#include <stdio.h>
#include "xla/ffi/api/c_api.h"
#define AT(type, field) printf("%zu ", offsetof(type, field))
int main(void) {
  AT(XLA_FFI_CallFrame, extension_start); AT(XLA_FFI_CallFrame, api); AT(XLA_FFI_CallFrame, ctx);
  AT(XLA_FFI_CallFrame, stage); AT(XLA_FFI_CallFrame, args.args);
  AT(XLA_FFI_CallFrame, rets.rets); AT(XLA_FFI_CallFrame, attrs.attrs);
  AT(struct XLA_FFI_Api, api_version.major_version); AT(struct XLA_FFI_Api, XLA_FFI_Error_Create);
  AT(struct XLA_FFI_Api, XLA_FFI_Stream_Get); AT(struct XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);
  AT(XLA_FFI_Buffer, data); AT(XLA_FFI_Scalar, value);
  AT(EXTENSION, type); AT(XLA_FFI_Metadata_Extension, metadata);
  AT(XLA_FFI_Metadata, api_version.major_version);
  printf("%d %d ", XLA_FFI_ExecutionStage_EXECUTE, XLA_FFI_Extension_Metadata);
  printf("%d %d ", XLA_FFI_Error_Code_INVALID_ARGUMENT, XLA_FFI_Error_Code_INTERNAL);
  printf("%d %d %d\\n", XLA_FFI_Error_Create_Args_STRUCT_SIZE,
         XLA_FFI_Stream_Get_Args_STRUCT_SIZE, XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE);
}
"""


def test_fields_lie_where_jaxlibs_header_says(tmp_path):
    """A C compiler is asked, which the tests of CUDA kernels need anyway."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "needs a C compiler"
    folder = Path(jax.ffi.include_dir())
    names = "XLA_FFI_InternalExtension", "XLA_FFI_Extension_Base"  # that of JAX before 0.12
    header = (folder / "xla/ffi/api/c_api.h").read_text()
    named = f"-DEXTENSION={next(name for name in names if name in header)}"
    (tmp_path / "fields.c").write_text(FIELDS)
    program = str(tmp_path / "fields")
    command = [compiler, named, "-I", str(folder), str(tmp_path / "fields.c"), "-o", program]
    subprocess.run(command, check=True)
    found = [
        int(x) for x in subprocess.run([program], capture_output=True, text=True).stdout.split()
    ]
    words = frame._EXTENSION, frame._API, frame._CONTEXT, frame._STAGE
    words += frame._ARGS, frame._RETS, frame._ATTRS
    wanted = [8 * word for word in words]
    wanted += [frame._VERSION, frame._ERROR_CREATE, frame._STREAM_GET, frame._DEVICE_ORDINAL_GET]
    wanted += [frame._DATA, 8, 8, 24, 24, frame.EXECUTE, frame._METADATA]
    wanted += [frame._INVALID_ARGUMENT, frame._INTERNAL]
    wanted += [frame._ErrorCreate.errc.offset + 4, frame._StreamGet.stream.offset + 8]
    wanted += [frame._DeviceOrdinalGet.device_ordinal.offset + 4]
    assert found == wanted


@pytest.fixture
def into(monkeypatch):
    """Return a list of what functions returned, and of the arrays in XLA's memory."""
    seen = []
    make = target._Entry._make

    def watched(self, operands, results):
        run = self._run
        self._run = lambda *given: seen.append((made := list(run(*given)), results)) or made
        make(self, operands, results)
        self._run = run

    monkeypatch.setattr(target._Entry, "_make", watched)
    return seen


def test_results_are_written_to_xlas_memory(into):
    def loss(q, k, v, bias):
        return (attention(q, k, v, bias=bias, mask=CAUSAL) ** 2).sum()

    bias = np.zeros((2, 9, 9), np.float32)
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(X, X, X, bias)
    cache = jax.jit(lambda q, k: attention_cached(q, k, k, [9, 7]))(X[:, :, :3], X)
    assert np.isfinite(cache).all()
    assert all(np.isfinite(x).all() for x in found)
    assert [len(results) for _, results in into] == [2, 4, 1]
    for made, results in into:
        assert all(x is result for x, result in zip(made, results, strict=True))


def test_operands_are_not_written(monkeypatch):
    def run(operands, into, shapes):
        with pytest.raises(ValueError, match="read-only"):
            operands[0][...] = 0
        return [operands[0] + 1]

    def made(x):
        return target.bind(target.Function(run), [jax.ShapeDtypeStruct((2,), x.dtype)], "", [x])

    assert np.array_equal(jax.jit(made)(jnp.ones(2))[0], [2, 2])


def test_donated_arrays_and_arrays_of_no_elements():
    wanted = cupyflash.attention(X, X, X)
    donated = jax.jit(attention, donate_argnums=0)
    assert np.array_equal(donated(jnp.array(X), X, X), wanted)
    assert jax.jit(attention)(X[:, :, :0], X, X).shape == (2, 2, 0, 8)
    assert not jax.jit(attention)(X, X[:, :, :0], X[:, :, :0]).any()


def test_a_function_lives_as_long_as_its_program(monkeypatch):
    monkeypatch.setattr(target, "_leaving", type(target._leaving)(maxlen=1))
    before = len(target._entries)
    program = jax.jit(lambda q: attention(q, X, X)).lower(X).compile()
    assert len(target._entries) == before + 1
    jax.clear_caches()
    gc.collect()
    assert np.array_equal(program(X), cupyflash.attention(X, X, X))
    del program
    gc.collect()
    assert len(target._leaving) == 1  # calls that run now find it
    target._leaving.clear()
    assert len(target._entries) <= before


def test_programs_that_are_let_go_while_they_run():
    x = np.random.default_rng(1).standard_normal((1, 2, 300, 16)).astype(np.float32)
    wanted = cupyflash.attention(x, x, x)
    found = [jax.jit(lambda q, n=n: attention(q, x, x) + 0 * n)(x) for n in range(8)]
    gc.collect()
    for each in found:
        assert np.array_equal(each, wanted)


def test_a_program_of_another_process_is_refused(monkeypatch):
    program = jax.jit(lambda q: attention(q, X, X, mask=CAUSAL)).lower(X).compile()
    monkeypatch.setattr(target, "_entries", {})
    with pytest.raises(jax.errors.JaxRuntimeError, match="got a program of another process"):
        np.asarray(program(X))


@pytest.mark.parametrize("error", [ArgumentError("q: wrong"), KeyError("x"), KeyboardInterrupt()])
def test_errors_come_out_of_a_program(error):
    def run(operands, into, shapes):
        raise error

    def made(x):
        return target.bind(target.Function(run), [jax.ShapeDtypeStruct((2,), x.dtype)], "", [x])

    of_argument = isinstance(error, ArgumentError)
    wanted = "INVALID_ARGUMENT: q: wrong" if of_argument else f"INTERNAL: {type(error).__name__}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=wanted):
        np.asarray(jax.jit(made)(jnp.ones(2))[0])


@pytest.mark.parametrize("check", [True, False])
def test_shard_map_over_one_device(check):
    """Gradients of `k` and `v`, which do not vary over the axis, are sums."""
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("x",), axis_types=automatic, devices=jax.devices()[:1])
    P = jax.sharding.PartitionSpec
    specs = P(None, None, "x"), P(), P()
    options = {"mesh": mesh, "in_specs": specs, "out_specs": specs[0], "check_vma": check}
    mapped = jax.shard_map(attention, **options)
    assert np.array_equal(jax.jit(mapped)(X, X, X), attention(X, X, X))

    def gradients(function):
        loss = jax.grad(lambda *x: (function(*x) ** 2).sum(), argnums=(0, 1, 2))
        return jax.jit(loss)(X, X, X)

    for found, wanted in zip(gradients(mapped), gradients(attention), strict=True):
        assert np.allclose(found, wanted, atol=1e-6)


DEVICES = """
    import jax, numpy as np
    from cupyflash.jax import attention
    P, auto = jax.sharding.PartitionSpec, (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=auto)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 2, 20, 8))

    def gradients(function, *arrays):
        return jax.jit(jax.grad(lambda *x: (function(*x) ** 2).sum(), (0, 1, 2)))(*arrays)

    wanted, of_all = attention(q, k, v), gradients(attention, q, k, v)
    for specs in [(P("x"),) * 3, (P(None, None, "x"), P(), P())]:
        mapped = jax.shard_map(attention, mesh=mesh, in_specs=specs, out_specs=specs[0])
        assert np.array_equal(jax.jit(mapped)(q, k, v), wanted)
        for x, y in zip(gradients(mapped, q, k, v), of_all):
            assert np.allclose(x, y, atol=1e-5)
    sharded = [jax.device_put(x, jax.sharding.NamedSharding(mesh, P("x"))) for x in (q, k, v)]
    assert np.array_equal(jax.jit(attention)(*sharded), wanted)
    for x, y in zip(gradients(attention, *sharded), of_all):
        assert np.array_equal(x, y)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, P("x")) for x in (q, k, v)]
        assert np.array_equal(jax.jit(attention)(*sharded), wanted)
"""


@pytest.mark.thorough("a process of its own; one device is tried by the quick tests")
def test_two_devices(tmp_path):
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    program = textwrap.dedent(DEVICES)
    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True, env=os.environ | environment, cwd=tmp_path)


def test_kernels_are_launched_on_xlas_stream_and_memory(as_on_a_gpu, cupy, monkeypatch):
    lent = []
    borrowed = device_arrays.borrowed

    def watched(place, shape, dtype, strides, device, owner):
        lent.append((place, shape))
        return borrowed(place, shape, dtype, strides, device, owner)

    def refuse(*_, **__):
        raise AssertionError("arrays are copied")

    monkeypatch.setattr(device_arrays, "borrowed", watched)
    monkeypatch.setattr(cupy, "asarray", refuse, raising=False)

    def loss(q, k, v):
        return attention(q, k, v, mask=CAUSAL).sum()

    jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(X, X, X))
    assert as_on_a_gpu == [(77, 0)] * 2
    assert len(cupy.launches) >= 2
    words = np.concatenate([launch.words for launch in cupy.launches])
    # forward: q, k, v, out, lse; backward: dlse is told only if it is not known to be zero
    shapes = [shape for _, shape in lent]
    assert shapes.count((2, 2, 9, 8)) == 4 + 8
    for place, shape in lent:
        assert place in words, shape


def test_a_seed_is_read_on_the_gpu(as_on_a_gpu, cupy, monkeypatch):
    seeds = {}
    borrowed = device_arrays.borrowed

    def watched(place, shape, *how):
        if shape == (2,):
            seeds[place] = ctypes.c_uint64.from_address(place).value
        return borrowed(place, shape, *how)

    monkeypatch.setattr(device_arrays, "borrowed", watched)

    def made(key):
        return attention(X, X, X, dropout=0.5, seed=key)

    jax.block_until_ready(jax.jit(made)(jax.random.key(7)))
    (launch,) = cupy.launches
    place = params.params(0, 0, 0).place("seed_gmem") // 8
    assert seeds == {int(launch.words[place]): 7}


def test_what_other_machines_refuse():
    program = jax.jit(lambda q: attention(q, X, X)).trace(X)
    with pytest.raises(ArgumentTypeError, match="for a TPU"):
        program.lower(lowering_platforms=("tpu",))


def test_programs_for_a_gpu_need_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    program = jax.jit(lambda q: attention(q, X, X)).trace(X)
    with pytest.raises(ArgumentTypeError, match=r"for a GPU.*CuPy is not installed.*cuda13"):
        program.lower(lowering_platforms=("cuda",))


def test_the_cpu_has_no_stream(monkeypatch):
    """XLA's own answer to a question that only a GPU can answer is an error, and not a crash."""
    monkeypatch.setattr(target._Entry, "on_cpu", lambda _, frame: frame.stream())
    with pytest.raises(jax.errors.JaxRuntimeError, match="FrameError: XLA gave no stream"):
        np.asarray(jax.jit(lambda q: attention(q, X, X))(X))


def test_the_device_is_asked_of_xla(monkeypatch, into):
    asked = []
    on_cpu = target._Entry.on_cpu

    def watched(self, frame):
        asked.append((frame.device(), frame.version[0]))
        on_cpu(self, frame)

    monkeypatch.setattr(target._Entry, "on_cpu", watched)
    jax.block_until_ready(jax.jit(lambda q: attention(q, X, X))(X))
    assert asked == [(0, 0)]


def swapped(x):
    return jnp.swapaxes(x, 1, 2)  # (batch, length, heads, dim), and back


def attend(q, k, v):
    return swapped(attention(*map(swapped, (q, k, v)), mask=CAUSAL))


def attend_to_a_cache(q, k, v):
    return swapped(attention_cached(*map(swapped, (q, k, v)), [2, 1, 2], mask=CAUSAL))


def attend_to_pages(q, k, v):
    """Pages as vLLM has them: (pages, positions, heads, dim)."""
    table = jnp.array([[2], [0], [1]], jnp.int32)
    return swapped(attention_cached(*map(swapped, (q, k, v)), [2, 1, 2], table=table))


def turn(q, k, v):
    rotary = Rotary(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32))
    return swapped(rope(swapped(q) + 1, jnp.arange(2), rotary)) + k + v


ORDERS = {
    "attention": attend,
    "gradients": jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2)),
    "second derivatives": jax.grad(
        lambda *x: sum((g**2).sum() for g in jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2))(*x)),
        (0, 1, 2),
    ),
    "vmap": jax.vmap(lambda *x: attend(*(y[None] for y in x))[0]),
    "a cache": attend_to_a_cache,
    "pages": attend_to_pages,
    "rope": turn,
}


@pytest.mark.parametrize("name", ORDERS)
def test_axes_that_a_program_swaps_are_not_moved_in_memory(name):
    function = ORDERS[name]
    arrays = [jnp.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 3, 2, 4, 8))]
    program = jax.jit(function).lower(*arrays).compile()
    assert " transpose(" not in program.as_text()
    with jax.disable_jit():
        wanted = function(*arrays)
    for found, x in zip(jax.tree.leaves(program(*arrays)), jax.tree.leaves(wanted), strict=True):
        assert np.allclose(found, x, atol=1e-5)
