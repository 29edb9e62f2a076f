"""Mutants of the code generators in cupyflash/expr/cuda.py: of their templates and of their Python.

A mutant is executed as a module of its own; what its `generate` writes is compiled and run.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from emulator import build

from cupyflash import lookup, masks
from cupyflash.errors import ArgumentError
from cupyflash.expr import (  # fmt: skip
    absolute,
    exp,
    floor,
    len_k,
    len_q,
    log,
    maximum,
    tanh,
    where,
)
from cupyflash.expr.bind import bind
from cupyflash.expr.derivative import derivative
from cupyflash.expr.functions import POSITIONS, SCORE
from cupyflash.expr.interval import tile_class
from cupyflash.expr.nodes import as_expr, convert
from cupyflash.masks import flat_sizes

from . import operators
from .expressions import SIZES, Make, MaskCheck, ScoreCheck, _Generated
from .operators import ARITHMETIC, RELATIONS, Mutant

H, I, J = POSITIONS[1:]
FILE = "cupyflash/expr/cuda.py"
ROOT = Path(__file__).resolve().parents[2]

# In templates and other text: what may stand in the place of what.
_TEXTS = (
    ("{0}", "{1}"), ("{1}", "{0}"), ("{2}", "{1}"), ("minimum(", "maximum("),
    ("maximum(", "minimum("), ("saturating_add(", "saturating_subtract("),
    ("saturating_subtract(", "saturating_add("), ("saturating_multiply(", "saturating_add("),
    ("fabs(", "("), ("exp(", "log("), ("log(", "exp("), ("tanh(", "("), ("floor_divide(",
    "remainder("), ("remainder(", "floor_divide("), ("floor_to_int(", "(long long)("),
    ("multiply_rounded({0}, {1})", "{0} * {1}"), ("static_cast<{type}>", ""),
    ("static_cast<long long>", ""), ("0LL", "1LL"), ("true", "false"), ("false", "true"),
    ("infinity", "not_a_number"), ("not_a_number", "infinity"), (" != 0", " == 0"),
    ("775807LL - 1", "775807LL - 2"), ("saturating_multiply({0}, {1})", "{0} * {1}"),
    ("saturating_add({0}, {1})", "{0} + {1}"), ("p.ints", "p.floats"), ("p.floats", "p.ints"),
)  # fmt: skip
_WORDS = {
    "True": "False", "False": "True", "and": "or", "or": "and", "not": "", "any": "all",
    "reversed": "list", "_BOUND": "_INT", "allowed": "classes", "changed": "slope",
}  # fmt: skip


# Decorators, and what fields begin with where nothing is said of them.
_FIXED = re.compile(r"@|    \w+: [\w\[\], .]+ = ")


def mutants(file: str = FILE) -> list[Mutant]:
    """Return every mutant of a file of Python, in the order of their places.

    In the generators' own file, text is changed that becomes CUDA; in others text is for people.
    """
    text = (ROOT / file).read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[tuple[int, int, str], Mutant] = {}
    lines = text.splitlines()
    changes = [*_changes(text, starts, file == FILE), *_sides_and_clamps(text, starts)]
    for operator, start, end, after in changes:
        line = text.count("\n", 0, start) + 1
        if _FIXED.match(lines[line - 1]):
            continue
        made = Mutant(file, line, operator, start, end, text[start:end], after)
        if made.before != after:
            found.setdefault((start, end, after), made)
    return [found[key] for key in sorted(found)]


def _tokens(text: str, starts: list[int]) -> Iterator[tuple[int, str, int, int]]:
    """Yield kinds, texts and places; an f-string is one string, as it is up to Python 3.11."""
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind, string = token.type, token.string
        start = starts[token.start[0] - 1] + token.start[1]
        end = starts[token.end[0] - 1] + token.end[1]
        if tokenize.tok_name[kind] == "FSTRING_START":
            opened.append(start)
        elif tokenize.tok_name[kind] == "FSTRING_END":
            start = opened.pop()
            kind, string = tokenize.STRING, text[start:end]
        if not opened:
            yield kind, string, start, end


def _changes(text: str, starts: list[int], in_texts: bool) -> Iterator[tuple[str, int, int, str]]:
    previous = ""
    for kind, string, start, end in _tokens(text, starts):
        if kind == tokenize.STRING:
            documents = string.startswith(('"""', 'r"""')) or "{" in previous
            if in_texts and (not documents or previous in (":", ",")):
                yield from _in_text(string, start)
        elif kind == tokenize.OP:
            for table in (RELATIONS, ARITHMETIC):
                if string != "|":  # of types
                    for after in table.get(string, ()):
                        yield "relation", start, end, after
        elif kind == tokenize.NUMBER and string.isdigit():
            for other in {int(string) + 1, abs(int(string) - 1)}:
                yield "constant", start, end, str(other)
        elif kind == tokenize.NAME and string in _WORDS:
            yield "name", start, end, _WORDS[string]
        if kind not in (tokenize.NL, tokenize.COMMENT):
            previous = string


def _sides_and_clamps(text: str, starts: list[int]) -> Iterator[tuple[str, int, int, str]]:
    """One side of a condition is always taken; a call of `min` or `max` loses an operand."""
    lines = text.splitlines(keepends=True)

    def span(node: ast.expr) -> tuple[int, int]:
        places = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        start, end = (
            starts[line - 1] + len(lines[line - 1].encode()[:column].decode())
            for line, column in places
        )
        return start, end

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield "side", *span(node.test), "False"
            if not isinstance(node, ast.While):
                yield "side", *span(node.test), "True"
        elif isinstance(node, ast.Call) and len(node.args) > 1 and not node.keywords:
            function = text[slice(*span(node.func))]
            if function.rpartition(".")[2] not in operators.BOUNDS:
                continue
            operands = [text[slice(*span(each))] for each in node.args]
            for n in range(len(operands)):
                left = ", ".join(operands[:n] + operands[n + 1 :])
                yield (
                    "clamp",
                    *span(node),
                    f"({left})" if len(operands) == 2 else f"{function}({left})",
                )


def _in_text(string: str, start: int) -> Iterator[tuple[str, int, int, str]]:
    if string.startswith('"""') or not re.search(r"[{(!<-]|LL|true|false| != 0", string):
        return
    for before, after in _TEXTS:
        for match in re.finditer(re.escape(before), string):
            yield "template", start + match.start(), start + match.end(), after
    if "{0}" in string:
        for made in operators.mutants(FILE, string[1:-1]):
            first = start + 1 + made.start
            operand = string[made.start] == "{"  # the number of an operand
            if made.operator != "name" and not operand:
                yield made.operator, first, first + len(made.before), made.after


