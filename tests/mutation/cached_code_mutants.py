"""Faults of caches of codes, each with the test that is there to find it.

They are as those in `cache_mutants`.
"""

from __future__ import annotations

from .cache_mutants import Fault

ROW, NEW_ROW, CODE = (f"kernels_cu/common/{x}.cuh" for x in ("cache_row", "code_row", "code"))
ON_GPU, ON_CPU = "cuda/test_cached_codes.py::test_", "cpu/test_cached_codes.py::test_"
MEANING, EVERY = "attention_is_that_over_what_codes_mean", "every_code_means_its_number"
STEPS, SIZES = "steps_of_few_rows_have_the_bits_of_drafts_of_many", "head_sizes_and_strides"
DECODE, LEAVES, PRODUCTS = (
    f"kernels_cu/{x}"
    for x in ("sm80/decode_sm80.cu", "warp/decode_slots.cuh", "warp/fragment_codes.cuh")
)
APPEND = "kernels_cu/rowwise/append.cu"
PAGES, NEW = "pages_and_drafts_and_packed_queries", "new_rows_have_the_codes_of_quantize"
CACHE_CPU, CODES_CPU, APPEND_CPU, ROWS_CPU = (
    f"reference/cpu/{x}.py" for x in ("cache", "codes", "append", "rows_product")
)
GROUPS = "groups_of_columns_have_their_scales"

ON_A_GPU = {
    "the scales of another head": Fault(
        ROW,
        "layout::offset(side.scales, entry, head, true)",
        "layout::offset(side.scales, entry, head > 0 ? head - 1 : 0, true)",
        ON_GPU + MEANING,
        "int8",
    ),
    "the scales of another entry": Fault(
        ROW,
        "layout::offset(side.scales, entry, head, true)",
        "head * side.scales.head",
        ON_GPU + MEANING,
        "int8",
    ),
    "the scale of the next row": Fault(
        ROW,
        "scales_ + at.offset(side_.scale_page, side_.scales.row)",
        "scales_ + at.offset(side_.scale_page, side_.scales.row) + side_.scales.row",
        ON_GPU + MEANING,
        "int8",
    ),
    "pages of scales are as far apart as those of codes": Fault(
        ROW,
        "at.offset(side_.scale_page,",
        "at.offset(side_.page,",
        ON_GPU + PAGES + "_change_no_bit",
        "int8",
    ),
    "no scale": Fault(
        ROW,
        "code::product(scale, code::value<FORMAT>(byte >> d % IN_BYTE * BITS))",
        "code::value<FORMAT>(byte >> d % IN_BYTE * BITS)",
        ON_GPU + EVERY,
        "int8",
    ),
    "halves of a byte are swapped": Fault(
        ROW,
        "byte >> d % IN_BYTE * BITS",
        "byte >> (IN_BYTE - 1 - d % IN_BYTE) * BITS",
        ON_GPU + EVERY,
        "int4",
    ),
    "the scale of the first group": Fault(
        ROW, "d / INT4_GROUP * group", "0 * group", ON_GPU + MEANING, "int4"
    ),
    "the smallest codes are flushed": Fault(
        CODE, "if (size < 1u << F::FRACTION) {", "if (size < 1) {", ON_GPU + EVERY, "float8"
    ),
    "a code that is not finite is a number": Fault(
        CODE, "if (size >= F::SPECIAL)", "if (size > 0x7f)", ON_GPU + EVERY, "float8"
    ),
    "no code is negative": Fault(
        CODE,
        "static_cast<int>(bits << UNUSED) >> UNUSED",
        "static_cast<int>(bits << UNUSED >> UNUSED)",
        ON_GPU + EVERY,
        "int",
    ),
    "rows that a task has are skipped": Fault(
        DECODE, "task.rows > BLOCK_Q / 2;", "task.rows > BLOCK_Q;", ON_GPU + STEPS, "int8"
    ),
    "all keys have the weights of the first": Fault(
        PRODUCTS, "      weights[0].rotate();\n", "", ON_GPU + MEANING, "int8"
    ),
    "values of int8 are parts of codes": Fault(
        LEAVES, "    factors.other *= VALUE_UNIT;\n", "", ON_GPU + MEANING, "int8"
    ),
    "wide values of int8 are parts of codes": Fault(
        DECODE, "    decode_slots::apply_unit(leaf);\n", "", ON_GPU + SIZES, "int8 and 256"
    ),
    "scores of int8 are parts of codes": Fault(
        PRODUCTS,
        "c[r][n] * UNIT<CODES, Queries> * own[n];",
        "c[r][n] * own[n];",
        ON_GPU + MEANING,
        "int8",
    ),
    "the sign of another byte": Fault(
        PRODUCTS, "N == 0 ? 0xa280u", "N == 0 ? 0xb290u", ON_GPU + EVERY, "float8"
    ),
    "codes that are not finite are not seen": Fault(
        PRODUCTS, "word ^ (word + LAST)", "word & (word + LAST)", ON_GPU + EVERY, "float8"
    ),
    "the largest of half the columns": Fault(
        NEW_ROW, "lanes > 0; lanes /= 2", "lanes > 1; lanes /= 2", ON_GPU + NEW, "int8"
    ),
    "new halves of a byte are swapped": Fault(
        NEW_ROW, "<< m * BITS", "<< (IN_BYTE - 1 - m) * BITS", ON_GPU + NEW, "int4"
    ),
    "codes are made before the rotation": Fault(
        NEW_ROW, "if (column >= 2 * by.pairs)", "if (column >= 0)", ON_GPU + NEW, "int8"
    ),
    "scales go to another head": Fault(
        NEW_ROW, "head * scales.head", "0 * scales.head", ON_GPU + NEW, "int8"
    ),
    "scales go to the first row of a page": Fault(
        NEW_ROW, "at.row * scales.row", "0 * scales.row", ON_GPU + NEW, "int8"
    ),
    "all groups have one place for their scale": Fault(
        NEW_ROW, "scales += to.group", "scales += 0", ON_GPU + NEW, "int4"
    ),
    "columns of results lie as those of keys": Fault(
        PRODUCTS, "PIECE<VALUE_CODES> / 4", "PIECE<KEY_CODES> / 4", ON_GPU + MEANING, "int8-int4"
    ),
    "new values have the format of keys": Fault(
        APPEND, "if (VALUE_CODES != KEY_CODES && of_v)", "if (false)", ON_GPU + NEW, "int8-int4"
    ),
}

