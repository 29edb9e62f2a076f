"""Faults of quantize and hadamard, each with the test that is there to find it.

They are as those in `cache_mutants`.
"""

from __future__ import annotations

from .cache_mutants import Fault

CODE = "kernels_cu/common/code.cuh"
QUANTIZE, HADAMARD = (f"kernels_cu/rowwise/{x}.cu" for x in ("quantize", "hadamard"))
ROWS_OF_CODES = "cuda/test_quantize.py::test_"
CODES, EVERY = ROWS_OF_CODES + "codes_are_those_of_the_cpu", ROWS_OF_CODES + "every_number_of_16"
TINY = ROWS_OF_CODES + "where_numbers_of_float32_are_subnormal"
SPREAD = ROWS_OF_CODES + "rows_are_spread_within_the_bound"

ON_A_GPU = {
    "subnormal numbers are not lifted": Fault(
        CODE, "LIFTED_BELOW = -60", "LIFTED_BELOW = -126", TINY
    ),
    "the largest magnitude is that of one lane": Fault(
        QUANTIZE, "lanes > 0; lanes /= 2", "lanes > 1; lanes /= 2", CODES, "float32"
    ),
    "the largest magnitude is that of the first columns": Fault(
        QUANTIZE,
        "    largest = largest_of(values, largest);\n",
        "    largest_of(values, largest);\n",
        CODES,
        "float32",
    ),
    "ties go up": Fault(
        CODE, "- 1 + (size >> SHIFT & 1)", "- 1 + 1", EVERY + "_bits", "float8 and float16"
    ),
    "the smallest codes are rounded as normal ones": Fault(
        CODE, "power_of_two(1 - F::BIAS)))", "power_of_two(-F::BIAS)))", CODES, "float32"
    ),
    "an infinity is a number": Fault(
        CODE, "magnitude(x) == INFINITE", "magnitude(x) > INFINITE", EVERY + "_bits", "float16"
    ),
    "a NaN has no scale of its own": Fault(
        CODE, "if (largest > INFINITE) {", "if (false) {", CODES, "float64"
    ),
    "halves of a byte are swapped": Fault(
        QUANTIZE,
        "<< m * code::Format<FORMAT>::BITS",
        "<< (IN_BYTE - 1 - m) * code::Format<FORMAT>::BITS",
        EVERY + "_bits",
        "int4",
    ),
    "the scale of the group before": Fault(
        QUANTIZE,
        "scale + group * p.scale.col",
        "scale + (group > 0 ? group - 1 : 0) * p.scale.col",
        CODES,
        "float32",
    ),
    "signs of the columns behind": Fault(
        HADAMARD, "(c + n) % 4 & 1)", "(c + n + 1) % 4 & 1)", SPREAD, "96"
    ),
    "a barrier less": Fault(
        HADAMARD, "  __syncthreads();\n  passes<", "  passes<", SPREAD, "dtype and 64"
    ),
    "the inverse has its signs first": Fault(
        HADAMARD, "if (p.inverse == 0) flip", "if (p.inverse != 0) flip", SPREAD, "96"
    ),
    "no factor but a power of two": Fault(
        HADAMARD,
        "if constexpr (FACTOR > 1) multiply",
        "if constexpr (false) multiply",
        SPREAD,
        "96",
    ),
    "a row too many": Fault(
        HADAMARD, "if (row >= p.rows) return;", "if (row > p.rows) return;", SPREAD, "96"
    ),
}

QUANTIZE_CPU, HADAMARD_CPU = (f"reference/cpu/{x}.py" for x in ("quantize", "hadamard"))
OF_CODES, OF_ROWS = (f"frontend/test_{x}.py::test_" for x in ("quantize", "hadamard"))
IS_SPECIFIED = OF_CODES + "codes_are_those_of_the_specification"

ON_A_CPU = {
    "codes of 8 bits are rounded down": Fault(
        QUANTIZE_CPU,
        "half = (1 << (shift - 1)) - 1 + (size >> shift & 1)",
        "half = 0",
        OF_CODES + "every_number_of_16_bits",
    ),
    "scales are too small": Fault(
        QUANTIZE_CPU, "LEAST = -126", "LEAST = -127", OF_CODES + "the_smallest_scale"
    ),
    "columns of the group before": Fault(
        QUANTIZE_CPU,
        "high = encode(x[row, 2 * d + 1],",
        "high = encode(x[row, 2 * d],",
        IS_SPECIFIED,
    ),
    "the transpose of the small matrix": Fault(
        HADAMARD_CPU,
        "(factor[m] >> types.int64(n)) & 1",
        "(factor[n] >> types.int64(m)) & 1",
        OF_ROWS + "rows_are_multiplied_by_an_orthogonal_matrix",
        "96",
    ),
    "signs of every fourth column": Fault(
        HADAMARD_CPU,
        "np.stack(words, axis=-1)",
        "np.stack(words)",
        OF_ROWS + "rows_are_multiplied_by_an_orthogonal_matrix",
        "96",
    ),
}

FAULTS = {f"gpu: {name}": x for name, x in ON_A_GPU.items()} | {
    f"cpu: {name}": x for name, x in ON_A_CPU.items()
}
