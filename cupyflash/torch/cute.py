"""The functions of flash_attn 4, whose package is flash_attn.cute. Docstrings say what differs.

An argument without support here is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from ..errors import ArgumentError, ArgumentTypeError
from ..masks import Mask
from ..problem.keywords import explained
from ..scores import Score
from . import longest
from .flash_attn import band, by_rows, cached_by_rows, changes_of
from .operands import Settings

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

Window = Sequence[int | None]
_CALLABLE = (
    "Functions in CuTe run only there. Write the same with cupyflash.{0}.{1}(function), or take "
    "one of cupyflash.{0}, and pass what it returns."
)


@explained
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    qv: torch.Tensor | None = None,
    gather_kv_indices: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Score | Sequence[Score] | None = None,
    score_mod_bwd: None = None,
    mask_mod: Mask | None = None,
    aux_tensors: None = None,
    aux_scalars: None = None,
    block_sparse_tensors: None = None,
    block_sparse_tensors_bwd: None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention as the function of this name in flash_attn.cute does.

    What differs: tensors may be on the CPU, and may be float32 or float64. Head sizes are at most
    512. Arguments after `v` have names, because their order differs between releases of
    flash_attn. The log-sum-exp of a query that sees no key is -inf, and a sink has a gradient.

    Parameters
    ----------
    q : torch.Tensor, shape (B, Lq, Hq, D)
        Queries.
    k : torch.Tensor, shape (B, Lk, Hkv, D)
        Keys.
    v : torch.Tensor, shape (B, Lk, Hkv, Dv)
        Values.
    qv : torch.Tensor, shape (B, Lq, Hq, Dv), optional
        Queries of the values, whose products with `v` are added to those of `q` with `k`. Copies
        put both side by side, so that D + Dv is at most 512.
    gather_kv_indices : None
        Others are an error: say by a mask which keys are chosen.
    softmax_scale : float, optional
        Default: 1 / sqrt(D), or 1 / sqrt(D + Dv) with `qv`.
    causal : bool
        Whether query i sees only keys up to i + Lk - Lq, which aligns the mask at the end.
    window_size : pair of int or None
        How many keys before and after its own position a query sees; None means all.
    learnable_sink : torch.Tensor, shape (Hq,), optional
        Logit of one extra key of value 0 per head.
    softcap : float
        Bound of the scores, which then lie in (-softcap, softcap); 0 means no bound.
    num_splits, pack_gqa
        Ignored. No bit depends on how work is divided.
    deterministic : bool
        Whether gradients have the same bits in every run.
    score_mod : Score or sequence of Score, optional
        Changes of the scores from `cupyflash.scores`. A function of CuTe is an error.
    mask_mod : Mask, optional
        A mask from `cupyflash.masks`, without `causal` and `window_size`. A function of CuTe is an
        error.
    score_mod_bwd, aux_tensors, aux_scalars : None
        Others are an error: they belong to functions of CuTe.
    block_sparse_tensors, block_sparse_tensors_bwd : None
        Others are an error: a mask finds its blocks by itself.
    return_lse : bool
        Ignored: the log-sum-exp is always returned.

    Returns
    -------
    out : torch.Tensor, shape (B, Lq, Hq, Dv)
        In the dtype of `q`.
    lse : torch.Tensor, shape (B, Hq, Lq)
        Float32, or float64. Gradients flow through it, too.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`, and for an argument without support, with a remedy.
    """
    del num_splits, pack_gqa, return_lse
    _refuse({
        "gather_kv_indices": gather_kv_indices,
        "score_mod_bwd": score_mod_bwd,
        "aux_tensors": aux_tensors,
        "aux_scalars": aux_scalars,
        "block_sparse_tensors": block_sparse_tensors,
        "block_sparse_tensors_bwd": block_sparse_tensors_bwd,
    })  # fmt: skip
    settings = _settings(
        softmax_scale, causal, window_size, softcap, deterministic, score_mod, mask_mod
    )
    return by_rows(settings, _joined(q, k, v, qv), (None, None), learnable_sink)


