"""The kernels can be read beside their twins: each has one, and both tell the same steps.

The table in kernels_cu/README.md says which files are twins. The rules:

- Files: every CUDA file stands in the table once, and every twin exists. A module of `reference/`
  that has numbered steps is somebody's twin.
- Steps: a step is a comment of its own, a digit and words: "// 2 scores", "# 2 scores". A kernel's
  steps are its comments in the order of the text, with those of a function where it is called; a
  step that comes again counts where it came first. They are the same, in the same order, as those
  of the twin's function of the kernel's name, which is the file's stem without its hardware.
  `PARTS` has the kernels whose twin is called by another kernel, whose steps before it count, too.
- Namespaces: a header's namespace has the name of the file, of a file next to it whose name begins
  its own (`fragment_rows.cuh` continues `fragment.cuh`), or of the folder.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from mirror import (
    CUDA,
    ROOT,
    Row,
    Step,
    all_steps,
    cuda_functions,
    expanded,
    python_functions,
    table_of_twins,
    without_hardware,
)

TABLE = table_of_twins()

PYTHON = re.compile(r"\b(?:reference|cupyflash|tests)/[\w/]+\.py\b")

# Kernels that join all keys of a row by themselves where they have them, as their twin does.
JOINS = {"kernels_cu/sm80/decode_sm80.cu", "kernels_cu/simt/decode_simt.cu"}
# Kernel -> its twin's function, and the kernel that calls it.
PARTS = {
    **dict.fromkeys(
        ("reduce_blocks", "reduce_distance", "reduce_weights"),
        ("reduce_queries", ("reference/cpu/reduce.py", "reduce_queries")),
    ),
    "backward_bias": ("add_to_bias", ("reference/cpu/backward.py", "backward_dkdv")),
    "backward_tangent_bias": (
        "add_to_bias",
        ("reference/cpu/backward_tangent.py", "backward_tangent_dkdv"),
    ),
}


def files_of(row: Row) -> list[str]:
    """The CUDA files of a row, with those of its folders."""
    found = []
    for name in row.files:
        inside = sorted((ROOT / name).rglob("*.cu*")) if name.endswith("/") else [ROOT / name]
        found += [path.relative_to(ROOT).as_posix() for path in inside]
    return found


def kernels() -> list[tuple[str, str, str]]:
    """File, name and twin of every kernel."""
    return [
        (file, without_hardware(Path(file).stem), twin)
        for row in TABLE
        for file in files_of(row)
        if file.endswith(".cu")
        for twin in row.twins
    ]


def paths(folder: Path, pattern: str) -> list[str]:
    """The files of a folder and its folders, from the top of the checkout."""
    return sorted(path.relative_to(ROOT).as_posix() for path in folder.rglob(pattern))


HERE = paths(CUDA, "*.cu*")
TWINS = sorted({twin for row in TABLE for twin in row.twins})
IN_CUDA = [made for file in HERE for made in cuda_functions(file)]
IN_PYTHON = [
    made
    for twin in TWINS
    if (ROOT / twin).is_file()  # a test of its own says which are not
    for made in python_functions(twin)
]


# -- files ----------------------------------------------------------------------------------------


def test_every_cuda_file_is_in_the_table_once():
    assert sorted(file for row in TABLE for file in files_of(row)) == HERE


def test_every_twin_exists():
    assert [twin for twin in TWINS if not (ROOT / twin).is_file()] == []


def test_every_module_that_a_comment_names_exists():
    named = {name for path in HERE for name in PYTHON.findall((ROOT / path).read_text())}
    assert named
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_every_module_with_steps_is_a_twin():
    modules = [
        path for path in (ROOT / "reference" / "cpu").glob("*.py") if all_steps(path.read_text())
    ]
    assert modules
    assert {path.relative_to(ROOT).as_posix() for path in modules} - set(TWINS) == set()


def test_a_header_is_a_namespace():
    for made in IN_CUDA:
        path = ROOT / made.file
        beside = {each.stem for each in path.parent.glob("*.cuh")}
        may_be = {path.parent.name, path.stem}
        may_be |= {stem for stem in beside if path.stem.startswith(f"{stem}_")}
        assert not made.space or made.space in may_be, f"{made.file}: {made.space}::{made.name}"


# -- steps ----------------------------------------------------------------------------------------


@functools.cache
def steps_of(file: str, name: str, twin: str) -> tuple[list[Step], list[Step]]:
    """The steps of a kernel and of its twin, without what the twin of another kernel does."""
    (kernel,) = (x for x in IN_CUDA if (x.file, x.name) == (file, "KERNEL_NAME"))
    steps, own = expanded(kernel, IN_CUDA), function_of(name, twin)
    whole = PARTS[name][1] if name in PARTS else own
    others = {function_of(other, of) for _, other, of in kernels()} - {own, whole}
    if file in JOINS:
        others.remove(function_of("decode_combine", twin))
    callable_ones = [x for x in IN_PYTHON if (x.file, x.name) not in others]
    twins = {(x.file, x.name): x for x in IN_PYTHON}
    wanted = expanded(twins[whole], callable_ones)
    if name in PARTS:
        wanted = wanted[: wanted.index(twins[own].steps[-1]) + 1]
    return steps, wanted


def function_of(name: str, twin: str) -> tuple[str, str]:
    """File and name of a kernel's twin."""
    return twin, PARTS[name][0] if name in PARTS else name


