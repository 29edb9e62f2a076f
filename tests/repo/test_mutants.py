"""tests/tools/mutants.py: its mutants, their keys, its files, and what becomes of known ones.

Whether the kernels' mutants are noticed is not asked here: that is a run by hand or at night.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import forks
import mutants
import numpy as np
import pytest
from emulator import build
from mutation import generators, operators, survivors
from mutation.keys import Keys, key_of
from mutation.memory import Guarded
from mutation.operators import Mutant
from mutation.survivors import Entry, Tried
from mutation.workers import outcomes

needs_emulator = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


# -- the mutator ----------------------------------------------------------------------------------

# Names that C++ or CUDA gives.
WORDS = {"static_cast", "reinterpret_cast", "const_cast", "static_assert"}

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
    "side": ("void f() { if (a) b = 1; if (c) d(); else e(); while (f) g(); h = i ? j : k; }", {
        "void f() { if (true) b = 1; if (c) d(); else e(); while (f) g(); h = i ? j : k; }",
        "void f() { if (a) b = 1; if (true) d(); else e(); while (f) g(); h = i ? j : k; }",
        "void f() { if (a) b = 1; if (false) d(); else e(); while (f) g(); h = i ? j : k; }",
        "void f() { if (a) b = 1; if (c) d(); else e(); while (false) g(); h = i ? j : k; }",
        "void f() { if (a) b = 1; if (c) d(); else e(); while (f) g(); h = true ? j : k; }",
        "void f() { if (a) b = 1; if (c) d(); else e(); while (f) g(); h = false ? j : k; }",
    }),
    "clamp": ("a = fmax(b, c(1, 2)); d = y::clamp(e, 0, f); return g < h ? h : g;", {
        "a = (b); d = y::clamp(e, 0, f); return g < h ? h : g;",
        "a = (c(1, 2)); d = y::clamp(e, 0, f); return g < h ? h : g;",
        "a = fmax(b, c(1, 2)); d = (e); return g < h ? h : g;",
        "a = fmax(b, c(1, 2)); d = ((e) < (0) ? (0) : (e)); return g < h ? h : g;",
        "a = fmax(b, c(1, 2)); d = ((e) > (f) ? (f) : (e)); return g < h ? h : g;",
        "a = fmax(b, c(1, 2)); d = y::clamp(e, 0, f); return true ? h : g;",
        "a = fmax(b, c(1, 2)); d = y::clamp(e, 0, f); return false ? h : g;",
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
    assert files == {path.relative_to(mutants.KERNELS).as_posix() for path in mutants.sources()}
    assert {x.operator for x in found} == set(CHANGES)
    counts = Counter((x.file, x.start, x.end, x.after) for x in found)
    assert max(counts.values()) == 1


def test_sides_and_bounds_of_python(tmp_path, monkeypatch):
    text = "if é < 1:\n    a = min(b, np.maximum(c, 2))\nd = max(e, f, g) if h else max(i)\n"
    (tmp_path / "x.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(generators, "ROOT", tmp_path)
    made = [x for x in generators.mutants("x.py") if x.operator in ("side", "clamp")]
    assert len(made) == 11
    lines = text.splitlines()
    assert {x.apply(text) for x in made} == {
        "\n".join([*lines[:n], line, *lines[n + 1 :], ""])
        for n, changed in enumerate((
            ("if True:", "if False:"),
            ("    a = (b)", "    a = (np.maximum(c, 2))", "    a = min(b, (c))",
             "    a = min(b, (2))"),
            ("d = max(e, f, g) if True else max(i)", "d = max(e, f, g) if False else max(i)",
             "d = max(f, g) if h else max(i)", "d = max(e, g) if h else max(i)",
             "d = max(e, f) if h else max(i)"),
        ))
        for line in changed
    }  # fmt: skip


def test_mutants_of_the_code_generators():
    made = generators.mutants()
    assert {"template", "relation", "constant", "name", "side", "clamp"} <= {
        x.operator for x in made
    }
    text = mutants.text_of(generators.FILE)
    changed = {x.apply(text) for x in made}
    assert any('"less": "{0} <= {1}"' in each for each in changed)
    assert any('"add": "saturating_subtract({0}, {1})"' in each for each in changed)
    assert generators.structure(generators.module_of(text).generate) is None


# -- keys -----------------------------------------------------------------------------------------

KERNEL = """// Adds up.
void f(float* total, const float* part, int count) {
  float sum = 0;
  for (int n = 0; n < count; ++n) {
    const float value = part[n] * part[n + 1];
    sum += value;  // in order
    if (sum > LIMIT) sum = LIMIT;
  }
  total[0] = sum;
}
"""
LINE = "  const float"
GENERATOR = """_TEXTS = {
    "floor": "floor_of({0})",
    "less": "{0} < {1}",  # of one type
    "add": "saturating_add({0}, {1})",
}
def literal(value, kind):
    return value if kind == 1 else f"static_cast<{kind}>({value})"
