"""The text of a kernel: flattened, named, and the same for every call of one structure."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyflash.kernels_cu
from cupyflash import lookup, masks, scores
from cupyflash.arrays.dtypes import DTYPES
from cupyflash.expr.cuda import generate
from cupyflash.gpu import params, source, strides
from cupyflash.gpu.kernels.registry import SPECS
from cupyflash.gpu.kernels.spec import Tiles
from cupyflash.gpu.specialisation import Specialisation
from cupyflash.problem import validate
from cupyflash.problem.bound_exprs import trees
from cupyflash.problem.options import Options
from cupyflash.reference.cpu import tables

FOLDER = Path(cupyflash.kernels_cu.__file__).parent
KERNELS = sorted(path.stem for path in FOLDER.rglob("*.cu"))


def special(kernel, call, **more):
    made = trees(call)
    functions = generate(made.allowed, made.classes, made.changed, made.slope).functions
    problem = call.problem
    own = Tiles(64, 64, 256, 0)
    return Specialisation(
        SPECS[kernel],
        problem.dtype.name,
        problem.d,
        problem.d_v,
        own,
        packed=problem.packed,
        dropout=problem.dropout > 0,
        functions=functions,
        **more,
    )


def call(lead=(2,), heads=4, len_q=16, len_k=24, d=8, dtype=np.float32, **options):
    q = np.zeros((*lead, heads, len_q, d), dtype)
    k = np.zeros((*lead, heads, len_k, d), dtype)
    return validate.call(q, k, k, Options(**options))


@pytest.mark.parametrize("kernel", KERNELS)
def test_flattened_sources_include_nothing(kernel):
    text = source.source(special(kernel, call(mask=masks.causal(), score_mod=scores.softcap(2.0))))
    assert "#include" not in text
    assert "#pragma once" not in text
    defined = re.findall(r"^struct (?:alignas\(\d+\) )?(\w+)(?: \{)", text, re.MULTILINE)
    assert len(defined) == len(set(defined))


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_what_may_begin_early_waits(spec):
    """A kernel reads what the grid before wrote behind its wait, and wakes the next one."""
    text = source.read(spec.source)
    body = text[text.index("KERNEL_NAME(") :]
    # Behind a kernel that has waited at its beginning, one waits at its end, for the next.
    body = re.sub(r"  if constexpr \(SHARED\) ptx::wait_for_grids\(\);[^\n]*\n\}\s*$", "}", body)
    waits = list(re.finditer(r"ptx::wait_for_grids\(\);|cursor\.begin_early\(", body))
    wakes = body.count("ptx::launch_dependents();")
    assert (len(waits) > 0, wakes) == (spec.overlaps, int(spec.overlaps))
    if spec.overlaps:
        before, after = body[: waits[-1].start()], body[waits[-1].end() :]
        for written in ("records[", "cursor.next()", "begin_queries(", "p.k_new"):
            assert written not in before
        # It lets the next grid begin when it may read itself what the one before has read.
        assert "ptx::launch_dependents();" in (
            before if spec.part in ("join", "singles") else after
        )


def test_who_begins_beside_shared_keys_waits_for_them_at_its_end():
    """The next grid waits for it alone, and reads what both wrote."""
    text = source.read("sm80/decode_sm80.cu")
    last = text.rstrip().splitlines()[-2:]
    assert "if constexpr (SHARED) ptx::wait_for_grids();" in last[0]
    ahead = source.read("sm80/decode_sm80_shared.cu")
    ahead = ahead[ahead.index("KERNEL_NAME(") :]
    assert ahead.index("ptx::wait_for_grids();") < ahead.index("ptx::launch_dependents();")


def test_a_cursor_that_begins_early_waits_before_it_writes():
    text = source.read("decode/cursor.cuh")
    body = text[text.index("bool begin_early(") : text.index("Leaf next() {")]
    assert body.count("ptx::wait_for_grids();") == 2  # at once, or behind the first unit
    assert body.rindex("ptx::wait_for_grids();") < body.index("keep_record();")


def test_a_symbol_says_what_it_is_for():
    named = special("forward_simt", call(d=64, mask=masks.causal(), dropout=0.5, seed=1))
    assert named.name == "forward_simt__f32_d64_dv64__mask_dropout__q64_kv64"
    assert named.name.isidentifier()
    assert f"#define KERNEL_NAME {named.name}\n" in source.source(named)


# -- one kernel for all numbers -------------------------------------------------------------------


@given(
    offset=st.integers(-(2**40), 2**40),
    left=st.integers(0, 2**20),
    right=st.integers(0, 2**20),
    cap=st.floats(0.5, 50),
    slope=st.floats(0, 2),
    lengths=st.tuples(st.integers(2, 300), st.integers(2, 300)),
    batch=st.integers(2, 5),
)
def test_numbers_and_lengths_are_not_in_the_text(offset, left, right, cap, slope, lengths, batch):
    def text(offset, left, right, cap, slope, lengths, batch):
        mask = masks.causal(offset) & masks.window(left, right)
        chain = [
            scores.softcap(cap),
            scores.score(lambda s, b, h, i, j: s - slope * abs(i - j)),
            scores.alibi(np.zeros(4, np.float32)),
        ]
        request = call((batch,), 4, *lengths, mask=mask, score_mod=chain, scale=cap)
        return source.source(special("forward_simt", request))

    wanted = text(3, 4, 5, 1.5, 0.25, (16, 24), 2)
    assert text(offset, left, right, cap, slope, lengths, batch) == wanted


def test_different_structures_have_different_texts():
    options = [
        {},
        {"mask": masks.causal()},
        {"mask": ~masks.causal()},
        {"mask": masks.causal() & masks.prefix(2)},
        {"score_mod": scores.softcap(2.0)},
        {"mask": masks.mask(lambda b, h, i, j: j > i)},
    ]
    texts = {source.source(special("forward_simt", call(**each))) for each in options}
    assert len(texts) == len(options)


def test_one_array_is_one_table():
    array = np.arange(4)
    mask = masks.mask(lambda b, h, i, j: lookup(array)[h] + lookup(array)[h % 2] > i)
    made = trees(call(mask=mask))
    generated = generate(made.allowed, made.classes)
    assert len(generated.arrays) == 1
    assert generated.arrays[0] is array


# -- parameters -----------------------------------------------------------------------------------

OFFSETS = """
#include <cstddef>
{prelude}
#include "{header}"
extern "C" long long layout(int what, int field) {{
  switch (what * 1000 + field) {{
{cases}
  }}
  return -1;
}}
"""


def test_the_layouts_are_those_of_the_header(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed, and this test compiles a CUDA header with it")
    layouts = [("Params", params.params(3, 2, 4)), ("Summed", params.Layout(params.SUMMED))]
    layouts += [(f"{name.title()}Params", params.rowwise(name)) for name in params.ROWWISE]
    layouts += [("Operand", params.Layout(params.OPERAND)), ("Table", params.Layout(params.TABLE))]
    cases = []
    for what, (struct, layout) in enumerate(layouts):
        cases.append(f"    case {what * 1000}: return sizeof({struct});")
        for n, name in enumerate(layout.dtype.names):
            cases.append(f"    case {what * 1000 + n + 1}: return offsetof({struct}, {name});")
    prelude = "constexpr int NUM_INTS = 3, NUM_FLOATS = 2, NUM_TABLES = 4;"
    text = OFFSETS.format(
        prelude=prelude, header=FOLDER / "common/params.cuh", cases="\n".join(cases)
    )
    file, library = tmp_path / "layout.cpp", tmp_path / "layout.so"
    file.write_text(text)
    flags = ["-std=c++17", "-shared", "-fPIC", "-Wno-invalid-offsetof"]
    subprocess.run([compiler, *flags, str(file), "-o", str(library)], check=True)
    measured = ctypes.CDLL(str(library)).layout
    measured.restype = ctypes.c_longlong
    for what, (struct, layout) in enumerate(layouts):
        assert measured(what, 0) == layout.dtype.itemsize == layout.size, struct
        for n, name in enumerate(layout.dtype.names):
            assert measured(what, n + 1) == layout.dtype.fields[name][1], (struct, name)


def test_kinds_are_numbered_as_everywhere():
    assert tuple(params.KINDS) == tables.KINDS
    assert params.MAX_AXES == tables.MAX_AXES
    header = (FOLDER / "common/params.cuh").read_text()
    for name, number in params.KINDS.items():
        assert f"KIND_{name.upper()} = {number}" in header
    assert f"MAX_LEAD = {params.MAX_LEAD};" in header
    assert f"MAX_PARTS = {params.MAX_PARTS};" in header


def test_element_types_are_numbered_as_in_the_table():
    text = (FOLDER / "common/number.cuh").read_text()
    elements = re.findall(r"struct Element<(\d+)> \{.*?KIND = KIND_(\w+);\n\}", text, re.DOTALL)
    assert elements == [(str(dtype.code), dtype.name.upper()) for dtype in DTYPES.values()]
    for code, name in elements:
        assert f"IS_{name} = STORAGE == {code}" in text
    widths = re.findall(r"using stored = ([a-z ]+);.*?using accumulated = (\w+);", text, re.DOTALL)
    stored = {2: "unsigned short", 4: "float", 8: "double"}
    computed = {"float32": "float", "float64": "double"}
    assert widths == [
        (stored[dtype.itemsize], computed[dtype.accumulator]) for dtype in DTYPES.values()
    ]


def test_packed_bytes_are_what_was_told():
    layout = params.params(2, 1, 1)
    table = params.Table(1 << 40, (5,) + (0,) * 7, (-8,) + (0,) * 7)
    packed = layout.pack({
        "q": params.Operand(123, (1, 2, 3, 4), -5, 6, 7), "scale": 0.5, "heads": 9,
        "ints": [-1], "floats": [2.5], "tables": [table], "seed": 2**64 - 1,
    })  # fmt: skip
    read = np.frombuffer(packed, layout.dtype)[0]
    q = [read["q"][name].tolist() for name in read["q"].dtype.names]
    assert q == [123, [1, 2, 3, 4], -5, 6, 7]
    assert (read["scale"], read["heads"], read["seed"]) == (0.5, 9, 2**64 - 1)
    assert read["ints"].tolist() == [-1, 0]
    assert read["tables"][0]["strides"][0] == -8
    assert read["v"]["data"] == 0
    with pytest.raises(KeyError, match="sorted"):
        layout.pack({"sorted": 1})
    with pytest.raises(ValueError, match="ints: got 3 entries"):
        layout.pack({"ints": [1, 2, 3]})


# -- leading axes ---------------------------------------------------------------------------------


@given(st.data())
def test_joined_axes_reach_the_same_elements(data):
    lead = tuple(data.draw(st.lists(st.integers(1, 3), max_size=5)))
    arrays = {}
    for name in "abc":
        shape = tuple(data.draw(st.sampled_from([1, n])) for n in lead)
        shape = shape[data.draw(st.integers(0, len(lead))) :]
        order = data.draw(st.permutations(range(len(shape))))
        flat = np.zeros((*(shape[axis] for axis in order), 2, 3, 4), np.float32)
        back = [order.index(axis) for axis in range(len(shape))]
        arrays[name] = flat.transpose([*back, *(len(shape) + n for n in range(3))])
    try:
        joined = strides.lead_of(lead, {name: (x, 3) for name, x in arrays.items()})
    except validate.ArgumentError:
        assert sum(n > 1 for n in lead) > params.MAX_LEAD
        return
    assert np.prod(joined.sizes, dtype=int) == np.prod(lead, dtype=int)
    for name, x in arrays.items():
        wide = np.broadcast_to(x, (*lead, *x.shape[-3:]))
        for flat in range(int(np.prod(lead, dtype=int))):
            wanted = np.dot(np.unravel_index(flat, lead), wide.strides[: len(lead)]) if lead else 0
            place = np.unravel_index(flat, joined.sizes)
            assert np.dot(place, joined.strides[name]) * x.itemsize == wanted


def test_too_many_leading_axes_are_an_error():
    x = np.zeros((2,) * 8, np.float32).transpose(4, 3, 2, 1, 0, 5, 6, 7)
    with pytest.raises(validate.ArgumentError, match="at most 4"):
        strides.lead_of((2,) * 5, {"q": (x, 3)})


def test_divisors_are_written_out_and_other_numbers_are_not():
    def generated(width, offset):
        mask = masks.mask(lambda b, h, i, j: (i // width == j // width) | (i % width < j + offset))
        q = np.zeros((1, 300, 64), np.float16)
        made = trees(validate.call(q, q, q, Options(mask=mask)))
        return generate(made.allowed, made.classes, short=True)

    one, other, third = generated(48, 3), generated(48, 5), generated(50, 3)
    assert (one.ints, other.ints) == ((3,), (5,))
    assert one.functions == other.functions != third.functions
    assert "(static_cast<unsigned int>(static_cast<int>(at.i)) / 48u);" in one.functions.source
    assert "at.i) >> 6;" in generated(64, 3).functions.source
    assert "at.i) & 63;" in generated(64, 3).functions.source


@pytest.mark.parametrize("short", [False, True])
def test_divisions_that_a_shift_or_no_sign_cannot_do_stay_what_they_are(short):
    def generated(mask):
        q = np.zeros((1, 300, 64), np.float16)
        made = trees(validate.call(q, q, q, Options(mask=masks.mask(mask))))
        return generate(made.allowed, made.classes, short=short).functions.source

    source = generated(lambda b, h, i, j: (i - j) // 48 < (i - j) % -16)
    assert source.count("= floor_divide(") >= 1
    assert source.count("= remainder(") >= 1
    body = source[: source.index("tile_class")]
    assert ">>" not in body
    assert "/ 48u" not in body
    # A difference may be below 0; a shift rounds it down as well.
    assert ">> 4;" in generated(lambda b, h, i, j: (i - j) // 16 < 3)