@explained
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Score | Sequence[Score] | None = None,
    score_mod_bwd: None = None,
    mask_mod: Mask | None = None,
    block_sparse_tensors: None = None,
    aux_tensors: None = None,
    aux_scalars: None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention as the function of this name in flash_attn.cute does.

    What differs is as in `flash_attn_func`. In addition, there is no gradient with `seqused_k` or
    a `page_table`, which make of `k` and `v` a cache.

    Parameters
    ----------
    q : torch.Tensor, shape (total_q, Hq, D)
        Queries of all sequences; without `cu_seqlens_q` their shape is (B, Lq, Hq, D).
    k : torch.Tensor, shape (total_k, Hkv, D)
        Keys of all sequences. With `seqused_k` their shape is (B, S, Hkv, D), and with
        `page_table` they are in pages: (P, page, Hkv, D).
    v : torch.Tensor, shape (total_k, Hkv, Dv)
        Values, likewise.
    qv : torch.Tensor, shape (total_q, Hq, Dv), optional
        As in `flash_attn_func`. With `seqused_k` or `page_table` it is an error.
    cu_seqlens_q, cu_seqlens_k : torch.Tensor of int, shape (n + 1,), optional
        Sequence b has the rows from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. They are not read
        back from a GPU.
    max_seqlen_q, max_seqlen_k : int, optional
        No sequence has more queries or keys. On a GPU, kernels are chosen by it where sequences
        have at most 128 keys: then a longer one makes all results of the call wrong, and a later
        call on that GPU raises the error. Otherwise they are ignored.
    min_seqlen_k : int, optional
        Ignored.
    seqused_q : None
        Others are an error: cut the queries off before.
    seqused_k : torch.Tensor of int, shape (n,), optional
        How many keys of each sequence count.
    page_table : torch.Tensor of int, shape (n, N), optional
        The page numbers of each sequence, whose lengths are `seqused_k`.
    gather_kv_indices, softmax_scale, causal, window_size, learnable_sink, softcap
        As in `flash_attn_func`.
    num_splits, pack_gqa, deterministic, score_mod, score_mod_bwd, mask_mod
        As in `flash_attn_func`.
    block_sparse_tensors, aux_tensors, aux_scalars, return_lse
        As in `flash_attn_func`.

    Returns
    -------
    out : torch.Tensor, shape (total_q, Hq, Dv)
        In the dtype of `q`; (B, Lq, Hq, Dv) without `cu_seqlens_q`.
    lse : torch.Tensor, shape (Hq, total_q)
        Or (B, Hq, Lq).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `flash_attn_func`.
    """
    del min_seqlen_k, num_splits, pack_gqa, return_lse
    _refuse({
        "seqused_q": seqused_q,
        "gather_kv_indices": gather_kv_indices,
        "score_mod_bwd": score_mod_bwd,
        "block_sparse_tensors": block_sparse_tensors,
        "aux_tensors": aux_tensors,
        "aux_scalars": aux_scalars,
    })  # fmt: skip
    settings = _settings(
        softmax_scale, causal, window_size, softcap, deterministic, score_mod, mask_mod
    )
    if seqused_k is None and page_table is None:
        if (cu_seqlens_q is None) != (cu_seqlens_k is None):
            raise ArgumentError(
                "cu_seqlens_q, cu_seqlens_k: got one without the other; expected both or neither. "
                "Those of (B, L, H, D), as rows x.flatten(0, 1), are torch.arange(B + 1) * L."
            )
        offsets = cu_seqlens_q, cu_seqlens_k
        lengths = longest.known(max_seqlen_q, max_seqlen_k)
        if lengths is not None and cu_seqlens_q is not None:
            settings = settings._replace(longest=lengths)
        return by_rows(settings, _joined(q, k, v, qv), offsets, learnable_sink)
    if seqused_k is None:
        raise ArgumentError(
            "page_table: got it without seqused_k; expected the lengths of the sequences, too. "
            "Pass seqused_k=cu_seqlens_k.diff()."
        )
    if qv is not None:
        raise ArgumentError(
            "qv: got it with keys in a cache; expected None. Keep keys and values side by side in "
            "one cache, and call cupyflash.torch.attention_cached with v = k[..., D:]."
        )
    if cu_seqlens_k is not None and page_table is None:
        raise ArgumentError(
            "seqused_k: got it with cu_seqlens_k; expected only one of them. Drop the keys that do "
            "not count, and pass cu_seqlens_k of the others."
        )
    return cached_by_rows(settings, (q, k, v), seqused_k, page_table, cu_seqlens_q, learnable_sink)


_REMEDIES = {
    "seqused_q": "Cut the queries off, and pass cu_seqlens_q of the others.",
    "gather_kv_indices": "Pass mask=torch.zeros(B, 1, Lq, Lk, dtype=torch.bool).scatter(-1, "
    "indices[:, None].long(), True) to cupyflash.torch.attention.",
    "score_mod_bwd": "Leave it out: the gradient of a score from cupyflash.scores is derived.",
    "aux_tensors": "Use the tensors in the function that cupyflash.scores.score or "
    "cupyflash.masks.mask takes.",
    "block_sparse_tensors": "Leave it out: masks find their blocks by themselves, and "
    "cupyflash.masks.blocks(layout, block_q, block_k) makes one of blocks.",
}
_REMEDIES["aux_scalars"] = _REMEDIES["aux_tensors"].replace("tensors", "numbers")
_REMEDIES["block_sparse_tensors_bwd"] = _REMEDIES["block_sparse_tensors"]


def _refuse(named: Mapping[str, Any]) -> None:
    for name, value in named.items():
        if value is not None:
            raise ArgumentError(
                f"{name}: got {type(value).__name__}; expected None. {_REMEDIES[name]}"
            )


def _settings(
    scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    deterministic: bool,
    score_mod: Any,
    mask_mod: Any,
) -> Settings:
    mask: Any = band(causal, _sizes(window_size))
    if mask_mod is not None:
        if not isinstance(mask_mod, Mask):
            _refuse_function("mask_mod", mask_mod, "masks", "mask")
        if mask is not None:
            raise ArgumentError(
                "mask_mod: got it with causal or window_size; expected only one of them. Join "
                "them: mask_mod=cupyflash.masks.causal() & mask."
            )
        mask = mask_mod
    changes = changes_of(softcap, None)
    if score_mod is not None:
        every = score_mod if isinstance(score_mod, Sequence) else (score_mod,)
        for each in every:
            if not isinstance(each, Score):
                _refuse_function("score_mod", each, "scores", "score")
        if changes is not None:
            raise ArgumentError(
                f"softcap: got {softcap} with a score_mod; expected only one of them. Say the "
                f"order: score_mod=[cupyflash.scores.softcap({softcap}), score]."
            )
        changes = score_mod
    is_deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return Settings(mask, changes, scale, deterministic=is_deterministic, check=False, by_rows=True)


def _refuse_function(name: str, value: Any, module: str, function: str) -> NoReturn:
    kind = function.capitalize()
    raise ArgumentTypeError(
        f"{name}: got {type(value).__name__}; expected a {kind} of cupyflash. "
        f"{_CALLABLE.format(module, function)}"
    )


def _sizes(window_size: Window) -> Window:
    """Return sizes of a window after a check. A pair of negative numbers hides nothing there."""
    sizes = tuple(window_size)
    negative = [size for size in sizes if isinstance(size, int) and size < 0]
    if negative and len(negative) < len(sizes):
        raise ArgumentError(
            f"window_size: got {window_size!r}; expected two sizes of 0 or more, or None for a "
            "side that sees all keys. Replace -1, which means all in flash_attn 2, by None."
        )
    return sizes


def _joined(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return q, k and v by their names, with the columns of qv and v in q and k."""
    if qv is not None:
        if qv.shape[:-1] != q.shape[:-1] or qv.shape[-1] != v.shape[-1]:
            wanted = (*q.shape[:-1], v.shape[-1])
            raise ArgumentError(f"qv: got shape {tuple(qv.shape)}; expected {wanted}.")
        q, k = torch.cat([q, qv], dim=-1), torch.cat([k, v], dim=-1)
    return {"q": q, "k": k, "v": v}
