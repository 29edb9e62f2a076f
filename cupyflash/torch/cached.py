"""Tensors and a cache of keys and values: attention for inference, new rows, and rotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from .. import cache_update, dispatch, execute
from ..errors import ArgumentTypeError
from ..masks import Mask
from ..problem.arguments import Cached
from ..problem.codes import CacheCodes
from ..problem.keywords import explained
from ..problem.options import Options
from ..problem.rotary import Rotary
from ..request import Request
from ..scores import Score
from . import learned, recognised, recognised_cpu, tensors
from .operands import Operands, Settings
from .tensors import PLAIN, array_of

_NO_GRADIENT = (
    "no gradient flows through a cache; pass its .detach(), or call under torch.no_grad(). "
    "cupyflash.torch.attention computes gradients."
)


@overload
def attention_cached(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int], *, table: torch.Tensor | None = ...,
    offsets_q: torch.Tensor | Sequence[int] | None = ..., k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ..., kv_dtype: Any = ..., shared: int = ...,
    mask: Mask | torch.Tensor | None = ..., score_mod: Score | Sequence[Score] | None = ...,
    bias: torch.Tensor | None = ..., sink: torch.Tensor | None = ..., scale: float | None = ...,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention_cached(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int], *, table: torch.Tensor | None = ...,
    offsets_q: torch.Tensor | Sequence[int] | None = ..., k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ..., kv_dtype: Any = ..., shared: int = ...,
    mask: Mask | torch.Tensor | None = ..., score_mod: Score | Sequence[Score] | None = ...,
    bias: torch.Tensor | None = ..., sink: torch.Tensor | None = ..., scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@explained
def attention_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int],
    *,
    table: torch.Tensor | None = None,
    offsets_q: torch.Tensor | Sequence[int] | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_dtype: Any = None,
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
    k_scale, v_scale : torch.Tensor of float32, optional
        The scales of a cache of codes, as in `cupyflash.attention_cached`.
    kv_dtype : str or torch.dtype, optional
        What the bytes of `k` and `v` are if they are uint8: "int8", "float8_e4m3fn", "float8_e5m2"
        or "int4". Tensors of int8 and of float8 types say it themselves.
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
    traced = tensors.is_traced()
    if not traced and type(q) in PLAIN and q.is_cpu:
        others = table, offsets_q, k_scale, v_scale, kv_dtype, score_mod, bias, sink, scale
        unusual = any(each is not None for each in others) or return_lse is not False
        made = None
        if not unusual and type(shared) is int and not shared:
            made = recognised_cpu.cached_query(q, k, v, lengths, mask)
        if made is not None:
            return made
    x = Operands(q, k, v, bias, sink, mask if isinstance(mask, torch.Tensor) else None)
    settings = Settings(None if x.mask is not None else mask, score_mod, scale)
    given = {"lengths": lengths, "table": table, "offsets_q": offsets_q}
    given |= {"k_scale": k_scale, "v_scale": v_scale}
    seen = None
    if not traced:
        for read in () if score_mod is None else learned.tables_of(settings):
            tensors.refuse_gradients({"score_mod": read.owner}, _NO_GRADIENT)
        seen = _signature(settings, x, given, kv_dtype, shared, return_lse)
        made = None if seen is None else seen.launch(q)
        if made is not None:
            return (made[0], made[1]) if return_lse else made[0]
    floats = {"q": q, "bias": bias, "sink": sink}
    floats |= {name: y for name, y in (("k", k), ("v", v)) if not tensors.may_be_codes(y)}
    given |= {"mask": mask, "k": k, "v": v}
    named = floats | {name: y for name, y in given.items() if isinstance(y, torch.Tensor)}
    home = tensors.check(named, tuple(floats))
    tensors.refuse_meta(home)
    tensors.refuse_gradients(named, _NO_GRADIENT)
    q, k, v = tensors.to_autocast(q, k, v)
    if "k" in floats and "v" in floats:
        tensors.same_dtype(q, k, v)
    names = _kind(kv_dtype)
    rows = Cached(array_of(lengths), array_of(table), array_of(offsets_q), shared)
    codes = CacheCodes.of(array_of(k_scale), array_of(v_scale), names)
    options = Options.of(
        mask=array_of(mask),
        score_mod=score_mod,
        bias=array_of(bias),
        sink=array_of(sink),
        scale=scale,
        dropout=0.0,
        seed=None,
        precision=None,
    )
    request = Request(array_of(q), array_of(k), array_of(v), rows, codes, options)
    if home.type == "cpu":
        return tensors.of_results(execute.forward(request, return_lse, None, None))
    with tensors.stream_of(home):
        call = request.call
        size = dispatch.backend_of(call.q).workspace_size_cached(call)
        scratch = q.new_empty(size, dtype=torch.uint8)
        names = names[-1] if type(names) is tuple else names
        columns = v.shape[-1] * (2 if names == "int4" else 1)  # of which two share a byte
        out = tensors.empty_in_order_of(q, (*q.shape[:-1], columns))
        lse = q.new_empty(q.shape[:-1], dtype=tensors.lse_dtype(q)) if return_lse is True else None
        targets = array_of(out), array_of(lse), array_of(scratch)
        execute.forward(request, return_lse, *targets)
        of_arrays = execute.forward_signature(request, lse is not None, *targets)
    written = {"out": out} if lse is None else {"out": out, "lse": lse}
    recognised.keep(seen, of_arrays, written, q.dtype)
    return (out, lse) if return_lse else out


def _signature(
    settings: Settings,
    x: Operands,
    read: dict[str, Any],
    kv_dtype: Any,
    shared: Any,
    return_lse: Any,
) -> recognised.Signature | None:
    """Return the signature of a call on a GPU, or None if it must be checked every time.

    Nothing has to be checked before.
    """
    if not (type(x.q) in PLAIN and x.q.is_cuda and type(x.k) in PLAIN and type(x.v) in PLAIN):
        return None
    length, table = read["lengths"], read["table"]
    told = {}
    if type(length) is int:
        if table is not None and (type(table) not in PLAIN or table.ndim != 2):
            return None
        room = x.k.shape[-2] * (1 if table is None else table.shape[1]) if x.k.ndim == 4 else -1
        if not 0 <= length <= room:
            return None  # the check says why
        read = read | {"lengths": None}
        told = {"len_k": length}
    elif type(length) not in PLAIN:
        return None
    if type(shared) is not int:
        return None
    if type(return_lse) is not bool or not _is_name(kv_dtype):
        return None
    if tensors.is_transforming() or torch.is_autocast_enabled():
        return None
    if torch.is_grad_enabled():
        for each in (*x, *read.values()):
            if each is not None and getattr(each, "requires_grad", True):
                return None
    # A kernel may rely on values that are part of the keys.
    kind = "cached", return_lse, kv_dtype, shared, x.k.data_ptr() == x.v.data_ptr()
    seen = recognised.signature(kind, settings, x, read)
    if seen is not None:
        seen.addresses.update(told)
    return seen


def _is_name(kv_dtype: Any) -> bool:
    if type(kv_dtype) is tuple:
        return all(map(_is_name, kv_dtype))
    return kv_dtype is None or type(kv_dtype) in (str, torch.dtype)


@torch.compiler.disable(reason="calls over a cache are not operators of torch.compile")
@explained
def append(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int],
    *,
    table: torch.Tensor | None = None,
    offsets: torch.Tensor | Sequence[int] | None = None,
    q: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    positions: torch.Tensor | Sequence[Any] | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_dtype: Any = None,
    shared: int = 0,
) -> torch.Tensor | None:
    """Write new keys and values to a cache in place, and rotate keys and queries.

    The arguments are those of `cupyflash.append`. No gradient is computed.

    Parameters
    ----------
    k_new : torch.Tensor, shape (B, Hkv, n, D)
        New keys. With `offsets` they are packed: (Hkv, total, D).
    v_new : torch.Tensor, shape (B, Hkv, n, Dv)
        New values. With `offsets` they are packed: (Hkv, total, Dv).
    k : torch.Tensor, shape (B, Hkv, S, D)
        The cache's keys, in the dtype of `k_new` or codes. With `table` they are in pages: (P, Hkv,
        page, D).
    v : torch.Tensor, shape (B, Hkv, S, Dv)
        The cache's values. With `table` they are in pages: (P, Hkv, page, Dv).
    lengths : int or torch.Tensor, shape (B,)
        How many positions the cache holds after this step, as int32 or int64.
    table : torch.Tensor, shape (B, N), optional
        The page numbers of each sequence, of int32 or int64.
    offsets : torch.Tensor, shape (B + 1,), optional
        Entry b has the packed rows from ``offsets[b]`` to ``offsets[b + 1]``.
    q : torch.Tensor, shape (B, Hq, n, D), optional
        Queries of the same positions, which `rotary` rotates, too.
    rotary : Rotary, optional
        The angles, which may be made from tensors: ``Rotary(cos, sin)``.
    positions : torch.Tensor, shape (B, n) or (total,), optional
        The positions by which rows are rotated, if they are not those in the cache.
    k_scale, v_scale : torch.Tensor of float32, optional
        Where to write the scales of a cache of codes: (B, Hkv, S, 1), or (P, Hkv, page, 1).
    kv_dtype : str or torch.dtype, optional
        Which codes `k` and `v` hold if they are uint8.
    shared : int
        As in `cupyflash.append`: the number of first positions at which entries may write the same
        row of a page, if they write the same.

    Returns
    -------
    torch.Tensor or None
        The rotated queries, in the dtype of `q`; None without `q`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `cupyflash.append`, and if a tensor requires a gradient.
    """
    floats = {"k_new": k_new, "v_new": v_new, "q": q}
    held = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
    given = {"lengths": lengths, "table": table, "offsets": offsets, "positions": positions}
    named = floats | held | {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
    home = tensors.check(named, tuple(floats))
    tensors.refuse_meta(home)
    tensors.refuse_gradients(named, _NO_GRADIENT)
    queries = None if q is None else torch.empty_like(q)
    options: dict[str, Any] = {
        "table": array_of(table),
        "offsets": array_of(offsets),
        "positions": array_of(positions),
        "q": array_of(q),
        "rotary": rotary,
        "k_scale": array_of(k_scale),
        "v_scale": array_of(v_scale),
        "kv_dtype": _kind(kv_dtype),
        "out": array_of(queries),
        "shared": shared,
    }
    write(k_new, v_new, k, v, lengths, **options)
    for x in (k_scale, v_scale):
        _changed(x)
    return queries


def write(k_new: Any, v_new: Any, k: Any, v: Any, lengths: Any, **options: Any) -> None:
    """Write rows of tensors that were checked, with options of which tensors are arrays."""
    with tensors.stream_of(k.device):
        cache_update.append(*map(array_of, (k_new, v_new, k, v, lengths)), **options)
    _changed(k)
    _changed(v)


def _changed(x: Any) -> None:
    """Let autograd know that a tensor was written in place."""
    if isinstance(x, torch.Tensor) and not x.is_inference():
        torch.autograd.graph.increment_version(x)


@torch.compiler.disable(reason="rotations are not operators of torch.compile")
@explained
def rope(
    x: torch.Tensor,
    positions: torch.Tensor | Sequence[Any],
    rotary: Rotary,
    *,
    inverse: bool = False,
) -> torch.Tensor:
    """Rotate rows by their positions: rotary position embedding, with a gradient.

    The arguments are those of `cupyflash.rope`.

    Parameters
    ----------
    x : torch.Tensor, shape (B, H, L, D) or (H, total, D)
        Queries or keys.
    positions : torch.Tensor, shape (B, L) or (L,)
        Positions of the rows, the same for all heads, as int32 or int64.
    rotary : Rotary
        The angles, which may be made from tensors: ``Rotary(cos, sin)``.
    inverse : bool
        Rotate back.

    Returns
    -------
    torch.Tensor
        The rotated rows, with the shape and dtype of `x`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `cupyflash.rope`.
    """
    named = {"x": x}
    if isinstance(positions, torch.Tensor):
        named["positions"] = positions
    tensors.refuse_meta(tensors.check(named, ("x",)))
    tensors.refuse_transforms(named)
    if type(inverse) is not bool:
        raise ArgumentTypeError(f"inverse: got {inverse!r}; expected True or False.")
    made: torch.Tensor = _Rotation.apply(x, positions, rotary, inverse)
    return made


def rotated(x: torch.Tensor, positions: Any, rotary: Rotary, inverse: bool) -> torch.Tensor:
    """Rotate rows of a tensor that was checked, without a gradient."""
    made = torch.empty_like(x)
    with tensors.stream_of(x.device):
        cache_update.rope(
            array_of(x), array_of(positions), rotary, inverse=inverse, out=array_of(made)
        )
    return made


class _Rotation(torch.autograd.Function):
    """Rotates rows; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, positions: Any, rotary: Rotary, inverse: bool) -> Any:
        ctx.rest = positions, rotary, inverse
        return rotated(x, positions, rotary, inverse)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        positions, rotary, inverse = ctx.rest
        return _Rotation.apply(dout, positions, rotary, not inverse), None, None, None


def _kind(kv_dtype: Any) -> Any:
    """Return the names of codes, of which PyTorch's dtypes are some."""
    if isinstance(kv_dtype, tuple):
        return tuple(map(_kind, kv_dtype))
    return tensors.name_of(kv_dtype) if isinstance(kv_dtype, torch.dtype) else kv_dtype
