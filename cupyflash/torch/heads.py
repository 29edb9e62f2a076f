"""Heads that PyTorch's own attention broadcasts, and `cupyflash.torch.attention` does not."""

from __future__ import annotations

import torch

from ..errors import ArgumentError


def broadcast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a query, a key and a value whose heads fit, as PyTorch makes them fit.

    Nothing is copied, except for a key and a value in groups of different sizes.

    Parameters
    ----------
    query, key, value : torch.Tensor
        A tensor with two axes has one head.
    grouped : bool
        Whether the heads of the query are a multiple of those of the key and of the value.
        Otherwise a single head stands for any number of heads.

    Raises
    ------
    ArgumentError
        If the numbers of heads do not fit.
    """
    heads, heads_k, heads_v = (1 if x.ndim < 3 else x.shape[-3] for x in (query, key, value))
    if heads_k == heads_v and (heads == heads_k or heads_k == 1):
        return query, key, value
    heads, heads_k, heads_v = int(heads), int(heads_k), int(heads_v)
    in_groups = heads_k and heads_v and not (heads % heads_k or heads % heads_v)
    if grouped:
        if in_groups and heads_k != heads_v:
            key, value = _repeat(key, heads // heads_k), _repeat(value, heads // heads_v)
        return query, key, value
    most = {heads, heads_k, heads_v} - {1}
    if len(most) > 1:
        name, x = ("key", key) if heads_k not in (1, heads) else ("value", value)
        remedy = (
            "; or pass enable_gqa=True, with which heads of the query share one of the key and of "
            "the value"
            if in_groups
            else ""
        )
        raise ArgumentError(
            f"{name}: got shape {tuple(x.shape)} with a query of shape {tuple(query.shape)}; "
            f"expected equal numbers of heads, or one head{remedy}."
        )
    (count,) = most
    if heads != count:
        query = _expand(query, count)
    if heads_k != heads_v:
        key, value = _expand(key, count), _expand(value, count)
    return query, key, value


def _expand(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.expand(*x.shape[:-3], heads, *x.shape[-2:])


def _repeat(x: torch.Tensor, times: int) -> torch.Tensor:
    if x.ndim < 3 or x.shape[-3] == 1:
        return _expand(x, times)
    return x if times == 1 else x.repeat_interleave(times, -3)
