"""A kernel's facts are in its spec: nothing else knows kernels by name, and specs are complete."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from pathlib import Path

import kernel_table
import ml_dtypes
import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, target_of
from each import holds_for_each

from cupyflash import masks
from cupyflash.expr.cuda_functions import Functions
from cupyflash.gpu import source, strides
from cupyflash.gpu.kernels import registry
from cupyflash.gpu.kernels.registry import KERNELS, SPECS
from cupyflash.gpu.kernels.spec import Extent, Request, Tiles
from cupyflash.gpu.specialisation import FLAGS, Specialisation
from cupyflash.problem import cached, validate
from cupyflash.problem.formats import FORMATS
from cupyflash.problem.options import Options
from cupyflash.rowwise import OPERATIONS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kernels_cu"
OUTSIDE = [
    path
    for path in sorted((ROOT / "cupyflash").rglob("*.py"))
    if (ROOT / "cupyflash" / "gpu" / "kernels") not in path.parents
]
# Words of the language, names of parts of a call, and the names of public functions.
WORDS = {"checksum", "dequantize", "offsets", *(operation.name for operation in OPERATIONS)}
HARDWARE = re.compile(r"sm\d\d|simt|_f64|_tf32")
TESTS = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"}
DTYPES = [np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]


# -- nobody knows a kernel by its name ------------------------------------------------------------


def test_no_kernel_is_named_outside_of_the_specs():
    def rule(path):
        text = path.read_text()
        for name in sorted(SPECS.keys() - WORDS):
            assert not re.search(rf"\b{name}\b", text), name
        assert HARDWARE.findall(text) == []

    holds_for_each(OUTSIDE, rule)


def names_a_kernel(node: ast.expr) -> bool:
    """Whether an expression is `x.kernel`, or the name of a spec or a specialisation."""
    if not isinstance(node, ast.Attribute):
        return False
    of = ast.unparse(node.value).rpartition(".")[2]
    return node.attr == "kernel" or (node.attr == "name" and of in ("spec", "special", "kernel"))


def asked_names(tree: ast.AST) -> list[str]:
    """Return the expressions that ask what a kernel's name is or how it begins and ends."""
    found = []
    for node in ast.walk(tree):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = [node.func.value] if node.func.attr in TESTS else []
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
        elif isinstance(node, ast.Match):
            asked = [node.subject]
        if any(names_a_kernel(each) for each in asked):
            found.append(ast.unparse(node))
    return found


def test_no_kernels_name_is_tested():
    def rule(path):
        assert asked_names(ast.parse(path.read_text())) == []

    holds_for_each(OUTSIDE, rule)


@pytest.mark.parametrize(
    "text",
    [
        "launch.special.kernel == other",
        "'sm' in special.kernel",
        "work.spec.name.endswith(part)",
        "BYTES[special.kernel]",
        "kernel.name.startswith('a')",
    ],
)
def test_that_test_sees(text):
    assert asked_names(ast.parse(text))


# -- every kernel has its spec --------------------------------------------------------------------


