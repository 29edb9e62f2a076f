"""An implementation of PyTorch's own flash attention, which PyTorch's hook activates.

PyTorch then calls the functions below where its flash attention would run: below autograd, of which
it has the formulas itself. They are the same on the CPU and on a GPU.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

import torch
import torch.nn.attention

from .. import masks, scores
from ..errors import ArgumentError
from . import compute, functions, longest, recipes, tensors
from .flash_attn import band, by_rows, cached_by_rows
from .operands import Operands, Settings

Tensor: TypeAlias = torch.Tensor


def register_flash_attention(name: str = "cupyflash") -> None:
    """Register a name with PyTorch's hook for implementations of flash attention.

    ``torch.nn.attention.activate_flash_attention_impl(name)`` then makes PyTorch compute by
    cupyflash what it chooses its flash attention for, in ``scaled_dot_product_attention`` and in
    ``varlen_attn``, on GPUs and on the CPU. ``restore_flash_attention_impl()`` of the same module
    undoes it.

    Parameters
    ----------
    name : str
        The name.

    Raises
    ------
    ArgumentError
        PyTorch is older than 2.11, or has the name for its own implementations.

    Notes
    -----
    PyTorch still chooses: calls for which it takes its efficient, cuDNN or plain implementation
    stay there, such as masks on a GPU. Under ``torch.nn.attention.sdpa_kernel(
    SDPBackend.FLASH_ATTENTION)`` it says why. `cupyflash.torch.scaled_dot_product_attention`
    leaves nothing to that choice. Dropout drops other pairs than PyTorch does.

    Examples
    --------
    >>> import torch
    >>> from cupyflash.torch import register_flash_attention
    >>> register_flash_attention()
    >>> torch.nn.attention.activate_flash_attention_impl("cupyflash")
    >>> x = torch.ones(1, 4, 100, 32)
    >>> torch.nn.functional.scaled_dot_product_attention(x, x, x).shape
    torch.Size([1, 4, 100, 32])
    >>> torch.nn.attention.restore_flash_attention_impl()
    """
    hook = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if hook is None:
        raise ArgumentError(
            f"register_flash_attention: PyTorch {torch.__version__} has no hook for "
            "implementations; expected PyTorch 2.11 or newer. Call "
            "cupyflash.torch.scaled_dot_product_attention instead of PyTorch's function."
        )
    if name in ("FA2", "FA3", "FA4"):
        raise ArgumentError(
            f"name: got {name!r}, which PyTorch has for its own; expected another one, such as "
            '"cupyflash".'
        )
    hook(name, register_fn=_Active)


class _Active:
    """What PyTorch removes to have its own implementation again."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, function in _FUNCTIONS.items():
                self._library.impl(name, function, "CPU")
                if "_for_cpu" not in name:
                    self._library.impl(name, function, "CUDA")

    def remove(self) -> None:
        """Let PyTorch compute as before: its functions end with the library that holds them."""
        self._library = None


def _settings(
    mask: Any, scale: float | None, changes: Any = None, dropout: float = 0.0
) -> Settings:
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return Settings(mask, changes, scale, dropout, deterministic=is_deterministic, check=False)


