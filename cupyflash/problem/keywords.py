"""Keywords that a public function does not have: the error says what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..errors import ArgumentTypeError
from .options import NAMES

_OPTIONS = (
    f"the options are {', '.join(NAMES)}; beside them attention takes return_lse, out, lse_out, "
    "and attention_backward dlse, deterministic, grads_out, workspace"
)
_OTHER_NAMES = {  # of other libraries, or of other functions of this one
    "alibi_slopes": "say score_mod=scores.alibi(slopes)",
    "attention_mask": "say mask=array (bool), or bias=array (added to the scores)",
    "attn_bias": "say bias=array",
    "attn_mask": "say mask=array (bool), or bias=array (added to the scores)",
    "causal": "say mask=masks.causal()",
    "dropout_p": "say dropout=p, seed=number",
    "enable_gqa": "leave it out: grouped-query attention is read from the shapes",
    "is_causal": "say mask=masks.causal()",
    "key_padding_mask": "say mask=masks.lengths(k_lengths)",
    "lse_out": "attention and attention_varlen take it",
    "out": "attention and attention_varlen take it",
    "return_lse": "attention, attention_vjp and their varlen forms take it",
    "sm_scale": "say scale=number",
    "softcap": "say score_mod=scores.softcap(c)",
    "softmax_scale": "say scale=number",
    "window_size": "say mask=masks.window(left, right)",
}

P = ParamSpec("P")
R = TypeVar("R")


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Make a keyword that a function does not have an `ArgumentTypeError` that names the remedy.

    Nothing is looked at before the call: only where Python could not bind its arguments are the
    keywords compared with the signature.
    """

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*args, **keywords)
        except TypeError as error:
            here = error.__traceback__
            if here is not None and here.tb_next is None:  # `function` was never entered
                known = inspect.signature(function).parameters
                for name in keywords:
                    if name not in known:
                        remedy = _OTHER_NAMES.get(name, _OPTIONS)
                        raise ArgumentTypeError(
                            f"{name}: no argument of this function; {remedy}."
                        ) from None
            raise

    return call