"""


def key_at(text, before, after, behind="", file="x.cu"):
    """The key of the change of `before`, which stands once behind `behind`, to `after`."""
    start = text.index(before, text.index(behind))
    line = text.count("\n", 0, start) + 1
    return key_of(Mutant(file, line, "any", start, start + len(before), before, after), text)


def renamed(text, **names):
    for old, new in names.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text


SAME = {
    "other names": renamed(KERNEL, sum="aggregate", value="zoo", n="a_much_longer_index", f="g"),
    "other lines": "\n\nint unrelated = 3;\n\n" + KERNEL.replace("  float", "\n  float"),
    "other breaks": KERNEL.replace(" * part[n + 1]", "\n        * part[n + 1]"),
    "other comments": KERNEL.replace("// in order", "/* one\n by one */").replace("Adds", "Sums"),
    "pragmas": KERNEL.replace("  for", "#pragma unroll\n  for"),
    "far away": KERNEL.replace("total[0] = sum", "total[1] = 2 * sum"),
}
DIFFERENT = {
    "another literal": KERNEL.replace("n + 1]", "n + 2]"),
    "another relation of names": KERNEL.replace("part[n] *", "part[count] *"),
    "another statement": KERNEL.replace("* part", "- part"),
    "another neighbour": KERNEL.replace("sum += value", "sum -= value"),
}


@pytest.mark.parametrize("what", SAME)
def test_a_key_outlives(what):
    assert key_at(SAME[what], "*", "+", LINE) == key_at(KERNEL, "*", "+", LINE)


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_key_is_of(what):
    assert key_at(DIFFERENT[what], "[", "(", LINE) != key_at(KERNEL, "[", "(", LINE)


def test_keys_of_other_changes_differ():
    found = [
        key_at(KERNEL, before, after, behind)
        for before, after, behind in (
            ("*", "+", LINE), ("*", "-", LINE), ("part", "sum", LINE),
            ("part", "count", LINE), ("part", "count", "* part"), ("+", "-", "* part"),
            ("<", "<=", "for"), ("n", "count", "; n"), ("n", "sum", "; n"), (">", ">=", "if"),
            ("sum += value", "", LINE), ("sum > LIMIT", "!(sum > LIMIT)", "if"),
        )
    ]  # fmt: skip
    assert len(set(found)) == len(found)
    assert all(re.fullmatch("[0-9a-f]{12}", key) for key in found)


def test_a_file_s_name_is_no_part_of_a_key():
    assert key_at(KERNEL, "*", "+", file="sm90/y.cuh") == key_at(KERNEL, "*", "+")


def test_keys_of_the_code_generators():
    def key(text, before="<", after="<=", behind='"less"'):
        return key_at(text, before, after, behind, generators.FILE)

    wanted = key(GENERATOR)
    assert key(renamed(GENERATOR, floor_of="whole", _TEXTS="_CODE", saturating_add="add")) == wanted
    assert key(GENERATOR.replace("# of one type", "# of any type")) == wanted
    assert key("import math\n\n\n" + GENERATOR) == wanted
    assert key(GENERATOR, after=">=") != wanted
    assert key(GENERATOR, "{0}", "{1}") != key(GENERATOR, "{1}", "{0}")
    assert key(GENERATOR.replace('"less"', '"more"'), behind='"more"') != wanted
    assert key(GENERATOR, "==", "!=", "kind ==") == key(
        renamed(GENERATOR, kind="type_name", value="place"), "==", "!=", "type_name =="
    )


@pytest.mark.parametrize("file", ["sm90/forward_sm90.cu", "common/layout.cuh", "warp/fragment.cuh"])
def test_renames_in_a_kernel_change_no_key(file):
    """Every name that no operator knows gets another one, which comes before all others."""
    text = mutants.text_of(file)
    known = set(re.findall(r"\w+", Path(operators.__file__).read_text()))
    own = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)) - known - WORDS
    assert len(own) > 10
    changed = re.sub(r"\w+", lambda x: f"A_{x[0][::-1]}" if x[0] in own else x[0], text)
    keys, others = Keys(file, text), Keys(file, changed)
    before, after = operators.mutants(file, text), operators.mutants(file, changed)
    assert [keys(x) for x in before] == [others(x) for x in after]


@pytest.mark.thorough("parses every file that has mutants")
def test_few_mutants_share_a_key():
    every = mutants.keys_of(mutants.every_mutant())
    assert len(set(every.values())) > 0.97 * len(every)


# -- gaps and baseline ----------------------------------------------------------------------------


@pytest.mark.thorough("keys of every mutant; that keys stay the same is quick")
def test_the_gaps_are_mutants_that_exist():
    gaps = survivors.read_gaps()
    keys = [key for gap in gaps for key in gap.mutants]
    assert set(keys) - set(mutants.keys_of(mutants.every_mutant()).values()) == set()
    assert len(set(keys)) == len(keys)
    assert not set(keys) & set(survivors.read_baseline())
    assert all(len(x.split()) >= 5 for gap in gaps for x in (gap.reason, gap.closed_by))


def test_the_baseline_is_as_the_command_writes_it(tmp_path):
    found = survivors.read_baseline()
    assert {x.category for x in found.values()} <= set(survivors.CATEGORIES)
    survivors.write_baseline(found, tmp_path / "baseline")
    assert (tmp_path / "baseline").read_text() == survivors.BASELINE.read_text()


def test_what_a_run_makes_of_the_baseline():
    before = {key: Entry("sign", "slower") for key in ("kept", "stale", "again", "killed", "twin")}
    tried = [
        Tried("killed", "sign", "killed"), Tried("new", "loop", "survived"),
        Tried("again", "sign", "survived"), Tried("gap", "loop", "survived"),
        Tried("never", "loop", "timeout"),
        # Two mutants share a key, and one of them survived.
        Tried("twin", "sign", "survived"), Tried("twin", "sign", "killed"),
    ]  # fmt: skip
    existing = set(before) - {"stale"} | {"new", "gap", "never"}
    assert survivors.updated(before, {"gap"}, tried, existing) == {
        "kept": Entry("sign", "slower"), "again": Entry("sign", "slower"),
        "twin": Entry("sign", "slower"), "new": Entry("loop", "unread"),
    }  # fmt: skip


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_says_nothing_where_jax_has_been_imported():
    """JAX warns before a fork, for the children that go on with it."""
    program = """if True:
        import os, warnings
        from forks import fork
        os.register_at_fork(before=lambda: warnings.warn(
            "os.fork() was called. os.fork() is incompatible with multithreaded code, and JAX is "
            "multithreaded, so this will likely lead to a deadlock.", RuntimeWarning))
        child = fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=Path(forks.__file__).parent, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not done.stderr


