"""Rows of JAX arrays: written to a cache, which gives a new cache, and rotated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import cache_update
from ..problem import append as problem
from ..problem.codes import CacheCodes
from ..problem.keywords import explained
from ..problem.rotary import Rotary, rotation
from . import arguments, host
from .constants import Constants
from .constants import alike as constant_alike
from .rotation import rotated

_NO_GRADIENT = (
    "append: got a request for a gradient through codes; expected none, because codes have none. "
    "Pass jax.lax.stop_gradient(x)."
)


class Appended(NamedTuple):
    """What `append` returns: the cache with its new rows, and the rotated queries.

    Attributes
    ----------
    k, v : jax.Array
        The new arrays of keys and of values.
    k_scale, v_scale : jax.Array or None
        The new scales of a cache of codes.
    q : jax.Array or None
        The rotated queries, if there are any.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    q: jax.Array | None = None


@explained
def append(
    k_new: jax.Array,
    v_new: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: int | jax.Array | Sequence[int],
    *,
    table: jax.Array | None = None,
    offsets: jax.Array | Sequence[int] | None = None,
    q: jax.Array | None = None,
    rotary: Rotary | None = None,
    positions: jax.Array | Sequence[Any] | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    kv_dtype: Any = None,
    shared: int = 0,
) -> Appended:
    """Return a cache with new keys and values, and rotate keys and queries.

    JAX's arrays do not change, so this is `cupyflash.append` on a new cache. In a program of
    jax.jit that owns the cache, XLA writes the rows in place and copies nothing else: donate it
    (``donate_argnums``), or carry it through ``jax.lax.scan``. Otherwise the cache is copied, and
    so are, always, arrays of bfloat16 and float8, to which XLA's CPU cannot write in place.

    Parameters
    ----------
    k_new : jax.Array, shape (B, Hkv, n, D)
        New keys; with `offsets`, packed keys of shape (Hkv, total, D).
    v_new : jax.Array, shape (B, Hkv, n, Dv)
        New values; with `offsets`, packed values of shape (Hkv, total, Dv).
    k : jax.Array, shape (B, Hkv, S, D)
        The cache's keys, with room for S positions, of the dtype of `k_new` or codes of 8 or 4
        bits. With `table`, they are pages, (P, Hkv, page, D).
    v : jax.Array, shape (B, Hkv, S, Dv)
        The cache's values; with `table`, (P, Hkv, page, Dv).
    lengths : int or jax.Array of integers, shape (B,)
        How many positions the cache holds after this step: new row i of entry b goes to position
        ``lengths[b] - n + i``.
    table : jax.Array of integers, shape (B, N), optional
        The page numbers of each entry.
    offsets : jax.Array of integers, shape (B + 1,), optional
        Entry b has the packed rows from ``offsets[b]`` to ``offsets[b + 1]``.
    q : jax.Array, shape (B, Hq, n, D), optional
        Queries of the same positions, which are rotated, too; with `offsets`, (Hq, total, D).
    rotary : Rotary, optional
        Rotates keys and queries by their positions. Its angles are constants.
    positions : jax.Array of integers, shape (B, n) or (total,), optional
        The positions by which rows are rotated, if these are not those in the cache.
    k_scale, v_scale : jax.Array of float32, optional
        The scales of a cache of codes, one for each row or, in int4, for each 32 columns.
    kv_dtype : str or dtype_like, optional
        Which codes `k` and `v` hold if they are uint8.
    shared : int
        Entries may write the same row of a page for the same position if this is below `shared`.
        Their new rows must be equal there.

    Returns
    -------
    Appended
        (k, v, k_scale, v_scale, q): the new cache, and the rotated queries. What was not given is
        None. Gradients flow through all but codes.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`. What traced lengths, offsets, positions and tables hold is checked when
        the program runs; then JAX raises its JaxRuntimeError with the same message.

    Examples
    --------
    >>> import jax
    >>> from cupyflash.jax import append
    >>> step = jax.jit(append, donate_argnums=(2, 3))
    >>> k = v = jax.numpy.zeros((1, 2, 16, 8))
    >>> new = jax.numpy.ones((1, 2, 1, 8))
    >>> k, v, *_ = step(new, new, k, v + 0, 1)
    >>> k[0, 0, :, 0].sum().item()
    1.0
    """
    named = {"k_new": k_new, "v_new": v_new, "q": q}
    new = {name: arguments.array(name, x) for name, x in named.items() if x is not None}
    named = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
    held = {name: arguments.array(name, x) for name, x in named.items() if x is not None}
    named = {"lengths": lengths, "table": table, "offsets": offsets, "positions": positions}
    places = {
        name: arguments.integers(name, x)
        for name, x in named.items()
        if x is not None or name == "lengths"
    }
    where = _Places(new, held, rotary, kv_dtype, arguments.number("shared", shared))
    rows = {name: jax.lax.stop_gradient(x) for name, x in new.items()} if shared else {}
    page, row, position = where.of_rows(places, rows)
    if rotary is not None:
        position = jnp.asarray(places.get("positions", position))
    if "k_scale" in held or "v_scale" in held:
        new = _coded(new, held, position, rotary, kv_dtype)
    elif rotary is not None:
        turned = [name for name in ("k_new", "q") if name in new]
        new |= {name: rotated(new[name], position, rotary, False) for name in turned}
    made = {name: _written(x, new[_NEW.get(name, name)], page, row) for name, x in held.items()}
    return Appended(**made, q=new.get("q"))


