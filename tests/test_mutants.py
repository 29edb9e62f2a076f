"""The mutator itself, and a sample of mutants of what the last change touched."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import mutants
import numpy as np
import pytest
from emulator import build
from mutation import generators, operators
from mutation.memory import Guarded
from mutation.workers import outcomes

needs_emulator = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


# -- the mutator ----------------------------------------------------------------------------------

# A text, and the texts that an operator makes of it.
CHANGES = {
    "relation": ("a = b < c;", {"a = b <= c;", "a = b >= c;"}),
    "arithmetic": ("a = b * c;", {"a = b + c;"}),
    "constant": ("a = 0 + 16u + 0x10 + 2.5f;", {
        "a = 1 + 16u + 0x10 + 2.5f;", "a = 0 + 17u + 0x10 + 2.5f;", "a = 0 + 15u + 0x10 + 2.5f;",
        "a = 0 + 16u + 0x11 + 2.5f;", "a = 0 + 16u + 0xf + 2.5f;",
        "a = 0 + 16u + 0x10 + 2.5025f;",
    }),
    "deletion": ("void f() { a = 1; g(2); const int n = 3; return; }", {
        "void f() { ; g(2); const int n = 3; return; }",
        "void f() { a = 1; ; const int n = 3; return; }",
        "void f() { a = 1; g(2); const int n = 3; ; }",
    }),
    "barrier": ("void f() { __syncthreads(); x = ptx::barrier_or(y); ptx::cp_async_wait_all(); }", {
        "void f() { ; x = ptx::barrier_or(y); ptx::cp_async_wait_all(); }",
        "void f() { __syncthreads(); x = (y); ptx::cp_async_wait_all(); }",
        "void f() { __syncthreads(); x = ptx::barrier_or(y); ; }",
    }),
    "shuffle": ("a = ptx::shuffle_xor(b[1], lanes);", {"a = (b[1]);"}),
    "infinity": ("a = number::infinity();", {"a = accum_t(0);"}),
    "sign": ("a = -b;", {"a = b;"}),
    "negation": ("void f() { if (a) b = !c; }", {
        "void f() { if (!(a)) b = !c; }", "void f() { if (a) b = c; }",
    }),
    "logic": ("a = b && c;", {"a = b || c;"}),
    "name": ("a = row_thread() + column_thread();", {
        "a = column_thread() + column_thread();", "a = row_thread() + row_thread();",
    }),
    "loop": ("void f() { for (int a = 1; a < b; ++a) c(); }", {
        "void f() { for (int a = (1) + 1; a < b; ++a) c(); }",
        "void f() { for (int a = 1; a < (b) - 1; ++a) c(); }",
    }),
    "flag": ("f<true>(false);", {"f<false>(false);", "f<true>(true);"}),
}  # fmt: skip


@pytest.mark.parametrize("operator", CHANGES)
def test_every_operator(operator):
    text, wanted = CHANGES[operator]
    made = [x for x in operators.mutants("x.cu", text) if x.operator == operator]
    assert {x.apply(text) for x in made} == wanted
    assert len(made) == len(wanted)


def test_what_is_left_alone():
    text = """// a < b + 1
