"""Every kernel compiles for every GPU, by NVRTC, without a GPU; and fits what it is given."""

from __future__ import annotations

import io
import os
import re

import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, cases, specialisation

from cupyflash import ArgumentError, config, source, tiles, validate
from cupyflash.target import Target

# In CI a case is compiled for one of these, in turn; CUPYFLASH_TEST_ARCHS=all compiles all for all.
IN_TURN = ("sm_75", "sm_80", "sm_90", "sm_120")
CASES = cases()


def wanted() -> list[tuple[int, str]]:
    chosen = os.environ.get("CUPYFLASH_TEST_ARCHS", "")
    if not chosen:
        return [(n, IN_TURN[(n + n // 4) % 4]) for n in range(len(CASES))]
    archs = list(SHARED_MEMORY) if chosen == "all" else chosen.split(",")
    return [(n, arch) for arch in archs for n in range(len(CASES))]


def name(value: object) -> str:
    return "-".join(map(str, CASES[value])) if isinstance(value, int) else str(value)


@pytest.fixture(scope="module")
def nvrtc():
    core = pytest.importorskip("cuda.core")

    def compiled(text: str, arch: str) -> str:
        options = core.ProgramOptions(std="c++17", arch=arch, ftz=True, ptxas_options="-v")
        log = io.StringIO()
        core.Program(text, "c++", options).compile("cubin", logs=log)
        return log.getvalue()

    try:
        compiled('extern "C" __global__ void nothing() {}', "sm_90")
    except Exception as error:  # noqa: BLE001 (whatever keeps the library from being loaded)
        pytest.skip(f"NVRTC cannot be used: {error}")
    return compiled


@pytest.mark.parametrize(("number", "arch"), wanted(), ids=name)
def test_it_compiles(nvrtc, number, arch):
    special = specialisation(CASES[number], arch)
    log = nvrtc(source.source(special), arch)
    assert f"'{special.name}'" in log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) * special.tiles.threads <= 65536
    # A thread's local memory is for arrays that are indexed, not for a block's results.
    (stack,) = re.findall(r"(\d+) bytes stack frame", log)
    assert int(stack) <= 512, log


def test_few_cases_cover_much():
    assert len(CASES) <= 60
    for kernel in tiles.KERNELS:
        own = [case for case in CASES if case.kernel == kernel]
        assert len({case.dtype for case in own}) == 4
        assert {case.packed for case in own} == {False, True}
        assert len({case.sizes for case in own}) == 6


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_head_size_has_tiles(arch, dtype):
    target = Target(0, arch, (9, 0), 1, SHARED_MEMORY[arch])
    for d in (1, 3, 16, 17, 64, 65, 128, 129, 192, 256, 257, 320, 400, 511, 512):
        for d_v in (1, d, 512):
            q, v = np.zeros((1, d), dtype), np.zeros((1, d_v), dtype)
            for options in ({}, {"dropout": 0.5, "seed": 1}):
                problem = validate.call(q, q, v, **options).problem
                for kernel in tiles.KERNELS:
                    chosen = config.simt(kernel, problem, target, slope=True)
                    assert chosen.shared_memory <= SHARED_MEMORY[arch]


def test_too_little_shared_memory_is_an_error():
    target = Target(0, "a small GPU", (7, 5), 1, 8192)
    q = np.zeros((1, 512), np.float64)
    with pytest.raises(ArgumentError, match="8192 bytes"):
        config.choose(validate.call(q, q, q).problem, target)


def test_a_gpu_that_is_too_old_is_an_error():
    target = Target(0, "an old GPU", (7, 0), 80, 98304)
    q = np.zeros((1, 64), np.float32)
    with pytest.raises(ArgumentError, match=r"7\.0; wanted a GPU of 7\.5"):
        config.choose(validate.call(q, q, q).problem, target)


def test_the_choice_never_reads_the_batch_or_the_lengths():
    target = Target(0, "a GPU", (9, 0), 132, SHARED_MEMORY["sm_90"])
    plans = {
        config.choose(validate.call(*[np.zeros(shape, np.float32)] * 3).problem, target)
        for shape in [(1, 1, 64), (7, 2, 300, 64), (0, 3, 64)]
    }
    assert len(plans) == 1
