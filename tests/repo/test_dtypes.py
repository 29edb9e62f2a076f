"""The table of element types: true of NumPy's types, and the only list of them in the package."""

from __future__ import annotations

import ast
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from each import holds_for_each

from cupyflash.arrays import dtypes
from cupyflash.arrays.dtypes import DTYPES

PACKAGE = Path(__file__).resolve().parents[2] / "cupyflash"
NAMES = {"float16", "bfloat16", "float32", "float64"}


def test_names_and_numbers_tell_them_apart():
    assert set(DTYPES) == NAMES
    for field in ("name", "code", "suffix", "kind"):
        assert len({getattr(dtype, field) for dtype in DTYPES.values()}) == len(NAMES)
    assert [dtype.code for dtype in DTYPES.values()] == list(range(len(NAMES)))


@pytest.mark.parametrize("name", DTYPES)
def test_numbers_are_those_of_numpy(name):
    dtype = DTYPES[name]
    held = np.dtype(getattr(ml_dtypes, name, None) or name)
    facts = ml_dtypes.finfo(held)
    assert held.name == dtype.name
    assert held.itemsize == dtype.itemsize
    assert float(facts.eps) == 2 * dtype.unit_roundoff
    assert float(facts.max) == dtype.largest
    subnormal = float(facts.smallest_subnormal) / 2
    assert dtype.underflow == (subnormal if name == "float16" else float(facts.smallest_normal))
    assert dtypes.accumulator(held) == np.promote_types(held, np.float32)


def lists_all(node: ast.AST) -> bool:
    """Whether the texts of an expression name all types, one after the other."""
    texts = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
    words = " ".join(text for text in texts if isinstance(text, str)).split()
    words = [word.strip(".,;:()'\"") for word in words if word not in ("or", "and")]
    return any(set(words[n : n + len(NAMES)]) == NAMES for n in range(len(words)))


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """Return the expressions that are statements of their own."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def listings(path: Path) -> list[int]:
    """Return the lines of texts and displays that name all types."""
    tree = ast.parse(path.read_text())
    left_out = docstrings(tree)
    kinds = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.JoinedStr, ast.Constant)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, kinds) and node not in left_out and lists_all(node)
    ]


def test_no_other_module_lists_them():
    def rule(path):
        if path != Path(dtypes.__file__):
            assert listings(path) == []

    holds_for_each(sorted(PACKAGE.rglob("*.py")), rule)


def test_listings_are_seen(tmp_path):
    source = tmp_path / "source.py"
    source.write_text(
        '"""Of float16, bfloat16, float32 or float64."""\n'
        'A = ("float16", "bfloat16", "float32", "float64")\n'
        'B = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}\n'
        'C = f"{A}: expected float16, bfloat16, " "float32 or float64."\n'
        'D = ("float16", "float32")\n'
        'E = "int8 float16 bfloat16 float32 float64".split()\n'
        'F = "float16 and bfloat16 by tensor cores, float32 and float64 without"\n'
    )
    assert set(listings(source)) == {2, 3, 4, 6}