def test_memory_is_a_process_s_own():
    guarded = Guarded(np.zeros(3), output=True, at_end=True)

    def trial(value, folder):
        guarded.view[:] = value
        return "survived", ""

    assert len(list(outcomes(trial, [1.0, 2.0], jobs=2))) == 2
    assert np.isnan(guarded.view).all()


# -- mutants --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench():
    """Some problems of the portable kernels, which are enough for the table below."""
    from mutation.problems import cases
    from mutation.trial import Bench

    files = {file for file, *_ in KNOWN if file.endswith(".cu")}
    some = [case for case in cases() if case.name in PROBLEMS]
    assert len(some) == len(PROBLEMS)
    with tempfile.TemporaryDirectory() as folder:
        yield Bench(Path(folder), 2, files, some)


# Where, what stands there and what takes its place -> what becomes of it.
PROBLEMS = {"everything", "window and lengths", "packed segments", "large heads"}
KNOWN = [
    ("common/softmax.cuh", "l[r] *= alpha;", "l[r] += alpha;", "killed"),
    ("simt/backward_simt_dq.cu", "i0 = work.block * BLOCK_Q;", "i0 = work.block * BLOCK_Q + 1;",
     "killed"),
    ("rowwise/combine.cu", "l += weight(", "l -= weight(", "killed"),
    ("common/lookup.cuh", "found.low = low < found.low", "found.low = low > found.low",
     "killed"),
    ("simt/forward_simt.cu", "j0 += BLOCK_KV", "j0 += 0", "timeout"),
    # An assertion of large heads alone.
    ("common/matmul.cuh", "(D > D_V ? D : D_V) > 256", "D_V > 256", "killed"),
    ("rowwise/backward_sink.cu", "accum_t total = 0;", "accum_t total = nothing;", "invalid"),
    ("rowwise/backward_sink.cu", "accum_t total = 0;", "accum_t total = 0 * 1;", "equivalent"),
    ("rowwise/combine.cu", "constexpr int COLUMNS = 4;", "constexpr int COLUMNS = 2;", "survived"),
]  # fmt: skip


@needs_emulator
@pytest.mark.thorough("mutants; that the emulator reports faults is quick")
def test_what_becomes_of_known_mutants(bench):
    def trial(item, folder):
        file, before, after, _ = item
        text = mutants.text_of(file)
        assert before in text
        return bench.trial(file, text.replace(before, after), folder)

    for item, outcome in outcomes(trial, KNOWN, jobs=2):
        assert outcome.status == item[3], (item, outcome)


@needs_emulator
@pytest.mark.thorough("mutants; that generated code is NumPy's is quick")
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


def test_the_command_says_what_it_can():
    done = subprocess.run(
        [sys.executable, str(Path(mutants.__file__)), "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for option in ("--only", "--sample", "--seed", "--changed", "--jobs", "--json", "--minutes",
                   "--write-baseline"):  # fmt: skip
        assert re.search(rf"{option}\b", done.stdout)
