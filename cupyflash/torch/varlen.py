"""Attention with the arguments of PyTorch's varlen_attn. Its docstring says what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ArgumentError
from ..problem.keywords import explained
from . import longest, tensors
from .flash_attn import band, by_rows, cached_by_rows
from .operands import Settings
from .tensors import PLAIN


@explained
def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Compute attention as ``torch.nn.attention.varlen.varlen_attn`` does.

    What differs: tensors may be on the CPU, and may be float32 or float64. The head size of the
    values may differ, and head sizes are at most 512. The log-sum-exp has a gradient, too, and is
    -inf for a query that sees no key.

    Parameters
    ----------
    query : torch.Tensor, shape (total_q, Hq, D)
        Queries of all sequences.
    key : torch.Tensor, shape (total_k, Hkv, D)
        Keys of all sequences. With `block_table` they are in pages: (P, page, Hkv, D).
    value : torch.Tensor, shape (total_k, Hkv, Dv)
        Values of all sequences. With `block_table` they are in pages: (P, page, Hkv, Dv).
    cu_seq_q, cu_seq_k : torch.Tensor of int, shape (n + 1,)
        Sequence b has the rows from ``cu_seq[b]`` to ``cu_seq[b + 1]``. They are not read back from
        a GPU. `cu_seq_k` may be None with `block_table`.
    max_q, max_k : int
        No sequence has more queries or keys. On a GPU, kernels are chosen by it where sequences
        have at most 128 keys: then a longer one makes all results of the call wrong, and a later
        call on that GPU raises the error. Otherwise they are ignored.
    return_aux : torch.nn.attention.varlen.AuxRequest, optional
        If its `lse` is True, (out, lse) is returned.
    scale : float, optional
        Default: 1 / sqrt(D).
    window_size : pair of int
        How many keys before and after its own position a query sees; -1 means all. Positions are
        aligned at the end, so that (-1, 0) is a causal mask.
    enable_gqa : bool
        Whether Hq may be a multiple of Hkv.
    seqused_k : torch.Tensor of int, shape (n,), optional
        How many keys of each sequence count. Without `block_table` it is an error.
    block_table : torch.Tensor of int, shape (n, N), optional
        The page numbers of each sequence, whose lengths are `seqused_k`. There is no gradient then.
    num_splits : int, optional
        Ignored. No bit depends on how keys are divided, nor on the other sequences.

    Returns
    -------
    out : torch.Tensor, shape (total_q, Hq, Dv)
        In the dtype of `query`.
    lse : torch.Tensor, shape (Hq, total_q)
        Only if `return_aux` asks for it.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention_varlen`.
    """
    del num_splits
    named = {"query": query, "key": key, "value": value}
    if not enable_gqa:
        _refuse_groups(named)
    left, right = window_size
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    mask = band(False, (left, right))
    lengths = longest.known(max_q, max_k)
    settings = Settings(
        mask,
        scale=scale,
        deterministic=is_deterministic,
        check=False,
        longest=lengths,
        by_rows=True,
    )
    wants_lse = return_aux is not None and bool(return_aux.lse)
    if block_table is not None:
        if seqused_k is None:
            raise ArgumentError(
                "block_table: got it without seqused_k; expected the lengths of the sequences, "
                "too. Pass seqused_k=cu_seq_k.diff()."
            )
        out, lse = cached_by_rows(settings, named.values(), seqused_k, block_table, cu_seq_q)
    else:
        if cu_seq_k is None:
            raise ArgumentError(
                "cu_seq_k: got None without a block_table; expected the starts of the sequences. "
                "If keys and queries have the same, pass cu_seq_k=cu_seq_q."
            )
        if seqused_k is not None:
            raise ArgumentError(
                "seqused_k: got it without a block_table; expected None. Drop the keys that do "
                "not count, and pass cu_seq_k of the others."
            )
        out, lse = by_rows(settings, named, (cu_seq_q, cu_seq_k), None, wants_lse)
    return (out, lse) if wants_lse else out


def _refuse_groups(named: Mapping[str, torch.Tensor]) -> None:
    """Refuse fewer heads of keys than of queries."""
    query, key, _ = named.values()
    if type(query) in PLAIN and type(key) in PLAIN and query.shape[-2:-1] == key.shape[-2:-1]:
        return
    tensors.check(named, tuple(named))
    heads, heads_kv = query.shape[-2], key.shape[-2]
    if heads != heads_kv:
        raise ArgumentError(
            f"query, key: got {heads} and {heads_kv} heads; expected as many. Grouped-query "
            "attention needs enable_gqa=True."
        )
