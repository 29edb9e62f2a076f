"""Every function of kernels_cu/ptx/ does what NumPy says, on the emulator and on a GPU: bits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from conformance import ARCH, THREADS, bits, defined, functions
from conformance_cases import CASES
from cuda_table import ARCHS, compiled
from emulator import build, probe
from emulator.machine import FORWARD, REVERSE, randomly
from emulator.memory import encode
from halves import mostly_thorough

from cupyflash.arrays import cuda_device
from cupyflash.gpu import jit as compiler
from cupyflash.gpu import tma
from cupyflash.testing.copies import HostMemory

NO_EMULATOR = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
SOME_QUICK = mostly_thorough(
    "case",
    CASES,
    quick=lambda case: case in CASES[::3],
    why="the whole conformance; kernels that use these functions are held to their bounds",
    ids=lambda case: case.name,
)
BY_NAME = {case.name: case for case in CASES}


def capability(arch):
    return divmod(int(arch.removeprefix("sm_")), 10)


# -- every function -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(ARCH.iterdir()), ids=lambda path: path.name)
def test_every_function_has_a_twin(path):
    text = path.read_text()
    wanted = functions(text)
    assert wanted
    assert len(wanted) == text.count("__device__"), "a function that is not recognised as one"
    assert functions((build.HERE / "ptx" / path.name).read_text()) == wanted


def test_every_function_has_a_case():
    # As many cases as functions of one name, which differ in their types.
    wanted = Counter(name for _, name in defined())
    found = Counter(name for case in CASES for name in case.functions)
    assert list(wanted - found) == [], "write a case of these in tests/helpers/conformance_cases.py"
    assert list(set(found) - set(wanted)) == [], "there are no such functions in ptx/"


@EVERY_CASE
def test_a_case_is_about_what_it_calls(case):
    for name in case.functions:
        assert f"ptx::{name}(" in case.body or f"ptx::{name}<" in case.body


# -- on the emulator, and against NumPy -----------------------------------------------------------


@NO_EMULATOR
@SOME_QUICK
@mostly_thorough(
    "schedule",
    [FORWARD, REVERSE, randomly(5)],
    quick=[randomly(5)],
    why="other orders of the same threads",
    ids=str,
)
@mostly_thorough(
    "subnormal",
    [False, True],
    quick=[False],
    why="the few cases that differ are in test_emulator_words.py, too",
    ids=["flushed", "subnormal"],
)
def test_the_twin_does_what_numpy_says(case, schedule, subnormal):
    found = case.on_emulator(schedule, subnormal)
    case.check("the emulator", found, "NumPy", case.wanted(case.inputs()))


@EVERY_CASE
def test_a_wrong_bit_is_noticed(case):
    wanted = case.wanted(case.inputs())
    numbers = np.flatnonzero(wanted == wanted)  # but for NaN, whose bits are open
    found = wanted.copy()
    bits(found).reshape(-1)[numbers[-1]] ^= 1 << 8 * found.itemsize - 2
    with pytest.raises(AssertionError, match=": 1 of "):
        case.check("one", found, "other", wanted)
    case.check("one", wanted, "other", wanted)


def test_the_report_names_lane_and_bits():
    case = BY_NAME["float_to_half"]
    given = case.inputs()
    wanted = case.wanted(given)
    found = wanted.copy()
    place = THREADS + 40
    found[place] ^= 1
    said = (
        f"float_to_half: 1 of {len(given)} numbers differ\n"
        "block 1, thread 40 (warp 1, lane 8), out[0]: "
        f"in {given.view(np.uint32)[place, 0]:#010x}; the GPU {found[place, 0]:#06x}, "
        f"the emulator {wanted[place, 0]:#06x}"
    )
    with pytest.raises(AssertionError) as caught:
        case.check("the GPU", found, "the emulator", wanted)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("x", "found", "right"),
    [
        (0.5, 2**0.5 * (1 + 0.9 * 2**-22), True),
        (0.5, 2**0.5 * (1 - 0.9 * 2**-22), True),
        (0.5, 2**0.5 * (1 + 1.5 * 2**-22), False),
        (3, 8, True),
        (3, np.nextafter(np.float32(8), np.float32(9)), False),
        (-126, 2.0**-126, True),
        (-126.5, 0, True),
        (-126.5, -0.0, False),
        (-126.5, 2**-126.5, False),
        (128.5, np.inf, True),
        (128.5, np.finfo(np.float32).max, False),
        (-np.inf, 0, True),
        (np.inf, np.inf, True),
        (np.nan, np.nan, True),
        (np.nan, 1, False),
        (1.5, np.nan, False),
    ],
)
def test_how_wrong_exp2_may_be(x, found, right):
    case = BY_NAME["exp2"]
    x, found = (np.full((1, 1), value, np.float32) for value in (x, found))
    for pair in ((found, case.wanted(x)), (case.wanted(x), found)):
        assert case.agree(x, *pair).item() == right


# -- on a GPU, and against the emulator -----------------------------------------------------------


@pytest.mark.usefixtures("nvrtc")
@mostly_thorough("arch", ARCHS, quick=["sm_90"], why="the older and newer architectures")
@SOME_QUICK
def test_its_kernel_compiles(case, arch):
    if case.runs_on(capability(arch)):
        assert "'probe'" in compiled(case.cuda(), case.architecture or arch)


@pytest.mark.thorough("goes with the conformance on a GPU; the emulator's own is quick")
@NO_EMULATOR
@EVERY_CASE
def test_it_is_launched_as_on_a_gpu(case, monkeypatch):
    """All that happens for a GPU but the compilation and the launch, which the emulator does."""

    def kernel(name, text, shared_memory, architecture):
        assert (name, text, architecture) == ("probe", case.cuda(), case.architecture)
        assert f"SHARED_BYTES = {shared_memory};" in text
        given = case.inputs()
        emulated = probe.Probe(**case.kernel(given, case.wanted(given)))

        def start(grid, block, arguments, shared_mem):
            assert (block, shared_mem) == ((THREADS,), shared_memory)
            packed = b"".join(argument.tobytes() for argument in arguments)
            emulated.machine.launch(*grid, bytearray(packed))

        return start

    monkeypatch.setattr(compiler, "_compiled", kernel)
    monkeypatch.setattr(tma, "encode", encode)
    case.check("as on a GPU", case.on_gpu(HostMemory()), "the emulator", case.on_emulator())


@pytest.mark.gpu
@NO_EMULATOR
@EVERY_CASE
def test_conformance_of_the_emulator_to_the_gpu(gpu, case):
    facts = cuda_device.of(0)
    if not case.runs_on(facts.capability):
        pytest.skip(f"{facts.name} has no such instruction")
    case.check("the GPU", case.on_gpu(gpu), "the emulator", case.on_emulator())
