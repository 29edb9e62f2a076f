"""Who may import whom, read from the sources by `ast`."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from each import holds_for_each

ROOT = Path(__file__).resolve().parents[2]

# Folders and modules of `cupyflash`, lowest first: each imports from lower rows only. `__init__`
# and `__main__` may import all of them. Folders of `costs` have rows of their own.
ORDER = [
    ["errors", "hints", "lazy"],
    ["files"],
    ["arrays"],
    ["costs.analysis"],
    ["expr"],
    ["costs.figures"],
    ["masks"],
    ["reductions", "scores"],
    ["problem"],
    ["gpu"],
    ["rowwise"],
    ["backends"],
    ["dispatch"],
    ["outputs"],
    ["executor"],
    ["request", "row_request"],
    ["changes"],
    ["execute"],
    ["pieces", "reduced_call"],
    ["statistics"],
    [
        "api",
        "cache_update",
        "cached",
        "closures",
        "conversion",
        "foreign",
        "forward_mode",
        "planning",
        "quantization",
        "second_order",
        "streamed",
        "varlen",
    ],
    ["distributed"],
    ["costs.explanation"],
    ["analysis", "explanation", "figures"],
    ["jax", "torch"],
    ["testing"],
    ["bench"],
    ["commands"],
]
# The same inside of folders whose modules depend on each other one way, too. Modules of the other
# folders may import each other.
INSIDE = {
    "arrays": [
        ["cuda_device", "dtypes", "integers", "per_stream", "reports", "tape", "typed"],
        ["device_arrays", "elementwise"],
        ["contents", "copies", "interop", "transfers", "unallocated"],
    ],
    "problem": [
        ["formats", "options", "reduction_form"],
        ["encoding"],
        ["cache"],
        ["rows"],
        ["cached_rows"],
        ["call"],
        ["codes", "keywords", "route", "signatures"],
        ["coded"],
        ["pack_gqa", "positions"],
        ["bound_exprs"],
        ["device_args"],
        ["scalars"],
        ["validate"],
        ["cached", "lookups", "tangents"],
        ["hadamard", "quantize", "rotary", "written_rows"],
        ["append", "arguments"],
        ["replay"],
    ],
    "distributed": [
        ["transport"],
        ["partition"],
        ["agreement", "messages", "sharded"],
        ["all_reduce", "recorded_call", "row_exchange"],
        ["compute"],
        ["heads"],
        ["executor", "signatures"],
        ["calls", "varlen"],
    ],
    "distributed.transport": [
        ["communication", "faults", "meeting"],
        ["peers"],
        ["mpi", "nccl", "threads"],
        ["connect"],
    ],
    "distributed.partition": [
        ["documents", "head_batches", "intervals"],
        ["layouts", "local_lookups"],
        ["divisions", "fused_calls", "proofs"],
        ["exchange_schedule"],
        ["model"],
        ["schemes"],
        ["simulation"],
    ],
    "hints": [["did_you_mean", "install"], ["other_libraries"]],
    "pieces": [
        ["schedule"],
        ["packed", "parts", "place"],
        ["compute", "device", "heads"],
        ["executor"],
    ],
    "gpu": [
        ["disk_cache", "launcher", "params"],
        ["driver"],
        ["strides", "tma"],
        ["kernels"],
        ["call_code", "specialisation", "workspace"],
        ["source", "tile_lists"],
        ["jit", "writer"],
        ["decode_route", "lookups", "offsets", "rowwise", "short_sequences", "uploads"],
        ["route"],
        ["compiled", "reduction_route", "second_route"],
        ["launch"],
        ["growing", "reduction_launches", "second_launches"],
        ["row_launches"],
        ["launch_cache", "recent", "relaunch"],
        ["checksum_launches", "piece_launches"],
    ],
}
# The kernels' CPU twins stand beside the rows: they know nothing of cupyflash, and only these know
# them: who calls them, who writes the programs they run, who checks them, who reports on them, and
# who adds and copies arrays in host memory, and who has machine code compiled as theirs is.
USERS_OF_REFERENCE = [
    "cupyflash.arrays.transfers",
    "cupyflash.backends.cpu",
    "cupyflash.backends.cpu_lookups",
    "cupyflash.backends.cpu_programs",
    "cupyflash.backends.cpu_reductions",
    "cupyflash.backends.host_calls",
    "cupyflash.backends.host_quick",
    "cupyflash.backends.host_replay",
    "cupyflash.bench.runtime_peers",
    "cupyflash.expr.lower",
    "cupyflash.gpu.launcher",
    "cupyflash.pieces.place",
    "cupyflash.rowwise",
    "cupyflash.testing",
    "cupyflash.commands",
]
# Imported when first needed, never by `import cupyflash`.
LAZY = {"numba", "llvmlite", "cupy", "cupyx", "cuda", "hypothesis", "typer", "rich", "ml_dtypes"}
LAZY |= {"matplotlib", "torch", "transformers", "jax", "mpi4py"}
# For arrays of these libraries, whose users have imported them.
ADAPTERS = {
    "cupyflash.torch.growing_cache": {"torch", "transformers"},
    "cupyflash.torch.static_cache": {"torch", "transformers"},
    "cupyflash.torch": {"torch"},
    "cupyflash.jax": {"jax"},
}
REFERENCE_MAY_IMPORT = {"numpy", "numba", "llvmlite"} | set(sys.stdlib_module_names)

# CuPy stays behind these, and even they import it only when one of their functions is called.
USERS_OF_CUPY = [
    "cupyflash.arrays.contents",
    "cupyflash.arrays.copies",
    "cupyflash.arrays.cuda_device",
    "cupyflash.arrays.device_arrays",
    "cupyflash.arrays.elementwise",
    "cupyflash.arrays.reports",
    "cupyflash.arrays.transfers",
    "cupyflash.distributed.transport.connect",
    "cupyflash.distributed.transport.nccl",
    "cupyflash.distributed.transport.peers",
    "cupyflash.gpu.driver",
    "cupyflash.gpu.jit",
    "cupyflash.gpu.tma",
    "cupyflash.costs.explanation.registers",
    "cupyflash.bench.measure",
    "cupyflash.commands.info",
    "cupyflash.testing.copies",
]
# The one module that imports hypothesis; no module that is imported by itself imports it.
USER_OF_HYPOTHESIS = "cupyflash.testing.hypothesis_needed"

LEVEL = {name: level for level, row in enumerate(ORDER) for name in row}
LEVEL_INSIDE = {
    folder: {name: level for level, row in enumerate(rows) for name in row}
    for folder, rows in INSIDE.items()
}


class Import(NamedTuple):
    target: str  # absolute dotted name; for `from a import b` both a.b and a are possible targets
    line: int
    at_import: bool  # executed when the module is imported


def modules(folder: str, package: str) -> dict[str, Path]:
    """Dotted name -> file of every module of a package that lies in `folder`."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join((package, *parts))] = path
    return found