def test_every_source_has_one_spec():
    specs = [spec for part in KERNELS.values() for spec in part]
    found = {path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cu")}
    assert sorted(spec.source for spec in specs) == sorted(found)
    assert len(SPECS) == len(specs)
    assert all(spec.part == part for part, specs in KERNELS.items() for spec in specs)


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_tells_what_its_kernel_is(name):
    spec = SPECS[name]
    assert spec.computes
    assert spec.method.format(dtype="", accumulator="", products="")
    assert spec.precisions.keys() <= spec.heads.keys()
    assert set(spec.atomic_dq) <= spec.heads.keys()
    # Those for one architecture alone use what others do not have.
    code = re.sub(r"//[^\n]*", "", source.flatten((spec.source,)))
    assert (spec.architecture is not None) == (re.search(r"\bptx::wgmma_\w+\(", code) is not None)
    own = re.sub(r"//[^\n]*", "", (SOURCES / spec.source).read_text())
    assert bool(spec.atomic_dq) == ("ATOMIC_DQ" in own)
    # As many tensor maps follow its parameters, in this order.
    parameter = r"__grid_constant__ (?:ptx::TensorMap|warpgroup::LastMaps) (\w+)_map"
    maps = re.findall(parameter, own)
    operands = [] if spec.tma is None else [*spec.tma.loads, *spec.tma.stores]
    assert maps == [{"d_out": "do"}.get(each, each) for each in operands]


# Sums of dq have no choice; of codes, those that no kernel of their own serves become numbers;
# shared keys are those of each entry where no kernel reads them for all; and weights are summed as
# other values where they have no kernel.
WITH_ARRAYS = {"dq_rows", "forward_codes", "reduce_weights", "shared"}


@pytest.mark.parametrize("part", [part for part in KERNELS if part not in WITH_ARRAYS])
def test_every_part_has_a_kernel_for_every_device_and_type(part):
    for arch, dtype, d in itertools.product(SHARED_MEMORY, DTYPES, (1, 64, 200, 512)):
        q = np.zeros((1, d), dtype)
        blocks = (16, 64) if part == "join" else None  # those of a decode kernel
        problem = validate.call(q, q, q, Options()).problem
        request = Request(problem, target_of(arch), blocks=blocks)
        assert registry.select(part, request).spec in KERNELS[part]


def requests():
    """Calls of many kinds on every kind of device."""
    bias = np.zeros((600, 600), np.float32)
    devices = [*map(target_of, ("sm_75", "sm_80", "sm_90", "sm_120"))]
    devices.append(target_of("sm_90", lacks="it is old"))
    devices.append(dataclasses.replace(target_of("sm_80"), shared_memory=49152))
    options = [{}, {"mask": masks.causal()}, {"bias": bias}]
    for dtype, d, length, more, device in itertools.product(
        DTYPES, (60, 64, 128, 200, 300), (24, 600), options, devices
    ):
        if "bias" in more and length != 600:
            continue
        precision = "tf32x3" if dtype == np.float32 and d < 300 and device.name != "sm_75" else None
        q = np.zeros((2, length, d), dtype)
        call = validate.call(q, q, q, Options(**more, precision=precision))
        out = np.empty_like(q)
        arrays = {"d_out": q, "out": out, "dk": out, "dv": out}
        every = {name: (x, 3) for name, x in {"q": q, "k": q, "v": q, **arrays}.items()}
        lead = strides.lead_of((), every)
        for blocks in (None, (32, 32))[: 2 if d <= 64 and dtype.itemsize < 8 else 1]:
            made = Request(call.problem, device, call, arrays, lead, blocks=blocks)
            yield made
            if length == 24:  # of which a block has all
                yield dataclasses.replace(made, whole_heads=True)


def test_the_first_that_serves_wins_and_the_reason_says_why():
    chosen = set()
    for request in requests():
        for part, specs in KERNELS.items():
            if part in WITH_ARRAYS or (part == "decode" and request.blocks is not None):
                continue
            if part == "join" and request.blocks is None:
                continue
            choice = registry.select(part, request)
            chosen.add(choice.spec)
            before = specs[: specs.index(choice.spec)]
            passed = dict(choice.passed_over)
            for spec in before:
                if spec.is_for(request.problem, request.device):
                    assert passed.pop(spec) == (spec.serves(request) or spec_has_no_room(request))
            assert passed == {}
            assert choice.spec.serves(request) is None
            assert choice.tiles == choice.spec.configure(request)
            if part == "forward":
                reason, tiles = registry.reason(choice, request), choice.tiles
                assert f"{tiles.block_q} x {tiles.block_kv} tiles" in reason
                assert choice.spec.how(request.problem) in reason
                for spec, why in choice.passed_over[-1:]:
                    assert f"not by {spec.name}, because {why}" in reason
    # Only a cache has keys of 576 columns.
    q = np.zeros((1, 16, 1, 576), np.float16)
    call = cached.call(q, q[:, :1], q[:, :1, :, :512], 1, None, None, Options())
    chosen.add(registry.select("decode", Request.of(call, target_of("sm_90"))).spec)
    # Every kernel has a call that it serves.
    of_dbias = SPECS["backward_sm80_dkdv_dbias"]  # which is for calls that want that gradient
    served = {spec for spec in SPECS.values() if spec.part not in WITH_ARRAYS}
    assert chosen == served - {of_dbias}


def spec_has_no_room(request):
    return f"its tiles take more than {request.device.shared_memory} bytes of shared memory"


@pytest.mark.parametrize("name", SPECS)
def test_a_grid_covers_everything(name):
    spec = SPECS[name]
    request = next(x for x in requests() if x.problem.dtype.name in spec.heads)
    if spec.part == "join":
        request = dataclasses.replace(request, blocks=(16, 64))
    tiles = spec.configure(request) or Tiles(32, 32, 128, 0)
    for extent in (Extent(1000, 700, 3, 2, 0, 5), Extent(1000, 700, 3, 1, 4, 5)):
        grid = spec.grid(extent, tiles)
        rows = tiles.block_q if spec.part == "join" else 1
        assert 0 < grid.size <= grid.work_tiles * rows
    assert spec.grid(Extent(0, 0, 0, 0, 0, 5), tiles).size == 0


def test_a_specialisation_knows_no_more_than_its_spec():
    special = Specialisation(SPECS["combine"], "float32", 0, 0, Tiles(0, 0, 256, 0))
    assert special.name == "combine__f32"
    assert special.functions == Functions()
    assert "// rowwise/combine.cu" in source.source(special)


# -- compile-time values --------------------------------------------------------------------------

# Field of `Specialisation` -> a value of it other than that of `plain`, for those that are no bool.
OTHERS = {
    "dtype": "float64",
    "d": 96,
    "d_v": 80,
    "tiles": Tiles(
        16,
        32,
        64,
        48,
        resident_blocks=3,
        whole=True,
        whole_tasks=2,
        one_tile=True,
        row_sharers=2,
        v_parts=2,
        bias_stages=1,
    ),
    "bias": "bfloat16",
    "page_rows": 16,
    "functions": Functions(
        "", 4, 5, 6, True, True, True, True, True, 7, 8, 64, True, 9, True, True
    ),
    "team": 2,
    "k_codes": FORMATS["int8"],
    "v_codes": FORMATS["int4"],
}
# Values that no field of these says; and fields that are no compile-time value.
NO_FIELD, NO_VALUE = {"EACH_LANE_ARRIVES"}, {"spec"}


def plain():
    return Specialisation(SPECS["forward_simt"], "float32", 64, 64, Tiles(64, 64, 256, 0))


@pytest.mark.parametrize("field", dataclasses.fields(Specialisation), ids=lambda x: x.name)
def test_a_field_sets_its_own_values_and_no_others(field):
    if field.name in NO_VALUE:
        assert field.metadata["flags"] == ()
        return
    value = OTHERS.get(field.name, True)
    changed = dataclasses.replace(plain(), **{field.name: value})
    before, after = (source.prelude(x).splitlines() for x in (plain(), changed))
    differ = {y.split()[2] for x, y in zip(before, after, strict=True) if x != y}
    assert differ - {plain().name, changed.name} == {flag.name for flag in field.metadata["flags"]}
    shown = any(flag.shown for flag in field.metadata["flags"])
    assert (changed.name != plain().name) == shown


def test_every_value_comes_from_one_field():
    rows = [
        flag for field in dataclasses.fields(Specialisation) for flag in field.metadata["flags"]
    ]
    names = [flag.name for flag in FLAGS]
    assert len(set(names)) == len(names)
    assert set(names) - {flag.name for flag in rows} == NO_FIELD
    assert all(flag.about[0].isupper() and flag.about[-1] == "." for flag in FLAGS)


def test_every_value_is_read_by_a_kernel_and_every_field_is_documented():
    text = "".join(path.read_text() for path in SOURCES.rglob("*.cu*"))
    assert [flag.name for flag in FLAGS if not re.search(rf"\b{flag.name}\b", text)] == []
    for field in dataclasses.fields(Specialisation):
        assert f"{field.name} : {field.type}" in Specialisation.__doc__


# The arrays (..., H, L, D) and (..., H, L) of a backward.
OPERANDS = ("q", "k", "v", "out", "lse", "d_out", "dlse", "delta", "dq", "dk", "dv", "dq_accum")


@pytest.mark.parametrize("spec", [x for x in SPECS.values() if x.operands], ids=repr)
def test_a_kernel_is_told_of_every_array_that_it_reads_or_writes(spec):
    text = (SOURCES / spec.source).read_text()
    used = {name for name in OPERANDS if re.search(rf"\bp\.{name}\b", text)}
    assert used == set(spec.operands)


def test_symbols_say_what_differs():
    options = {"packed": True, "page_rows": 16, "team": 4, "tma_store": True, "count_tiles": True}
    name = dataclasses.replace(plain(), **options).name
    assert name == "forward_simt__f32_d64_dv64__packed_count_tma_team4__q64_kv64_page16"
    int8, int4 = FORMATS["int8"], FORMATS["int4"]
    for formats, words in {
        (int8, int8): "int8", (int8, None): "keys_int8", (None, int4): "values_int4",
        (int8, int4): "keys_int8_values_int4",
    }.items():  # fmt: skip
        name = dataclasses.replace(plain(), k_codes=formats[0], v_codes=formats[1]).name
        assert name == f"forward_simt__f32_d64_dv64__{words}__q64_kv64"


# -- the tables in the README ---------------------------------------------------------------------


@pytest.mark.parametrize("name", kernel_table.TABLES)
def test_the_readme_has_the_tables(name):
    page, table = kernel_table.PAGE.read_text(), kernel_table.TABLES[name]()
    assert kernel_table.shown(page, name) == table, "python tests/tools/kernel_table.py"
