"""Layers do not ask which kind of call they have: its rows and its encoding answer for it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "cupyflash"
MOST = 3  # files that may ask one question
# Question -> attributes that are asked for, and classes whose instances are.
ATTRIBUTES = {
    "packed": {"packed"},
    "cache": {"cache"},
    "codes": {"codes", "held_codes", "encoding", "has_codes", "operands_are_codes"},
}
CLASSES = {
    "packed": {"PackedRows", "DenseRows", "Packed", "Dense"},
    "cache": {"CachedRows", "Cached", "Cache"},
    "codes": {"Encoding", "Fp8Encoding", "CacheEncoding", "Fp8", "CacheCodes", "NoCodes"},
}
# Attributes of an encoding that are empty if there are no codes.
OF_CODES = {"operands", "scales", "form", "k_form", "v_form", "k_scale", "v_scale"}
# What has another attribute of this name: two codes in a byte, an array by packed rows, a flag of
# the object itself.
OTHERS = {"form", "alignment", "special", "value", "self"}


def names_in(node: ast.AST) -> list[str]:
    """Return the names of an expression ``a.b.c``, the last one first."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [*names, node.id] if isinstance(node, ast.Name) else names


def about(node: ast.AST, question: str) -> bool:
    """Whether an expression is what a question is about."""
    names = names_in(node)
    if question == "codes" and names[:1] and names[0] in OF_CODES:
        names = names[1:]
    return bool(names) and names[0] in ATTRIBUTES[question] and not OTHERS & {*names[1:2]}


def conditions(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Go through the expressions of which the truth decides something."""
    for node in nodes:
        if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
            yield node.test
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Call) and names_in(node.func) == ["bool"]:
            yield from node.args
        elif isinstance(node, ast.Match):
            yield node.subject


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """Return the nodes of a module."""
    return list(ast.walk(ast.parse(source)))


def asks(source: str, question: str) -> bool:
    """Whether a module asks which kind of call it has."""
    nodes = nodes_of(source)
    forwards = {
        id(node)
        for function in nodes
        if isinstance(function, ast.FunctionDef) and function.name == question
        for node in ast.walk(function)
    }
    for node in nodes:
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            right = node.comparators[0]
            is_none = isinstance(right, ast.Constant) and right.value is None
            if is_none and question != "packed" and about(node.left, question):
                return True
        if isinstance(node, ast.Call) and names_in(node.func) in (["isinstance"], ["type"]):
            named = {name for arg in node.args[1:] for each in ast.walk(arg)
                     for name in names_in(each)}  # fmt: skip
            if named & CLASSES[question]:
                return True
        if isinstance(node, ast.Call) and names_in(node.func) == ["getattr"]:
            constants = {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
            if question in constants:
                return True
        if question == "packed" and isinstance(node, ast.Attribute) and id(node) not in forwards:
            names = names_in(node)
            if names[0] == "packed" and names[1:] and names[1] not in OTHERS:
                return True
    # A local flag may have any name.
    return question != "packed" and any(
        about(node, question) for node in conditions(nodes) if isinstance(node, ast.Attribute)
    )


def modules() -> list[Path]:
    """Return the modules of the package, without those that test kernels or read command lines.

    Options and words of commands have these names, too.
    """
    folders = {"testing", "commands"}
    return [path for path in ROOT.rglob("*.py") if not folders & {*path.relative_to(ROOT).parts}]


@pytest.mark.parametrize("question", ATTRIBUTES)
def test_few_modules_ask(question):
    asking = [p.relative_to(ROOT).as_posix() for p in modules() if asks(p.read_text(), question)]
    assert len(asking) <= MOST, "\n".join(asking)


@pytest.mark.parametrize(
    ("question", "source"),
    [
        ("packed", "lead = () if call.problem.packed else call.problem.lead"),
        ("packed", "self._packed = problem.packed"),
        ("packed", "if isinstance(call.rows, rows.PackedRows): pass"),
        ("packed", "flag = getattr(sizes, 'packed', False)"),
        ("cache", "if call.cache is not None: pass"),
        ("cache", "assert problem.rows.cache is not None"),
        ("cache", "x = isinstance(rows, (DenseRows, CachedRows))"),
        ("codes", "part = 'forward' if call.codes is None else 'forward_codes'"),
        ("codes", "if call.encoding.operands: pass"),
        ("codes", "if not checked.cache.encoding.scales: pass"),
        ("codes", "known = bool(call.encoding.scales) and device"),
    ],
)
def test_a_question_is_found(question, source):
    assert asks(source, question)


@pytest.mark.parametrize(
    ("question", "source"),
    [
        ("packed", "if form.packed == 1: pass"),
        ("packed", "def packed(self):\n    return self.rows.packed"),
        ("cache", "capacity = call.cache.capacity"),
        ("codes", "addresses = dict(call.encoding.scales)"),
    ],
)
def test_what_is_no_question_is_not_found(question, source):
    assert not asks(source, question)
