"""How CUDA C++ writes the operations of expressions, and what they cost."""

from __future__ import annotations

# How an operation is written, by the type of its result, with the names of its operands. Functions
# that are not part of C++ are in common/lookup.cuh and common/expression.cuh. A tile's class
# computes with bounds of integers, which may be at the ends of 64 bits.
FLOAT = {
    "add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "divide": "{0} / {1}",
    "negative": "-{0}",
    "absolute": "fabs({0})",
    "minimum": "minimum({0}, {1})",
    "maximum": "maximum({0}, {1})",
    "power": "pow({0}, {1})",
    "exp": "exp({0})",
    "exp2": "exp2({0})",
    "log": "log({0})",
    "tanh": "tanh_of({0})",
    "sigmoid": "sigmoid({0})",
    "erf": "erf({0})",
    "sqrt": "sqrt({0})",
    "sin": "sin({0})",
    "cos": "cos({0})",
    "to_float": "static_cast<{type}>({0})",
    "where": "{0} ? {1} : {2}",
}
# Integer operations whose results may not fit although their operands do.
ARITHMETIC = {
    "add", "subtract", "multiply", "negative", "absolute", "floor_divide", "remainder",
    "left_shift",
}  # fmt: skip
INT = {
    "add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "negative": "-{0}",
    "absolute": "{0} < 0 ? -{0} : {0}",
    "minimum": "{0} < {1} ? {0} : {1}",
    "maximum": "{0} > {1} ? {0} : {1}",
    "floor_divide": "floor_divide({0}, {1})",
    "remainder": "remainder({0}, {1})",
    "left_shift": "left_shift({0}, {1})",
    "right_shift": "right_shift({0}, {1})",
    "floor": "floor_to_int({0})",
    "to_int": "static_cast<{type}>({0})",
    "where": "{0} ? {1} : {2}",
}
BOUND = INT | {
    "add": "saturating_add({0}, {1})",
    "subtract": "saturating_subtract({0}, {1})",
    "multiply": "saturating_multiply({0}, {1})",
    "left_shift": "saturating_left_shift({0}, {1})",
    "negative": "saturating_subtract(0LL, {0})",
    "absolute": "{0} < 0 ? saturating_subtract(0LL, {0}) : {0}",
}
BOOL = {
    "less": "{0} < {1}",
    "less_equal": "{0} <= {1}",
    "equal": "{0} == {1}",
    "not_equal": "{0} != {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_xor": "{0} != {1}",
    "logical_not": "!{0}",
    "where": "{0} ? {1} : {2}",
}

# Operations that cost more than a multiplication, with their approximate cost; and those of
# divisions by a positive number that is written out: a power of two, another one.
STEPS = {
    "exp": 4, "log": 12, "tanh": 16, "divide": 12, "floor": 8, "floor_divide": 24, "remainder": 24,
    "exp2": 4, "sigmoid": 16, "erf": 20, "sqrt": 8, "sin": 24, "cos": 24, "power": 40,
}  # fmt: skip
SHIFT, UNSIGNED = 1, 4
