"""Every kernel compiles for every GPU, by NVRTC, without a GPU; and takes what the table says."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from cuda_specialisations import OPTIONS, SHARED_MEMORY, capability, cases, runs_on, specialisation
from cuda_table import ARCHS, Resources, key_of, measure, nvrtc_version, read
from halves import mostly_thorough

from cupyflash import ArgumentError
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route
from cupyflash.gpu.kernels import registry, simt, sm80_f64, sm90
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import validate
from cupyflash.problem.options import Options

CASES = cases()
MADE_WITH, TABLE = read()
REMEDY = "run `python tests/tools/cuda_table.py` and look at what git shows of tests/data"

ELSEWHERE = 2  # times as many are admitted with another compiler or architecture, and always a
FEW = 64  # bytes: NVRTC 13.5 spills up to 60 in `append` on sm_120
# The most bytes that a thread of a kernel spills in the table: at the tiles that are chosen a
# block's results fill its registers, and with smaller tiles it would read more.
SPILLS = {
    "forward_simt_tangent": 32,
    "forward_sm80": 212,
    "forward_sm80_tangent": 16,
    "forward_sm90": 196,
    "forward_sm90_fp8": 162,  # in PARTIAL tiles
    "forward_sm90_tangent": 404,  # nearly all of it in the producer, which has few registers
    "forward_sm90_tf32": 136,
    "backward_bias": 88,  # of heads of a few numbers, with slopes of scores
    "backward_sm80_dkdv": 156,
    "backward_sm80_dq": 32,
    "backward_sm80_bias": 8,
    "backward_sm80_tangent_dkdv": 32,
    "backward_sm90_bias": 4,
    "backward_sm90_dkdv": 120,  # in float16, where two blocks share an SM
    "backward_f64_dkdv": 220,
    "backward_delta": 8,  # with 256 threads
    "decode_sm80": 176,
    "decode_sm80_shared": 36,
    "decode_sm90": 164,  # where NaN and infinities are added one by one
}

# Blocks that the source itself lets share an SM, apart from those of the tiles.
RESIDENT = {"backward_delta": 8}


def fits(arch: str, found: Resources) -> None:
    # Registers are handed out to a warp by 256, 8 for each thread.
    assert -(-found.registers // 8) * 8 * found.threads <= 65536
    assert found.shared_memory <= SHARED_MEMORY[arch]
    # A thread's local memory is for what was spilled, not for arrays.
    assert found.stack <= 512


# -- the table, without a compiler ----------------------------------------------------------------


def test_few_cases_cover_much():
    assert len(CASES) <= 425
    reductions = [case for case in CASES if case.kernel.startswith("reduce_")]
    assert len({case.dtype for case in reductions}) == 4  # of all kernels together
    for kernel in simt.KERNELS:
        own = [case for case in CASES if case.kernel == kernel]
        if own[0] in reductions:
            assert len({case.sizes for case in own}) == 2
            continue
        assert len({case.dtype for case in own}) == 4
        assert {case.packed for case in own} == {False, True}
        assert len({case.sizes for case in own}) == 6
    own = [case for case in CASES if case.kernel == "forward_sm90"]
    assert {sm90.fit_forward(*case.sizes).block_kv for case in own} == {128, 176, 112, 80, 48, 32}
    for itemsize in (2, 4, 8):
        own = [
            case
            for case in CASES
            if case.kernel == "forward_sm80" and case.dtype.itemsize == itemsize
        ]
        assert {case.options for case in own} == set(OPTIONS)
        assert {case.packed for case in own} == {False, True}
        assert len({case.sizes for case in own}) == {2: 9, 4: 6, 8: 4}[itemsize]
    for kernel in sm80_f64.BACKWARD_TILES:
        own = [case for case in CASES if case.kernel == kernel]
        assert {case.options for case in own} == set(OPTIONS)
        assert {case.packed for case in own} == {False, True}


def test_the_table_has_every_case():
    wanted = [key_of(case, arch) for case in CASES for arch in ARCHS if runs_on(case, arch)]
    assert len(wanted) == len(set(wanted))
    assert list(TABLE) == wanted, REMEDY


def test_the_table_has_the_tiles_that_are_chosen():
    for case in CASES:
        for arch in (x for x in ARCHS if runs_on(case, x)):
            chosen, found = specialisation(case, arch).tiles, TABLE[key_of(case, arch)]
            block = (chosen.block_q, chosen.block_kv, chosen.threads, chosen.shared_memory)
            assert block == found[:4], f"{key_of(case, arch)}: {REMEDY}"


def test_what_the_table_says_fits():
    for key, found in TABLE.items():
        fits(key.arch, found)


def test_spills_are_those_that_are_admitted():
    most: dict[str, int] = {}
    made = ((case, arch) for case in CASES for arch in ARCHS if runs_on(case, arch))
    for (case, arch), (key, found) in zip(made, TABLE.items(), strict=True):
        if found.spill_stores:
            taken = -(-found.registers // 8) * 8  # they are handed out by eight
            blocks = specialisation(case, arch).tiles.resident_blocks
            threads = found.threads * max(blocks, RESIDENT.get(key.kernel, 1))
            assert taken >= min(255, 65536 // threads // 8 * 8), "held back for no reason"
            most[key.kernel] = max(most.get(key.kernel, 0), found.spill_stores)
    assert most == SPILLS


# -- with NVRTC -----------------------------------------------------------------------------------


def wanted() -> list[tuple[int, str]]:
    """Numbers of cases and architectures; CUPYFLASH_TEST_ARCHS=all compiles all for all.

    Unless some are chosen, compute capabilities 8.0 and 12.0, which have the same kernels, get
    every fourth case each, and 9.0 has all. The table has the others, and whoever makes it anew
    compiles them.
    """
    chosen = os.environ.get("CUPYFLASH_TEST_ARCHS", "")
    archs = list(SHARED_MEMORY) if chosen == "all" else chosen.split(",") if chosen else ARCHS
    every = [(n, arch) for arch in archs for n, case in enumerate(CASES) if runs_on(case, arch)]
    turns = {} if chosen else {"sm_80": 1, "sm_120": 2}
    return [(n, arch) for n, arch in every if n % 4 == turns.get(arch, n % 4)]


def one_of_each() -> set[tuple[int, str]]:
    """Return the first case of each kernel, on the last architecture that has it."""
    first = {CASES[number].kernel: number for number, _ in sorted(wanted(), reverse=True)}
    return set({n: (n, arch) for n, arch in wanted() if first[CASES[n].kernel] == n}.values())


def name(value: object) -> str:
    if not isinstance(value, int):
        return str(value)
    kernel, dtype, (d, d_v), options, packed, cache = CASES[value]
    return f"{kernel}-{dtype}-{d}x{d_v}-{options}" + "-packed" * packed + f"-{cache}" * bool(cache)


@pytest.fixture(scope="module")
def measured(request, nvrtc):
    """What the kernels of the selected tests take, compiled a few at a time."""
    jobs = [
        (item.callspec.params["number"], item.callspec.params["arch"])
        for item in request.session.items
        if item.function is test_it_compiles_to_what_the_table_says
    ]
    pool = ThreadPoolExecutor(os.cpu_count())
    made: dict[tuple[int, str], Future[Resources]] = {
        (number, arch): pool.submit(measure, CASES[number], arch) for number, arch in jobs
    }
    yield made
    pool.shutdown(cancel_futures=True)


@mostly_thorough(
    ("number", "arch"),
    wanted(),
    quick=one_of_each(),
    why="more types, options and architectures of kernels of which one case is quick",
    ids=name,
)
def test_it_compiles_to_what_the_table_says(measured, number, arch):
    found, key = measured[number, arch].result(), key_of(CASES[number], arch)
    fits(arch, found)
    if key in TABLE and nvrtc_version() == MADE_WITH:
        assert found == TABLE[key], REMEDY
        return
    # Another compiler, or an architecture that is not in the table: the same limits.
    assert found.spill_stores <= max(FEW, ELSEWHERE * SPILLS.get(key.kernel, 0)), found


def test_the_table_was_made_with_this_compiler(measured):
    if nvrtc_version() == MADE_WITH:
        return
    said = (
        f"tests/data/cuda_resources.csv was made with NVRTC {MADE_WITH} and this is "
        f"{nvrtc_version()}: kernels were held to its limits, not to its numbers"
    )
    if os.environ.get("CI"):
        pytest.fail(f'{said}; the extra "test" of pyproject.toml decides the version')
    pytest.skip(said)


# -- the choice of tiles --------------------------------------------------------------------------


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_head_size_has_tiles(arch, dtype):
    target = Target(0, arch, capability(arch), 1, SHARED_MEMORY[arch])
    for d in (1, 3, 16, 17, 64, 65, 128, 129, 192, 256, 257, 320, 400, 511, 512):
        for d_v in (1, d, 512):
            q, v = np.zeros((1, d), dtype), np.zeros((1, d_v), dtype)
            for options in ({}, {"dropout": 0.5, "seed": 1}):
                problem = validate.call(q, q, v, Options(**options)).problem
                for kernel in simt.KERNELS:
                    spec = registry.SPECS[kernel]
                    chosen = spec.configure(Request(problem, target, slope=True))
                    assert chosen is not None
                    assert chosen.shared_memory <= SHARED_MEMORY[arch]
                spec, chosen, _ = registry.select("forward", Request(problem, target))
                assert chosen.shared_memory <= SHARED_MEMORY[arch]
                most = {np.float16: 512, np.float32: 0, np.float64: 128}[dtype]
                tensor = max(d, d_v) <= most and arch != "sm_75"
                assert spec.name == ("forward_sm80" if tensor else "forward_simt")


def test_too_little_shared_memory_is_an_error():
    target = Target(0, "a small GPU", (7, 5), 1, 8192)
    q = np.zeros((1, 512), np.float64)
    with pytest.raises(ArgumentError, match="8192 bytes"):
        route.of(validate.call(q, q, q), target)


def test_a_gpu_that_is_too_old_is_an_error():
    target = Target(0, "an old GPU", (7, 0), 80, 98304)
    q = np.zeros((1, 64), np.float32)
    with pytest.raises(ArgumentError, match=r"7\.0; expected a GPU of 7\.5"):
        route.of(validate.call(q, q, q), target)


def test_the_choice_never_reads_the_batch_or_the_lengths():
    target = Target(0, "a GPU", (9, 0), 132, SHARED_MEMORY["sm_90"])
    plans = {
        route.of(validate.call(*[np.zeros(shape, np.float32)] * 3), target).plan
        for shape in [(1, 1, 64), (7, 2, 300, 64), (0, 3, 64)]
    }
    assert len(plans) == 1
