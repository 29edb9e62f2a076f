"""The kernels can be read beside their twins: same files, same function names, same steps.

The table in kernels_cu/README.md says which files are twins. The rules:

- Files: every CUDA file stands in the table once, every twin exists, and every module of
  `reference/` is somebody's twin or one of those that only call or check kernels. Twins have the
  same stem; a kernel's stem, without its hardware (`simt`), may also be that of a function in it.
- Functions: those of a row's CUDA files and of its twins have the same names, but for those that
  are listed here with the reason. A leading underscore counts for nothing, nor do methods. What
  stands in CUDA files without a twin (a GPU's instructions and number types) may have its like in
  any module, and an opcode's name, in lower case, stands for the function that does the same.
- Steps: a step is a comment of its own, a digit and words: "// 2 scores", "# 2 scores". A kernel's
  steps are its comments in the order of the text, with those of a function where it is called; a
  step that comes again counts where it came first. They are the same, in the same order, as those
  of the twin's function of the kernel's name.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mirror import (
    CUDA,
    ROOT,
    Function,
    Row,
    all_steps,
    cuda_functions,
    expanded,
    python_functions,
    table_of_twins,
    without_hardware,
)

from cupyflash.reference.program import Op

TABLE = table_of_twins()

# Modules of reference/ without a twin.
ONLY_ON_THE_CPU = {
    "__init__": "the package",
    "elementary": "exp2, exp and tanh: on a GPU instructions and CUDA's own functions",
    "jit": "compiles: on a GPU cupyflash/compile.py",
    "launch": "calls kernels: on a GPU cupyflash/launch.py",
    "naive": "the specification that both are compared with",
    "naive_formulas": "its formulas",
    "threads": "a GPU has its own",
}

OTHER_STEMS = {
    "matmul": "one product of tiles is two modules: LLVM code in registers, and what calls it",
    "lookup": "programs are run step by step on the CPU and generated on the GPU",
    "expression": "programs are run step by step on the CPU and generated on the GPU",
    "fragment": "products by tensor cores, which the CPU has no like of",
    "bias_tile": "a block's tile of the bias; on the CPU an item of a list",
    "fragment_bias": "tiles that were given it, one after the other; on the CPU loops",
    "warpgroup": "products by tensor cores, which the CPU has no like of",
    "warpgroup_tile": "tile, where those who copy and those who compute part",
    "warpgroup_work": "what blocks work on, one thing after the other",
    "warpgroup_passing": "what blocks work on, one thing after the other",
    "warpgroup_rows": "products by tensor cores, which the CPU has no like of",
    "warpgroup_split": "products by tensor cores, which the CPU has no like of",
    "fragment_rows": "where fragments lie, in registers and in shared memory",
    "fragment_wide": "products by tensor cores, which the CPU has no like of",
    "power": "2^x by instructions and a polynomial; power_of_two is its like",
    "fragment_tile": "tile, where scores lie as tensor cores leave them",
    "fragment_product": "products by tensor cores, which the CPU has no like of",
    "fragment_gradient": "gradient_tile, where scores lie as tensor cores leave them",
    "warpgroup_gradient": "gradient_tile, where scores lie as tensor cores leave them",
    "warpgroup_unit": "dS is scaled before it is rounded to float16, which the CPU does not do",
    "fragment_softmax": "softmax, where scores lie as tensor cores leave them",
}

SPACES = {"fragment_rows": "fragment", "fragment_wide": "fragment"}  # of what headers share

# Functions on one side only: row (by its first file) -> reason -> names.
ONLY_CUDA = {
    "backward_bias.cu": {
        "sums in registers, stored by way of shared memory": "store store_vectors",
    },
    "backward_sm80_bias.cu": {
        "sums in registers, stored by way of shared memory": "put_sums",
        "gradient_tile, in whose steps the next product begins": "weigh",
    },
    "backward_delta.cu": {
        "lanes share rows, two at a time": "sum_rows",
    },
    "backward_sm80_dkdv.cu": {
        "what a block knows of a head lies in shared memory": "copy_of first_of",
    },
    "combine.cu": {
        "a block finds its row by itself; on the CPU, rows are contiguous copies": "offset lse_of",
        "computed again for every group of columns, which one thread's registers hold": "weight",
    },
    "forward_sm90.cu": {
        "places that tiles pass through": "stage_of parity_of parity_of_job q_place_of q_parity_of",
    },
    "forward_sm90_tf32.cu": {
        "barriers of the places that tiles pass through": "arrive wait",
    },
    "common/layout.cuh": {
        "a block finds its work by itself; methods of Layout list it on the CPU": (
            "clamp complete first_entry entries_sharing shared_entry sequence_of work_of divide"
        ),
        "strides are read in place; memory.row_address has them on the CPU": "lead_offset offset",
        "what is written of a job for others": "describe tell tell_block",
        "tiles that pass by are numbers, and pass through places": (
            "place_of class_of first_of stage_of parity_of full empty full_d_out wait_for_place "
            "each_tile bring_numbers"
        ),
        "what a thread found, for all of a block": "any_thread",
        "the order in which blocks run, and sums that several of them add to": (
            "taking_turns heads_at_a_time grouped_offset"
        ),
    },
    "common/memory.cuh": {
        "rows in global memory; Layout.rows describes them on the CPU": "rows numbers",
        "through shared memory and as they lie; the CPU transposes them": (
            "load_rows begin_rows finish_rows finish_vector"
        ),
    },
    "common/matmul.cuh": {
        "sizes in shared memory": (
            "larger round_up chunks chunk_columns whole_columns odd_stride run_of padded_columns "
            "stage_rows held_columns"
        ),
        "the grid of threads": "row_thread column_thread result_row result_column row_run",
        "dq beside the sums of dk and dv": "multiply_transposed rows_at_once",
        "a masked pair is told by its weight; the CPU keeps a tile of `seen`": (
            "no_part takes_part multiply_add_seen multiply_transposed_seen"
        ),
        "results in registers": "clear add scale",
        "operands that pass through shared memory": "multiply_rows multiply_both buffer_elements",
        "sizes and places of 16-bit rows in shared memory": (
            "row_bytes lanes_for place begin_rows negate_rows turn_rows finite_rows"
        ),
        "the lanes of a warp": "lane_row lane_column warp_row left_rows right_rows",
        "pieces of 16 x 8 x 16, and weights rounded for them": "mma multiply_step narrow",
        "a loop over registers": "rotate",
        "values that are not finite, added without pairs that take no part": (
            "add_nonfinite clear_nonfinite taken"
        ),
        "the output of tensor cores goes through shared memory": "store_rows put_rows copy_out",
        "that of warpgroups waits in registers, as words, or passes through shared memory": (
            "narrow_rows swap_halves first_column tma_store_rows tma_store_wait"
        ),
        "pieces of 16 x 8 x 8, and what wide elements are split into": (
            "part multiply_across multiply_piece"
        ),
        "a warp's part of a result in float64": "warp_rows lane_quarter",
        "an element of a tile that tensor cores read, and its column": (
            "element_of place_of column_of swizzle"
        ),
        "what tensor cores make NaN of, computed again": "any_nan multiply_nan fits",
        "an operand read transposed, or one by one": "multiply_add_transposed element",
        "results of several blocks": "add_fragments add_fragments_nonfinite clear_pair",
        "warpgroups and the barriers between them": "index wait release arrive_warp",
        "rows of queries, a tile of each warpgroup": "begin_queries",
        "what of a piece is not finite": "zero_times",
        "tiles that are copied by boxes, and described for products": "begin_tile describe whole",
        "tiles that are split on their way to shared memory": "columns_of put_unit at_step splits",
    },
    "common/tile.cuh": {
        "sizes of a tile": "smaller rows_from is_whole",
        "a thread's cells of a tile": "cell store_cells load_cells",
        "one walk over the cells for score and mask": "change apply_score_and_mask",
        "draws and applies at once, without a tile of factors": "apply_dropout",
        "tensor cores' tiles are looked for before they are copied": (
            "next_tile tiles_in find_classes tile_before first_of_full class_of"
        ),
        "tensor cores ask the mask before they multiply, and for a row's range of keys at once": (
            "find_pairs columns_to distance hide_pairs hide_beyond change_scores columns_at_once "
            "find_halves"
        ),
        "what is the same for all pairs of a head; a program's first part finds it on the CPU": (
            "given_of"
        ),
        "Python's kernels return their count": "count_tiles",
    },
    "common/softmax.cuh": {
        "e^x by 2^x or by double precision, which has no fast 2^x": "exponential",
        "reference/elementary.py has it": "exp2",
        "threads share a row's columns": "row_sum",
        "maxima and sums first, the output when its product is done": "raise_max scale_rows",
        "tensor cores' scores are logits only at the end": "join_sink",
        "a maximum in either type": "larger",
        "weights of a part of a tile": "find_offset exponentiate_halves",
    },
    "common/gradient_tile.cuh": {
        "the two halves of gradient_tile: dv is accumulated between them, because dS takes the "
        "place of p": "probabilities score_gradients",
        "a thread's cells of a tile": "query_of",
        "P and dS of float64 in shared memory": "store_pair store_tile",
        "the first half on tensor cores, without steps of its own": (
            "recompute_probabilities recompute_changed change_scores site_of ask_mask exponentiate "
            "probability"
        ),
        "draws where pairs lie in fragments": "draw transpose",
        "P and dS in 16 bits, in shared memory": "narrow store_word store_words scale_words",
        "dS is scaled before it is rounded to float16": (
            "largest_of largest_finite largest_of_tile unify"
        ),
        "P and dS by warpgroups": "find_hidden hide_pairs narrow_kept place_of_words",
        "lse and delta, loaded while products are computed": "numbers_from delta_from",
        "sums of dq in global memory": "place_of_sum add_rows",
        "values that are not finite, added without pairs that take no part": (
            "all_finite element add_nonfinite clear_nonfinite is_spoilt are_keys_spoilt "
            "copy_finite_keys clear_keys_for_a_while restore_keys"
        ),
        "boxes of keys, and of packed arrays": (
            "begin_keys clear_rows clear_keys clear_missing_keys"
        ),
        "results by way of shared memory": "tma_store_rows",
    },
    "common/lookup.cuh": {
        "the address of an element, and both extremes of a range at once": (
            "apart place row_extremes int_extremes float_extremes take_in take_pieces range_int "
            "range_float"
        ),
        "operations that generated code calls without the type in the name": (
            "floor_divide floor_divide_long divide_bits remainder minimum maximum"
        ),
        "reference/elementary.py has it": "tanh_of",
        "arithmetic that Python's integers and floats have": (
            "infinity not_a_number multiply_rounded saturating_add saturating_subtract "
            "saturating_multiply"
        ),
    },
}
ONLY_PYTHON = {
    "backward_sm90_dkdv.cu": {
        "queries are lanes, in panels made once": "transpose_blocks",
        "backward_sm80_dq is its twin": "backward_dq",
    },
    "backward_sm80_dkdv.cu": {
        "queries are lanes, in panels made once": "transpose_blocks",
    },
    "backward_f64_dkdv.cu": {
        "queries are lanes, in panels made once": "transpose_blocks",
    },
    "backward_simt_dkdv.cu": {
        "queries are lanes, in panels made once; a GPU's threads read rows as they lie": (
            "transpose_blocks"
        ),
    },
    "common/layout.cuh": {
        "results of another type or layout are stand-ins at first": "finish",
    },
    "common/memory.cuh": {
        "addresses are numbers in Numba": "row_address",
        "queries are lanes": "load_transposed",
        "asked once per call; a GPU's block asks for every stage": "count_nonfinite",
    },
    "common/matmul.cuh": {
        "vectors and the code for them": "vector_lanes padded block product",
    },
    "common/tile.cuh": {
        "tensor cores find the pairs first, and SIMT kernels have both in one walk": "apply_mask",
        "registers of the interpreter": "make_registers",
        "row by row, each by its program": "apply_score",
        "a tile of what takes part; a GPU has weights that say it": "note_seen",
        "a tile of factors, which every lane has its own of": "dropout_factors scale_tile",
    },
    "common/gradient_tile.cuh": {
        "memory of one thread": "make_scratch",
        "both halves in one pass over the tile": "gradient_tile",
    },
    "common/lookup.cuh": {
        "what an interpreter needs": (
            "empty_program describe_table loader run lookup_step int_step float_step compare_step"
        ),
        "the address of an element, and the extremes of a range by one thread": (
            "find_places index_range range_extremes"
        ),
        "one of four types, by a number": "load_as_float",
    },
    "common/philox.cuh": {
        "the host computes it": "threshold keep_probability",
    },
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


WITHOUT_TWIN = [file for row in TABLE if not row.twins for file in files_of(row)]
TWINNED = [row for row in TABLE if row.twins and row.twins[0].startswith("reference/")]
IDS = [row.files[0].removeprefix("kernels_cu/") for row in TWINNED]
CUDA_FUNCTIONS = {file: cuda_functions(file) for row in TABLE for file in files_of(row)}
PYTHON_FUNCTIONS = {
    twin: python_functions(twin)
    for row in TWINNED
    for twin in row.twins
    if (ROOT / twin).is_file()  # a test of its own says which are not
}


# -- files ----------------------------------------------------------------------------------------


def test_every_cuda_file_is_in_the_table_once():
    named = [file for row in TABLE for file in files_of(row)]
    here = [path.relative_to(ROOT).as_posix() for path in CUDA.rglob("*.cu*")]
    assert sorted(named) == sorted(here)


def test_every_twin_exists_and_every_module_is_one():
    twins = {twin for row in TABLE for twin in row.twins}
    assert [twin for twin in twins if not (ROOT / twin).is_file()] == []
    modules = {path.stem for path in (ROOT / "reference").glob("*.py")}
    assert modules - {Path(twin).stem for twin in twins} == set(ONLY_ON_THE_CPU)


def test_twins_have_one_stem():
    others = set()
    for row in TABLE:
        for file in files_of(row) if row.twins else ():
            stem = without_hardware(Path(file).stem)
            stems = {Path(twin).stem for twin in row.twins}
            if file.endswith(".cu"):
                stems |= {made.name for twin in row.twins for made in PYTHON_FUNCTIONS[twin]}
            if stem not in stems:
                others.add(stem)
    assert others == set(OTHER_STEMS)


# -- functions ------------------------------------------------------------------------------------


def cuda_names(files: list[str]) -> set[str]:
    return {
        without_hardware(Path(file).stem) if made.name == "KERNEL_NAME" else made.name
        for file in files
        for made in CUDA_FUNCTIONS[file]
    }


def compare(found: set[str], table: dict[str, dict[str, str]], row: str) -> None:
    """Assert that the names found on one side only are those that are listed, once each."""
    listed = [name for names in table.get(row, {}).values() for name in names.split()]
    assert len(listed) == len(set(listed)), f"listed twice: {sorted(listed)}"
    unlisted, stale = sorted(found - set(listed)), sorted(set(listed) - found)
    assert not unlisted, f"on one side only, without a reason: {unlisted}"
    assert not stale, f"listed, but gone or on both sides: {stale}"


@pytest.mark.parametrize(("row", "name"), list(zip(TWINNED, IDS, strict=True)), ids=IDS)
def test_functions_have_the_same_names(row, name):
    ours = cuda_names(files_of(row))
    theirs = {made.name.lstrip("_") for twin in row.twins for made in PYTHON_FUNCTIONS[twin]}
    opcodes = {op.name.lower() for op in Op} if "reference/program.py" in row.twins else set()
    compare(ours - theirs - opcodes, ONLY_CUDA, name)
    compare(theirs - ours - cuda_names(WITHOUT_TWIN), ONLY_PYTHON, name)


def test_the_lists_speak_of_rows_of_the_table():
    assert (ONLY_CUDA.keys() | ONLY_PYTHON.keys()) - set(IDS) == set()


def test_a_header_is_a_namespace():
    # What generated code calls has none.
    generated = {"lookup", "expression"}
    for file, functions in CUDA_FUNCTIONS.items():
        path = Path(file)
        wanted = {"primitives": SPACES.get(path.stem, path.stem), "arch": "arch"}.get(
            path.parent.name, ""
        )
        allowed = {wanted, ""} if path.stem in generated else {wanted}
        assert {made.space for made in functions} <= allowed, file


# -- steps ----------------------------------------------------------------------------------------


def known(functions: dict[str, list[Function]]) -> dict[str, Function]:
    """Functions with steps, by name; kernels are not called."""
    found: dict[str, Function] = {}
    for made in (made for each in functions.values() for made in each):
        if made.name != "KERNEL_NAME":
            assert made.name not in found or not (made.steps or found[made.name].steps), made.name
            found[made.name] = made
    return found


IN_CUDA, IN_PYTHON = known(CUDA_FUNCTIONS), known(PYTHON_FUNCTIONS)


@pytest.mark.parametrize(("file", "name", "twin"), kernels())
def test_steps_are_the_same_in_the_same_order(file, name, twin):
    (kernel,) = (made for made in CUDA_FUNCTIONS[file] if made.name == "KERNEL_NAME")
    (function,) = (made for made in PYTHON_FUNCTIONS[twin] if made.name == name)
    steps = expanded(kernel, IN_CUDA)
    assert steps == expanded(function, IN_PYTHON)
    assert [step.number for step in steps] == sorted({step.number for step in steps})


def test_every_step_belongs_to_a_kernel():
    of_kernels, of_twins = set(), set()
    for file, name, twin in kernels():
        (kernel,) = (made for made in CUDA_FUNCTIONS[file] if made.name == "KERNEL_NAME")
        (function,) = (made for made in PYTHON_FUNCTIONS[twin] if made.name == name)
        of_kernels |= set(expanded(kernel, IN_CUDA))
        of_twins |= set(expanded(function, IN_PYTHON))
    for folder, pattern, steps in (
        (CUDA, "*.cu*", of_kernels),
        (ROOT / "reference", "*.py", of_twins),
    ):
        for path in folder.rglob(pattern):
            assert set(all_steps(path.read_text())) - steps == set(), path


def test_the_documents_count_the_steps_of_the_forward():
    (forward,) = (made for made in PYTHON_FUNCTIONS["reference/forward.py"])
    wanted = ", ".join(f"{step.number} {step.words}" for step in expanded(forward, IN_PYTHON))
    for path in (CUDA / "README.md", ROOT / "CONTRIBUTING.md"):
        assert wanted in re.sub(r"\s+", " ", path.read_text()), path