PACKAGE = modules("cupyflash", "cupyflash")
REFERENCE = modules("reference", "cupyflash.reference")
ALL = PACKAGE | REFERENCE | modules("kernels_cu", "cupyflash.kernels_cu")


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, at_import: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = at_import and not (
            isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or for_types_only(child)
        )
        yield child, at_import
        yield from walk(child, inside)


@functools.cache
def imports(name: str, path: Path) -> list[Import]:
    """Every import of a module, wherever it stands, with relative ones resolved."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = []
    for node, at_import in walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, at_import) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                dotted = ".".join((*base, alias.name))
                target = dotted if dotted in ALL else ".".join(base)
                found.append(Import(target, node.lineno, at_import))
    return found


def row_of(module: str) -> str:
    """`cupyflash.expr.nodes` -> `expr`, `cupyflash.costs.figures.svg` -> `costs.figures`; the
    package itself -> the empty string.
    """
    names = module.split(".")[1:]
    return ".".join(names[:2]) if names[1:] and names[0] == "costs" else "".join(names[:1])


def part_of(module: str, folder: str) -> str:
    """`cupyflash.gpu.kernels.spec` in `gpu` -> `kernels`; the folder itself -> the empty string."""
    return module.removeprefix(f"cupyflash.{folder}").strip(".").partition(".")[0]


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_the_table_names_existing_modules():
    rows = {row_of(name) for name in PACKAGE} - {"", "__main__", "costs"}
    assert rows - set(LEVEL) == set(), "modules without a row in ORDER"
    assert set(LEVEL) - rows == set(), "rows in ORDER without a module"
    for folder, levels in LEVEL_INSIDE.items():
        inside = {part_of(x, folder) for x in PACKAGE if within(x, f"cupyflash.{folder}")} - {""}
        assert inside == set(levels), folder


def test_cupyflash_imports_one_way():
    def rule(name):
        mine = row_of(name)
        if mine in ("", "__main__", "costs"):
            return
        for target, line, _ in imports(name, PACKAGE[name]):
            if not within(target, "cupyflash"):
                continue
            where = f"{PACKAGE[name].relative_to(ROOT)}:{line} imports {target}"
            theirs = row_of(target)
            if within(target, "cupyflash.reference"):
                assert any(within(name, user) for user in USERS_OF_REFERENCE), where
            elif within(target, "cupyflash.kernels_cu"):
                raise AssertionError(where + ": the CUDA sources are data")
            elif theirs != mine:
                # "" is `from cupyflash import x`: the top, which imports everything.
                assert theirs, where + ": import the module that defines it"
                assert LEVEL[theirs] < LEVEL[mine], where
            for folder, levels in LEVEL_INSIDE.items():
                if within(name, f"cupyflash.{folder}") and within(target, f"cupyflash.{folder}"):
                    one, other = part_of(name, folder), part_of(target, folder)
                    assert one in ("", other) or levels[other] < levels[one], where

    holds_for_each(PACKAGE, rule)


def test_cupy_stays_behind_few_modules():
    def rule(name):
        if any(within(name, user) for user in USERS_OF_CUPY):
            return
        for target, line, _ in imports(name, PACKAGE[name]):
            where = f"{PACKAGE[name].relative_to(ROOT)}:{line} imports {target}"
            assert target.partition(".")[0] not in {"cupy", "cupyx", "cuda"}, where

    holds_for_each(PACKAGE, rule)


def test_heavy_packages_are_imported_when_needed():
    def rule(name):
        for target, line, at_import in imports(name, PACKAGE[name]):
            where = f"{PACKAGE[name].relative_to(ROOT)}:{line} imports {target}"
            if at_import and (name, target) != (USER_OF_HYPOTHESIS, "hypothesis"):
                mine = next((ADAPTERS[x] for x in ADAPTERS if within(name, x)), set())
                assert target.partition(".")[0] not in LAZY - mine, where

    holds_for_each(PACKAGE, rule)


def test_importing_cupyflash_does_not_reach_reference():
    # A module may import `reference`, hence Numba, if it is itself imported only when needed.
    paths = {"cupyflash": "cupyflash"}
    ahead = ["cupyflash"]
    while ahead:
        name = ahead.pop()
        for target, _, at_import in imports(name, ALL[name]):
            if not (at_import and target in ALL):
                continue
            parts = target.split(".")
            for end in range(1, len(parts) + 1):  # importing a.b.c imports a and a.b first
                module = ".".join(parts[:end])
                if module not in paths:
                    paths[module] = f"{paths[name]} -> {module}"
                    ahead.append(module)
    assert [path for name, path in paths.items() if within(name, "cupyflash.reference")] == []


def test_reference_knows_nothing_of_cupyflash():
    def rule(name):
        for target, line, _ in imports(name, REFERENCE[name]):
            where = f"{REFERENCE[name].relative_to(ROOT)}:{line} imports {target}"
            if within(target, "cupyflash"):
                # Only through a relative import of a sibling: `from . import philox`.
                assert within(target, "cupyflash.reference"), where
            else:
                assert target.partition(".")[0] in REFERENCE_MAY_IMPORT, where

    holds_for_each(REFERENCE, rule)


def test_reference_imports_siblings_relatively():
    def rule(name):
        for node in ast.walk(ast.parse(REFERENCE[name].read_text())):
            if isinstance(node, ast.Import):
                assert not any(within(alias.name, "cupyflash") for alias in node.names)
                assert not any(within(alias.name, "reference") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert not within(node.module or "", "cupyflash")
                assert not within(node.module or "", "reference")

    holds_for_each(REFERENCE, rule)
