"""The public functions on tensors: their signatures, documentation and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from ..errors import ArgumentError, ArgumentTypeError
from ..masks import Mask
from ..problem.keywords import explained
from ..scores import Score
from . import autograd, learned, operators, recipes, tensors
from .operands import Operands, Settings


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask | torch.Tensor | None = ...,
    score_mod: Score | Sequence[Score] | None = ..., bias: torch.Tensor | None = ...,
    sink: torch.Tensor | None = ..., scale: float | None = ..., dropout: float = ...,
    seed: int | torch.Tensor | None = ..., precision: Literal["tf32x3"] | None = ...,
    return_lse: Literal[False] = False, deterministic: bool = ...,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask | torch.Tensor | None = ...,
    score_mod: Score | Sequence[Score] | None = ..., bias: torch.Tensor | None = ...,
    sink: torch.Tensor | None = ..., scale: float | None = ..., dropout: float = ...,
    seed: int | torch.Tensor | None = ..., precision: Literal["tf32x3"] | None = ...,
    return_lse: Literal[True], deterministic: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@explained
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | torch.Tensor | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Any:
    """Compute exact attention on tensors, through which gradients flow.

    The options are those of `cupyflash.attention`. On a GPU, the call runs on PyTorch's current
    stream, and its results and scratch memory come from PyTorch's allocator.

    Parameters
    ----------
    q : torch.Tensor, shape (..., Hq, Lq, D)
        Queries of float16, bfloat16, float32 or float64, on the CPU or a GPU, with any strides.
        Under torch.autocast, q, k and v are converted.
    k : torch.Tensor, shape (..., Hkv, Lk, D)
        Keys.
    v : torch.Tensor, shape (..., Hkv, Lk, Dv)
        Values.
    mask : Mask or torch.Tensor of bool, optional
        True where a query attends to a key. Arrays in a mask have no gradient, and are on the
        device of `q`.
    score_mod : Score or sequence of Score, optional
        Changes of the scores. Of the arrays in them, tensors of learned look-ups have gradients,
        ``cupyflash.lookup(tensor, learned=True)``.
    bias : torch.Tensor, optional
        It is added to the scores, and broadcasts to (..., Hq, Lq, Lk). Its gradient is computed
        only if it requires one.
    sink : torch.Tensor, shape (Hq,), optional
        Logit of one extra key of value 0 per head.
    scale : float, optional
        Any finite number. Default: 1 / sqrt(D).
    dropout : float
        Probability in [0, 1) of dropping a pair, after the softmax; needs `seed`.
    seed : int or 0-d torch.Tensor of int64, optional
        The same seed drops the same pairs everywhere. A tensor on the GPU is read when the kernel
        runs.
    precision : {None, "tf32x3"}
        How float32 tensors are multiplied, as in `cupyflash.attention`.
    return_lse : bool
        Return (out, lse) instead of out. Gradients flow through both.
    deterministic : bool
        Whether gradients have the same bits in every run. They also do under
        ``torch.use_deterministic_algorithms(True)``.

    Returns
    -------
    out : torch.Tensor, shape (..., Hq, Lq, Dv)
        In the dtype and memory order of `q`.
    lse : torch.Tensor, shape (..., Hq, Lq)
        Only with `return_lse`: float32, or float64.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument is wrong. The message names it, what it got and expected, and the remedy.
        Third derivatives also raise ArgumentError.

    Notes
    -----
    Under torch.compile, make masks and scores outside the compiled function. Their arrays and
    integers may change from call to call, and what else is in them compiles the function again if
    it changes. PyTorch has no torch.func.grad of operators inside of a compiled function; call
    backward() on its result instead. Under torch.func.vmap, the mapped axis becomes a leading axis
    of a single call. If that would change the meaning of b, dropout or a mapped sink, the calls are
    made one by one.

    Examples
    --------
    >>> import torch
    >>> from cupyflash import masks
    >>> from cupyflash.torch import attention
    >>> x = torch.ones(2, 4, 100, 32, requires_grad=True)
    >>> attention(x, x, x, mask=masks.causal()).sum().backward()
    >>> x.grad.shape
    torch.Size([2, 4, 100, 32])
    """
    settings = Settings(
        mask, score_mod, scale, dropout, seed, precision, _is_deterministic(deterministic)
    )
    return run(settings, q, k, v, bias, sink, None, None, return_lse)


@overload
def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets_q: torch.Tensor,
    offsets_k: torch.Tensor, *, check: bool | None = ..., mask: Mask | torch.Tensor | None = ...,
    score_mod: Score | Sequence[Score] | None = ..., bias: torch.Tensor | None = ...,
    sink: torch.Tensor | None = ..., scale: float | None = ..., dropout: float = ...,
    seed: int | torch.Tensor | None = ..., precision: Literal["tf32x3"] | None = ...,
    return_lse: Literal[False] = False, deterministic: bool = ...,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets_q: torch.Tensor,
    offsets_k: torch.Tensor, *, check: bool | None = ..., mask: Mask | torch.Tensor | None = ...,
    score_mod: Score | Sequence[Score] | None = ..., bias: torch.Tensor | None = ...,
    sink: torch.Tensor | None = ..., scale: float | None = ..., dropout: float = ...,
    seed: int | torch.Tensor | None = ..., precision: Literal["tf32x3"] | None = ...,
    return_lse: Literal[True], deterministic: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@explained
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets_q: torch.Tensor,
    offsets_k: torch.Tensor,
    *,
    check: bool | None = None,
    mask: Mask | torch.Tensor | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Any:
    """Compute attention within each of several sequences that lie one after the other.

    The options are those of `cupyflash.attention_varlen`; tensors and gradients are as in
    `cupyflash.torch.attention`.

    Parameters
    ----------
    q : torch.Tensor, shape (Hq, total_q, D)
        Queries of all sequences.
    k : torch.Tensor, shape (Hkv, total_k, D)
        Keys of all sequences.
    v : torch.Tensor, shape (Hkv, total_k, Dv)
        Values of all sequences.
    offsets_q, offsets_k : torch.Tensor of int, shape (n + 1,)
        Sequence b has the rows from ``offsets[b]`` to ``offsets[b + 1]``, on the device of `q`.
    check : bool, optional
        How offsets on a GPU are checked. By default a short kernel does it, and a later call on
        the device raises the error; True raises it at once, for which the call waits; False checks
        nothing.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention`, and in `cupyflash.attention_varlen`.
    return_lse, deterministic
        As in `attention`.

    Returns
    -------
    out : torch.Tensor, shape (Hq, total_q, Dv)
        What `attention` returns for each sequence alone.
    lse : torch.Tensor, shape (Hq, total_q)
        Only with `return_lse`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.
    """
    settings = Settings(
        mask, score_mod, scale, dropout, seed, precision, _is_deterministic(deterministic), check
    )
    return run(settings, q, k, v, bias, sink, offsets_q, offsets_k, return_lse)


def _is_deterministic(value: Any) -> Any:
    return torch.are_deterministic_algorithms_enabled() if value is False else value


def run(
    settings: Settings,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    offsets_q: torch.Tensor | None,
    offsets_k: torch.Tensor | None,
    return_lse: bool,
) -> Any:
    """Check the tensors of a call, and compute it."""
    if type(return_lse) is not bool:
        raise ArgumentTypeError(f"return_lse: got {return_lse!r}; expected True or False.")
    mask = seed = None
    if settings.mask is not None and isinstance(settings.mask, torch.Tensor):
        mask, settings = settings.mask, Settings(None, *settings[1:])
    if settings.seed is not None and isinstance(settings.seed, torch.Tensor):
        seed, settings = settings.seed, settings._replace(seed=None)
    x = Operands(q, k, v, bias, sink, mask, seed, offsets_q, offsets_k)
    traced = tensors.is_traced()
    if not traced:
        if type(settings.mask) is tuple or type(settings.score_mod) is list:
            settings = _without_recipes(settings)
        tables = () if settings.score_mod is None else learned.tables_of(settings)
        made = None
        if not (tables and torch.is_grad_enabled()):
            made = autograd.again(settings, x, return_lse)
        if made is not None:
            return made if return_lse else made[0]
    x = _checked(x)
    if traced or x.q.is_meta or tensors.has_traced(x):
        made = operators.attention(settings, x)
    elif tables:
        made = learned.attention(settings, x, tables, return_lse)
    else:
        made = autograd.attention(settings, x, return_lse)
    out, lse = made
    if settings.rows_first:
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _without_recipes(settings: Settings) -> Settings:
    changes = settings.score_mod
    return settings._replace(
        mask=recipes.made(settings.mask),
        score_mod=[*map(recipes.made, changes)] if type(changes) is list else changes,
    )


def _checked(x: Operands) -> Operands:
    """Return the tensors of a call after checks, converted as torch.autocast wants it."""
    mask = x.mask
    named = {"q": x.q, "k": x.k, "v": x.v, "bias": x.bias, "sink": x.sink, "mask": mask}
    named |= {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k}
    home = tensors.check(named, ("q", "k", "v", "bias", "sink"))
    if x.seed is not None:
        checked_seed(x.seed, home)
    if mask is not None and mask.dtype is not torch.bool:
        raise ArgumentTypeError(
            f"mask: got a tensor of {mask.dtype}; expected bool, True meaning attend. Additive "
            "masks go to bias=."
        )
    q, k, v = tensors.to_autocast(x.q, x.k, x.v)
    tensors.same_dtype(q, k, v)
    return x._replace(q=q, k=k, v=v)


def checked_seed(seed: torch.Tensor, home: torch.device) -> torch.Tensor:
    """Return a seed that is a tensor, after checks of its shape, dtype and device."""
    tensors.refuse_unlike("seed", seed)
    if seed.ndim or seed.dtype not in tensors.SEEDS:
        raise ArgumentTypeError(
            f"seed: got a tensor of shape {tuple(seed.shape)}, {seed.dtype}; expected an integer, "
            "or a 0-d tensor of int64 or uint64."
        )
    if seed.device.type != "cpu" and seed.device != home:
        raise ArgumentError(
            f"seed: got a tensor on device {seed.device}, but q is on {home}; expected it there, "
            "or on the CPU."
        )
    return seed


def drawn_seed(dropout_p: float) -> torch.Tensor | int | None:
    """Return a seed from PyTorch's generator if there is dropout: a number where it has one."""
    if not dropout_p:
        return None
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
    if tensors.is_traced() or tensors.is_transforming() or type(seed) is not torch.Tensor:
        return seed
    return int(seed)
