"""Attention on tensors over a cache of keys and values, for inference, without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import cache_update
from .. import cached as arrays
from ..masks import Mask
from ..problem.keywords import explained
from ..problem.rotary import Rotary
from ..scores import Score
from . import tensors
from .tensors import array_of

_NO_GRADIENT = (
    "no gradient flows through a cache; pass its .detach(), or call under torch.no_grad(). "
    "cupyflash.torch.attention computes gradients."
)


@torch.compiler.disable(reason="calls over a cache are not operators of torch.compile")
@explained
def attention_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int],
    *,
    table: torch.Tensor | None = None,
    offsets_q: torch.Tensor | Sequence[int] | None = None,
    shared: int = 0,
    mask: Mask | torch.Tensor | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention of new queries over a cache of keys and values.

    The arguments are those of `cupyflash.attention_cached`. No gradient is computed. Under
    torch.compile, the call breaks the graph in two.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Hq, Lq, D)
        Queries. With `offsets_q` they are packed: (Hq, total, D).
    k : torch.Tensor, shape (B, Hkv, S, D)
        Keys, with room for S positions. With `table` they are in pages: (P, Hkv, page, D).
    v : torch.Tensor, shape (B, Hkv, S, Dv)
        Values. With `table` they are in pages: (P, Hkv, page, Dv).
    lengths : int or torch.Tensor, shape (B,)
        The number of positions that the cache holds, including those of the queries. A tensor is
        of int32 or int64, on the device of `q`.
    table : torch.Tensor, shape (B, N), optional
        The page numbers of each sequence, of int32 or int64.
    offsets_q : torch.Tensor, shape (B + 1,), optional
        Sequence b has the packed queries from ``offsets_q[b]`` to ``offsets_q[b + 1]``.
    shared, mask, score_mod, bias, sink, scale
        As in `cupyflash.attention_cached`.
    return_lse : bool
        Return (out, lse) instead of out.

    Returns
    -------
    out : torch.Tensor, shape (B, Hq, Lq, Dv), or (Hq, total, Dv)
        In the dtype of `q`.
    lse : torch.Tensor, shape (B, Hq, Lq), or (Hq, total)
        Only with `return_lse`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `cupyflash.attention_cached`, and if a tensor requires a gradient.
    """
    named = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    given = {"lengths": lengths, "table": table, "offsets_q": offsets_q, "mask": mask}
    all_named = named | {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    home = tensors.check(all_named, tuple(named))
    tensors.refuse_meta(home)
    tensors.refuse_gradients(all_named, _NO_GRADIENT)
    q, k, v = tensors.to_autocast(q, k, v)
    tensors.same_dtype(q, k, v)
    options = {
        "table": array_of(table),
        "offsets_q": array_of(offsets_q),
        "shared": shared,
        "mask": array_of(mask),
        "score_mod": score_mod,
        "bias": array_of(bias),
        "sink": array_of(sink),
        "scale": scale,
        "return_lse": return_lse,
    }
    operands = array_of(q), array_of(k), array_of(v), array_of(lengths)
    if home.type == "cpu":
        return tensors.of_results(arrays.attention_cached(*operands, **options))
    with tensors.stream_of(home):
        sizes = {name: options[name] for name in ("table", "offsets_q", "shared")}
        size = arrays.workspace_size_cached(*operands[:3], **sizes)
        scratch = q.new_empty(size, dtype=torch.uint8)
        out = tensors.empty_in_order_of(q, (*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=tensors.lse_dtype(q)) if return_lse is True else None
        arrays.attention_cached(
            *operands,
            **options,
            out=array_of(out),
            lse_out=array_of(lse),
            workspace=array_of(scratch),
        )
    return (out, lse) if return_lse else out


def append(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor | None,
    rotary: Rotary | None,
) -> None:
    """Write new rows to a cache in place, as `cupyflash.append` does."""
    with tensors.stream_of(k.device):
        rows = map(array_of, (k_new, v_new, k, v, lengths))
        cache_update.append(*rows, table=array_of(table), rotary=rotary)


def rope(x: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate rows by their positions, as `cupyflash.rope` does."""
    rotated = torch.empty_like(x)
    with tensors.stream_of(x.device):
        cache_update.rope(array_of(x), array_of(positions), rotary, out=array_of(rotated))
    return rotated
