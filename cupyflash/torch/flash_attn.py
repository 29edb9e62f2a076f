"""The functions of flash_attn, with their arguments. Each docstring says what differs.

An argument without support here is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

import torch

from .. import scores
from ..arrays.integers import integer
from ..errors import ArgumentError, ArgumentTypeError
from ..masks import Mask
from ..problem.keywords import explained
from . import autograd, functions, learned, longest, recipes, tensors
from .cached import attention_cached
from .operands import Operands, Settings
from .tensors import PLAIN

Window: TypeAlias = "Sequence[int | None] | torch.Tensor"


def sizes_of(window_size: Window) -> list[int | None]:
    """Return how many keys before and after its own position a query sees; None means all."""
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
        if type(left) is int and type(right) is int:  # as most calls have them: there is no loop
            return [None if left < 0 else left, None if right < 0 else right]
    sizes: list[int | None] = []
    for value in window_size:
        size = value if type(value) is int or value is None else integer(value)
        if size is None and value is not None:
            raise ArgumentTypeError(
                f"window_size: got {window_size!r}; expected two integers, of which -1 means all."
            )
        sizes.append(None if size is None or size < 0 else size)
    if len(sizes) != 2:
        raise ArgumentError(
            f"window_size: got {window_size!r}; expected two integers, (left, right)."
        )
    return sizes


def band(causal: bool, window_size: Window) -> Any:
    """Return the mask of a diagonal and a window, aligned at the end."""
    left, right = sizes_of(window_size)
    return recipes.band(causal, left, right, None)


def changes_of(softcap: float, alibi_slopes: torch.Tensor | None) -> Any:
    """Return the score changes, in flash_attn's order."""
    changes: list[Any] = []
    if softcap > 0:
        changes.append(scores.softcap(float(softcap)))
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
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    lengths: tuple[int, int] | None = None,
) -> Any:
    """Compute attention of tensors whose axis of heads is the second to last.

    No packed sequence has more queries and keys than the lengths.
    """
    if alibi_slopes is not None:
        tensors.check({"q": qkv[0], "alibi_slopes": alibi_slopes}, ("q", "alibi_slopes"))
    settings = Settings(
        mask=band(causal, window_size),
        score_mod=changes_of(softcap, alibi_slopes),
        scale=softmax_scale,
        dropout=dropout_p,
        seed=functions.drawn_seed(dropout_p),
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        check=False,
        longest=lengths,
        by_rows=True,
    )
    wants_lse = bool(return_attn_probs)
    out, lse = by_rows(settings, dict(zip("qkv", qkv, strict=True)), offsets, None, wants_lse)
    return (out, lse, None) if wants_lse else out


def by_rows(
    settings: Settings,
    qkv: Mapping[str, torch.Tensor],
    offsets: tuple[torch.Tensor | None, torch.Tensor | None],
    sink: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, Any]:
    """Return out and lse of tensors, by their names, whose axis of heads is the second to last.

    The settings are `by_rows`. The lse may be None if it is not wanted.
    """
    if not tensors.is_traced():
        q, k, v = qkv.values()
        given = Operands(q, k, v, None, sink, None, None, *offsets)
        made = _again(settings, given, return_lse)
        if made is not None:
            return made
    settings = settings._replace(by_rows=False)
    tensors.check(qkv, tuple(qkv))
    axes = 4 if offsets[0] is None else 3
    for name, x in qkv.items():
        if x.ndim != axes:
            wanted = "(B, L, H, D)" if axes == 4 else "(total, H, D)"
            raise ArgumentError(f"{name}: got shape {tuple(x.shape)}; expected {wanted}.")
    q, k, v = (x.transpose(-3, -2) for x in qkv.values())
    made = functions.run(settings, q, k, v, None, sink, *offsets, return_lse)
    out, lse = made if return_lse else (made, None)
    return out.transpose(-3, -2), lse


def _again(settings: Settings, x: Operands, return_lse: bool) -> Any:
    """Return out and lse of a call on a GPU like an earlier one, or None. Nothing was checked."""
    if type(x.q) not in PLAIN or not x.q.is_cuda or isinstance(settings.seed, torch.Tensor):
        return None
    if settings.score_mod is not None and learned.tables_of(settings):
        return None
    return autograd.again(settings, x, return_lse)


_flash_eager = torch.compiler.disable(
    _flash, reason="alibi_slopes= makes a score change from a tensor, outside graphs"
)


def call(*args: Any) -> Any:
    """Compute a call of `_flash`, whose arguments it takes, in a graph if that is possible."""
    function = _flash if args[7] is None else _flash_eager
    return function(*args)


@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...  # fmt: skip


@explained
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
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
    window_size : pair of int
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
    return call(
        (q, k, v), offsets, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = False, block_table: torch.Tensor | None = ...,
) -> torch.Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True], block_table: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor, None]: ...  # fmt: skip


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
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Compute attention as flash_attn's function of this name does; see `flash_attn_func`.

    With a `block_table`, there is no gradient and no dropout.

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
        No sequence has more queries or keys. On a GPU, kernels are chosen by it where sequences
        have at most 128 keys: then a longer one makes all results of the call wrong, and a later
        call on that GPU raises the error. Otherwise they are ignored.
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
    if block_table is None:
        return call(
            (q, k, v), (cu_seqlens_q, cu_seqlens_k), dropout_p, softmax_scale, causal, window_size,
            softcap, alibi_slopes, deterministic, return_attn_probs,
            longest.known(max_seqlen_q, max_seqlen_k),
        )  # fmt: skip
    if dropout_p:
        raise ArgumentError(f"dropout_p: got {dropout_p} with a block_table; expected 0.0.")
    out, lse = over_cache(
        (q, k, v), cu_seqlens_k.diff(), block_table, cu_seqlens_q, softmax_scale, causal,
        window_size, softcap, alibi_slopes,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def over_cache(
    qkv: Sequence[torch.Tensor],
    lengths: torch.Tensor,
    table: torch.Tensor | None,
    offsets_q: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    seen: Mask | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention over a cache whose axis of heads is the second to last.

    Of the keys that the other arguments allow, queries see those that `seen` allows, too.
    """
    mask = band(causal, window_size)
    if seen is not None:
        mask = seen if mask is None else recipes.made(mask) & seen
    settings = Settings(mask, changes_of(softcap, alibi_slopes), softmax_scale)
    return cached_by_rows(settings, qkv, lengths, table, offsets_q)


def cached_by_rows(
    settings: Settings,
    qkv: Iterable[torch.Tensor],
    lengths: torch.Tensor,
    table: torch.Tensor | None,
    offsets_q: torch.Tensor | None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse over a cache whose axis of heads is the second to last."""
    q, k, v = (x.transpose(-3, -2) for x in qkv)
    changes = settings.score_mod
    out, lse = attention_cached(
        q,
        k,
        v,
        lengths,
        table=table,
        offsets_q=offsets_q,
        mask=recipes.made(settings.mask),
        score_mod=[*map(recipes.made, changes)] if type(changes) is list else changes,
        sink=sink,
        scale=settings.scale,
        return_lse=True,
    )
    return out.transpose(-3, -2), lse
