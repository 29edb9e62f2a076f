"""The quick half of the tests uses all that is public; the thorough half says why it may wait."""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import conftest
import pytest
from each import holds_for_each
from halves import mostly_thorough

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
HELPERS = sorted((ROOT / "tests" / "helpers").glob("*.py"))
MODULES = ["cupyflash"] + [
    f"cupyflash.{x}" for x in "analysis bench distributed expr figures masks scores testing".split()
]
FEWEST_WORDS = 3  # of a reason


class Uses:
    """What pieces of a file use of cupyflash, as "module.name"."""

    def __init__(self, tree: ast.Module) -> None:
        self.imported: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for each in node.names:
                    # A public module shows what its private ones have.
                    module = ".".join(node.module.split(".")[:2])
                    self.imported[each.asname or each.name] = f"{module}.{each.name}"

    def __call__(self, node: ast.AST) -> set[str]:
        found = {self.imported.get(x.id, "") for x in ast.walk(node) if isinstance(x, ast.Name)}
        for x in ast.walk(node):
            if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name | ast.Attribute):
                inside = x.value.id if isinstance(x.value, ast.Name) else x.value.attr
                found.add(f"{inside}.{x.attr}")
                found.add(f"cupyflash.{inside}.{x.attr}")
        return found


def used_by_quick_tests(path: Path) -> set[str]:
    """Return what a file's quick tests use, and what the functions use that they call."""
    tree = ast.parse(path.read_text())
    uses = Uses(tree)
    functions = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    waiting = {
        name
        for name, node in functions.items()
        if name.startswith("test_")
        and not any(is_the_marker(x) for each in node.decorator_list for x in ast.walk(each))
    }
    others = [x for x in tree.body if not isinstance(x, ast.FunctionDef)]
    found = set().union(*map(uses, others))
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        found |= uses(functions[name])
        called = {x.id for x in ast.walk(functions[name]) if isinstance(x, ast.Name)}
        waiting |= called & functions.keys() - seen
    return found


def is_the_marker(node: ast.AST) -> bool:
    """Whether this is `pytest.mark.thorough`."""
    return isinstance(node, ast.Attribute) and node.attr == "thorough"


def public_functions() -> list[str]:
    found = []
    for name in MODULES:
        module = importlib.import_module(name)
        found += [f"{name}.{x}" for x in module.__all__ if inspect.isfunction(getattr(module, x))]
    return found


def test_the_quick_half_uses_every_public_function():
    used = set().union(*map(used_by_quick_tests, FILES))
    for path in HELPERS:  # which hand on what they import
        tree = ast.parse(path.read_text())
        used |= Uses(tree)(tree) | set(Uses(tree).imported.values())
    assert len(public_functions()) > 70
    assert [name for name in public_functions() if name not in used] == []


def test_a_thorough_test_says_why():
    def rule(path):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        calls = [x for x in nodes if isinstance(x, ast.Call)]
        reasons = [x.args[0] for x in calls if is_the_marker(x.func) and len(x.args) == 1]
        assert len(reasons) == sum(map(is_the_marker, nodes)), "the marker takes a reason"
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id == "mostly_thorough":
                reasons += [x.value for x in call.keywords if x.arg == "why"]
        for why in reasons:
            assert len(ast.literal_eval(why).split()) >= FEWEST_WORDS

    holds_for_each(FILES, rule)


def test_quick_is_what_pytest_selects_by_itself():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    place = options["addopts"].index("-m")
    assert options["addopts"][place + 1] == conftest.QUICK


def test_ci_runs_the_other_half():
    command = "pytest -n 2 -m thorough"
    for name in (".ci/run", "README.md", "CONTRIBUTING.md", "docs/install.md"):
        assert command in (ROOT / name).read_text(), name


def test_workers_that_collect_from_either_end_have_one_order():
    """Otherwise xdist refuses to run anything."""
    names = ["a/test_b.py", "a/test_c.py", "a/test_faults.py", "d/test_a.py"]

    def order(from_the_end):
        config = SimpleNamespace(workerinput={conftest.FROM_THE_END: from_the_end})
        folder = mock.Mock(spec=pytest.Dir, config=config)
        made = conftest.pytest_make_collect_report(folder)
        next(made)
        with pytest.raises(StopIteration) as stopped:
            made.send(SimpleNamespace(result=names[:]))
        files = stopped.value.value.result
        assert files == (names[::-1] if from_the_end else names)
        items = [SimpleNamespace(path=Path(name), n=n) for name in files for n in range(2)]
        conftest.pytest_collection_modifyitems(config, items)
        return [(str(item.path), item.n) for item in items]

    assert order(False) == order(True)
    assert order(True)[0] == ("a/test_faults.py", 0)  # a long one


def test_some_cases_of_a_matrix_are_quick():
    made = mostly_thorough("size", [(1, 2), (3, 4), (5, 6)], quick=[(3, 4)], why="they are alike")
    first, second, third = made.args[1]
    assert second == (3, 4)
    for param, size in ((first, (1, 2)), (third, (5, 6))):
        assert param.values == (size,)
        assert [(x.name, x.args) for x in param.marks] == [("thorough", ("they are alike",))]
    both = mostly_thorough(
        ("d", "d_v"), [(1, 2), (3, 4)], quick=lambda x: x[0] == 3, why="they are alike"
    )
    assert both.args[1][0].values == (1, 2)
    for wrong in ([(7, 8)], [(1, 2), (7, 8)]):
        with pytest.raises(AssertionError, match="quick"):
            mostly_thorough("size", [(1, 2), (3, 4)], quick=wrong, why="they are alike")
