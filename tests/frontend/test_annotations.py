"""Annotations of public names: they can be read, and overloads say what the functions say."""

from __future__ import annotations

import importlib
import inspect
import runpy
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType

import pytest

MODULES = (
    "cupyflash", "cupyflash.analysis", "cupyflash.bench", "cupyflash.distributed",
    "cupyflash.expr", "cupyflash.figures", "cupyflash.masks", "cupyflash.scores",
    "cupyflash.streamed", "cupyflash.testing",
)  # fmt: skip
# The kit is for other people's kernels, whose arrays and results may be anything.
MAY_SAY_ANY = ("cupyflash.testing.",)


def functions_of(owner: type) -> Iterator[tuple[str, object]]:
    for name, value in vars(owner).items():
        if name.startswith("_") and name not in {"__init__", "__call__"}:
            continue
        found = getattr(value, "fget", None) or getattr(value, "function", None) or value
        found = getattr(found, "__func__", found)
        if inspect.isfunction(found):
            yield f"{owner.__name__}.{name}", found


def public() -> dict[str, object]:
    """Every public class and function, and what classes have."""
    found: dict[str, object] = {}
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                found[f"{module.__name__}.{name}"] = value
                for inner, function in functions_of(value):
                    found[f"{module.__name__}.{inner}"] = function
            elif callable(value):
                found[f"{module.__name__}.{name}"] = value
    return found


PUBLIC = public()
OVERLOADED = [name for name, x in PUBLIC.items() if typing.get_overloads(inspect.unwrap(x))]


def test_these_are_all():
    assert len(PUBLIC) > 250
    assert len(OVERLOADED) == 20


@pytest.mark.parametrize("name", PUBLIC)
def test_annotations_can_be_read(name):
    hints = typing.get_type_hints(PUBLIC[name])
    if not name.startswith(MAY_SAY_ANY):
        anything = [each for each, hint in hints.items() if hint is typing.Any]
        assert not anything, f"{name} says nothing of {anything}"


def typed_keywords(hint: object) -> dict[str, object]:
    """The keywords of ``**options: Unpack[TypedDict]``."""
    (table,) = typing.get_args(hint)
    return typing.get_type_hints(table)


@pytest.mark.parametrize("name", OVERLOADED)
def test_overloads_have_the_arguments_of_the_function(name):
    """One by one or by ``**options``, with the same types; some decide the type of the result."""
    function = PUBLIC[name]
    own = typing.get_type_hints(function)
    returned = own.pop("return")
    told = typing.get_overloads(inspect.unwrap(function))
    results = set()
    for overload in told:
        hints = typing.get_type_hints(overload)
        result = hints.pop("return")
        results |= set(typing.get_args(result)) if isinstance(result, UnionType) else {result}
        if "options" in hints:
            hints |= typed_keywords(hints.pop("options"))
        assert hints.keys() == own.keys()
        narrower = {each for each in own if hints[each] != own[each]}
        assert narrower <= {"q", "return_lse", "results", "rotary", "out", "reductions"}, narrower
        for parameter in inspect.signature(overload).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "return_lse":
                default = inspect.signature(function).parameters[parameter.name].default
                assert parameter.default in (default, inspect.Parameter.empty)
    assert len(results) > 1 or "return_lse" not in own
    assert returned is not typing.Any


def test_the_users_program_runs(capsys):
    """`.ci/typecheck` checks its types."""
    program = Path(__file__).parents[1] / "typing" / "user_code.py"
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out.startswith("(2, 4, 40, 16)\nPlan(")
