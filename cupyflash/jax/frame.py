"""What XLA hands to a target of its typed FFI: a call frame, read by offsets of its C structures.

All fields that are read here are words of 64 bits, in the layout of major version 0 of XLA's FFI
(`xla/ffi/api/c_api.h`, which jaxlib brings). Another major version is refused by `Frame.version`.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

# Words of XLA_FFI_CallFrame, whose last fields are structures themselves: args, rets and attrs.
_EXTENSION, _API, _CONTEXT, _STAGE, _ARGS, _RETS, _ATTRS = 1, 2, 3, 4, 9, 14, 20
_FIELDS = struct.Struct("8x4q32xq32xq40xq")  # these words, in this order
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


class _Questions(threading.local):
    """What a thread asks XLA; a call writes its context there, and XLA the answer."""

    def __init__(self) -> None:
        self.of_stream = _StreamGet(ctypes.sizeof(_StreamGet), None, None, None)
        size = _DeviceOrdinalGet.device_ordinal.offset + 4  # without what pads the structure
        self.of_device = _DeviceOrdinalGet(size, None, None, 0)
        self.at_stream, self.at_device = map(ctypes.addressof, (self.of_stream, self.of_device))


_questions = _Questions()


class FrameError(Exception):
    """XLA refused what a target asked for."""


class Frame:
    """A call of a target.

    Parameters
    ----------
    address : int
        Where the XLA_FFI_CallFrame lies.
    """

    __slots__ = ("_api", "_args", "_attrs", "_context", "_extension", "_rets", "_stage")

    def __init__(self, address: int) -> None:
        (
            self._extension, self._api, self._context, self._stage, self._args, self._rets,
            self._attrs,
        ) = _FIELDS.unpack(ctypes.string_at(address, _FIELDS.size))  # fmt: skip

    @property
    def is_question(self) -> bool:
        """Whether XLA asks about the target instead of calling it."""
        return bool(self._extension)

    @property
    def stage(self) -> int:
        """The stage of the execution; calls are at `EXECUTE`."""
        return int(self._stage) & 0xFFFFFFFF  # an int of 32 bits, and what pads it

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor version of XLA's FFI."""
        major, minor = (ctypes.c_int32 * 2).from_address(self._api + _VERSION)
        return int(major), int(minor)

    def answer(self) -> None:
        """Say that the target has the version of XLA, whose structures only grow, and no traits.

        A target without traits is no part of a command buffer: XLA launches it itself each time.
        """
        major, minor = self.version
        extension = self._extension
        if ctypes.c_int32.from_address(extension + 8).value != _METADATA or major:
            return  # then XLA refuses the version that its structure has, 0.0
        metadata = ctypes.c_int64.from_address(extension + 24).value
        (ctypes.c_int32 * 2).from_address(metadata + 24)[:] = [major, minor]

    def operands(self, count: int) -> list[int]:
        """Return the addresses of the operands' elements."""
        return _addresses(self._args, count)

    def results(self, count: int) -> list[int]:
        """Return the addresses of the results' elements."""
        return _addresses(self._rets, count)

    def number(self) -> int:
        """Return the one attribute, an integer of 64 bits."""
        scalar = _word(self._attrs).value
        return _word(_word(scalar + 8).value).value

    def stream(self) -> int:
        """Return the CUDA stream of the call.

        Raises
        ------
        FrameError
            If the platform has none.
        """
        question = _questions.of_stream
        question.ctx = self._context
        if self._function(_STREAM_GET)(_questions.at_stream):
            raise FrameError("XLA gave no stream to a call")
        return int(question.stream or 0)

    def device(self) -> int:
        """Return the number of the device of the call, as CUDA counts those of the process.

        Raises
        ------
        FrameError
            If the platform has none.
        """
        question = _questions.of_device
        question.ctx = self._context
        if self._function(_DEVICE_ORDINAL_GET)(_questions.at_device):
            raise FrameError("XLA gave no device to a call")
        return int(question.device_ordinal)

    def error(self, message: str, is_argument: bool) -> int:
        """Return what a target returns instead of 0; XLA destroys it."""
        size = _ErrorCreate.errc.offset + 4
        code = _INVALID_ARGUMENT if is_argument else _INTERNAL
        made = self._function(_ERROR_CREATE)(
            ctypes.byref(_ErrorCreate(size, None, message.encode(), code))
        )
        return int(made or 0)

    def _function(self, offset: int) -> Any:
        return _function_at(_word(self._api + offset).value)


_word = ctypes.c_int64.from_address
_function_at = functools.cache(_Function)


@functools.cache
def _pointers(count: int) -> struct.Struct:
    return struct.Struct(f"{count}q")


def _addresses(pointers: int, count: int) -> list[int]:
    """Return where the elements of buffers are, of which there is an array of pointers."""
    if not count:
        return []
    words = _pointers(count).unpack(ctypes.string_at(pointers, 8 * count))
    return [_word(word + _DATA).value for word in words]
