"""Keywords that a function does not have: a hint, and no other error is touched."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from cupyflash import (
    ArgumentTypeError,
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_varlen_vjp,
    attention_vjp,
    execute,
    masks,
    plan,
    scores,
    workspace_size,
)  # fmt: skip
from cupyflash.problem import keywords

WITH_OPTIONS = [
    attention, attention_backward, attention_vjp, attention_varlen, attention_varlen_backward,
    attention_varlen_vjp, plan, workspace_size,
]  # fmt: skip


@pytest.mark.parametrize("function", WITH_OPTIONS)
def test_a_wrong_keyword_is_found_before_anything_else(function):
    with pytest.raises(ArgumentTypeError, match=r"causal: .* say mask=masks.causal\(\)") as caught:
        function(1, causal=True)  # which lacks arguments, too
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("function", WITH_OPTIONS)
def test_other_type_errors_are_those_of_python(function):
    with pytest.raises(TypeError, match="missing") as caught:
        function(mask=None)
    assert type(caught.value) is TypeError


@pytest.mark.parametrize("function", WITH_OPTIONS)
def test_too_many_arguments_by_position(function):
    wanted = ", ".join(
        name
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is each.POSITIONAL_OR_KEYWORD
    )
    message = (
        rf"^got 12 arguments by position; expected \d, {wanted}, and every option by its name: "
    )
    with pytest.raises(ArgumentTypeError, match=message) as caught:
        function(*[None] * 12)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (masks.causal(), "say mask=mask"),
        (scores.softcap(30.0), "say score_mod=score"),
        (np.ones((2, 2), bool), r"say mask=array \(bool, True = attend\), or bias=array"),
        (True, "the options are mask, score_mod, bias, "),
    ],
)
def test_an_option_by_position(value, remedy):
    with pytest.raises(ArgumentTypeError, match=f"expected 3, q, k, v, .*: {remedy}"):
        attention(*[np.ones((2, 3))] * 3, value)


@pytest.mark.parametrize("name", sorted(keywords._OTHER_NAMES))
def test_keywords_of_other_libraries(name):
    """Every hint comes from a function without that keyword, and names keywords that there are."""
    without = [each for each in WITH_OPTIONS if name not in inspect.signature(each).parameters]
    hint = keywords._OTHER_NAMES[name]
    with pytest.raises(ArgumentTypeError) as caught:
        without[0](**{name: None})
    assert str(caught.value) == f"{name}: this function has no such argument; {hint}."
    everything = {word for each in WITH_OPTIONS for word in inspect.signature(each).parameters}
    assert set(re.findall(r"\b(\w+)=", hint)) <= everything
    for space, called in re.findall(r"\b(masks|scores)\.(\w+)", hint):
        assert called in {"masks": masks, "scores": scores}[space].__all__


def test_a_misspelt_keyword():
    with pytest.raises(ArgumentTypeError, match=r"scal: .*; did you mean scale\? Otherwise, "):
        attention(*[np.ones((2, 3))] * 3, scal=1.0)


def test_a_type_error_inside_a_call_passes(monkeypatch):
    def fail(*_, **__):
        raise TypeError("forward() got an unexpected keyword argument 'causal'")

    monkeypatch.setattr(execute, "forward", fail)
    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        attention(*[np.ones((2, 3))] * 3)
    assert type(caught.value) is TypeError


TAKEN = {name: hint for name, hint in keywords._OTHER_NAMES.items() if hint.endswith(" take it")}


@pytest.mark.parametrize("name", sorted(TAKEN))
def test_functions_that_a_hint_names_take_the_keyword(name):
    by_name = {each.__name__: each for each in WITH_OPTIONS}
    named = re.findall(r"attention\w*", TAKEN[name])
    assert named
    if "varlen forms" in TAKEN[name]:
        named += [each.replace("attention", "attention_varlen") for each in named]
    for each in named:
        assert name in inspect.signature(by_name[each]).parameters, each
