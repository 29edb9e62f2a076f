"""Calls over a cache as PyTorch operators, for torch.compile and for make_fx.

Masks and score changes are stored under a number, as in `operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentTypeError
from . import cached_calls, operators, tensors
from .operands import Settings


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int],
    *,
    table: torch.Tensor | None,
    offsets_q: torch.Tensor | Sequence[int] | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    kv_dtype: Any,
    shared: int,
    mask: Any,
    score_mod: Any,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float | None,
    return_lse: bool,
) -> Any:
    """Return what `cupyflash.torch.attention_cached` does, as a node of a graph."""
    if type(return_lse) is not bool:
        raise ArgumentTypeError(f"return_lse: got {return_lse!r}; expected True or False.")
    q, k, v = tensors.to_autocast(q, k, v)
    if isinstance(mask, np.ndarray):
        mask = torch.as_tensor(mask, device=q.device)
    table = _tensor("table", table, q)
    dense = mask if isinstance(mask, torch.Tensor) else None
    named = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink, "mask": dense, "table": table}
    named |= {"k_scale": k_scale, "v_scale": v_scale}
    tensors.check(named, ("q", "bias", "sink"))
    tensors.refuse_gradients(named, cached_calls.NO_GRADIENT)
    tables, numbers = operators.numbered(
        Settings(mask=None if dense is not None else mask, score_mod=score_mod, scale=scale)
    )
    ends, length = _lengths(lengths, q)
    rows = _tensor("offsets_q", offsets_q, q)
    out, lse = _attention(
        q, k, v, bias, sink, dense, ends, table, rows, k_scale, v_scale,
        tables, numbers, length, _text(kv_dtype), shared, return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def append(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int],
    **options: Any,
) -> torch.Tensor | None:
    """Do what `cupyflash.torch.append` does, as a node of a graph; rotations break it."""
    if any(options[name] is not None for name in ("rotary", "q", "positions")):
        return _rotated(k_new, v_new, k, v, lengths, **options)
    named = {"k_new": k_new, "v_new": v_new, "k": k, "v": v}
    tensors.check(named, ("k_new", "v_new"))
    tensors.refuse_gradients(named, cached_calls.NO_GRADIENT)
    ends, length = _lengths(lengths, k)
    table, offsets = (_tensor(name, options[name], k) for name in ("table", "offsets"))
    _append(
        k_new, v_new, k, v, options["k_scale"], options["v_scale"], ends, table, offsets, length,
        _text(options["kv_dtype"]), options["shared"],
    )  # fmt: skip
    return None


_rotated = torch.compiler.disable(
    cached_calls.append, reason="rotations are not operators of torch.compile"
)


def _lengths(given: Any, like: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Return lengths as a tensor; or None, and the one number that they are."""
    if isinstance(given, int | torch.SymInt) and not isinstance(given, bool):
        return None, given
    return _tensor("lengths", given, like), -1


def _tensor(name: str, given: Any, like: torch.Tensor) -> torch.Tensor | None:
    """Return numbers, if there are some, as a tensor beside another one."""
    if given is None or isinstance(given, torch.Tensor):
        return given
    if not isinstance(given, list | tuple | np.ndarray):
        raise ArgumentTypeError(
            f"{name}: got {type(given).__name__}; expected a tensor or a sequence of integers."
        )
    return torch.as_tensor(given, device=like.device)


def _text(kv_dtype: Any) -> str:
    """Return the names of codes as one text; of a pair, one may be none."""
    names = cached_calls.names_of(kv_dtype)
    if isinstance(names, tuple):
        return ",".join(name or "" for name in names)
    return names or ""


def _names(text: str) -> Any:
    names = tuple(name or None for name in text.split(","))
    return names if len(names) > 1 else names[0]


@torch.library.custom_op("cupyflash::attention_cached", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    mask: torch.Tensor | None,
    lengths: torch.Tensor | None,
    table: torch.Tensor | None,
    offsets_q: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    tables: Sequence[torch.Tensor],
    numbers: Sequence[int],
    length: int,
    kv_dtype: str,
    shared: int,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    settings = operators.settings_of(tables, numbers, 0.0, False, 0)
    out, lse = cached_calls.attention(
        q,
        k,
        v,
        length if lengths is None else lengths,
        table=table,
        offsets_q=offsets_q,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=_names(kv_dtype),
        shared=shared,
        mask=settings.mask if mask is None else mask,
        score_mod=settings.score_mod,
        bias=bias,
        sink=sink,
        scale=settings.scale,
        return_lse=True,
    )
    placed, no_lse = _empty(q, out.shape[-1], False)
    if out.stride() == placed.stride():
        placed = out
    else:
        placed.copy_(out)
    return placed, lse if return_lse else no_lse


@_attention.register_fake
def _(q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[Any, Any]:
    *_, kv_dtype, _, return_lse = rest
    names = _names(kv_dtype)
    last = names[-1] if type(names) is tuple else names
    return _empty(q, v.shape[-1] * (2 if last == "int4" else 1), return_lse)


def _empty(q: torch.Tensor, columns: int, has_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised results; without `has_lse` the second one has no elements."""
    out = tensors.empty_in_order_of(q, (*q.shape[:-1], columns))
    rows = q.shape[:-1] if has_lse else (0,)
    return out, q.new_empty(rows, dtype=tensors.lse_dtype(q))


@torch.library.custom_op("cupyflash::append", mutates_args=("k", "v", "k_scale", "v_scale"))
def _append(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    lengths: torch.Tensor | None,
    table: torch.Tensor | None,
    offsets: torch.Tensor | None,
    length: int,
    kv_dtype: str,
    shared: int,
) -> None:
    cached_calls.append(
        k_new,
        v_new,
        k,
        v,
        length if lengths is None else lengths,
        table=table,
        offsets=offsets,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=_names(kv_dtype),
        shared=shared,
    )


@_append.register_fake
def _(*_: Any) -> None:
    """Nothing is made."""