def module_of(text: str) -> types.ModuleType:
    """Execute a changed text as a module beside the original."""
    module = types.ModuleType("cupyflash.expr.mutant")
    module.__package__ = "cupyflash.expr"
    sys.modules[module.__name__] = module  # where dataclasses look
    exec(compile(text, FILE, "exec"), module.__dict__)
    return module


LITERALS = (
    (True, "true"), (False, "false"), (0, "0LL"), (7, "7LL"), (-7, "(-7LL)"),
    (-(2**63), "(-9223372036854775807LL - 1)"), (-(2**63) + 1, "(-9223372036854775807LL)"),
    (0.5, "static_cast<float>(0x1.0000000000000p-1)"), (float("inf"), "infinity<float>()"),
    (float("-inf"), "-infinity<float>()"), (float("nan"), "not_a_number<float>()"),
)  # fmt: skip


_NUMBERS = lookup(np.linspace(0, 1, 50).astype(np.float32))
_IDS = lookup(np.arange(50, dtype=np.int32))
# A mask and a score: what the mask and the score with its slope cost, how many numbers are the same
# for a head, and whether scores read by place; and with short positions.
_EFFORTS: dict[tuple[Any, Any], tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    (None, 3.0 * tanh(SCORE * 0.5)): ((0, 22, 3, False, True),) * 2,
    (None, 3.0 * tanh(SCORE / 3.0)): ((0, 33, 3, False, True),) * 2,
    (I >= J, SCORE - _NUMBERS[H] * absolute(I + len_k - len_q - J)): (
        (1, 7, 1, False, False), (1, 5, 1, False, False),
    ),
    (None, SCORE + _NUMBERS[J] * 2.0): ((0, 3, 1, True, False),) * 2,
    (_IDS[I] == _IDS[J], SCORE * (_NUMBERS[H] + len_q * 0.5)): ((3, 1, 2, False, True),) * 2,
    (None, exp(-SCORE) + log(maximum(SCORE, 0.125))): ((0, 35, 2, False, True),) * 2,
    (I // 7 == J % 5, SCORE + floor(SCORE) * 1.0): (
        (49, 11, 1, False, False), (9, 11, 1, False, False),
    ),
}  # fmt: skip


def effort(make: Make) -> str | None:
    """What a kernel is told of the cost of its functions, on which only its speed hangs."""
    for (mask, score), wanted in _EFFORTS.items():
        allowed = None if mask is None else bind(as_expr(mask), flat_sizes(SIZES))
        changed = bind(as_expr(score), flat_sizes(SIZES))
        slope = convert(derivative(changed), "float")
        for short in (False, True):
            has = make(allowed, None, changed, slope, short=short).functions
            found = has.mask_steps, has.score_steps, has.num_given, has.score_reads, has.has_dscore
            if found != wanted[short]:
                return f"{score} takes {found}"
    return None