@pytest.mark.parametrize(("file", "name", "twin"), kernels())
def test_steps_are_the_same_in_the_same_order(file, name, twin):
    steps, wanted = steps_of(file, name, twin)
    assert steps == wanted
    assert [step.number for step in steps] == sorted({step.number for step in steps})


def test_every_step_belongs_to_a_kernel():
    both = [steps_of(*each) for each in kernels()]
    of_kernels = {step for steps, _ in both for step in steps}
    of_twins = {step for _, steps in both for step in steps}
    for files, steps in ((HERE, of_kernels), (paths(ROOT / "reference", "*.py"), of_twins)):
        for file in files:
            assert set(all_steps((ROOT / file).read_text())) - steps == set(), file


def test_the_documents_count_the_steps_of_the_forward():
    _, steps = steps_of("kernels_cu/simt/forward_simt.cu", "forward", "reference/cpu/forward.py")
    wanted = ", ".join(f"{step.number} {step.words}" for step in steps)
    for path in (CUDA / "README.md", ROOT / "CONTRIBUTING.md"):
        assert wanted in re.sub(r"\s+", " ", path.read_text()), path


# -- how the sources are read ---------------------------------------------------------------------

SPLIT = """
namespace {
// 9 of a comment that is no function's
template <bool FIRST>
__device__ __forceinline__ void load(int n) {
  // 1 load q
}

struct Pipeline {
  __device__ __forceinline__ int next() const {
    // 4 advance
    return 0;
  }
};

template <bool FIRST, int WIDTH>
__device__ __forceinline__ void consumer(const Pipeline& pipeline) {
  for (int n = 0; n < WIDTH; ++n) {
    softmax::load(n);
    pipeline.next();
  }
  consumer<false, 1>(pipeline);
}

template <int WIDTH> __device__ __noinline__ void producer(const Params& p) { load<WIDTH == 1>(p); }
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL_NAME(const Params p) {
  // producer(p) is no call, and 3 < load is none that means the other file's
  producer<4>(p);
  // 2 scores
  if (warp > 0) return consumer<true, 2>(pipeline);
  consumer<false, 2>(pipeline);
}
"""
HEADER = """
namespace softmax {
__device__ void load(int n) {
  // 3 row max
}
}  // namespace softmax
"""


def test_steps_follow_the_functions_of_a_file(tmp_path):
    (tmp_path / "kernel.cu").write_text(SPLIT)
    (tmp_path / "other.cu").write_text(SPLIT.replace("load q", "load k"))
    (tmp_path / "softmax.cuh").write_text(HEADER)
    names = ("other.cu", "kernel.cu", "softmax.cuh")
    functions = [made for name in names for made in cuda_functions(str(tmp_path / name))]
    assert {made.name for made in functions} == {
        "load", "next", "consumer", "producer", "KERNEL_NAME",
    }  # fmt: skip
    (kernel,) = (x for x in functions if x.name == "KERNEL_NAME" and "kernel.cu" in x.file)
    assert expanded(kernel, functions) == [
        (1, "load q"), (2, "scores"), (3, "row max"), (4, "advance"),
    ]  # fmt: skip
