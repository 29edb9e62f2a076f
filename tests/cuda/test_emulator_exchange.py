"""Blocks of one launch read what others wrote: what orders that, and what the emulator reports."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import build
from emulator.machine import FORWARD, REVERSE, Fault, randomly
from emulator.probe import Probe

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

SCHEDULES = (FORWARD, REVERSE, *map(randomly, range(4)))
HEADERS = ("ptx/atomic.cuh", "ptx/barrier.cuh")

# Every thread writes a number; the last block's threads add up what threads of all blocks wrote.
# The lines between have the names by which a test leaves them out. Shuffles order nothing.
EXCHANGE = {
    "": "unsigned long long* const count = static_cast<unsigned long long*>(p.in);\n"
        "int* const out = static_cast<int*>(p.out);",
    "write": "out[THREADS * blockIdx.x + t] = 1000 * blockIdx.x + t;",
    "fence before": "ptx::fence_device();",
    "barrier before": "__syncthreads();",
    "before the swap": "",
    "swap": "unsigned long long seen = 0, expected = 1;\n"
            "while (t == 0 && seen != expected) {\n"
            "  expected = seen;\n"
            "  seen = ptx::compare_and_swap(count, expected, (expected + 1) % gridDim.x);\n"
            "}\n"
            "const bool last = __shfl_sync(0xffffffffu, seen, 0) + 1 == gridDim.x;",
    "after the swap": "",
    "barrier after": "__syncthreads();",
    "fence after": "if (last) ptx::fence_device();",
    "sum": "int sum = 0;\n"
           "for (int b = 0; last && b < gridDim.x; ++b)\n"
           "  sum += out[THREADS * b + (t + 5) % THREADS];\n"
           "if (last) out[THREADS * gridDim.x + t] = sum;",
}  # fmt: skip


def exchange(threads=32, **other):
    """Return the probe, with other lines than EXCHANGE for names whose words are joined by _."""
    lines = EXCHANGE | {name.replace("_", " "): line for name, line in other.items()}
    return Probe("\n".join(lines.values()), threads=threads, headers=HEADERS)


def run(probe, blocks=3, schedule=FORWARD, threads=32):
    """Run it; the counter must be as before, and the sums right."""
    count, out = np.zeros(2, np.uint64), np.zeros(threads * (blocks + 1), np.int32)
    probe.run(out, count, blocks, schedule)
    assert count.tolist() == [0, 0]
    written, sums = out[:-threads].reshape(blocks, threads), out[-threads:]
    each = 1000 * np.arange(blocks)[:, None] + np.arange(threads)
    np.testing.assert_array_equal(written, each)
    np.testing.assert_array_equal(sums, np.roll(each.sum(axis=0), -5))


FENCES_OF_ONE = {
    "fence_before": "",
    "before_the_swap": "if (t == 0) ptx::fence_device();",
    "after_the_swap": "if (t == 0) ptx::fence_device();",
    "fence_after": "",
}
OF_A_BLOCK = {
    "after_the_swap": "if (t == 0) smem[0] = last;",
    "fence_after": "if (!smem[0]) return;\nptx::fence_device();",
    "sum": EXCHANGE["sum"].replace("last && ", "").replace("if (last) ", ""),
}
NAMED = "ptx::named_barrier_sync(1, THREADS);"
RIGHT = {
    "every thread fences": {},
    "one thread fences for its block": FENCES_OF_ONE,
    "of several warps": OF_A_BLOCK | {"threads": 128},
    "a warp's barriers": {"barrier_before": "__syncwarp();", "barrier_after": "__syncwarp();"},
    "named barriers": OF_A_BLOCK
    | {"barrier_before": NAMED, "barrier_after": NAMED, "threads": 128},
    "more fences and barriers": {
        "before_the_swap": "ptx::fence_device();\n__syncthreads();",
        "after_the_swap": "ptx::fence_device();\n__syncthreads();",
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_fences_and_swaps_order_blocks(name):
    probe, threads = exchange(**RIGHT[name]), RIGHT[name].get("threads", 32)
    for blocks in (1, 2, 7):
        for schedule in SCHEDULES:
            run(probe, blocks, schedule, threads)


UNORDERED = (
    r"reads global memory that thread \d+ of block \d has written "
    r"with no fence_device, compare_and_swap and fence_device since \(probe.cu:\d+\)"
)
SWAPPED = (
    r"global memory that thread 0 of block \d has swapped: "
    r"only compare_and_swap may touch it in this launch \(probe.cu:\d+\)"
)
# What is other than in EXCHANGE -> who fails in the forward schedule, and what the report says.
WRONG = {
    "no fence before": ({"fence_before": ""}, (2, 0), UNORDERED),
    "a fence of one thread before": (
        {"fence_before": "if (t == 0) ptx::fence_device();"}, (2, 0), UNORDERED,
    ),
    "a fence before the write": (
        {"write": "ptx::fence_device();\n" + EXCHANGE["write"], "fence_before": ""},
        (2, 0), UNORDERED,
    ),
    "a fence behind the swap only": (
        {"fence_before": "", "after_the_swap": "ptx::fence_device();"}, (2, 0), UNORDERED,
    ),
    "no fence after": ({"fence_after": ""}, (2, 0), UNORDERED),
    "a fence of one thread after": (
        {"fence_after": "if (t == 0) ptx::fence_device();"}, (2, 1), UNORDERED,
    ),
    "a fence after in front of the swap": (
        {"fence_after": "", "before_the_swap": "ptx::fence_device();"}, (2, 0), UNORDERED,
    ),
    "no barrier before": ({"barrier_before": ""}, (2, 0), UNORDERED),
    "a shuffle as the barrier before": (
        {"barrier_before": "__shfl_sync(0xffffffffu, t, 0);"}, (2, 0), UNORDERED,
    ),
    "no barrier after": ({"barrier_after": ""}, (2, 1), UNORDERED),
    "no swap": (
        {"swap": "const bool last = blockIdx.x + 1 == gridDim.x;"}, (2, 0), UNORDERED,
    ),
    "another counter": (
        {"swap": EXCHANGE["swap"].replace("(count,", "(count + blockIdx.x % 2,")
                                 .replace("last = ", "last = blockIdx.x == 2 || ")},
        (2, 0), UNORDERED.replace(r"block \d", "block 1"),
    ),
    "the counter read beside swaps": (
        {"before_the_swap": "if (t == 9 && *count > 7) return;"}, (0, 9), "reads " + SWAPPED,
    ),
    "the counter read by who swapped it": (
        {"after_the_swap": "if (t == 0 && *count > 7) return;"}, (0, 0), "reads " + SWAPPED,
    ),
    "the counter written beside swaps": (
        {"after_the_swap": "if (t == 0 && last) *count = 0;"}, (2, 0), "writes " + SWAPPED,
    ),
    "half of the counter": (
        {"sum": "if (last) out[t] = reinterpret_cast<int*>(count)[1];"}, (2, 0), "reads " + SWAPPED,
    ),
    "a swap across numbers": (
        {"swap": "ptx::compare_and_swap(\nreinterpret_cast<unsigned long long*>(out + 1), 0, 0);\n"
                 "const bool last = false;"},
        (0, 0), r"swaps 8 bytes where no such number begins \(.* < probe.cu:7\)",
    ),
    "a swap of shared memory": (
        {"swap": "ptx::compare_and_swap(\nreinterpret_cast<unsigned long long*>(smem), 0, 0);\n"
                 "const bool last = false;"},
        (0, 0), r"swaps shared memory: compare_and_swap is for global memory \(.* < probe.cu:7\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_order_is_reported(what):
    other, who, text = WRONG[what]
    probe = exchange(**other)
    with pytest.raises(Fault, match=text) as caught:
        run(probe)
    assert (caught.value.kernel, caught.value.block, caught.value.thread) == ("probe", *who)
    if what not in ("no swap", "another counter"):  # where a block says by its number who is last
        for schedule in SCHEDULES[1:]:
            with pytest.raises(Fault, match=text):
                run(probe, schedule=schedule)


@pytest.mark.parametrize("schedule", [FORWARD, REVERSE], ids=str)
def test_a_counter_that_is_written_without_a_barrier(schedule):
    body = """
      unsigned long long* const count = static_cast<unsigned long long*>(p.in);
      if (t == 5) *count = 0;
      %s
      if (t == 9) ptx::compare_and_swap(count, 0, 1);
    """
    count = np.ones(1, np.uint64)
    Probe(body % "__syncthreads();", headers=HEADERS).run(given=count, schedule=schedule)
    assert count[0] == 1
    with pytest.raises(Fault, match=r"memory that thread \d of block 0 has (written|swapped)"):
        Probe(body % "", headers=HEADERS).run(given=count, schedule=schedule)
    # Thread 7 reads it between the barrier and the swap, or after the swap.
    reads = "__syncthreads();\nif (t == 7) smem[7] = *count;"
    with pytest.raises(Fault, match=r"memory that thread \d of block 0 has (read|swapped)"):
        Probe(body % reads, headers=HEADERS).run(given=count, schedule=schedule)


# Of two blocks the one that swaps first has written a number, and reads it afterwards.
OVERWRITES = """
  unsigned long long* const count = static_cast<unsigned long long*>(p.in);
  int* const out = static_cast<int*>(p.out);
  if (t > 0) return;
  if (ptx::compare_and_swap(count, 0, 1) == 0) {
    out[0] = 1;
    %s
    ptx::fence_device();
    ptx::compare_and_swap(count, 1, 2);
    %s
  } else {
    ptx::compare_and_swap(count, 0, 0);
    ptx::fence_device();
    out[0] = 2;
  }
