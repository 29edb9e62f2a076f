"""Keywords that a function does not have: a hint, and no other error is touched."""

from __future__ import annotations

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
    plan,
    workspace_size,
)  # fmt: skip

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
    with pytest.raises(TypeError, match="positional argument") as caught:
        function(*[None] * 12)
    assert type(caught.value) is TypeError


def test_a_type_error_inside_a_call_passes(monkeypatch):
    def fail(*_, **__):
        raise TypeError("forward() got an unexpected keyword argument 'causal'")

    monkeypatch.setattr(execute, "forward", fail)
    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        attention(*[np.ones((2, 3))] * 3)
    assert type(caught.value) is TypeError
