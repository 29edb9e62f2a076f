"""The emulator reports what a kernel must not do: which kernel, block and thread, and where."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from caches import results
from coded_arrays import Coded
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, Fault, randomly
from emulator.probe import Probe
from emulator.problems import lean_kernels, reduce_in_every_form

import cupyflash.kernels_cu
from cupyflash import lookup, masks, scores
from cupyflash.gpu import source, tile_lists
from cupyflash.gpu.kernels import decode, simt
from cupyflash.problem import cached, coded, validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.hadamard import transform
from cupyflash.problem.options import Options
from cupyflash.problem.reduction_form import Form
from cupyflash.problem.tangents import SecondTangents, Tangents
from cupyflash.rowwise import HADAMARD

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

# Body -> who fails in the forward schedule, and what the report says.
FAULTS = {
    "a barrier that some threads have left behind": (
        "if (t < 40) return;\n__syncthreads();",
        (40, r"waits at __syncthreads \(probe.cu:2\) for thread 0, which has ended"),
    ),
    "threads that end while others wait": (
        "if (t < 40) __syncthreads();",
        (40, r"ended while other threads wait for it at __syncthreads \(probe.cu:1\)"),
    ),
    "two barriers at once": (
        "if (t < 40) {\n__syncthreads();\n} else {\n__syncthreads();\n}",
        (40, r"waits at __syncthreads \(probe.cu:4\) while thread 0 waits at .*\(probe.cu:2\)"),
    ),
    "two kinds of barriers": (
        "if (t < 40) __syncthreads(); else __syncthreads_or(1);",
        (40, r"waits at __syncthreads_or \(probe.cu:1\) while thread 0 waits at __syncthreads "),
    ),
    "a deadlock": (
        "if (t != 3) __shfl_xor_sync(0xffffffffu, t, 1);\n__syncthreads();",
        (0, r"deadlock: threads 0-2 wait at __shfl_xor_sync \(probe.cu:1\); threads 3-3 wait at "
            r"__syncthreads \(probe.cu:2\); threads 4-31 wait at __shfl_xor_sync .*; threads 32-63 "
            r"wait at __syncthreads \(probe.cu:2\)"),
    ),
    "a lane that has ended": (
        "if (t == 5) return;\n__shfl_xor_sync(0xffffffffu, t, 1);",
        (5, r"ended while other threads wait for it at __shfl_xor_sync \(probe.cu:2\)"),
    ),
    "lanes at different functions": (
        "if (t % 2) __any_sync(0xffffffffu, t); else __ballot_sync(0xffffffffu, t);",
        (1, r"waits at __any_sync \(probe.cu:1\) while thread 0 waits at __ballot_sync"),
    ),
    "lanes with different masks": (
        "if (t < 32) __shfl_xor_sync(t < 16 ? 0x1ffffu : 0xffff0000u, t, 1);\n__syncthreads();",
        (0, r"deadlock: threads 0-15 wait at __shfl_xor_sync .*; threads 16-63 wait at __syncthr"),
    ),
    "a mask without the lane itself": (
        "__shfl_xor_sync(0xffffu, t, 1);",
        (16, r"calls __shfl_xor_sync .* with mask 0xffff, which lacks itself"),
    ),
    "a lane outside of the mask": (
        "if (t < 16) __shfl_xor_sync(0xffffu, t, 16);",
        (0, r"reads lane 16 by __shfl_xor_sync .*, whose mask is 0xffff"),
    ),
    "a write behind shared memory": (
        "smem[t] = 0;\nif (t == 63) smem[t + 1] = 0;",
        (63, r"writes 4 bytes at byte 256 of 256 of shared memory \(probe.cu:2\)"),
    ),
    "a write across its end": (
        "if (t == 9) *reinterpret_cast<double*>(smem + 63) = 0;",
        (9, r"writes 8 bytes at byte 252 of 256 of shared memory"),
    ),
    "a write before it": (
        "smem[t - 1] = 0;",
        (0, r"writes 4 bytes at byte -4 of 256 of shared memory"),
    ),
    "a read behind it": (
        "static_cast<int*>(p.out)[t] = smem[t + 1000];",
        (0, r"reads 4 bytes at byte 4000 of 256 of shared memory"),
    ),
    "shared memory that nothing has written": (
        "if (t == 7) static_cast<int*>(p.out)[t] = smem[t];",
        (7, r"reads byte 28 of shared memory, which no thread has written"),
    ),
    "a read that no barrier orders after a write": (
        "smem[t] = t;\nif (t < 33) return;\nstatic_cast<int*>(p.out)[t] = smem[t ^ 33];",
        (33, r"reads byte 0 of shared memory, which thread 0 has written .*\(probe.cu:3\)"),
    ),
    "a write that no barrier orders after a read": (
        "smem[t] = t;\n__syncthreads();\nif (t == 0) static_cast<int*>(p.out)[0] = smem[33];\n"
        "if (t == 33) smem[t] = 1;",
        (33, r"writes byte 132 of shared memory, which thread 0 has read with no barrier since"),
    ),
    "two writes": (
        "smem[0] = t;",
        (1, r"writes byte 0 of shared memory, which thread 0 has written with no barrier since"),
    ),
    "a shuffle in place of a barrier": (
        "smem[t] = t;\n__shfl_xor_sync(0xffffffffu, t, 1);\n"
        "static_cast<int*>(p.out)[t] = smem[t ^ 1];",
        (0, r"reads byte 4 of shared memory, which thread 1 has written"),
    ),
    "a warp's barrier in place of the block's": (
        "smem[t] = t;\n__syncwarp();\nif (t > 31) static_cast<int*>(p.out)[t] = smem[t ^ 32];",
        (32, r"reads byte 0 of shared memory, which thread 0 has written"),
    ),
    "global memory written by two threads": (
        "static_cast<int*>(p.out)[t / 2] = 0;",
        (1, r"writes global memory that thread 0 of block 0 has written with no ba.*be.cu:1\)"),
    ),
    "global memory read while it is written": (
        "static_cast<int*>(p.out)[t] = 0;\nif (t == 9) smem[9] = static_cast<int*>(p.out)[8];",
        (9, r"reads global memory that thread 8 of block 0 has written"),
    ),
    "a copy that is read before it is finished": (
        "if (t == 3) {\nptx::cp_async(smem, p.out, true);\n"
        "static_cast<int*>(p.out)[60] = smem[2];\nptx::cp_async_wait_all();\n}",
        (3, r"reads byte 8 of shared memory, which a copy of thread 3 has not finished .*be.cu:3"),
    ),
    "a copy that others read without a barrier": (
        "if (t == 3) {\nptx::cp_async(smem, p.out, true);\nptx::cp_async_wait_all();\n}\n"
        "if (t > 31) static_cast<int*>(p.out)[t] = smem[2];\n",
        (32, r"reads byte 8 of shared memory, which thread 3 has written with no barrier since"),
    ),
    "a copy to where others still read": (
        "smem[t] = 0;\n__syncthreads();\nif (t == 9) static_cast<int*>(p.out)[t] = smem[2];\n"
        "if (t == 33) {\nptx::cp_async(smem, p.out, false);\nptx::cp_async_wait_all();\n}",
        (33, r"writes byte 8 of shared memory, which thread 9 has read .*probe.cu:5"),
    ),
    "a copy beside shared memory": (
        "if (t == 5) ptx::cp_async(smem + 64, p.out, false);",
        (5, r"writes 16 bytes at byte 256 of 256 of shared memory"),
    ),
    "a copy to where no vector begins": (
        "if (t == 5) ptx::cp_async(smem + 2, p.out, false);",
        (5, r"copies 16 bytes where no vector begins"),
    ),
    "a copy from where no vector begins": (
        "if (t == 5) ptx::cp_async(smem, static_cast<int*>(p.out) + 1, true);",
        (5, r"copies 16 bytes where no vector begins"),
    ),
    "a copy that nobody waits for": (
        "if (t == 5) ptx::cp_async(smem, p.out, true);",
        (5, r"ended before its copies were finished"),
    ),
    "a copy that is in the last group, which is not waited for": (
        "if (t == 5) {\nptx::cp_async(smem, p.out, true);\nptx::cp_async_commit();\n"
        "ptx::cp_async_wait<1>();\nstatic_cast<int*>(p.out)[60] = smem[0];\n"
        "ptx::cp_async_wait<0>();\n}",
        (5, r"reads byte 0 of shared memory, which a copy of thread 5 has not finished .*cu:5"),
    ),
    "a copy that is in no group": (
        "if (t == 5) {\nptx::cp_async_commit();\nptx::cp_async(smem, p.out, true);\n"
        "ptx::cp_async_wait<0>();\nstatic_cast<int*>(p.out)[60] = smem[0];\n}",
        (5, r"reads byte 0 of shared memory, which a copy of thread 5 has not finished .*cu:5"),
    ),
    "a matrix's row that no barrier orders after a write": (
        "unsigned int to[4];\nif (t < 4) smem[t] = t;\nif (t > 31) ptx::ldmatrix_x4(to, 0);",
        (32, r"reads byte 0 of shared memory, which thread 0 has written with no barrier since"),
    ),
    "a matrix's row that begins between 16 bytes": (
        "unsigned int to[4];\nptx::ldmatrix_x4(to, 8 * t + 8);",
        (0, r"gives ldmatrix_x4 \(probe.cu:2\) the address 8, which is no multiple of 16"),
    ),
    "a matrix instruction that lanes do not reach": (
        "unsigned int a[4] = {};\nfloat c = 0;\nif (t == 3) return;\n"
        "ptx::mma_m16n8k16_f16(c, c, c, c, a, 0, 0);",
        (3, r"ended while other threads wait for it at mma_m16n8k16_f16 \(probe.cu:4\)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_faults_are_reported(what):
    body, (thread, text) = FAULTS[what]
    probe = Probe(body, headers=("ptx/cp_async.cuh", "ptx/mma.cuh"))
    out = np.zeros(64, np.int32)
    with pytest.raises(Fault) as caught:
        probe.run(out, blocks=3)
    assert (caught.value.kernel, caught.value.block, caught.value.thread) == ("probe", 0, thread)
    assert re.search(text, str(caught.value)), caught.value
    for schedule in (REVERSE, randomly(1), randomly(2)):  # not by chance of the order
        with pytest.raises(Fault):
            probe.run(out, blocks=3, schedule=schedule)


def test_the_block_that_fails_is_named():
    with pytest.raises(Fault, match="probe, block 2, thread 7: writes"):
        Probe("if (blockIdx.x == 2 && t == 7) smem[64] = 0;").run(blocks=4)


def test_lanes_that_do_not_exist():
    body = "__shfl_xor_sync(0xffffffffu, t, 1);"
    with pytest.raises(Fault, match=r"thread 32: .* mask 0xffffffff, but the block has 40 threads"):
        Probe(body, threads=40).run()
    Probe(body.replace("0xffffffffu", "t < 32 ? 0xffffffffu : 0xffu"), threads=40).run()


def test_two_blocks_must_not_write_the_same():
    body = "if (t == 0) static_cast<int*>(p.out)[0] = blockIdx.x;"
    out = np.zeros(1, np.int32)
    with pytest.raises(Fault, match=r"block 1, thread 0: writes global .* of block 0 has written"):
        Probe(body).run(out, blocks=2)
    with pytest.raises(Fault, match=r"block 0, thread 0: writes global .* of block 1 has written"):
        Probe(body).run(out, blocks=2, schedule=REVERSE)


def test_after_a_fault_a_kernel_runs_again():
    probe = Probe("if (*static_cast<int*>(p.in) && t == 40) return;\n__syncthreads();\n"
                  "static_cast<int*>(p.out)[t] = t;")  # fmt: skip
    out = np.zeros(64, np.int32)
    with pytest.raises(Fault):
        probe.run(out, np.ones(1, np.int32))
    np.testing.assert_array_equal(probe.run(out, np.zeros(1, np.int32)), np.arange(64))


def test_a_kernel_that_does_not_compile_says_why():
    with pytest.raises(RuntimeError, match=r"probe.cu:2.*nothing_known"):
        Probe("int known;\nnothing_known();")


def test_other_shared_memory_is_refused():
    # It would be one thread's own: only the memory whose size is given at launch is shared.
    with pytest.raises(RuntimeError, match="__shared__"):
        Probe("__shared__ int own[2];")


# -- the sources' own barriers ---------------------------------------------------------------------

FOLDER = Path(cupyflash.kernels_cu.__file__).parent
BARRIER = re.compile(r"__syncthreads\(\);.*|ptx::barrier_or(?=\()")
# It orders rows of dq in global memory, of which the emulator compares no two plain accesses.
OF_GLOBAL_MEMORY = "the tile's dq, written by all threads"
# It is for lists of more rows than a block has threads, which take the emulator minutes.
OF_LONG_LISTS = "costs that other threads may still read"


def _barriers() -> list[tuple[str, int]]:
    paths = [path for path in FOLDER.rglob("*.cu*") if path.parent.name != "ptx"]
    paths.remove(FOLDER / "ide_prelude.cuh")  # no kernel includes it
    for name in ("checksum", "offsets"):  # theirs order nothing: without one, results are wrong
        paths.remove(FOLDER / "rowwise" / f"{name}.cu")
    return [
        (path.relative_to(FOLDER).as_posix(), n)
        for path in sorted(paths)
        for n, found in enumerate(BARRIER.findall(path.read_text()))
        if OF_GLOBAL_MEMORY not in found and OF_LONG_LISTS not in found
    ]


def _everything(emulator):
    """Run every kernel that has a barrier, with all that puts one into them, on several tiles."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def run(q, k, do, bias=None, sink=None, **options):
        call = validate.call(q, k, k, Options(bias=bias, sink=sink, **options))
        out, lse = draw(*do.shape), draw(*do.shape[:-1])
        emulator.forward(call, out, lse)
        for each in (emulator, dataclasses.replace(emulator, deterministic=True)):
            made = [None if x is None else np.empty_like(x) for x in (q, k, k, bias, sink)]
            each.backward(call, do, out, lse, None, Gradients(*made))

    chosen = {"mask": masks.causal(), "sink": np.zeros(2, np.float32), "bias": draw(40, 33)}
    shape = (2, 2, 40, 72)
    run(draw(*shape), draw(1, 33, 72), draw(*shape), dropout=0.5, seed=1, **chosen)
    run(draw(2, 40, 8), draw(2, 1, 33, 8), draw(2, 2, 40, 8))
    # Batch entries share queries; the first sees nothing, and the rows of the second one's do begin
    # where they cannot be read as vectors.
    do = draw(2, 2 * 40 * 8 + 1)[:, :-1].reshape(2, 2, 40, 8, copy=False)
    run(draw(2, 40, 8), draw(2, 1, 33, 8), do, mask=masks.lengths(np.array([0, 33])))

    # Tensor cores: values that are not finite where a tile is masked; tiles that are not; no tile.
    def run_half(d, last, **options):
        q, k, v = (draw(2, 1, n, d).astype(np.float16) for n in (40, 33, 33))
        v[:, :, 20] = last
        call = validate.call(q, k, v, Options(**options))
        out, lse = np.empty_like(q), draw(2, 1, 40)
        emulator.forward(call, out, lse)
        out = np.nan_to_num(out, posinf=0)
        lse[~np.isfinite(lse)] = 0
        do = np.asfortranarray(
            draw(*out.shape).astype(np.float16)
        )  # copied at once, not on its way
        do[:, :, 30] = last
        for each in (emulator, dataclasses.replace(emulator, deterministic=True)):
            made = (np.empty_like(x) for x in (q, k, v))
            each.backward(call, do, out, lse, None, Gradients(*made, None, None))

    def run_shared(emulator, d, last, dtype, **options):
        q, k, v, do = (
            draw(*shape).astype(dtype)
            for shape in ((2, 40, d), *[(2, 1, 33, d)] * 2, (2, 2, 40, d))
        )
        call = validate.call(q, k, v, Options(**options))
        out, lse = np.empty_like(do), draw(2, 2, 40).astype(call.problem.accumulator)
        emulator.forward(call, out, lse)
        k[:, :, 20], do[:, :, 30] = last, last
        for each in (emulator, dataclasses.replace(emulator, deterministic=True)):
            made = (np.empty_like(x) for x in (q, k, v))
            each.backward(call, do, out, lse, None, Gradients(*made, None, None))

    def run_bias(emulator, d, order):
        # Two entries that were given the same bias; rows are copied on their way, or at once.
        q, k, v, do = (
            draw(2, *shape, d).astype(np.float16, order=order)
            for shape in ((2, 40), (1, 33), (1, 33), (2, 40))
        )
        bias = draw(2, 40, 33).astype(np.float16)
        call = validate.call(q, k, v, Options(bias=bias))
        out, lse = np.zeros_like(q), np.zeros((2, 2, 40), np.float32)
        made = (np.empty_like(x) for x in (q, k, v, bias))
        emulator.backward(call, do, out, lse, None, Gradients(*made, None))

    # More tiles than are classified at once, the first ones EMPTY. Before the others: one small
    # kernel shows what they do not.
    q, k = draw(1, 40, 8).astype(np.float16), draw(1, 1100, 8).astype(np.float16)
    call = validate.call(q, k, k, Options(mask=masks.mask(lambda b, h, i, j: j >= 1060)))
    emulator.forward(call, np.empty_like(q), draw(1, 40))

    # Few queries and many keys: a task that two blocks share, and tasks that one has alone.
    for dtype in (np.float16, np.float32):
        for lead in ((), (3,)):
            q, k = draw(*lead, 2, 1, 8).astype(dtype), draw(*lead, 1, 1300, 8).astype(dtype)
            for options in (Options(), Options(mask=masks.causal())):  # tasks are alike, or not
                call = validate.call(q, k, k, options)
                emulator.forward(call, np.empty_like(q), draw(*lead, 2, 1))

    # Entries that share their first keys: a team of warps has them, whose last one has no rows.
    q, k = draw(9, 8, 1, 8).astype(np.float16), draw(1, 1, 600, 8).astype(np.float16)
    for options in (Options(), Options(mask=masks.causal())):
        call = cached.call(q, k, k, np.full(9, 600), None, None, options, shared=512)
        with mock.patch.object(decode, "FEWEST_SHARED_BYTES", 0):
            emulator.forward(call, *results(call))

    # Caches whose tasks have a block each, that joins its leaves itself.
    blocks = dataclasses.replace(emulator.blocks, multiprocessors=64)
    for dtype in (np.float16, np.float32):
        q, k = draw(2, 4, 1, 8).astype(dtype), draw(2, 2, 480, 8).astype(dtype)
        call = cached.call(q, k, k, np.array([480, 131]), None, None, Options())
        dataclasses.replace(emulator, blocks=blocks).forward(call, *results(call))

    # Rows that are transformed by several passes, and by a small matrix after them.
    for columns in (256, 4096, 640):
        rows = draw(2, columns)
        checked = transform(rows, 1, False, None)
        emulator.rowwise(HADAMARD, checked, out=np.empty_like(rows))

    for order in "CF":
        run_bias(emulator, 8, order)
        # Two warpgroups.
        run_bias(dataclasses.replace(emulator, blocks=Blocks(hopper=True)), 200, order)

    # Warps that share keys, and warps that do not.
    for each in (emulator, dataclasses.replace(emulator, blocks=Blocks(16, 32, 64))):
        run_shared(each, 24, np.inf, ml_dtypes.bfloat16, mask=masks.causal())
        run_shared(each, 24, 1, np.float16)
        run_shared(each, 24, 1, ml_dtypes.bfloat16)
    run_shared(emulator, 24, np.inf, np.float64, mask=masks.causal())
    run_shared(emulator, 24, 1, np.float64)
    run_shared(emulator, 24, 1, np.float64, mask=masks.lengths(np.array([0, 33])))
    run_half(72, np.inf, mask=masks.causal())
    run_half(72, 1)
    run_half(256, 1, mask=masks.lengths(np.array([0, 33])))

    q, k = draw(1, 70, 64).astype(np.float16), draw(1, 200, 64).astype(np.float16)
    call = validate.call(q, k, k)
    warpgroups = dataclasses.replace(emulator, blocks=Blocks(hopper=True))
    warpgroups.forward(call, np.empty_like(q), draw(1, 70))
    made = (np.empty_like(x) for x in (q, k, k))
    warpgroups.backward(call, q, q, draw(1, 70), None, Gradients(*made, None, None))

    # Tangents, whose tile and that of weights have pairs dropped.
    q, k, tq, tk = draw(1, 70, 24), draw(1, 200, 24), draw(1, 70, 24), draw(1, 200, 24)
    written = draw(1, 70, 24), draw(1, 70, 24), draw(1, 70), draw(1, 70)
    call = validate.call(q, k, k, Options(dropout=0.5, seed=1))
    emulator.forward_tangent(call, Tangents(tq, tk, tk), written)

    # Those of 16 bits: values that are not finite where a tile is masked, tiles that are not, no
    # tile, and rows that warps share.
    for d, last, options in (
        (24, np.inf, Options(mask=masks.causal())), (136, 1, Options()),
        (24, 1, Options(mask=masks.lengths(np.array([0, 33])))),
    ):  # fmt: skip
        q, k, v = (draw(2, 1, n, d).astype(np.float16) for n in (40, 33, 33))
        v[:, :, 20] = last
        written = np.empty_like(q), np.empty_like(q), draw(2, 1, 40), draw(2, 1, 40)
        emulator.forward_tangent(validate.call(q, k, v, options), Tangents(q, k, k), written)

    # Their gradients, whose tangents are resident or not, and of a bias that heads share.
    bias, sink = draw(70, 200), draw(2)
    q, tq, k, tk = draw(2, 2, 70, 24), draw(2, 2, 70, 24), draw(2, 1, 200, 24), draw(1, 1, 200, 24)
    options = Options(dropout=0.5, seed=1, bias=bias, sink=sink, mask=masks.window(40, 30))
    call = validate.call(q, k, tk, options)
    made = (np.empty_like(x) for x in (q, k, tk, bias, sink))
    rows = {"do": q, "out": tq, "lse": draw(2, 2, 70), "dlse": draw(2, 2, 70)}
    moved = SecondTangents(Tangents(tq, k, tk, bias, sink), q, draw(2, 2, 70))
    written = Gradients(*made), (np.empty_like(q), draw(2, 2, 70))
    for deterministic in (False, True):
        emulator.backward_tangent(call, rows, moved, *written, deterministic=deterministic)
        with mock.patch.dict(simt.KERNELS, lean_kernels()):
            emulator.backward_tangent(call, rows, moved, *written, deterministic=deterministic)
    # As above: entries share queries, and the first one sees nothing.
    q, k = draw(2, 40, 8), draw(2, 1, 33, 8)
    call = validate.call(q, k, k, Options(mask=masks.lengths(np.array([0, 33]))))
    made = *(np.empty_like(x) for x in (q, k, k)), None, None
    rows = {"do": do, "out": draw(2, 2, 40, 8), "lse": draw(2, 2, 40)}
    moved = SecondTangents(Tangents(q, k, k), do)
    written = Gradients(*made), (draw(2, 2, 40, 8), draw(2, 2, 40))
    for deterministic in (False, True):
        emulator.backward_tangent(call, rows, moved, *written, deterministic=deterministic)

    # Those of 16 bits, of one stage and of two: numbers that are not finite where a tile is masked,
    # tiles that are not, and queries that entries share.
    for d, last, options in (
        (24, np.inf, Options(mask=masks.causal())), (40, np.inf, Options(mask=masks.causal())),
        (24, 1, Options()), (40, 1, Options()),
        (24, 1, Options(mask=masks.lengths(np.array([0, 33])))),
    ):  # fmt: skip
        q, k = draw(2, 70, d).astype(np.float16), draw(2, 1, 73, d).astype(np.float16)
        q[:, 20] = k[:, :, 20] = last
        of_rows = draw(2, 2, 70, d).astype(np.float16)
        call = validate.call(q, k, k, options)
        rows = {"do": of_rows, "out": of_rows, "lse": draw(2, 2, 70)}
        moved = SecondTangents(Tangents(q, k, k), of_rows)
        made = *(np.empty_like(x) for x in (q, k, k)), None, None
        written = Gradients(*made), (np.empty_like(of_rows), draw(2, 2, 70))
        emulator.backward_tangent(call, rows, moved, *written)

    # Gradients of learned look-ups: of queries, over several tiles, and of one number.
    gate = lookup(draw(40), learned=True), lookup(draw(), learned=True)
    q, k = draw(2, 2, 40, 8), draw(2, 1, 33, 8)
    changes = [scores.score(lambda s, b, h, i, j: s * gate[0][i]), scores.softcap(gate[1])]
    call = validate.call(q, k, k, Options(score_mod=changes, dropout=0.5, seed=1))
    rows = {"do": q, "out": draw(*q.shape), "lse": draw(2, 2, 40)}
    emulator.backward_lookups(call, rows, {x: np.empty_like(x.array) for x in gate})

    # Reductions: lists of the largest, and results that are joined over several tiles of keys.
    some = masks.mask(lambda b, h, i, j: ((j < 16) | (j >= 32)) & (j <= i))
    call = validate.call(q, k, k, Options(mask=some, score_mod=scores.softcap(3.0)))
    reduce_in_every_form(emulator, call, draw(2, 2, 40))
    call = validate.call(*(x.astype(np.float16) for x in (q, k, k)), Options(mask=some))
    form = Form("weight", "blocks", "sum", rows=(0, 40), block=(40, 40))
    emulator.reduce(call, form, draw(2, 2, 40), None)

    # Lists of tiles, whose rows are dealt in an order.
    chosen = masks.chosen(np.array([[0, 2], [1, -1], [3, 0]]), (64, 64))
    q, k = draw(1, 180, 64).astype(np.float16), draw(1, 250, 64).astype(np.float16)
    with mock.patch.object(tile_lists, "FEWEST_TILES", 1):
        call = validate.call(q, k, k, Options(mask=chosen))
        warpgroups.forward(call, np.empty_like(q), draw(1, 180))

    held = Coded.of("float8_e4m3fn", draw(1, 70, 64), *(draw(1, 200, 64) for _ in range(2)))
    given = coded.Fp8(*held.scales, held.form, "float32")
    call = validate.call(*held.arrays, Options(), given=given)
    warpgroups.forward(call, draw(1, 70, 64), draw(1, 70))

    # Compressed keys of a cache, whose first columns are the values.
    q, k = draw(1, 16, 1, 576).astype(np.float16), draw(1, 1, 130, 576).astype(np.float16)
    call = cached.call(q, k, k[..., :512], np.array([130]), None, None, Options())
    warpgroups.forward(call, *results(call))

    # Rows of the output are longer than those of the queries, whose place they take.
    q, k, v = draw(1, 70, 72), draw(1, 200, 72), draw(1, 200, 128)
    v[:, 20] = np.inf
    call = validate.call(q, k, v, Options(mask=masks.causal(), precision="tf32x3"))
    warpgroups.forward(call, draw(1, 70, 128), draw(1, 70))
    q = draw(1, 40, 64)  # which registers hold
    warpgroups.forward(
        validate.call(q, q, q, Options(precision="tf32x3")), draw(1, 40, 64), draw(1, 40)
    )


@pytest.mark.parametrize(("path", "number"), _barriers())
@pytest.mark.thorough("mutants; that the emulator reports faults is quick")
def test_no_barrier_of_the_sources_may_be_missing(path, number):
    def read(name):
        text = build.read(name)
        if name != path:
            return text
        match = list(BARRIER.finditer(text))[number]
        return text[: match.start()] + text[match.end() :].removeprefix("\n")

    def has_it(special):
        # Deltas and pieces of tasks are what other kernels compute with.
        included = source.flatten((special.spec.source,))
        needed = special.spec.part in ("delta", "tangent_delta", "decode", "shared")
        return needed or f"// {path}\n" in included

    with pytest.raises(
        Fault, match=r"no barrier since|fence_device since|no thread has written|has not fini"
    ):
        _everything(Emulator(read=read, runs=has_it))


@pytest.mark.thorough("goes with the barriers that are missing")
def test_with_all_barriers_no_fault_is_reported():
    for schedule in (FORWARD, REVERSE, randomly(0)):
        _everything(Emulator(schedule=schedule))