ON_A_CPU = {
    "the scales of another head": Fault(
        CACHE_CPU,
        "page * k.scale_page + h * k.scale_head",
        "page * k.scale_page + 0 * k.scale_head",
        ON_CPU + MEANING,
        "int8",
    ),
    "the scale of the next row": Fault(
        CACHE_CPU,
        "v_scales[place + n] = v_scale + n * v.scale_row",
        "v_scales[place + n] = v_scale + (n + 1) * v.scale_row",
        ON_CPU + MEANING,
        "int8",
    ),
    "the scales of another entry": Fault(
        CACHE_CPU, "            page = owner\n", "            page = 0\n", ON_CPU + MEANING, "int8"
    ),
    "values have the format of keys": Fault(
        "cupyflash/rowwise.py",
        "(encoding.v_form, encoding.v_scale)",
        "(encoding.k_form, encoding.v_scale)",
        ON_CPU + MEANING,
        "int8-int4",
    ),
    "no scale": Fault(
        CODES_CPU,
        "            value = builder.fmul(value, scale)\n",
        "",
        ON_CPU + EVERY,
        "int8",
    ),
    "halves of a byte are swapped": Fault(
        CODES_CPU, "n // 2 + n % 2 * count", "n // 2 + (1 - n % 2) * count", ON_CPU + EVERY, "int4"
    ),
    "the lower half of every byte": Fault(
        CODES_CPU, "d % 2, scale, target", "0, scale, target", ON_CPU + EVERY, "int4"
    ),
    "the scale of the first group": Fault(
        CODES_CPU,
        "begin // source.group * source.scale_group",
        "0 * source.scale_group",
        ON_CPU + MEANING,
        "int4",
    ),
    "no scale where codes are read in place": Fault(
        ROWS_CPU,
        "builder.fmul(emit_code(builder, kind, held, self.lanes), scale)",
        "emit_code(builder, kind, held, self.lanes)",
        ON_CPU + MEANING,
        "int8",
    ),
    "keys in place have the scale of the first group": Fault(
        ROWS_CPU,
        "offset = builder.mul(n, step)",
        "offset = builder.mul(INT(0), step)",
        ON_CPU + GROUPS,
    ),
    "values in place have the scale of the first group": Fault(
        ROWS_CPU,
        "builder.mul(builder.sdiv(column, group), step)",
        "builder.mul(INT(0), step)",
        ON_CPU + GROUPS,
    ),
    "a code that is not finite is a number": Fault(
        CODES_CPU, "{E4M3: 0x7F, E5M2: 0x7C}", "{E4M3: 0x80, E5M2: 0x80}", ON_CPU + EVERY, "float8"
    ),
    "new rows without their scale": Fault(
        APPEND_CPU, "            _put(of.array, page, row, scale)\n", "", ON_CPU + NEW, "int8"
    ),
    "a scale for all columns": Fault(
        APPEND_CPU,
        "quantize(new, new.shape[-1] // groups,",
        "quantize(new, new.shape[-1],",
        ON_CPU + NEW,
        "int4",
    ),
}

FAULTS = {f"gpu: codes: {name}": x for name, x in ON_A_GPU.items()} | {
    f"cpu: codes: {name}": x for name, x in ON_A_CPU.items()
}
