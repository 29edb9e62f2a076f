"""What stands for barriers in shared memory, copies of boxes and warpgroups' products finds faults.

What they compute is held to NumPy by tests/helpers/conformance_warpgroups.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from conformance_warpgroups import COPY, PHASES, STORE, product
from emulator import build
from emulator.machine import FORWARD, REVERSE, Fault, randomly
from emulator.memory import encode
from emulator.probe import Probe

from cupyflash.arrays.device_arrays import address

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

BARRIER = ("ptx/barrier.cuh", "ptx/mma.cuh")
SCHEDULES = (FORWARD, REVERSE, randomly(0), randomly(1))
SS, RS = product("ss", "f16", 80, True), product("rs", "bf16", 64, True)


def run(body, threads=128, **more):
    Probe(body, kind="Words", elements=512, threads=threads, headers=BARRIER, **more).run()


def run_changed(case, old, new, schedules=SCHEDULES):
    """Run a case of conformance with other statements, in several schedules."""
    assert old in case.body
    given = case.inputs()
    wanted = case.wanted(given)
    text = case.kernel(given, wanted)
    text["body"] = text["body"].replace(old, new)
    probe = Probe(**text)
    for schedule in schedules:
        out = np.zeros_like(wanted)
        maps = b""
        if case.map is not None:
            maps = encode(case.map, address({"in": given, "out": out}[case.map.name]))
        probe.run(out, given, len(given) // 128, schedule, maps)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("ptx::mbarrier_arrive(8);", "no barrier is at 8"),
        ("ptx::mbarrier_try_wait(64, 0);", "no barrier is at 64"),
        ("if (t == 0) ptx::mbarrier_init(4, 1);", "address 4, 1 arrivals"),
        ("if (t == 0) ptx::mbarrier_init(8, 0);", "address 8, 0 arrivals"),
        (
            "if (t == 0) ptx::mbarrier_init(8, 1);\n__syncthreads();\n"
            "ptx::mbarrier_try_wait(8, 0);",
            r"deadlock: threads 0-127 wait at mbarrier_try_wait \(probe.cu:3\)",
        ),
        (
            "if (t == 0) ptx::mbarrier_init(8, 200);\nptx::mbarrier_arrive(8);",
            "which thread 0 has written with no barrier since",
        ),
        (
            "if (t == 0) {\nptx::mbarrier_init(8, 2);\nfor (int n = 0; n < 3; ++n) "
            "ptx::mbarrier_arrive_expect_tx(8, 16);\n}",
            "once more than barrier 8 counts",
        ),
        ("ptx::named_barrier_sync(16, 128);", "barrier 16, 128 threads"),
        ("ptx::named_barrier_sync(1, 100);", "barrier 1, 100 threads"),
        (
            "ptx::named_barrier_sync(1, t < 32 ? 128 : 64);",
            "barrier 1 is one of 128 threads, not 64",
        ),
        (
            "ptx::named_barrier_sync(1, 256);",
            r"deadlock: threads 0-127 wait at named_barrier_sync \(probe.cu:1\)",
        ),
        (
            "smem[t].x[0] = t;\nptx::named_barrier_arrive(1, 128);\nsmem[t ^ 1].x[0] = 0;",
            "has written with no barrier since",
        ),
    ],
)
def test_barriers(body, words):
    with pytest.raises(Fault, match=words):
        run(body)


@pytest.mark.parametrize(
    ("case", "old", "new", "words"),
    [
        (
            PHASES,
            "ptx::mbarrier_arrive(barrier);",
            "if (t) ptx::mbarrier_arrive(barrier);",
            "deadlock",
        ),
        (
            PHASES,
            "while (!ptx::mbarrier_try_wait(barrier, n % 2)) {\n        }",
            "",
            "no barrier since|no thread has written|once more than",
        ),
        (COPY, "ptx::fence_mbarrier_init();", "", "was not published"),
        (COPY, "tma_load(begin,", "tma_load(begin + 64,", "eight rows do not begin"),
        (
            COPY,
            "ptx::mbarrier_arrive_expect_tx(barrier, 8192);",
            "ptx::mbarrier_arrive(barrier);",
            "has not fini",
        ),
        (COPY, "ptx::mbarrier_arrive_expect_tx(barrier, 8192);", "", "deadlock"),
        (COPY, "(barrier, 8192)", "(barrier, 8200)", "deadlock"),
        (
            COPY,
            "__syncthreads();  // the barrier",
            "words[t] = t;\n__syncthreads();",
            "copies to byte 0 of shared memory, which thread 0 has not published",
        ),
        (
            COPY,
            "while (!ptx::mbarrier_try_wait(barrier, 0)) {\n      }",
            "__syncthreads();",
            "a copy of thread 0 has not finished",
        ),
        (STORE, "ptx::fence_proxy_async();", "", "has not published"),
        (STORE, "__syncthreads();  // the box", "", "no barrier since|no thread has written"),
        (STORE, "ptx::tma_store_wait_read();", "", "ended before its copies had read"),
        (STORE, "ptx::tma_store_commit();", "", "ended before its copies had read"),
        (STORE, "tma_store(map, begin,", "tma_store(map, begin + 64,", "do not begin"),
        (
            STORE,
            "ptx::tma_store_wait_read();",
            "words[0] ^= 1;\nptx::fence_proxy_async();\nptx::tma_store_wait_read();",
            "was written to meanwhile",
        ),
        (SS, "ptx::fence_proxy_async();", "", "has not published"),
        (SS, "__syncthreads();  // the operands", "", "no barrier since|no thread has written"),
        (SS, "ptx::wgmma_fence();", "", "no fence is behind"),
        (SS, "ptx::wgmma_wait<0>();", "", "ended before its products were finished"),
        (SS, "ptx::wgmma_commit();", "", "ended before its products were finished"),
        (
            RS,
            "ptx::wgmma_wait<0>();",
            "d[1][3] += 1;\nptx::wgmma_wait<0>();",
            "touched a result before it waited",
        ),
        (RS, "1ull << 62 |", "2ull << 62 |", "without the swizzle of 128 bytes"),
        (
            RS,
            "ptx::wgmma_wait<0>();",
            "if (t < 96) ptx::wgmma_wait<0>();",
            "ended|deadlock",
        ),
        (RS, "ptx::wgmma_commit();", "if (t) ptx::wgmma_commit();", "other products than"),
        (
            SS,
            "ptx::wgmma_wait<0>();",
            "words[t] = 0;\nptx::wgmma_wait<0>();",
            "has read with no barrier since|has not published|no barrier since",
        ),
    ],
)
def test_faults_of_cases(case, old, new, words):
    with pytest.raises(Fault, match=words):
        run_changed(case, old, new)
