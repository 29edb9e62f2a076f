"""Structures in memory, which kernels take as one address instead of a hundred values.

A structure is a named tuple of numbers, contiguous arrays and other structures. Python packs it
into words of 8 bytes, and a kernel reads a field by its name when it uses it. An array is stored as
its address and its lengths; a structure within another one as its words.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_getattr_generic, models, register_model
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import as_dtype

from .addresses import address

WORD = 8  # bytes
_FORMATS = {types.int64: "q", types.float32: "f4x", types.float64: "d"}


class Struct(types.Type):  # type: ignore[misc]
    """Numba's type of a structure: the address of its words.

    Parameters
    ----------
    fields : type
        The named tuple.
    members : tuple of numba.types.Type
        The types of its fields: int64, float32, float64, C-contiguous arrays, and structures.
    """

    def __init__(self, fields: Any, members: tuple[types.Type, ...]) -> None:
        self.members = dict(zip(fields._fields, members, strict=True))
        self.offsets: dict[str, int] = {}
        words = 0
        for name, member in self.members.items():
            self.offsets[name] = words * WORD
            words += _words(member)
        self.word_count = words
        self.format = "".join(_format(member) for member in members)
        self._kept: dict[int, tuple[Any, list[Any]]] = {}
        self._forms = [
            (
                member if isinstance(member, Struct) else None,
                ArrayForm(member) if isinstance(member, types.Array) else None,
            )
            for member in members
        ]
        # Numba distinguishes types by their names, which become part of the names of functions, so
        # they are short.
        digest = hashlib.sha256(repr((fields.__module__, members)).encode()).hexdigest()
        super().__init__(f"{fields.__name__}_{digest[:12]}")

    def keep(self, values: Any) -> Any:
        """Return `values`, whose words are computed once: they and their arrays never change."""
        leaves: list[Any] = []
        self.flatten(values, leaves)
        self._kept[id(values)] = values, leaves
        return values

    def flatten(self, values: Any, leaves: list[Any]) -> None:
        """Append what the words of `values` hold."""
        if id(values) in self._kept:
            leaves += self._kept[id(values)][1]
            return
        for (within, form), value in zip(self._forms, values, strict=True):
            if form is not None:
                leaves += form.words(value)
            elif within is not None:
                within.flatten(value, leaves)
            else:
                leaves.append(value)


@functools.cache
def form_for(form_of: Callable[[types.Type], Struct], number: np.dtype[Any]) -> Struct:
    """Return the form of a structure whose numbers have a dtype, given its form for their type."""
    return form_of(numba.from_dtype(number))


def _words(member: types.Type) -> int:
    if isinstance(member, Struct):
        return member.word_count
    return 1 + member.ndim if isinstance(member, types.Array) else 1


def _format(member: types.Type) -> str:
    if isinstance(member, Struct):
        return member.format
    return "q" * (1 + member.ndim) if isinstance(member, types.Array) else _FORMATS[member]


class Packed:
    """A structure in memory. It holds what its addresses belong to.

    A field may be changed between calls of kernels; no kernel may run that reads it.

    Attributes
    ----------
    address : int
        Where it is.
    words : array of c_int64
        Its memory.
    """

    def __init__(self, kind: Struct, values: Any) -> None:
        leaves: list[Any] = []
        kind.flatten(values, leaves)
        self._kind = kind
        self._held: dict[str, Any] = {"": values}  # what addresses belong to
        self.words: Any = (ctypes.c_int64 * kind.word_count)()
        struct.pack_into("=" + kind.format, self.words, 0, *leaves)
        self.address = ctypes.addressof(self.words)

    @property
    def values(self) -> Any:
        """The structure that it was last made of."""
        return self._held[""]

    @property
    def held(self) -> object:
        """What its addresses belong to at present."""
        return tuple(self._held.values())

    def move_to(self, address: int) -> None:
        """Change the first field, an address. Who calls this holds what lies there."""
        self.words[0] = address

    def replace(self, values: Any) -> None:
        """Change all fields."""
        leaves: list[Any] = []
        self._kind.flatten(values, leaves)
        struct.pack_into("=" + self._kind.format, self.words, 0, *leaves)
        self._held[""] = values

    def place_of(self, name: str) -> int:
        """Return the address of a field's first word."""
        return self.address + self._kind.offsets[name]

    def change(self, name: str, value: Any) -> None:
        """Change a field."""
        member, offset = self._kind.members[name], self._kind.offsets[name]
        leaves: list[Any] = []
        if isinstance(member, Struct):
            member.flatten(value, leaves)
        elif isinstance(member, types.Array):
            leaves += ArrayForm(member).words(value)
        else:
            leaves.append(value)
        struct.pack_into("=" + _format(member), self.words, offset, *leaves)
        self._held[name] = value


class ArrayForm:
    """What arrays of a type have in common, where Numba's own objects are slow to ask."""

    def __init__(self, kind: types.Array) -> None:
        self._kind, self._dtype, self.ndim = kind, as_dtype(kind.dtype), kind.ndim

    def words(self, array: np.ndarray[Any, Any]) -> tuple[int, ...]:
        """Return an array's address and lengths, once it is known to be what kernels take."""
        if array.dtype != self._dtype or array.ndim != self.ndim or not array.flags.c_contiguous:
            raise TypeError(
                f"got an array {array.dtype} {array.shape} with strides {array.strides}, expected "
                f"{self._kind}"
            )
        # An array without elements is never read.
        return address(array) if array.size else 0, *array.shape


@register_model(Struct)
class _StructModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Struct) -> None:
        super().__init__(manager, kind, ir.IntType(64))


@infer_getattr
class _StructFields(AttributeTemplate):  # type: ignore[misc]
    key = Struct

    def generic_resolve(self, kind: Struct, name: str) -> types.Type | None:
        return kind.members.get(name)


@lower_getattr_generic(Struct)
def _read_field(context: Any, builder: Any, kind: Struct, value: Any, name: str) -> Any:
    member, word = kind.members[name], ir.IntType(64)

    def word_at(offset: int, of: ir.Type) -> Any:
        place = builder.add(value, word(offset))
        read = builder.load(builder.inttoptr(place, of.as_pointer()))
        # A structure is written before its kernel begins, and never while it runs.
        read.set_metadata("invariant.load", builder.module.add_metadata([]))
        return read

    offset = kind.offsets[name]
    if isinstance(member, Struct):
        return builder.add(value, word(offset))
    if not isinstance(member, types.Array):
        return word_at(offset, context.get_value_type(member))
    element = context.get_data_type(member.dtype)
    itemsize = context.get_abi_sizeof(element)
    lengths = [word_at(offset + WORD * (1 + axis), word) for axis in range(member.ndim)]
    strides = [word(itemsize)]
    for length in lengths[:0:-1]:
        strides.insert(0, builder.mul(strides[0], length))
    array = context.make_array(member)(context, builder)
    populate_array(
        array,
        data=word_at(offset, element.as_pointer()),
        shape=lengths,
        strides=strides,
        itemsize=itemsize,
        meminfo=None,
    )
    return array._getvalue()
