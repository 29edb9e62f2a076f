"""The emulator reports what a kernel must not do: which kernel, block and thread, and where."""

from __future__ import annotations

import re

import numpy as np
import pytest
from emulator import build
from emulator.machine import REVERSE, Fault, randomly
from emulator.probe import Probe

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
