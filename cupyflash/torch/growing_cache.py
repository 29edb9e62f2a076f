"""Layers of a cache of transformers with room for later keys: a step copies only its own rows.

Those of the library's DynamicCache copy all rows in every step. What is returned has the same
numbers, as a view of the room, which attention reads with its strides.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils

from ..arrays.integers import integer
from ..errors import ArgumentError
from . import appended, tensors

_FEWEST = 64  # rows of the smallest room


class _Rooms:
    """What both kinds of layers have: rows of keys and of values with room behind them.

    `keys` and `values` are views of the rooms. Where other code has put other tensors in their
    place, as a reordering of beams does, the next step makes new rooms.
    """

    keys: Any
    values: Any
    _rooms: tuple[torch.Tensor, torch.Tensor] | None = None
    _appended: appended.Appended | None = None  # to the rooms, on a GPU
    _last: tuple[Any, Any, int, int] = None, None, 0, 0  # keys and values, and their rows in rooms
    rows = 0  # that are expected

    def _extended(self, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any, int, int]:
        """Return the rows that are held with the new ones behind them, and where these are.

        Time on the host matters: between two steps, nobody else writes to most layers.
        """
        held_k, held_v, first, end = self._last
        if self._rooms is not None and held_k is self.keys and held_v is self.values:
            room_k, room_v = self._rooms
            count = k.shape[2]
            if end + count <= room_k.shape[2]:
                known = self._appended
                if known is None or count > 1 or not known.write(k, v, end + 1):
                    refuse_unlike(room_k, k)
                    refuse_unlike(room_v, v)
                    room_k.narrow(2, end, count).copy_(k)
                    room_v.narrow(2, end, count).copy_(v)
                rows = end + count - first
                return room_k.narrow(2, first, rows), room_v.narrow(2, first, rows), first, rows
        rooms = self._rooms or (None, None)
        all_k, room_k, first = _with(self.keys, k, rooms[0], self.rows)
        all_v, room_v, first_v = _with(self.values, v, rooms[1], self.rows)
        is_alike = first == first_v and room_k.shape[2] == room_v.shape[2]
        self._rooms = (room_k, room_v) if is_alike else None
        if room_k is not rooms[0] or room_v is not rooms[1]:
            is_for_gpu = is_alike and room_k.is_cuda
            self._appended = appended.Appended(room_k, room_v) if is_for_gpu else None
        return all_k, all_v, first, all_k.shape[2]

    def __copy__(self) -> Any:
        """Return a layer with the same rows, of which neither writes to these rooms any more."""
        self._rooms, self._appended, self._last = None, None, _Rooms._last
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def _hold(self, keys: torch.Tensor, values: torch.Tensor, first: int, end: int) -> None:
        """Hold keys and values, which are these rows of the rooms."""
        self.keys, self.values = keys, values
        self._last = keys, values, first, end

    def _must_copy(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether rows may not be written in place, so that the library's own way is taken."""
        if tensors.is_traced():
            return True
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            return True  # what autograd has saved must stay as it is
        return _is_unlike(self.keys, k) or _is_unlike(self.values, v)


def _is_unlike(held: torch.Tensor | None, x: torch.Tensor) -> bool:
    """Whether there are rows already, of another dtype or on another device."""
    if held is None or (held.dtype is x.dtype and held.device == x.device):
        return False
    return held.numel() > 0


def refuse_unlike(held: torch.Tensor, new: torch.Tensor) -> None:
    """Refuse rows of other entries or heads, which copies would repeat to fill a room."""
    if held.shape[:2] != new.shape[:2] or held.shape[3] != new.shape[3]:
        batch, heads, _, columns = held.shape
        raise ArgumentError(
            f"key_states, value_states: got shape {tuple(new.shape)}; expected ({batch}, {heads}, "
            f"n, {columns}), as those in the cache. Give other sequences a cache of their own."
        )


def _with(
    held: torch.Tensor, new: torch.Tensor, room: torch.Tensor | None, expected: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return `held` and `new` rows one after the other, their room, and the first row in it."""
    batch, heads, count, columns = new.shape
    before = held.shape[-2] if held.numel() else 0
    if before:
        refuse_unlike(held, new)
    if before and room is not None:
        first = _row_of(held, room)
        end = first + before + count
        if first >= 0 and end <= room.shape[2]:
            room[:, :, first + before : end] = new
            return room[:, :, first:end], room, first
    rows = before + count
    room = new.new_empty(batch, heads, max(_size(rows), expected), columns)
    if before:
        room[:, :, :before] = held
    room[:, :, before:rows] = new
    return room[:, :, :rows], room, 0


def _size(rows: int) -> int:
    """Return the rows of a room for some and for later ones.

    There are few sizes, each half as large again as the one before. So many calls on the rows of
    rooms have the same strides, by which they are recognised.
    """
    size = _FEWEST
    while size < rows + _FEWEST // 2:
        size = -(-size * 3 // (2 * _FEWEST)) * _FEWEST
    return size


def _row_of(held: torch.Tensor, room: torch.Tensor) -> int:
    """Return which row of a room is the first one of `held`; -1 if this is not in the room."""
    step = room.stride(2) * room.itemsize
    at = held.data_ptr() - room.data_ptr()
    is_there = held.stride() == room.stride() and held.shape[:2] == room.shape[:2]
    if not (is_there and step and 0 <= at < step * room.shape[2]) or at % step:
        return -1
    return at // step


class GrowingLayer(_Rooms, cache_utils.DynamicLayer):
    """A layer that holds all keys."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Hold new rows, and return all of them."""
        if self._must_copy(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        k, v, first, rows = self._extended(key_states, value_states)
        self._hold(k, v, first, first + rows)
        return k, v


class GrowingSlidingLayer(_Rooms, cache_utils.DynamicSlidingWindowLayer):
    """A layer that holds the keys of a window; those before lie in front of them for a while."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Hold new rows, and return those that the new queries may see."""
        if self._must_copy(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count, kept = key_states.shape[-2], self.sliding_window - 1
        self.cumulative_length += count
        k, v, first, rows = self._extended(key_states, value_states)
        end = first + rows
        if self.record_past:  # `crop` will drop those before the window
            self._hold(k, v, first, end)
            hidden = max(rows - kept - count, 0)
            return k[:, :, hidden:], v[:, :, hidden:]
        hidden = max(rows - kept, 0)
        self._hold(k[:, :, hidden:], v[:, :, hidden:], first + hidden, end)
        return k, v


def growing(config: Any, rows: Any) -> cache_utils.DynamicCache:
    """Return a cache for models of a configuration; see `transformers.growing_cache`."""
    number = integer(rows)
    if number is None or number < 0:
        raise ArgumentError(
            f"rows: got {rows!r}; expected how many tokens a sequence will have at most, or 0."
        )
    cache = cache_utils.DynamicCache(config=config)
    for n, layer in enumerate(cache.layers):
        if type(layer) is cache_utils.DynamicLayer:
            cache.layers[n] = GrowingLayer()
            cache.layers[n].rows = number
        elif type(layer) is cache_utils.DynamicSlidingWindowLayer:
            cache.layers[n] = GrowingSlidingLayer(layer.sliding_window)
    if not any(isinstance(layer, _Rooms) for layer in cache.layers):
        names = sorted({type(layer).__name__ for layer in cache.layers})
        raise ArgumentError(
            f"config: got one of a model whose layers are {', '.join(names)}; expected some with a "
            "DynamicLayer or a DynamicSlidingWindowLayer. Use transformers.DynamicCache(config="
            "config)."
        )
    return cache
