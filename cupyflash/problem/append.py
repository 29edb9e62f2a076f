"""Calls that write to a cache: what users pass, turned into an `Append`, or into an error."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.device_arrays import address, is_device_array
from ..arrays.interop import floats, one_home, outputs
from ..errors import ArgumentError
from . import cached, codes, device_args, validate, written_rows
from .call import Array, Cache
from .encoding import Encoding
from .rotary import Rotary, check_positions, check_rotary, position_array


@dataclass(frozen=True, eq=False)
class Append:
    """A checked call of `append`.

    Attributes
    ----------
    k_new, v_new : array
        (B, Hkv, n, D) and (B, Hkv, n, Dv), or packed (Hkv, total, D) and (Hkv, total, Dv). If
        values are columns of the keys, v_new and v have no columns here, because the keys contain
        them.
    k, v : array
        (B, Hkv, S, D) and (B, Hkv, S, Dv), or pages.
    cache : Cache
        Where positions are, and how many the cache holds afterwards.
    batch : int
        Entries.
    offsets : array or None
        (B + 1,), for packed rows.
    q, out : array or None
        Queries, and where to write the rotated ones, or None for a new array.
    rotary : Rotary or None
        The angles.
    positions : array or None
        The positions by which rows are rotated; None for those in the cache.
    device : int or None
        The device of the arrays.
    """

    k_new: Array
    v_new: Array
    k: Array
    v: Array
    cache: Cache
    batch: int
    offsets: Array | None
    q: Array | None
    out: Array | None
    rotary: Rotary | None
    positions: Array | None
    device: int | None


def append(
    k_new: Any,
    v_new: Any,
    k: Any,
    v: Any,
    lengths: Any,
    table: Any,
    offsets: Any,
    q: Any,
    rotary: Any,
    positions: Any,
    out: Any,
    given: codes.CacheCodes | codes.NoCodes = codes.NONE,
    shared: Any = 0,
) -> Append:
    """Validate a call of `append`."""
    named = {"k_new": k_new, "v_new": v_new}
    k, v, encoding = codes.codes_of(k, v, given, k_new)
    if q is not None:
        named["q"] = q
    arrays = {name: floats(x, name) for name, x in named.items()}
    dtype = codes.same_dtype(arrays | codes.numbers_of(k, v, encoding))
    k_new, v_new, q = arrays["k_new"], arrays["v_new"], arrays.get("q")
    encoding.check_queries(dtype, "k_new")
    _check_options(q, rotary, positions, out)
    cache = cached.cache(k, v, table)
    keys, values = codes.shapes_of(k, v, encoding)
    validate.heads_of(keys, keys, values)
    validate.head_sizes(keys, keys, values, cached.MAX_HEAD_SIZE)
    _check_rows(arrays, keys, values, packed=offsets is not None)
    read = dict(arrays)
    total = k_new.shape[-2]
    if offsets is None:
        batch, bounds = k_new.shape[0], None
        counts: Array | None = np.full(batch, total)
    else:
        held = validate.offsets_array(offsets, "offsets")
        batch = held.size - 1
        offsets, bounds = device_args.offsets_to_check(held, "offsets", k_new, cached.CHECKS_ALL)
        counts = None
        if bounds is not None:
            bounds = validate.checked_offsets(bounds, "offsets", total)
            counts = np.diff(bounds)
    if table is None and k.shape[0] != batch:
        raise cached.too_few_entries(k, batch)
    cache = replace(
        cache,
        table=cached.table_array(table, batch),
        lengths=cached.lengths_of(lengths, batch, cache.capacity),
        encoding=encoding,
    )
    shared = cached.shared_positions(shared, cache.capacity)
    if counts is not None:
        cached.check_pages(cache, k.shape[0], counts)
    integers = {"lengths": cache.lengths, "table": cache.table}
    read |= {name: x for name, x in integers.items() if x is not None and not isinstance(x, int)}
    after = cache.lengths if isinstance(cache.lengths, int) else cached.readable(cache.lengths)
    if after is not None and counts is not None:
        _check_room(np.broadcast_to(after, (batch,)), counts)
    if rotary is not None:
        check_rotary(rotary, "k_new", k_new)
        read |= rotary.arrays
        if positions is not None:
            shape = (total,) if offsets is not None else (batch, total)
            read["positions"] = positions = position_array(positions, [shape], rotary)
        elif after is not None and counts is not None:
            last = np.broadcast_to(after, (batch,))[counts > 0] - 1
            check_positions(last, rotary, "lengths")
    scales = encoding.scales
    device = one_home(read | {"k": k, "v": v} | scales)
    if after is not None and counts is not None:
        new = {name: x for name, x in read.items() if name in ("k_new", "v_new", "positions")}
        lengths = np.broadcast_to(np.asarray(after, np.int64), (batch,))
        written_rows.check(cache, counts, lengths, new, offsets is not None, shared)
    for name in scales:
        codes.check_written(getattr(given, name), name, k if name == "k_scale" else v)
    written = {"k": k, "v": v} | scales
    if _is_view_of_keys(v, k):
        _check_views(v_new, k_new, rotary)
        _check_scales_of_views(encoding)
        v_new, v = v_new[..., :0], v[..., :0]
        written = {name: x for name, x in written.items() if name not in ("v", "v_scale")}
        read["v_new"] = v_new
    targets = {name: (x, x.shape, x.dtype) for name, x in written.items()}
    if out is not None and q is not None:
        targets["out"] = (out, q.shape, q.dtype)
    outputs(targets, read)
    return Append(k_new, v_new, k, v, cache, batch, offsets, q, out, rotary, positions, device)


def told_length(
    k_new: Any, k: Any, lengths: Any, table: Any, offsets: Any, positions: Any, rotary: Any
) -> int | None:
    """Return the length of all entries of a call on a GPU if no check can refuse it, or None."""
    number = lengths if type(lengths) is int else None
    if number is None or offsets is not None or not is_device_array(k_new):
        return None
    room: tuple[int, ...] = getattr(k, "shape", ())
    new = k_new.shape
    if len(room) != 4 or len(new) != 4:
        return None
    most = room[-2]
    if table is not None:
        most = most * table.shape[1] if is_device_array(table) and table.ndim == 2 else 0
    if rotary is not None and positions is None:
        most = min(most, getattr(rotary, "rows", 0))
    return number if new[-2] <= number <= most else None


def _check_options(q: Any, rotary: Any, positions: Any, out: Any) -> None:
    """Refuse arguments that would do nothing."""
    if q is not None and rotary is None:
        raise ArgumentError(
            "q: got queries without rotary, but this function only rotates them; expected "
            "rotary=Rotary(cos, sin) as well. Otherwise, leave q out."
        )
    for name, value, needs, other in (
        ("positions", positions, "rotary", rotary),
        ("out", out, "q", q),
    ):
        if value is not None and other is None:
            raise ArgumentError(
                f"{name}: got {type(value).__name__} without {needs}, which it belongs to; "
                f"expected both or neither. Leave {name} out."
            )


def _check_rows(arrays: dict[str, Array], keys: Any, values: Any, packed: bool) -> None:
    """Check the shapes of new rows against each other and against the cache."""
    lead, rows = ("", "total") if packed else ("B, ", "n")
    k_new = arrays["k_new"]
    for name in ("k_new", "v_new", "q"):
        if name not in arrays:
            continue
        x, axes = arrays[name], 3 if packed else 4
        heads, columns = ("Hq", "D") if name == "q" else ("Hkv", "Dv" if name == "v_new" else "D")
        wanted = f"({lead}{heads}, {rows}, {columns}){', packed by offsets' if packed else ''}"
        if x.ndim != axes:
            raise ArgumentError(f"{name}: got shape {x.shape}; expected {wanted}.")
        if (*x.shape[:-3], x.shape[-2]) != (*k_new.shape[:-3], k_new.shape[-2]):
            raise ArgumentError(
                f"{name}: got shape {x.shape} with k_new of shape {k_new.shape}; expected "
                f"{wanted}, with as many batch entries and rows as k_new."
            )
        if name == "q":
            if x.shape[-1] != k_new.shape[-1]:
                raise ArgumentError(
                    f"q: got shape {x.shape} with k_new of shape {k_new.shape}; expected equal "
                    f"last axes (the head size D), but {x.shape[-1]} is not {k_new.shape[-1]}."
                )
            continue
        cache, into = ("v", values) if name == "v_new" else ("k", keys)
        if (x.shape[-3], x.shape[-1]) != (into.shape[-3], into.shape[-1]):
            raise ArgumentError(
                f"{name}: got shape {x.shape} with {cache} of shape {into.shape}; expected "
                f"{into.shape[-3]} heads of {into.shape[-1]} columns, as {cache} has. The head "
                "axis is the third from the end: pass an array of shape (B, L, H, D) as "
                "x.swapaxes(-3, -2)."
            )
    if "q" in arrays:
        validate.heads_of(arrays["q"], k_new, arrays["v_new"])


def _check_room(after: Array, counts: Array) -> None:
    bad = np.flatnonzero(after < counts)
    if bad.size:
        b = int(bad[0])
        raise ArgumentError(
            f"lengths: entry {b} is {int(after[b])} with {int(counts[b])} new rows; expected "
            f"{int(counts[b])} or more: lengths counts what the cache holds after this step, "
            "including the new rows. Add their number to lengths first."
        )


def _is_view_of_keys(v: Array, k: Array) -> bool:
    """Whether values are the first columns of the keys."""
    return bool(
        k.size
        and address(v) == address(k)
        and v.shape[:-1] == k.shape[:-1]
        and v.strides == k.strides
        and v.shape[-1] <= k.shape[-1]
    )


def _check_scales_of_views(held: Encoding) -> None:
    """Refuse formats and scales of values that are not those of the keys that contain them."""
    if held.k_form != held.v_form:
        raise ArgumentError(
            f"kv_dtype: got {held.words}, but v is the first columns of k; expected one type. Pass "
            "a v in memory of its own, or one type."
        )
    if held.k_scale is None or held.v_scale is None:
        return
    if held.k_scale.size and not _is_view_of_keys(held.v_scale, held.k_scale):
        raise ArgumentError(
            "v_scale: got a separate array, but v is the first columns of k, whose codes have the "
            "scales of k; expected v_scale=k_scale, or its first columns."
        )


def _check_views(v_new: Array, k_new: Array, rotary: Rotary | None) -> None:
    if k_new.size and not _is_view_of_keys(v_new, k_new):
        raise ArgumentError(
            "v_new: got a separate array, but v is the first columns of k, which k_new fills; "
            f"expected v_new=k_new[..., :{v_new.shape[-1]}]."
        )
    if rotary is not None:
        raise ArgumentError(
            "rotary: got one with a v that is the first columns of k, so that v would be "
            "rotated, too; expected a k_new whose last columns are already rotated. Call rope on "
            "them first, and leave rotary out."
        )
