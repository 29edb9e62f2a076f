"""The floating-point modes in which the CPU computes: those of IEEE 754, whatever a caller has set.

Modes belong to a thread: how it rounds, and whether numbers below the normal range count as 0. Some
libraries set them for speed, and a new thread begins with those of the thread that starts it. Here,
every thread computes in the usual modes, so that a result depends on nothing but its arguments.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from llvmlite import binding, ir

P = ParamSpec("P")
R = TypeVar("R")

_WORD, _BYTE = ir.IntType(64), ir.IntType(8)
_SAVED = 1 << 32  # beside saved modes, so that they are never 0
_USUAL_MXCSR, _USUAL_FPCR = 0x1F80, 0  # to the nearest, no number counts as 0, nothing traps


def _emit_x86(builder: Any, word: Any, call: Callable[..., Any], begin: bool) -> None:
    """Emit code for MXCSR. `word` is where the caller's modes are kept."""
    half = ir.IntType(32)
    place = builder.alloca(half)
    raw = builder.bitcast(place, _BYTE.as_pointer())
    if begin:
        call("llvm.x86.sse.stmxcsr", ir.VoidType(), raw)
        saved = builder.zext(builder.load(place), _WORD)
        builder.store(builder.or_(saved, _WORD(_SAVED)), word)
        builder.store(half(_USUAL_MXCSR), place)
    else:
        builder.store(builder.trunc(builder.load(word), half), place)
    call("llvm.x86.sse.ldmxcsr", ir.VoidType(), raw)


def _emit_arm(builder: Any, word: Any, call: Callable[..., Any], begin: bool) -> None:
    """Emit code for FPCR."""
    if begin:
        saved = call("llvm.aarch64.get.fpcr", _WORD)
        builder.store(builder.or_(saved, _WORD(_SAVED)), word)
        modes: Any = _WORD(_USUAL_FPCR)
    else:
        modes = builder.and_(builder.load(word), _WORD(_SAVED - 1))
    call("llvm.aarch64.set.fpcr", ir.VoidType(), modes)


def _begin_and_end(triple: str, module: ir.Module, builder: Any, word: Any) -> tuple[Any, Any]:
    """Return functions that emit code: for the usual modes, and for those that `word` keeps."""
    cpu = triple.partition("-")[0].lower()
    if cpu in ("x86_64", "amd64", "i686", "i386"):
        emit: Callable[..., None] | None = _emit_x86
    else:
        emit = _emit_arm if cpu in ("aarch64", "arm64") else None

    def call(called: str, result: Any, *args: Any) -> Any:
        made = module.globals.get(called) or ir.Function(
            module, ir.FunctionType(result, [x.type for x in args]), called
        )
        return builder.call(made, args)

    def of(begin: bool) -> Callable[[], None]:
        return lambda: None if emit is None else emit(builder, word, call, begin)

    return of(True), of(False)


def emit_in_usual_modes(module: ir.Module, builder: Any, inner: Callable[[], Any]) -> Any:
    """Emit what `inner` emits, in the usual modes; return what that returns."""
    begin, end = _begin_and_end(module.triple, module, builder, builder.alloca(_WORD))
    begin()
    result = inner()
    end()
    return result


def _written(triple: str) -> ir.Module:
    """Return a module with ``begin`` and ``end``, which take the address of a word."""
    module = ir.Module("float_modes")
    module.triple = triple
    for name in "begin", "end":
        kind = ir.FunctionType(ir.VoidType(), [_WORD.as_pointer()])
        function = ir.Function(module, kind, f"cupyflash_float_modes_{name}")
        builder = ir.IRBuilder(function.append_basic_block())
        (word,) = function.args
        begin, end = _begin_and_end(triple, module, builder, word)
        if name == "begin":
            begin()
        else:
            is_saved = builder.icmp_unsigned("!=", builder.load(word), _WORD(0))
            with builder.if_then(is_saved):
                end()
                builder.store(_WORD(0), word)
        builder.ret_void()
    return module


_compiling = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(  # a forked child must not inherit what another thread's LLVM has locked
        before=_compiling.acquire,
        after_in_parent=_compiling.release,
        after_in_child=_compiling.release,
    )


@functools.cache
def _functions() -> tuple[Any, Any]:
    """Return ``begin`` and ``end``."""
    engine = compiled(_written)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    begin, end = (
        kind(engine.get_function_address(f"cupyflash_float_modes_{name}"))
        for name in ("begin", "end")
    )
    return begin, end


_engines: list[Any] = []  # they hold code, to which other threads may have pointers


def compiled(written: Callable[[str], ir.Module]) -> Any:
    """Compile the module that `written` makes for this machine; return its engine."""
    with _compiling:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        triple = binding.get_process_triple()
        parsed = binding.parse_assembly(str(written(triple)))
        engine = binding.create_mcjit_compiler(
            parsed, binding.Target.from_triple(triple).create_target_machine(opt=0)
        )
        engine.finalize_object()
        _engines.append(engine)
        return engine


def use_usual_modes() -> None:
    """Set the usual modes in this thread, for good."""
    begin, _ = _functions()
    before = ctypes.c_uint64()  # it lives until the end
    begin(ctypes.addressof(before))


def own_arithmetic(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function compute in the usual modes, and NumPy be quiet about overflow and underflow.

    A caller's settings are meant for the caller's own arithmetic. They are there again afterwards,
    also after an exception from a signal: the word is filled as the modes are changed.
    """
    quiet = np.errstate(all="ignore")(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        begin, end = _functions()
        word = ctypes.c_uint64()
        place = ctypes.addressof(word)
        try:
            begin(place)
            return quiet(*args, **kwargs)
        finally:
            end(place)

    return run