#include "x.cuh"
#pragma unroll 4
/* 1 + 2 */ static_assert(A < B && 1 == 2, "a < b");
template <typename T> const char* name = "1 < 2";
"""
    assert operators.mutants("x.cu", text) == []


def test_lines_keep_their_numbers():
    text = "void f() {\n  g(1,\n    2);\n  h();\n}\n"
    deleted = next(x for x in operators.mutants("x.cu", text) if x.operator == "deletion")
    assert deleted.apply(text) == "void f() {\n  \n;\n  h();\n}\n"
    assert deleted.line == 2
    assert deleted.shown() == "x.cu:2 [deletion] g(1, 2) -> (nothing)"


def test_every_source_has_mutants_of_every_operator():
    found = mutants.kernel_mutants()
    files = {x.file for x in found}
    sources = [x for x in mutants.KERNELS.rglob("*.cu*") if x.parent.name != "ptx"]
    assert files == {path.relative_to(mutants.KERNELS).as_posix() for path in sources} - {
        "common/params.cuh"
    }
    assert {x.operator for x in found} == set(CHANGES)
    counts = Counter((x.file, x.start, x.end, x.after) for x in found)
    assert max(counts.values()) == 1


def test_mutants_of_the_code_generators():
    made = generators.mutants()
    assert {"template", "relation", "constant", "name"} <= {x.operator for x in made}
    text = mutants.text_of(generators.FILE)
    changed = {x.apply(text) for x in made}
    assert any('"less": "{0} <= {1}"' in each for each in changed)
    assert any('"add": "saturating_subtract({0}, {1})"' in each for each in changed)
    assert generators.structure(generators.module_of(text).generate) is None


# -- the list of survivors ------------------------------------------------------------------------


def test_the_list_names_mutants_that_exist():
    every = {mutants.key_of(x, mutants.text_of(x.file)) for x in mutants.every_mutant()}
    listed = mutants.justified()
    assert [key for key in listed if key not in every] == []
    assert all(len(reason.split()) >= 5 for reason in listed.values())


# -- processes ------------------------------------------------------------------------------------


def _trial(item, folder):
    if item == "loops":
        import signal

        signal.setitimer(signal.ITIMER_VIRTUAL, 0.2)
        while True:
            pass
    if item == "crashes":
        import ctypes

        ctypes.string_at(8)
    if item == "fails":
        raise ValueError(str(folder))
    return "survived", ""


def test_processes_may_loop_crash_and_fail():
    items = ["loops", "crashes", "fails", "lives"]
    found = dict(outcomes(_trial, items, jobs=2))
    assert {name: found[name].status for name in items} == {
        "loops": "timeout", "crashes": "killed", "fails": "killed", "lives": "survived",
    }  # fmt: skip
    assert found["crashes"].why == "SIGSEGV"
    folder = found["fails"].why.removeprefix("ValueError: ")
    assert not Path(folder).exists()
    assert list(outcomes(_trial, items, until=time.monotonic() - 1)) == []


def test_memory_is_a_process_s_own():
    guarded = Guarded(np.zeros(3), output=True, at_end=True)

    def trial(value, folder):
        guarded.view[:] = value
        return "survived", ""

    assert len(list(outcomes(trial, [1.0, 2.0], jobs=2))) == 2
    assert np.isnan(guarded.view).all()


# -- mutants --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample():
    """Mutants of lines that the last commit changed; of any lines where that is not known."""
    try:
        lines = mutants.changed_lines("HEAD~1")
    except (subprocess.CalledProcessError, FileNotFoundError):
        lines = {}
    every = mutants.every_mutant()
    found = [x for x in every if x.line in lines.get(x.file, ())] or every
    random.Random(0).shuffle(found)
    reasons = mutants.justified()
    return [x for x in found if mutants.key_of(x, mutants.text_of(x.file)) not in reasons][:40]


@pytest.fixture(scope="module")
def bench():
    from mutation.trial import Bench

    with tempfile.TemporaryDirectory() as folder:
        yield Bench(Path(folder), 2)


# Where, what stands there and what takes its place -> what becomes of it.
KNOWN = [
    ("common/softmax.cuh", "l[r] *= alpha;", "l[r] += alpha;", "killed"),
    ("backward_simt_dq.cu", "i0 = work.block * BLOCK_Q;", "i0 = work.block * BLOCK_Q + 1;",
     "killed"),
    ("combine.cu", "l += weight(", "l -= weight(", "killed"),
    ("common/lookup.cuh", "found.low = low < found.low", "found.low = low > found.low",
     "killed"),
    ("forward_simt.cu", "j0 += BLOCK_KV", "j0 += 0", "timeout"),
    # An assertion of large heads alone.
    ("common/matmul.cuh", "(D > D_V ? D : D_V) > 256", "D_V > 256", "killed"),
    ("backward_sink.cu", "accum_t total = 0;", "accum_t total = nothing;", "invalid"),
    ("backward_sink.cu", "accum_t total = 0;", "accum_t total = 0 * 1;", "equivalent"),
    ("combine.cu", "constexpr int COLUMNS = 4;", "constexpr int COLUMNS = 2;", "survived"),
]  # fmt: skip


@needs_emulator
def test_what_becomes_of_known_mutants(bench):
    def trial(item, folder):
        file, before, after, _ = item
        text = mutants.text_of(file)
        assert before in text
        return bench.trial(file, text.replace(before, after), folder)

    for item, outcome in outcomes(trial, KNOWN, jobs=2):
        assert outcome.status == item[3], (item, outcome)


@needs_emulator
def test_generators_are_tried(bench):
    text = mutants.text_of(generators.FILE)
    changes = {'"less": "{0} < {1}"': ('"less": "{0} <= {1}"', "killed"),
               "self.structural)": ("not self.structural)", "killed"),
               "import math": ("import math  ", "survived")}  # fmt: skip

    def trial(before, folder):
        assert before in text
        return bench.try_generator(text.replace(before, changes[before][0]), folder)

    for before, outcome in outcomes(trial, changes, jobs=2):
        assert outcome.status == changes[before][1], (before, outcome)


@needs_emulator
def test_a_sample_of_changed_lines(bench, sample):
    """Not every mutant is one that can be noticed, but at least four of five are."""

    def trial(mutant, folder):
        changed = mutant.apply(mutants.text_of(mutant.file))
        if mutant.file == generators.FILE:
            return bench.try_generator(changed, folder)
        return bench.trial(mutant.file, changed, folder)

    results = list(outcomes(trial, sample, jobs=2, until=time.monotonic() + 30))
    print(mutants.table(results))
    counts = Counter(outcome.status for _, outcome in results)
    dead, alive = counts["killed"] + counts["timeout"], counts["survived"]
    survivors = [x.shown() for x, outcome in results if outcome.status == "survived"]
    assert alive <= 1 + (dead + alive) // 5, (
        f"write a test, or say in {mutants.JUSTIFIED} why not: {survivors}"
    )


def test_the_command_says_what_it_can():
    done = subprocess.run(
        [sys.executable, str(Path(mutants.__file__)), "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for option in ("--only", "--sample", "--seed", "--changed", "--jobs", "--json", "--minutes"):
        assert re.search(rf"{option}\b", done.stdout)
