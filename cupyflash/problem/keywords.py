"""Arguments that a public function does not have: the error says what to write instead."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from ..arrays.device_arrays import is_device_array
from ..errors import ArgumentTypeError
from ..hints.did_you_mean import nearest
from ..masks import Mask
from ..scores import Score
from .options import NAMES

_OPTIONS = (
    f"the options are {', '.join(NAMES)}; attention also takes return_lse, out, lse_out, "
    "and attention_backward dlse, deterministic, bias_gradient, grads_out, workspace"
)
_ARRAY_MASK = "say mask=array (bool, True = attend), or bias=array (added to the scores)"
_CAUSAL = "say mask=masks.causal()"
_DROPOUT = "say dropout=p, seed=number"
_LENGTHS = "say mask=masks.lengths(k_lengths), with the number of keys of every batch entry"
_NO_BACKEND = "leave it out: the arrays' type chooses, NumPy's the CPU and CuPy's the GPU"
_NO_LONGEST = "leave it out: the longest sequence is found from the offsets"
_NO_WEIGHTS = (
    "leave it out: the weights are never stored. With return_lse=True they are "
    "exp(logits - lse[..., None])"
)
_CACHED = "attention_cached, plan_cached and explain_cached take it, for keys in a cache"
_PAGED = "attention_cached takes page numbers, (B, N), as table"
_SCALE = "say scale=number"
_SEED = "say seed=number"
_SEGMENTS = "say mask=masks.segments(ids)"
_SINK = "say sink=array, of one logit per query head"
_SOFTCAP = "say score_mod=scores.softcap(c)"
_TILES = "leave it out: plan(q, k, v) says which tiles are chosen, and why"
_WINDOW = "say mask=masks.window(left, right), in which None is unbounded"
_OFFSETS = (
    "attention_varlen takes offsets_{0}: 0, and the running sum of the sequences' lengths, on "
    "arrays of shape (H, total, D)"
)
_OTHER_NAMES = {  # names in other libraries, or in other functions of this one
    "alibi_slopes": "say score_mod=scores.alibi(slopes)",
    "attention_mask": _ARRAY_MASK,
    "attn_bias": "say bias=array",
    "attn_mask": _ARRAY_MASK,
    "average_attn_weights": _NO_WEIGHTS,
    "backend": _NO_BACKEND,
    "block_k": _TILES,
    "block_kv": _TILES,
    "block_mask": "say mask=masks.mask(function), which finds the blocks by itself",
    "block_q": _TILES,
    "block_table": _PAGED,
    "cache_seqlens": "attention_cached takes lengths, which count the new tokens, too",
    "causal": _CAUSAL,
    "check": "attention_vjp and the functions attention_varlen take it",
    "cu_seqlens": _OFFSETS.format("q and offsets_k"),
    "cu_seqlens_k": _OFFSETS.format("k"),
    "cu_seqlens_kv": _OFFSETS.format("k"),
    "cu_seqlens_q": _OFFSETS.format("q"),
    "deterministic": "attention_backward, attention_vjp and their varlen forms take it",
    "dlse": "attention_backward, attention_varlen_backward and the functions vjp take it",
    "dropout_p": _DROPOUT,
    "dropout_prob": _DROPOUT,
    "dropout_rate": _DROPOUT,
    "dropout_rng": _SEED,
    "dropout_seed": _SEED,
    "enable_gqa": "leave it out: grouped-query attention is read from the shapes",
    "grads_out": "attention_backward and attention_varlen_backward take it",
    "implementation": _NO_BACKEND,
    "is_causal": _CAUSAL,
    "k_descale": "attention, attention_cached and append take k_scale",
    "key": "say k=array",
    "key_padding_mask": _LENGTHS,
    "key_value_seq_lengths": _LENGTHS,
    "kv_dtype": _CACHED,
    "lengths": _CACHED,
    "local_window_size": _WINDOW,
    "logit_cap": _SOFTCAP,
    "logits_soft_cap": _SOFTCAP,
    "lse_out": "attention and attention_varlen take it",
    "max_seqlen_k": _NO_LONGEST,
    "max_seqlen_kv": _NO_LONGEST,
    "max_seqlen_q": _NO_LONGEST,
    "need_weights": _NO_WEIGHTS,
    "num_splits": "leave it out: keys are divided by themselves, and no bit depends on how",
    "offsets_k": "attention_varlen and its backward take it",
    "offsets_q": "attention_varlen and its backward take it",
    "out": "attention and attention_varlen take it",
    "page": "explain_cached takes it",
    "page_table": _PAGED,
    "q_descale": "attention and attention_varlen take q_scale",
    "query": "say q=array",
    "query_seq_lengths": "say mask=masks.lengths(k_lengths, q_lengths)",
    "reductions": "attention takes it; for packed sequences, call reduce with the rows of each",
    "return_attn_probs": _NO_WEIGHTS,
    "return_lse": "attention, attention_vjp and their varlen forms take it",
    "return_softmax_lse": "say return_lse=True",
    "return_weights": _NO_WEIGHTS,
    "rng": _SEED,
    "s_aux": _SINK,
    "score": "say score_mod=",
    "segment_ids": _SEGMENTS,
    "seqused_k": _LENGTHS,
    "shared": _CACHED,
    "shared_prefix_len": "attention_cached takes shared, the positions that all entries share",
    "sinks": _SINK,
    "sliding_window": _WINDOW,
    "sm_scale": _SCALE,
    "soft_cap": _SOFTCAP,
    "softcap": _SOFTCAP,
    "softmax_scale": _SCALE,
    "table": _CACHED,
    "v_descale": "attention, attention_cached and append take v_scale",
    "value": "say v=array",
    "window": _WINDOW,
    "window_size": _WINDOW,
    "workspace": "attention_backward and attention_varlen_backward take it",
}

P = ParamSpec("P")
R = TypeVar("R")


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Turn an argument that a function does not have into an error that names the remedy.

    Nothing is checked before the call: only if Python cannot bind the arguments are they compared
    with the signature.
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
                        raise ArgumentTypeError(
                            f"{name}: this function has no such argument; {_remedy(name, known)}."
                        ) from None
                by_position = [
                    each for each in known.values() if each.kind is each.POSITIONAL_OR_KEYWORD
                ]
                if len(args) > len(by_position):
                    names = ", ".join(each.name for each in by_position)
                    more = args[len(by_position)]
                    raise ArgumentTypeError(
                        f"got {len(args)} arguments by position; expected {len(by_position)}, "
                        f"{names}, and every option by its name: {_named(more, known)}."
                    ) from None
            raise

    return call


def _remedy(name: str, known: Mapping[str, inspect.Parameter]) -> str:
    hint = _OTHER_NAMES.get(name)
    if hint and set(re.findall(r"say (\w+)=", hint)) <= set(known):
        return hint
    near = nearest(name, known, 1)
    takes = _OPTIONS if set(NAMES) <= set(known) else f"it takes {', '.join(known)}"
    return f"did you mean {near[0]}? Otherwise, {takes}" if near else takes


def _named(value: Any, known: Mapping[str, inspect.Parameter]) -> str:
    """Return how to write a value that was passed by position."""
    if isinstance(value, Score):
        return "say score_mod=score"
    if isinstance(value, Mask):
        return "say mask=mask"
    if hasattr(value, "__array__") or hasattr(value, "__dlpack__") or is_device_array(value):
        return _ARRAY_MASK
    options = [each.name for each in known.values() if each.kind is each.KEYWORD_ONLY]
    return f"the options are {', '.join(options)}"