def structure(make: Make) -> str | None:
    """Numbers and arrays are told at run time: another number is no other text."""
    texts = []
    for offset, size in ((3, 40), (-17, 40)):
        table = lookup(np.arange(size) + offset)
        root = bind(
            (masks.causal(offset) & masks.window(offset + 20, None)).expr
            & masks.mask(lambda b, h, i, j: (table[i] > table[j % 40]) | (i * 0.5 > offset)).expr,  # noqa: B023
            flat_sizes(SIZES),
        )
        made = make(root, tile_class(root))
        texts.append(made.functions.source)
        if len(made.arrays) != 1 or made.functions.num_tables != 1:
            return "a table stands twice"
        has = made.functions
        if (has.num_ints, has.num_floats) != (len(made.ints), len(made.floats)):
            return "numbers are miscounted"
        if (has.has_mask, has.has_score, has.has_dscore) != (True, False, False):
            return "flags are wrong"
    if texts[0] != texts[1]:
        return "a number is part of the text"
    for half in texts[0].split("int tile_class"):
        lines = [x.partition(" = ")[2] for x in half.splitlines() if x.startswith("  const")]
        if len(set(lines)) != len(lines):
            return "an operation stands twice"
    made = make(
        bind(as_expr((I + 3 > J * 5) & (I * 0.5 > 2.5)), flat_sizes(SIZES)),
        bind(as_expr(where(I + 7 > J, 2, 1)), flat_sizes(SIZES)),
    )
    if (made.ints, made.floats) != ((5, 3), (2.5, 0.5)):
        return "numbers that are told are not the mask's own, in their order"
    made = make(changed=bind(as_expr(SCORE * 2.0 + 7.0), flat_sizes(SIZES)))
    if sorted(made.floats) != [2.0, 7.0]:
        return "numbers that are told are not the score's own"
    # Products on which an integer or a condition hangs, however deep; others may be contracted.
    for root, products in (
        ((I * 0.5 + 1.0 > J * 0.3), 2),
        (where(floor((I * 0.5 + 0.25) * 3.0) > J, I, J) > 3, 2),
        (SCORE * 2.0 + SCORE * I, 0),
        (where(SCORE * 3.0 > 1.0, SCORE * 2.0, SCORE * 5.0), 1),
        (SCORE * 2.0 + floor(SCORE * 2.0) * 3.0, 1),
        (SCORE * 2.0 - floor(SCORE / 2.0 + SCORE) * 3.0, 0),
    ):
        bound = bind(as_expr(root), flat_sizes(SIZES))
        made = make(bound) if bound.type == "bool" else make(changed=bound)
        if made.functions.source.count("multiply_rounded(") != products:
            return f"products of {root}"
        has = made.functions
        flags = (has.has_mask, has.has_score, has.has_dscore)
        if flags != (bound.type == "bool", bound.type == "float", False):
            return "flags are wrong"
    wrong = effort(make)
    if wrong is not None:
        return wrong
    chosen = where(J > 3, True, False)
    if make(bind(as_expr(chosen), flat_sizes(SIZES))).floats:
        return "a condition is told as a number"
    literal = make.__globals__["_literal"]
    for node, text in LITERALS:
        if literal(as_expr(node), "float") != text:
            return f"{node} is written otherwise"
    for axes, fails in ((8, False), (9, True)):
        try:
            array = np.zeros((1,) * axes, np.int32)
            make(bind(lookup(array)[(0,) * axes] > POSITIONS[3], flat_sizes(SIZES)))
        except ArgumentError:
            if not fails:
                return "8 axes are too many"
        else:
            if fails:
                return "9 axes are not too many"
    return None


def checks(make: Make) -> list[_Generated]:
    """Return the values that generated code must compute."""
    return [MaskCheck(make), ScoreCheck("float32", make), ScoreCheck("float64", make)]


def same_output(first: list[_Generated], other: list[_Generated]) -> bool:
    """Whether two generators wrote the same texts and numbers."""
    return all(
        a.compose(build.read) == b.compose(build.read)
        and [x.ints for x in a.made] == [x.ints for x in b.made]
        and [x.floats for x in a.made] == [x.floats for x in b.made]
        and [[id(y) for y in x.arrays] for x in a.made]
        == [[id(y) for y in x.arrays] for x in b.made]
        for a, b in zip(first, other, strict=True)
    )