"""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_write_after_what_other_blocks_read(schedule):
    out = np.zeros(2, np.int32)
    body = OVERWRITES % ("ptx::fence_device();\nout[1] = out[0];", "")
    Probe(body, headers=HEADERS).run(out, np.zeros(1, np.uint64), 2, schedule)
    assert out.tolist() == [2, 1]
    late = Probe(OVERWRITES % ("", "out[1] = out[0];"), headers=HEADERS)
    with pytest.raises(Fault, match=r"writes .* that thread 0 of block \d has read with no fe"):
        late.run(out, np.zeros(1, np.uint64), 2, schedule)


def test_order_is_passed_on_through_another_counter():
    # The first block tells the second one, that one the third: in the forward schedule alone.
    body = """
      unsigned long long* const count = static_cast<unsigned long long*>(p.in);
      int* const out = static_cast<int*>(p.out);
      if (t > 0) return;
      if (blockIdx.x == 0) out[0] = 7;
      if (blockIdx.x > 0) ptx::compare_and_swap(count + blockIdx.x - 1, 1, 2);
      %s
      if (blockIdx.x < 2) ptx::compare_and_swap(count + blockIdx.x, 0, 1);
      if (blockIdx.x == 2) out[1] = out[0];
    """
    out = np.zeros(2, np.int32)
    Probe(body % "ptx::fence_device();", headers=HEADERS).run(out, np.zeros(2, np.uint64), 3)
    assert out.tolist() == [7, 7]
    skips = Probe(body % "if (blockIdx.x != 1) ptx::fence_device();", headers=HEADERS)
    with pytest.raises(Fault, match=f"block 2, thread 0: {UNORDERED}"):
        skips.run(out, np.zeros(2, np.uint64), 3)
    # What failed has written nothing, so it tells nothing.
    fails = Probe(body.replace("0, 1);", "5, 1);") % "ptx::fence_device();", headers=HEADERS)
    with pytest.raises(Fault, match=f"block 2, thread 0: {UNORDERED}"):
        fails.run(out, np.zeros(2, np.uint64), 3)
    # Another thread of the second block fences.
    others = "if (t == 1) ptx::fence_device();\n__syncthreads();"
    handed = body.replace("if (t > 0) return;", "").replace(
        "if (blockIdx", "if (t == 0 && blockIdx"
    )
    out[:] = 0
    Probe(handed % f"__syncthreads();\n{others}", headers=HEADERS).run(
        out, np.zeros(2, np.uint64), 3
    )
    assert out.tolist() == [7, 7]


def test_threads_of_a_block_exchange_by_swaps():
    body = """
      unsigned long long* const count = static_cast<unsigned long long*>(p.in);
      int* const out = static_cast<int*>(p.out);
      if (t == 3) out[0] = 7;
      if (t == 3) ptx::fence_device();
      if (t == 3) ptx::compare_and_swap(count, 0, 1);
      __shfl_sync(0xffffffffu, t, 0);
      if (t == 9) ptx::compare_and_swap(count, 1, 2);
      %s
      if (t == 9) out[1] = out[0];
    """
    out = np.zeros(2, np.int32)
    for schedule in SCHEDULES:
        right = Probe(body % "if (t == 9) ptx::fence_device();", headers=HEADERS)
        right.run(out, np.zeros(1, np.uint64), schedule=schedule)
        assert out.tolist() == [7, 7]
        with pytest.raises(Fault, match=r"thread 9: reads .* thread 3 of block 0 has written"):
            Probe(body % "", headers=HEADERS).run(out, np.zeros(1, np.uint64), schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_block_reads_what_it_wrote_after_a_barrier(schedule):
    body = """
      int* const out = static_cast<int*>(p.out);
      out[t] = t;
      __syncthreads();
      const int other = out[t ^ 33];
      %s
      out[t] = other;
    """
    out = np.zeros(64, np.int32)
    Probe(body % "__syncthreads();").run(out, schedule=schedule)
    np.testing.assert_array_equal(out, np.arange(64) ^ 33)
    text = r"thread \d+ of block 0 has (read|written) with no barrier since \(probe.cu:\d\)"
    with pytest.raises(Fault, match=text):
        Probe(body % "").run(out, schedule=schedule)
