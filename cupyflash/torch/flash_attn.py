"""The functions of flash_attn, with their arguments. Each docstring says what differs.

An argument without support here is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import scores
from ..errors import ArgumentError, ArgumentTypeError
from ..problem.keywords import explained
from ..problem.rotary import Rotary
from ..problem.written_rows import WrittenTwiceError
from . import functions, recipes, tensors
from .cached import append, attention_cached, rope
from .compute import Settings


def _band(causal: bool, window_size: Sequence[int | None]) -> Any:
    left, right = (None if x is None or x < 0 else x for x in window_size)
    return recipes.band(causal, left, right, None)


def _changes(softcap: float, alibi_slopes: torch.Tensor | None) -> Any:
    """Return the score changes, in flash_attn's order."""
    changes: list[Any] = []
    if softcap > 0:
        changes.append(("softcap", float(softcap)))
    if alibi_slopes is not None:
        tensors.refuse_gradients(
            {"alibi_slopes": alibi_slopes},
            "no gradient flows through slopes; pass its .detach().",
        )
        changes.append(scores.alibi(tensors.array_of(alibi_slopes)))
    return changes or None


def _flash(
    qkv: Sequence[torch.Tensor],
    offsets: tuple[torch.Tensor | None, torch.Tensor | None],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> Any:
    """Compute attention of tensors whose axis of heads is the second to last."""
    named = dict(zip(("q", "k", "v"), qkv, strict=True)) | {"alibi_slopes": alibi_slopes}
    tensors.check(named, tuple(named))
    axes = 4 if offsets[0] is None else 3
    for name, x in zip("qkv", qkv, strict=True):
        if x.ndim != axes:
            wanted = "(B, L, H, D)" if axes == 4 else "(total, H, D)"
            raise ArgumentError(f"{name}: got shape {tuple(x.shape)}; expected {wanted}.")
    settings = Settings(
        mask=_band(causal, window_size),
        score_mod=_changes(softcap, alibi_slopes),
        scale=softmax_scale,
        dropout=dropout_p,
        seed=functions.drawn_seed(dropout_p),
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        check=False,
    )
    q, k, v = (x.transpose(-3, -2) for x in qkv)
    out, lse = functions.run(settings, q, k, v, None, None, *offsets, True)
    out = out.transpose(-3, -2)
    return (out, lse, None) if return_attn_probs else out


_flash_eager = torch.compiler.disable(
    _flash, reason="alibi_slopes= makes a score change from a tensor, outside graphs"
)


def _flash_call(*args: Any) -> Any:
    function = _flash if args[7] is None else _flash_eager
    return function(*args)


@explained
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention as flash_attn's function of this name does.

    What differs: tensors may be on the CPU, and may be float32 or float64. Head sizes are at most
    512, and that of the values may differ. Dropout draws its seed from PyTorch's generator of the
    CPU, and drops other pairs. The log-sum-exp of a query that sees no key is -inf.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Lq, Hq, D)
        Queries.
    k : torch.Tensor, shape (B, Lk, Hkv, D)
        Keys.
    v : torch.Tensor, shape (B, Lk, Hkv, Dv)
        Values.
    dropout_p : float
        Probability in [0, 1) of dropping a pair.
    softmax_scale : float, optional
        Default: 1 / sqrt(D).
    causal : bool
        Whether query i sees only keys up to i + Lk - Lq, which aligns the mask at the end.
    window_size : tuple of int
        How many keys before and after its own position a query sees; -1 means all.
    softcap : float
        Bound of the scores, which then lie in (-softcap, softcap); 0 means no bound.
    alibi_slopes : torch.Tensor, shape (Hq,) or (B, Hq), optional
        Slopes of ALiBi, which subtracts slope * abs(i + Lk - Lq - j) from the scores. They have no
        gradient. Under torch.compile, a call with slopes breaks the graph in two.
    deterministic : bool
        Whether gradients have the same bits in every run.
    return_attn_probs : bool
        Return (out, lse, None). Probabilities are never stored.

    Returns
    -------
    out : torch.Tensor, shape (B, Lq, Hq, Dv)
        In the dtype of `q`.
    lse : torch.Tensor, shape (B, Hq, Lq)
        Only with `return_attn_probs`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.
    """
    offsets = None, None
    return _flash_call(
        (q, k, v), offsets, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@explained
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention as flash_attn's function of this name does; see `flash_attn_func`.

    Parameters
    ----------
    qkv : torch.Tensor, shape (B, L, 3, H, D)
        Queries, keys and values.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`.
    deterministic, return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    out : torch.Tensor, shape (B, L, H, D)
        As in `flash_attn_func`.
    lse : torch.Tensor, shape (B, H, L)
        Only with `return_attn_probs`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.
    """
    tensors.check({"qkv": qkv}, ("qkv",))
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ArgumentError(f"qkv: got shape {tuple(qkv.shape)}; expected (B, L, 3, H, D).")
    offsets = None, None
    return _flash_call(
        qkv.unbind(2), offsets, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@explained
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Compute attention as flash_attn's function of this name does; see `flash_attn_func`.

    In addition, `max_seqlen_q` and `max_seqlen_k` are ignored. With a `block_table`, there is no
    gradient and no dropout.

    Parameters
    ----------
    q : torch.Tensor, shape (total_q, Hq, D)
        Queries of all sequences.
    k : torch.Tensor, shape (total_k, Hkv, D)
        Keys of all sequences. With `block_table` they are in pages: (P, page, Hkv, D).
    v : torch.Tensor, shape (total_k, Hkv, Dv)
        Values of all sequences. With `block_table` they are in pages: (P, page, Hkv, Dv).
    cu_seqlens_q, cu_seqlens_k : torch.Tensor of int, shape (n + 1,)
        Sequence b has the rows from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. They are not read
        back from a GPU.
    max_seqlen_q, max_seqlen_k : int
        Ignored.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`. Slopes have the shape (Hq,) or (n, Hq).
    deterministic, return_attn_probs
        As in `flash_attn_func`.
    block_table : torch.Tensor of int, shape (n, N), optional
        The page numbers of each sequence.

    Returns
    -------
    out : torch.Tensor, shape (total_q, Hq, Dv)
        As in `flash_attn_func`.
    lse : torch.Tensor, shape (Hq, total_q)
        Only with `return_attn_probs`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention_varlen`.
    """
    del max_seqlen_q, max_seqlen_k
    if block_table is None:
        return _flash_call(
            (q, k, v), (cu_seqlens_q, cu_seqlens_k), dropout_p, softmax_scale, causal, window_size,
            softcap, alibi_slopes, deterministic, return_attn_probs,
        )  # fmt: skip
    if dropout_p:
        raise ArgumentError(f"dropout_p: got {dropout_p} with a block_table; expected 0.0.")
    out, lse = _cached(
        (q, k, v), cu_seqlens_k.diff(), block_table, cu_seqlens_q, softmax_scale, causal,
        window_size, softcap, alibi_slopes,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def _cached(
    qkv: Sequence[torch.Tensor],
    lengths: torch.Tensor,
    table: torch.Tensor | None,
    offsets_q: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention over a cache whose axis of heads is the second to last."""
    changes = _changes(softcap, alibi_slopes)
    q, k, v = (x.transpose(-3, -2) for x in qkv)
    out, lse = attention_cached(
        q,
        k,
        v,
        lengths,
        table=table,
        offsets_q=offsets_q,
        mask=recipes.made(_band(causal, window_size)),
        score_mod=changes and [recipes.made(each) for each in changes],
        scale=softmax_scale,
        return_lse=True,
    )
    return out.transpose(-3, -2), lse


@torch.compiler.disable(reason="calls over a cache are not operators of torch.compile")
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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Compute attention over a cache as flash_attn's function of this name does.

    What differs: tensors may be on the CPU, and may be float32 or float64. Head sizes are at most
    576, and pages may have any length. `num_splits` is ignored, and no bit depends on how keys are
    divided among blocks. `cache_leftpad` is an error. The log-sum-exp of a query that sees no key
    is -inf.

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
    cache_leftpad : None
        Padding at the start of a cache is not supported.
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
    if cache_leftpad is not None:
        raise ArgumentError(
            "cache_leftpad: got a tensor; expected None. Call cupyflash.torch.attention_cached "
            "with mask=masks.mask(lambda b, h, i, j: j >= pad[b]) and pad = lookup(cache_leftpad)."
        )
    if (k is None) != (v is None):
        raise ArgumentError("k, v: got one without the other; expected both or neither.")
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    home = tensors.check(named, tuple(named))
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
        is_band = causal or tuple(window_size) != (-1, -1)
        positions = held[:, None] + (rows if is_band else torch.zeros_like(rows))
        q = rope(q.transpose(1, 2), positions, rotary).transpose(1, 2)
    if k is not None and v is not None:
        lengths = held + k.shape[1]
        k_new, v_new, k_held, v_held = (x.transpose(1, 2) for x in (k, v, k_cache, v_cache))
        try:
            append(k_new, v_new, k_held, v_held, lengths, block_table, rotary)
        except WrittenTwiceError as error:
            name = "block_table" if cache_batch_idx is None else "cache_batch_idx"
            raise ArgumentError(
                f"{name}: {error.what}; expected one position for each row that is written. Pass "
                "numbers that differ wherever new rows are written."
            ) from None
    out, lse = _cached(
        (q, k_cache, v_cache), lengths, block_table, None, softmax_scale, causal, window_size,
        softcap, alibi_slopes,
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
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(
            f"cache_seqlens: got {type(value).__name__}; expected an int, or a tensor of int32, "
            "(B,)."
        )
    return torch.full((q.shape[0],), value, dtype=torch.int32, device=q.device)
