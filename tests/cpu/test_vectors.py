"""Vector code for every kind of registers: run here where LLVM can, compiled for the others."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
from llvmlite import binding, ir

from cupyflash.reference.cpu.microkernel import FEW, emit_block
from cupyflash.reference.cpu.vectors import INT, Emitter, emit_exp2, registers_of

KINDS = {
    "AVX-512": registers_of({"avx512f": True, "avx": True}, "x86_64"),
    "AVX2": registers_of({"avx512f": False, "avx": True}, "x86_64"),
    "SSE": registers_of({}, "x86_64"),
    "ARM": registers_of({"neon": True}, "aarch64"),
}
# Triple, CPU, how a register is named, and a fused multiplication and addition of whole registers.
TARGETS = {
    "AVX-512": ("x86_64-unknown-linux-gnu", "skylake-avx512", r"vfmadd\d+ps\s.*%zmm"),
    "AVX2": ("x86_64-unknown-linux-gnu", "haswell", r"vfmadd\d+ps\s.*%ymm"),
    "ARM": ("aarch64-unknown-linux-gnu", "cortex-a72", r"fmla\s+v\d+\.4s"),
}
FLOAT = ir.FloatType()


def block_function(rows: int, vectors: int, vector_bytes: int) -> ir.Module:
    """Make a module with the function ``block`` that computes one block of float32."""
    module = ir.Module()
    function = ir.Function(
        module, ir.FunctionType(ir.VoidType(), [INT] * 8 + [FLOAT] + [INT] * 2), "block"
    )
    builder = ir.IRBuilder(function.append_basic_block())
    emit_block(Emitter(builder, FLOAT, vector_bytes), rows, vectors, list(function.args))
    builder.ret_void()
    return module


def optimised(module: ir.Module, machine: binding.TargetMachine) -> binding.ModuleRef:
    """Return a module as Numba's pipeline would leave it for a machine."""
    parsed = binding.parse_assembly(str(module))
    passes = binding.create_pass_builder(
        machine, binding.create_pipeline_tuning_options(speed_level=3)
    )
    passes.getModulePassManager().run(parsed, passes)
    return parsed


def run_here(module: ir.Module, name: str, *kinds: type) -> tuple[object, object]:
    """Compile a module for this machine; return what holds its code, and a function of it."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    features = binding.get_host_cpu_features().flatten()
    machine = target.create_target_machine(binding.get_host_cpu_name(), features, 3)
    engine = binding.create_mcjit_compiler(optimised(module, machine), machine)
    engine.finalize_object()
    return engine, ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address(name))


def test_registers_are_those_of_the_cpu():
    assert {name: tuple(kind) for name, kind in KINDS.items()} == {
        "AVX-512": (64, 12), "AVX2": (32, 6), "SSE": (16, 6), "ARM": (16, 12),
    }  # fmt: skip


@pytest.mark.parametrize("few", [False, True], ids=["most rows", "few rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_the_product_and_its_maxima(kind, few):
    vector_bytes, rows = KINDS[kind]
    rows = FEW if few else rows
    columns, depth = 2 * vector_bytes // 4, 13
    engine, block = run_here(
        block_function(rows, 2, vector_bytes), "block",
        *[ctypes.c_int64] * 8, ctypes.c_float, *[ctypes.c_int64] * 2,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    a, b = (
        rng.integers(-4, 5, shape).astype(np.float32) for shape in ((depth, rows + 3), (13, 99))
    )
    c = rng.integers(-4, 5, (rows, columns)).astype(np.float32)
    wanted = a[:, :rows].T @ b[:, :columns]
    largest = rng.integers(-40, 40, columns).astype(np.float32)
    largest[0] = np.nan
    found, maxima = c.copy(), largest.copy()
    places = a.ctypes.data, 1, rows + 3, b.ctypes.data, 99, found.ctypes.data, columns, depth
    block(*places, 0.5, 1, maxima.ctypes.data)
    assert np.array_equal(found, c + wanted)
    assert np.array_equal(maxima, largest, equal_nan=True)
    block(*places, 0.5, 0, maxima.ctypes.data)
    assert np.array_equal(found, wanted / 2)
    expected = np.maximum(largest, wanted.max(axis=0) / 2)
    assert np.array_equal(maxima, expected, equal_nan=True)
    b[:, 1] = np.nan  # no number, so the maximum is what it was
    block(*places, 0.5, 0, maxima.ctypes.data)
    assert np.array_equal(maxima, expected, equal_nan=True)
    del engine


@pytest.mark.parametrize("kind", TARGETS)
def test_the_sums_stay_in_registers(kind):
    vector_bytes, rows = KINDS[kind]
    triple, cpu, fused = TARGETS[kind]
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = block_function(rows, 2, vector_bytes)
    module.triple = triple
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    text = machine.emit_assembly(optimised(module, machine))
    # The loop of the contraction: what lies between a label and the jump back to it.
    blocks = re.split(r"^(\.LBB\w+):", text, flags=re.MULTILINE)
    loops = [
        code.split(label)[0]
        for label, code in zip(blocks[1::2], blocks[2::2], strict=True)
        if label in code
    ]
    assert loops
    for loop in loops:
        count = len(re.findall(fused, loop))
        assert count
        assert count % (2 * rows) == 0
        assert not re.search(r"v?mov[au]ps[^\n]*\(%rsp|str\s+q|ldr\s+q\d+, \[sp", loop), loop
        assert "lea" not in loop, loop  # addresses are not computed from one another


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_powers_of_two(dtype):
    kind = ir.FloatType() if dtype == np.float32 else ir.DoubleType()
    lanes = 32 // np.dtype(dtype).itemsize
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT, INT]), "power")
    builder = ir.IRBuilder(function.append_basic_block())
    emit = Emitter(builder, kind, 32)
    emit.store(emit_exp2(builder, emit.load(function.args[0])), function.args[1])
    builder.ret_void()
    engine, power = run_here(module, "power", ctypes.c_int64, ctypes.c_int64)

    def powers(x: np.ndarray) -> np.ndarray:
        result = np.empty_like(x)
        for n in range(0, len(x), lanes):
            power(x[n:].ctypes.data, result[n:].ctypes.data)
        return result

    rng = np.random.default_rng(0)
    lowest = np.log2(np.finfo(dtype).tiny)
    x = np.concatenate([rng.uniform(low, 0, 8000) for low in (-1e-3, -1, -20, lowest)])
    x = x.astype(dtype)
    exact = np.exp2(x.astype(np.longdouble))
    error = np.abs(powers(x).astype(np.longdouble) / exact - 1).max()
    assert error <= (2.0**-22.9 if dtype == np.float32 else 2.0**-50)
    ends = np.array([0, -0.0, -1, -3, -np.inf, np.nan, lowest - 0.51, -1e30], dtype)
    wanted = np.array([1, 1, 0.5, 0.125, 0, np.nan, 0, 0], dtype)
    assert np.array_equal(powers(ends), wanted, equal_nan=True)
    del engine