def _bounded(settings: Settings, offsets: Tensor | None, max_q: int, max_k: int) -> Settings:
    """Return the settings of packed sequences that have at most so many queries and keys."""
    lengths = None if offsets is None else longest.known(max_q, max_k)
    return settings if lengths is None else settings._replace(longest=lengths)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,  # noqa: ARG001, as PyTorch passes it
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `_flash_attention_forward`, whose axis of heads is the second to last."""
    _refuse_debug(return_debug_mask)
    mask = band(is_causal, (window_size_left, window_size_right))
    changes = None if alibi_slopes is None else [scores.alibi(tensors.array_of(alibi_slopes))]
    settings = _settings(mask, scale, changes, dropout_p)
    rng, unused = _random(dropout_p, query)
    with torch.no_grad():
        if block_table is None and seqused_k is None:
            settings = settings._replace(seed=rng[0] if dropout_p else None, by_rows=True)
            settings = _bounded(settings, cum_seq_q, max_q, max_k)
            named = {"query": query, "key": key, "value": value}
            out, lse = by_rows(settings, named, (cum_seq_q, cum_seq_k))
        elif dropout_p or seqused_k is None or block_table is None:
            raise ArgumentError(
                "seqused_k, block_table: got one without the other, or with dropout; expected "
                "both, without dropout. Call cupyflash.torch.attention_cached for a cache in one "
                "array."
            )
        else:
            qkv = query, key, value
            out, lse = cached_by_rows(settings, qkv, seqused_k, block_table, cum_seq_q)
    return out, lse, rng, unused, query.new_empty(0)


def _forward_inplace(out: Tensor, *args: Any, **options: Any) -> Tensor:
    made, lse, *_ = _forward(*args, **options)
    out.copy_(made)
    return lse


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *,  # noqa: ARG001, as PyTorch passes it
    scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `_flash_attention_backward`."""
    settings = _settings(
        recipes.made(band(is_causal, (window_size_left, window_size_right))), scale,
        dropout=dropout_p,
    )  # fmt: skip
    settings = _bounded(settings, cum_seq_q, max_q, max_k)
    rows = [x.transpose(-3, -2) for x in (grad_out, query, key, value, out)]
    do, q, k, v, out = rows
    seed = rng_state[0] if dropout_p else None
    x = Operands(q, k, v, seed=seed, offsets_q=cum_seq_q, offsets_k=cum_seq_k)
    gradients = compute.backward(settings, x, (out, logsumexp), do, None, False)
    return tuple(each.transpose(-3, -2) for each in gradients)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute `_scaled_dot_product_flash_attention`."""
    _refuse_debug(return_debug_mask)
    rng, unused = _random(dropout_p, query)
    settings = _settings(masks.causal(0) if is_causal else None, scale, dropout=dropout_p)
    settings = settings._replace(seed=rng[0] if dropout_p else None)
    with torch.no_grad():
        out, lse = functions.run(settings, query, key, value, None, None, None, None, True)
    nothing = query.new_empty(0, dtype=torch.int32)
    lengths = query.shape[-2], key.shape[-2]
    return out, lse, nothing, nothing.clone(), *lengths, rng, unused, query.new_empty(0)


def _dense_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float,  # noqa: ARG001, as PyTorch passes it
    is_causal: bool, philox_seed: Tensor, philox_offset: Tensor, *,  # noqa: ARG001, as PyTorch passes it
    scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `_scaled_dot_product_flash_attention_backward`."""
    settings = _settings(masks.causal(0) if is_causal else None, scale, dropout=dropout_p)
    x = Operands(query, key, value, seed=philox_seed[0] if dropout_p else None)
    return tuple(compute.backward(settings, x, (out, logsumexp), grad_out, None, False))


def _host(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `_scaled_dot_product_flash_attention_for_cpu`."""
    settings = _settings(masks.causal(0) if is_causal else None, scale)
    _refuse_dropout(dropout_p)
    with torch.no_grad():
        out, lse = functions.run(settings, query, key, value, attn_mask, None, None, None, True)
    # What PyTorch's compiler takes for granted are the strides of PyTorch's own results.
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _host_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    dropout_p: float, is_causal: bool, *, attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `_scaled_dot_product_flash_attention_for_cpu_backward`."""
    settings = _settings(masks.causal(0) if is_causal else None, scale)
    _refuse_dropout(dropout_p)
    x = Operands(query, key, value, attn_mask)
    gradients = compute.backward(settings, x, (out, logsumexp), grad_out, None, False)
    return tuple(each.transpose(1, 2).contiguous().transpose(1, 2) for each in gradients)


def _random(dropout_p: float, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return the seed of a call as PyTorch keeps it, and a tensor that it keeps as well."""
    seed = functions.drawn_seed(dropout_p) or 0
    state = torch.tensor([int(seed), 0], dtype=torch.int64).to(query.device)
    return state.view(torch.uint64), query.new_zeros((), dtype=torch.int64).view(torch.uint64)


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise ArgumentError(
            f"dropout_p: got {dropout_p}; expected 0.0. Call "
            "cupyflash.torch.scaled_dot_product_attention, which takes it."
        )


def _refuse_debug(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise ArgumentError(
            "return_debug_mask: got True; expected False, because weights are never stored. Call "
            "torch.nn.attention.restore_flash_attention_impl() before."
        )


_FUNCTIONS = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_inplace,
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention": _dense,
    "_scaled_dot_product_flash_attention_backward": _dense_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _host,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _host_backward,
}
