"""flash_attn's function over a cache of keys and values, with its arguments."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from ..arrays.integers import integer
from ..errors import ArgumentError, ArgumentTypeError
from ..expr.arguments import number_or_per_batch
from ..expr.functions import POSITIONS
from ..masks import Mask
from ..problem.keywords import explained
from ..problem.rotary import Rotary
from ..problem.written_rows import WrittenTwiceError
from . import tensors
from .cached_calls import rotated, write
from .flash_attn import Window, over_cache, sizes_of


def _begun(leftpad: torch.Tensor, lengths: torch.Tensor) -> Mask:
    """Return the mask of the keys from a first position on, another for each entry.

    Diagonals are aligned at the end, so that they are the same with and without such padding.
    """
    if leftpad.shape != lengths.shape or leftpad.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"cache_leftpad: got {leftpad.dtype} of shape {tuple(leftpad.shape)}; expected int32 "
            f"of shape {tuple(lengths.shape)}."
        )
    if not leftpad.is_cuda and bool((leftpad < 0).any()):
        raise ArgumentError(
            f"cache_leftpad: got {int(leftpad.min())}; expected the position of the first key, 0 "
            "or more."
        )
    first = number_or_per_batch(tensors.array_of(leftpad), "cache_leftpad")
    return Mask(first <= POSITIONS[3])


@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ..., rotary_cos: torch.Tensor | None = ...,
    rotary_sin: torch.Tensor | None = ..., cache_seqlens: int | torch.Tensor | None = ...,
    cache_batch_idx: torch.Tensor | None = ..., cache_leftpad: torch.Tensor | None = ...,
    block_table: torch.Tensor | None = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: torch.Tensor | None = ...,
    num_splits: int = ..., return_softmax_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ..., rotary_cos: torch.Tensor | None = ...,
    rotary_sin: torch.Tensor | None = ..., cache_seqlens: int | torch.Tensor | None = ...,
    cache_batch_idx: torch.Tensor | None = ..., cache_leftpad: torch.Tensor | None = ...,
    block_table: torch.Tensor | None = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: torch.Tensor | None = ...,
    num_splits: int = ..., *, return_softmax_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@torch.compiler.disable(reason="it rotates rows, which is no operator of torch.compile")
@explained
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Compute attention over a cache as flash_attn's function of this name does.

    What differs: tensors may be on the CPU, and may be float32 or float64. Head sizes are at most
    576, and pages may have any length. `num_splits` is ignored, and no bit depends on how keys are
    divided among blocks. `cache_leftpad` may be used with pages. The log-sum-exp of a query that
    sees no key is -inf.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Lq, Hq, D)
        Queries.
    k_cache : torch.Tensor, shape (B, S, Hkv, D)
        Keys, with room for S positions. With `block_table` they are in pages: (P, page, Hkv, D).
        New keys are written in place.
    v_cache : torch.Tensor, shape (B, S, Hkv, Dv)
        Values. With `block_table` they are in pages: (P, page, Hkv, Dv).
    k : torch.Tensor, shape (B, n, Hkv, D), optional
        New keys, which are written after those that the cache holds.
    v : torch.Tensor, shape (B, n, Hkv, Dv), optional
        New values.
    rotary_cos, rotary_sin : torch.Tensor, shape (M, R / 2), optional
        Cosines and sines for M positions, by which new keys and queries are rotated. Without
        `causal` and without a window, all queries are rotated as the first one is.
    cache_seqlens : int or torch.Tensor, shape (B,), optional
        The number of positions that the cache holds, without the new ones. Default: S.
    cache_batch_idx : torch.Tensor, shape (B,), optional
        The entry of the cache that belongs to each entry of `q`.
    cache_leftpad : torch.Tensor of int, shape (B,), optional
        The position of the first key of each entry; earlier ones are padding. `cache_seqlens`
        counts the padding, too, and rows are rotated by their positions in the cache.
    block_table : torch.Tensor, shape (B, N), optional
        The page numbers of each entry.
    softmax_scale, causal, window_size, softcap
        As in `flash_attn_func`.
    rotary_interleaved : bool
        Whether pairs are neighbouring columns. Otherwise the columns of a pair are R / 2 apart.
    alibi_slopes : torch.Tensor, optional
        As in `flash_attn_func`.
    num_splits : int
        Ignored.
    return_softmax_lse : bool
        Return (out, lse) instead of out.

    Returns
    -------
    out : torch.Tensor, shape (B, Lq, Hq, Dv)
        In the dtype of `q`.
    lse : torch.Tensor, shape (B, Hq, Lq)
        Only with `return_softmax_lse`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention_cached`.
    """
    del num_splits
    if (k is None) != (v is None):
        raise ArgumentError("k, v: got one without the other; expected both or neither.")
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    home = tensors.check({**named, "cache_leftpad": cache_leftpad}, tuple(named))
    tensors.refuse_meta(home)
    for name, x in named.items():
        if x is not None and x.ndim != 4:
            raise ArgumentError(
                f"{name}: got shape {tuple(x.shape)}; expected four axes, (B, L, H, D)."
            )
    tensors.refuse_gradients(named, "no gradient flows through a cache; pass its .detach().")
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ArgumentError(
                "cache_batch_idx: got it with a block_table; expected only one of them."
            )
        block_table = cache_batch_idx[:, None]  # every entry of the cache is one page
    held = _held(cache_seqlens, q, k_cache, k is not None, block_table)
    lengths = held
    rotary = None
    if (rotary_cos is None) != (rotary_sin is None):
        raise ArgumentError(
            "rotary_cos, rotary_sin: got one without the other; expected both or neither."
        )
    if rotary_cos is not None and rotary_sin is not None:
        if k is None:
            raise ArgumentError("rotary_cos: got it without k; expected the new keys, too.")
        cos, sin = (tensors.array_of(x.float()) for x in (rotary_cos, rotary_sin))
        rotary = Rotary(cos, sin, rotary_interleaved)
        rows = torch.arange(q.shape[1], device=home, dtype=held.dtype)
        is_band = causal or sizes_of(window_size) != [None, None]
        positions = held[:, None] + (rows if is_band else torch.zeros_like(rows))
        q = rotated(q.transpose(1, 2), positions, rotary, False).transpose(1, 2)
    if k is not None and v is not None:
        lengths = held + k.shape[1]
        k_new, v_new, k_held, v_held = (x.transpose(1, 2) for x in (k, v, k_cache, v_cache))
        table = tensors.array_of(block_table)
        try:
            write(k_new, v_new, k_held, v_held, lengths, table=table, rotary=rotary)
        except WrittenTwiceError as error:
            name = "block_table" if cache_batch_idx is None else "cache_batch_idx"
            raise ArgumentError(
                f"{name}: {error.what}; expected one position for each row that is written. Pass "
                "numbers that differ wherever new rows are written."
            ) from None
    seen = None if cache_leftpad is None else _begun(cache_leftpad, lengths)
    out, lse = over_cache(
        (q, k_cache, v_cache), lengths, block_table, None, softmax_scale, causal, window_size,
        softcap, alibi_slopes, seen,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _held(
    value: Any,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    appends: bool,
    table: torch.Tensor | None,
) -> torch.Tensor:
    """Return how many positions each entry of a cache holds, (B,)."""
    if value is None:
        if appends:
            raise ArgumentError(
                "cache_seqlens: got None with new keys; expected how many positions are held."
            )
        value = k_cache.shape[1] * (1 if table is None else table.shape[1])
    if isinstance(value, torch.Tensor):
        return value if value.ndim else value.expand(q.shape[0])
    held = integer(value)
    if held is None:
        raise ArgumentTypeError(
            f"cache_seqlens: got {type(value).__name__}; expected an int, or a tensor of int32, "
            "(B,)."
        )
    return torch.full((q.shape[0],), held, dtype=torch.int32, device=q.device)
