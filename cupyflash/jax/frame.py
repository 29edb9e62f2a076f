"""What XLA hands to a target of its typed FFI: a call frame, read by offsets of its C structures.

All fields that are read here are words of 64 bits, in the layout of major version 0 of XLA's FFI
(`xla/ffi/api/c_api.h`, which jaxlib brings). Another major version is refused by `Frame.version`.
"""

from __future__ import annotations

import ctypes
from typing import Any

# Words of XLA_FFI_CallFrame, whose last fields are structures themselves: args, rets and attrs.
_API, _CONTEXT, _STAGE, _ARGS, _RETS, _ATTRS = 2, 3, 4, 9, 14, 20
_EXTENSION = 1
_Words = ctypes.c_int64 * 21
EXECUTE = 3  # of XLA_FFI_ExecutionStage
_METADATA = 1  # of XLA_FFI_Extension_Type
# Bytes from the beginning of XLA_FFI_Api.
_VERSION, _ERROR_CREATE, _STREAM_GET, _DEVICE_ORDINAL_GET = 32, 48, 80, 184
_DATA = 24  # bytes from the beginning of XLA_FFI_Buffer
_INVALID_ARGUMENT, _INTERNAL = 3, 13  # of XLA_FFI_Error_Code

Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class _ErrorCreate(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("errc", ctypes.c_int),
    ]


class _StreamGet(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),  # out
    ]


class _DeviceOrdinalGet(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
        ("device_ordinal", ctypes.c_int32),  # out
    ]


class FrameError(Exception):
    """XLA refused what a target asked for."""


class Frame:
    """A call of a target.

    Parameters
    ----------
    address : int
        Where the XLA_FFI_CallFrame lies.
    """

    __slots__ = ("_words",)

    def __init__(self, address: int) -> None:
        self._words = _Words.from_address(address)

    @property
    def is_question(self) -> bool:
        """Whether XLA asks about the target instead of calling it."""
        return bool(self._words[_EXTENSION])

    @property
    def stage(self) -> int:
        """The stage of the execution; calls are at `EXECUTE`."""
        return int(self._words[_STAGE]) & 0xFFFFFFFF  # an int of 32 bits, and what pads it

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor version of XLA's FFI."""
        major, minor = (ctypes.c_int32 * 2).from_address(self._words[_API] + _VERSION)
        return int(major), int(minor)

    def answer(self) -> None:
        """Say that the target has the version of XLA, whose structures only grow, and no traits.

        A target without traits is no part of a command buffer: XLA launches it itself each time.
        """
        major, minor = self.version
        extension = self._words[_EXTENSION]
        if ctypes.c_int32.from_address(extension + 8).value != _METADATA or major:
            return  # then XLA refuses the version that its structure has, 0.0
        metadata = ctypes.c_int64.from_address(extension + 24).value
        (ctypes.c_int32 * 2).from_address(metadata + 24)[:] = [major, minor]

    def operands(self, count: int) -> list[int]:
        """Return the addresses of the operands' elements."""
        return _addresses(self._words[_ARGS], count)

    def results(self, count: int) -> list[int]:
        """Return the addresses of the results' elements."""
        return _addresses(self._words[_RETS], count)

    def number(self) -> int:
        """Return the one attribute, an integer of 64 bits."""
        scalar = ctypes.c_int64.from_address(self._words[_ATTRS]).value
        value = ctypes.c_int64.from_address(scalar + 8).value
        return ctypes.c_int64.from_address(value).value

    def stream(self) -> int:
        """Return the CUDA stream of the call.

        Raises
        ------
        FrameError
            If the platform has none.
        """
        question = _StreamGet(ctypes.sizeof(_StreamGet), None, self._words[_CONTEXT], None)
        self._ask(_STREAM_GET, question, "a stream")
        return int(question.stream or 0)

    def device(self) -> int:
        """Return the number of the device of the call, as CUDA counts those of the process.

        Raises
        ------
        FrameError
            If the platform has none.
        """
        size = _DeviceOrdinalGet.device_ordinal.offset + 4  # without what pads the structure
        question = _DeviceOrdinalGet(size, None, self._words[_CONTEXT], 0)
        self._ask(_DEVICE_ORDINAL_GET, question, "a device")
        return int(question.device_ordinal)

    def error(self, message: str, is_argument: bool) -> int:
        """Return what a target returns instead of 0; XLA destroys it."""
        size = _ErrorCreate.errc.offset + 4
        code = _INVALID_ARGUMENT if is_argument else _INTERNAL
        made = self._function(_ERROR_CREATE)(
            ctypes.byref(_ErrorCreate(size, None, message.encode(), code))
        )
        return int(made or 0)

    def _ask(self, function: int, question: Any, what: str) -> None:
        if self._function(function)(ctypes.byref(question)):
            raise FrameError(f"XLA gave no {what.removeprefix('a ')} to a call")

    def _function(self, offset: int) -> Any:
        pointer = ctypes.c_int64.from_address(self._words[_API] + offset).value
        return _Function(pointer)


def _addresses(pointers: int, count: int) -> list[int]:
    """Return where the elements of buffers are, of which there is an array of pointers."""
    words = (ctypes.c_int64 * count).from_address(pointers) if count else ()
    return [ctypes.c_int64.from_address(word + _DATA).value for word in words]