class _Places:
    """Where the rows of a call go, checked as `cupyflash.append` checks it.

    Parameters
    ----------
    new, held : dict
        New rows and the arrays of the cache, by name.
    rotary, kv_dtype, shared
        As in `append`.
    """

    def __init__(
        self,
        new: dict[str, Any],
        held: dict[str, Any],
        rotary: Rotary | None,
        kv_dtype: Any,
        shared: Any,
    ) -> None:
        self._new = {name: arguments.like(x) for name, x in new.items()}
        self._held = {name: (x.shape, x.dtype) for name, x in held.items()}
        self._rotary, self._kv_dtype, self._shared = rotary, kv_dtype, shared

    def of_rows(
        self, places: dict[str, Any], new: dict[str, Any]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return entry or page, row and position of each new row: (B, n), or packed (total,).

        `new` has the rows if what they hold is compared.
        """
        found = self._check(*self._known_or_alike(places))
        given = [*places.values(), *new.values()]
        if all(map(arguments.is_known, given)):
            if new:
                found = self._check(
                    {name: arguments.known(x) for name, x in places.items()}, new=new
                )
            page, row, position = (jnp.asarray(x.astype(np.int32)) for x in found)
            return page, row, position
        results = [jax.ShapeDtypeStruct(found[0].shape, np.int32)] * 3

        def run(places: dict[str, Any], new: dict[str, Any], _: Any) -> list[Any]:
            return [x.astype(np.int32) for x in self._check(places, new=new)]

        def checked(places: dict[str, Any], new: dict[str, Any]) -> list[Any]:
            made: list[Any] = host.call(run, results, places, new)
            return made

        operands = {name: jnp.asarray(x) for name, x in places.items()}
        if any(map(arguments.is_traced, given)):
            made = jax.lax.platform_dependent(operands, new, default=checked, cuda=self._on_gpu)
        else:
            made = self._on_gpu(operands, new)
        page, row, position = made
        return page, row, position

    def _on_gpu(self, places: dict[str, Any], _: Any) -> list[Any]:
        """Return the same, unchecked, because a check would wait for the GPU.

        What is out of range is in no page, so that nothing is written for it.
        """
        k_new, (pages, _, room, _) = self._new["k_new"], self._held["k"][0]
        size = max(room, 1)
        offsets, table = places.get("offsets"), places.get("table")
        count = k_new.shape[-2]
        if offsets is None:
            batch = k_new.shape[0]
            entry = jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, count))
            ends = jnp.full(batch, count)
        else:
            batch = offsets.size - 1
            entry = jnp.searchsorted(offsets[1:], jnp.arange(count), side="right")
            ends = offsets[1:]
        after = jnp.broadcast_to(places["lengths"], (batch,)) - ends
        position = after[jnp.minimum(entry, batch - 1)] + jnp.arange(count)
        capacity = room if table is None else room * table.shape[1]
        is_there = (entry < batch) & (position >= 0) & (position < capacity)
        position = jnp.where(is_there, position, 0)
        page = entry if table is None else table[entry, position // size]
        page = jnp.where(is_there & (page >= 0) & (page < pages), page, pages)
        return [x.astype(np.int32) for x in (page, position % size, position)]

    def _check(
        self, places: dict[str, Any], pages: int = 0, new: dict[str, Any] | None = None
    ) -> list[Any]:
        """Return entry or page, row and position of each new row.

        The cache has at least so many `pages`. `new` are rows in place of those that are like them.
        """
        # What is written must not overlap, so each array has memory of its own; nobody touches it.
        held = {
            name: np.empty((max(shape[0], pages), *shape[1:]) if shape[:1] > (0,) else shape, dtype)
            for name, (shape, dtype) in self._held.items()
        }
        given = CacheCodes(held.pop("k_scale", None), held.pop("v_scale", None), self._kv_dtype)
        optional = dict.fromkeys(("table", "offsets", "positions"))
        rows = {name: np.asarray(x) for name, x in (new or {}).items()}
        arrays = {"q": None, **self._new, **rows, **held, **optional, **places}
        checked = problem.append(
            **arrays, rotary=self._rotary, out=None, given=given, shared=self._shared
        )
        lengths = np.broadcast_to(checked.cache.lengths, (checked.batch,))
        if checked.offsets is None:
            count = checked.k_new.shape[-2]
            entry = np.arange(checked.batch)[:, None]
            position = lengths[:, None] - count + np.arange(count)
        else:
            counts = np.diff(checked.offsets)
            entry = np.repeat(np.arange(checked.batch), counts)
            ends = checked.offsets[1:].astype(np.int64)
            position = (lengths - ends)[entry] + np.arange(len(entry))
        row = position % max(checked.cache.page_size, 1)
        page = np.broadcast_to(entry, row.shape)
        if checked.cache.table is not None:
            page = checked.cache.table[page, position // checked.cache.page_size]
        return [page, row, position]

    def _known_or_alike(self, places: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return integers for a check: what they are, or if some are traced, what stands for them.

        Then the new rows are the first ones of each entry, in pages of its own, of which there are
        enough: the second result is their number.
        """
        made = {
            name: arguments.known(x) if arguments.is_known(x) else arguments.like(x)
            for name, x in places.items()
        }
        where = [places.get(name) for name in ("lengths", "table", "offsets")]
        k_new, (shape, _) = self._new["k_new"], self._held["k"]
        if all(map(arguments.is_known, where)) or k_new.ndim < 3 or len(shape) != 4:
            return made, 0
        counts = np.full(k_new.shape[0], k_new.shape[-2])
        if "offsets" in places:
            made["offsets"] = self._offsets(places["offsets"], made["offsets"])
            counts = np.diff(np.ravel(made["offsets"]))
        after = np.asarray(made["lengths"])
        if after.shape == counts.shape:
            made["lengths"] = counts.astype(after.dtype)
        else:
            made["lengths"] = np.full_like(after, max(counts, default=0))
        table = np.asarray(made.get("table", 0))
        if table.ndim != 2 or len(table) != len(counts):
            return made, 0
        page = max(shape[2], 1)
        first = (made["lengths"] - counts) // page
        pages = np.where(counts > 0, -(-made["lengths"] // page) - first, 0)
        number = np.arange(table.shape[1]) - first[:, None]
        own = (np.cumsum(pages) - pages)[:, None] + number
        made["table"] = np.where(number < 0, 0, own).astype(table.dtype)
        return made, int(pages.sum())

    def _offsets(self, offsets: Any, known: Any) -> Any:
        """Return offsets for a check; entries are equally long if they are traced."""
        if arguments.is_known(offsets) or offsets.ndim != 1 or offsets.size < 2:
            return known
        even: Any = np.arange(offsets.size) * self._new["k_new"].shape[-2] // (offsets.size - 1)
        return even.astype(offsets.dtype)


def _coded(
    new: dict[str, Any], held: dict[str, Any], position: Any, rotary: Rotary | None, kv_dtype: Any
) -> dict[str, Any]:
    """Return new rows as codes, with scales: those of a cache that has room for nothing else."""
    packed = new["k_new"].ndim == 3
    if packed:  # one entry
        new, position = {name: x[None] for name, x in new.items()}, position[None]
    batch, _, count, _ = new["k_new"].shape
    room = {
        name: jax.ShapeDtypeStruct((batch, x.shape[1], count, x.shape[-1]), x.dtype)
        for name, x in held.items()
    }
    results = room | {name: x for name, x in new.items() if name == "q"}
    at = {} if rotary is None else {"positions": position}

    constants = Constants({"lengths": count, "rotary": rotary, "kv_dtype": kv_dtype})
    names = sorted(results)  # in the order of a tree's leaves

    def run(arrays: dict[str, Any], into: tuple[Any, ...]) -> dict[str, Any]:
        options = dict(constants.beside(arrays["k_new"]))
        made = dict(zip(names, into, strict=False))
        for name, x in room.items():
            if name not in made:
                made[name] = host.empty_beside(arrays["k_new"], x.shape, x.dtype)
        if made["k"].dtype != room["k"].dtype:
            options["kv_dtype"] = room["k"].dtype.name  # on a GPU, where codes are bytes
        q = cache_update.append(
            **arrays, **{n: made[n] for n in room}, **options, out=made.get("q")
        )
        return made if "q" not in arrays else {**made, "q": q}

    made = host.call(run, results, new | at, no_gradient=_NO_GRADIENT)
    made = {name: x[0] for name, x in made.items()} if packed else dict(made)
    return {_NEW.get(name, name): x for name, x in made.items()}


_NEW = {"k": "k_new", "v": "v_new"}  # name of an array of the cache -> name of its new rows


@jax.custom_vjp
def _written(held: jax.Array, new: jax.Array, page: jax.Array, row: jax.Array) -> jax.Array:
    """Return an array of a cache with new rows (B, H, n, columns), or packed ones."""
    rows = jnp.swapaxes(new, -3, -2)  # indices that a slice divides put their axes first
    if held.dtype.name in _WIDENED:
        bits = jnp.dtype(f"uint{8 * held.dtype.itemsize}")
        held, rows = (jax.lax.bitcast_convert_type(x, bits) for x in (held, rows))
        made = held.at[page, :, row].set(rows, mode="drop")
        return jax.lax.bitcast_convert_type(made, new.dtype)
    return held.at[page, :, row].set(rows, mode="drop")


# XLA's CPU writes to arrays of these types in float32, which takes longer and changes NaNs.
_WIDENED = "bfloat16", "float8_e4m3fn", "float8_e5m2"


def _with_places(held: Any, new: Any, page: Any, row: Any) -> tuple[Any, Any]:
    return _written(held, new, page, row), (page, row)


def _gradients(places: tuple[Any, Any], cotangent: Any) -> tuple[Any, ...]:
    page, row = places
    d_new = jnp.swapaxes(cotangent[page, :, row], -3, -2)
    return cotangent.at[page, :, row].set(0), d_new, None, None


_written.defvjp(_with_places, _gradients)


@explained
def rope(
    x: jax.Array,
    positions: jax.Array | Sequence[Any],
    rotary: Rotary,
    *,
    inverse: bool = False,
) -> jax.Array:
    """Rotate rows by their positions: rotary position embedding.

    As `cupyflash.rope`, whose bits it has. Gradients flow through `x`. Under vmap, the mapped axis
    becomes a part of a single call.

    Parameters
    ----------
    x : jax.Array, shape (B, H, L, D) or (H, total, D)
        Queries or keys.
    positions : jax.Array of integers, shape (B, L) or (L,)
        Positions of the rows, the same for all heads.
    rotary : Rotary
        The angles, which are constants.
    inverse : bool
        Rotate back.

    Returns
    -------
    jax.Array
        The rotated rows, with the shape and dtype of `x`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`. Whether traced positions have angles is checked when the program runs;
        then JAX raises its JaxRuntimeError with the same message.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> from cupyflash import Rotary
    >>> from cupyflash.jax import rope
    >>> angles = np.outer(np.arange(100), [1.0, 0.1]).astype(np.float32)
    >>> rotary = Rotary(np.cos(angles), np.sin(angles))
    >>> x = jax.numpy.ones((1, 2, 3, 4))
    >>> rope(x, [7, 8, 9], rotary).shape
    (1, 2, 3, 4)
    """
    x = arguments.array("x", x)
    positions = arguments.integers("positions", positions)
    is_known = arguments.is_known(positions)
    alike = arguments.known(positions) if is_known else arguments.like(positions)
    checked = rotation(arguments.like(x), alike, constant_alike(rotary), inverse, None)
    return rotated(x, jnp.asarray(positions), rotary, checked.inverse)
