"""Names of other libraries, and misspelt ones: the error says what to call instead."""

from __future__ import annotations

import inspect
import re
import types

import pytest

import cupyflash
from cupyflash import attention, elsewhere, masks, scores
from cupyflash.similar import did_you_mean

TABLES = {cupyflash: elsewhere.PACKAGE, masks: elsewhere.MASKS, scores: elsewhere.SCORES}
NAMES = [(module, name) for module, table in TABLES.items() for name in table]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_names_of_other_libraries(module: types.ModuleType, name: str) -> None:
    if module is cupyflash and hasattr(module, name):  # a subpackage that a test has imported
        assert name in {"bench", "testing"}
        return
    assert name not in module.__all__
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    wanted = f"module {module.__name__!r} has no attribute {name!r}; {TABLES[module][name]}."
    assert str(caught.value) == wanted
    assert caught.value.name == name


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_remedies_name_what_there_is(module: types.ModuleType, name: str) -> None:
    """Every function that a remedy calls exists, and takes the keywords that it shows."""
    remedy = TABLES[module][name]
    for space, called in re.findall(r"\b(masks|scores)\.(\w+)", remedy):
        assert called in getattr(cupyflash, space).__all__
    known = {*inspect.signature(attention).parameters, "offset"}
    for called in re.findall(r"(?<![.\w])(\w+)\(", remedy):
        assert called in cupyflash.__all__, called
        known |= {*inspect.signature(getattr(cupyflash, called)).parameters}
    for keyword in re.findall(r"\b(\w+)=", remedy):
        assert keyword in known


@pytest.mark.parametrize(
    ("module", "name", "meant"),
    [
        (cupyflash, "atention", "attention or attention_vjp"),
        (masks, "Causal", "causal"),
        (masks, "segment", "segments"),
        (scores, "softcaps", "softcap"),
    ],
)
def test_misspelt_names(module: types.ModuleType, name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"{name}'; did you mean {meant}\?$"):
        getattr(module, name)


def test_names_like_nothing() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        _ = cupyflash.xyzzy
    assert did_you_mean("xyzzy", ["causal"]) == ""
