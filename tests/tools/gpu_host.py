"""Where the host's time of small calls on a GPU goes: the whole call, and without parts of it.

    python tests/tools/gpu_host.py

Each row is a call that is recognised. `all` is the whole; `plain` has launches that never begin
early; `python` has no launches, so that it is the package and the memory of arrays alone. Below are
CuPy's parts, each alone, and the launches of one query over a cache: by the driver's function as
the package calls it, plain and so that they begin early, and by the functions of other packages.
With PyTorch, the last rows are calls of tensors, and those of its own attention beside them. Times
are medians over runs of 20 calls, for which an idle device has room, in microseconds.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

import cupyflash
from cupyflash import masks
from cupyflash.gpu import driver, launch
from cupyflash.problem import replay

CALLS, RUNS = 20, 200


def microseconds(cupy: Any, call: Callable[[], Any], runs: int = RUNS) -> float:
    """Return the time until a call returns, while the device has room for it."""
    for _ in range(3):
        call()
    times = []
    for _ in range(runs):
        cupy.cuda.get_current_stream().synchronize()
        before = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - before) / CALLS)
    return 1e6 * statistics.median(times)


def calls(cupy: Any) -> dict[str, Callable[[], Any]]:
    """Return small calls by name."""
    made = np.random.default_rng(0).standard_normal

    def draw(*shape: int, count: int = 3) -> list[Any]:
        return [cupy.asarray(made(shape).astype(np.float16)) for _ in range(count)]

    dense, packed = draw(1, 8, 128, 64), draw(8, 512, 64)
    (q,), (k, v) = draw(1, 6, 1, 48, count=1), draw(1, 6, 512, 48, count=2)
    longer = draw(1, 6, 4096, 48, count=2)
    lengths, growing = cupy.asarray(np.array([250], np.int32)), itertools.cycle(range(200, 300))
    ends = np.arange(5, dtype=np.int32) * 128
    offsets = {name: cupy.asarray(ends.astype(name)) for name in ("int32", "int64")}
    varlen = functools.partial(cupyflash.attention_varlen, *packed)
    cached = functools.partial(cupyflash.attention_cached, q, k, v)
    window = masks.window(64, 0)
    found = {
        "attention": lambda: cupyflash.attention(*dense),
        "attention_cached": lambda: cached(lengths),
        "attention_cached, a window": lambda: cached(lengths, mask=window),
        "attention_cached, room for more keys": lambda: cupyflash.attention_cached(
            q, *longer, lengths
        ),
        "attention_cached, a number that grows": lambda: cached(next(growing)),
        "attention_varlen, host": lambda: varlen(ends, ends),
    }
    for (name, each), check in itertools.product(offsets.items(), (None, False, True)):
        found[f"attention_varlen, {name}, check={check}"] = functools.partial(
            varlen, each, each, check=check
        )
    return found


@contextmanager
def never_early() -> Iterator[None]:
    """Let kernels begin when the ones before have ended."""
    with (
        mock.patch.object(driver, "OVERLAP_DRIVER", 2**31),
        mock.patch.object(replay, "_entries", {}),
    ):
        driver.queue.cache_clear()
        yield
    driver.queue.cache_clear()


def _launch_nothing(*_: Any) -> int:
    return 0


@contextmanager
def launching_nothing(queue: driver.Queue) -> Iterator[None]:
    """Let calls make no launches."""
    nothing = _launch_nothing
    with (
        mock.patch.multiple(queue, launch=nothing),
        mock.patch.object(launch.CompiledLaunches, "start", nothing),
    ):
        yield


def table(cupy: Any, runs: int = RUNS) -> dict[str, list[float]]:
    """Return the times of calls, and of CuPy's parts."""
    rows = {}
    for name, call in calls(cupy).items():
        times = [microseconds(cupy, call, runs)]
        with never_early():
            times.append(microseconds(cupy, call, runs))
        with launching_nothing(driver.queue(cupy.cuda.runtime.getDevice())):
            times.append(microseconds(cupy, call, runs))
        rows[name] = times
    queue = driver.queue(cupy.cuda.runtime.getDevice())
    parts = {
        "memory": lambda: cupy.cuda.alloc(1 << 16),
        "an array": lambda: cupy.ndarray((1, 8, 128, 64), np.float16),
        "the stream": queue.current_stream,
        "whether it is captured": lambda: queue.current_stream().is_capturing(),
        "the device": queue.is_here,
    }
    rows |= {name: [microseconds(cupy, part, runs)] for name, part in parts.items()}
    for name, launched in launches(cupy, queue):
        rows[name] = [microseconds(cupy, launched, runs)]
    return rows


def launches(cupy: Any, queue: driver.Queue) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield ways to launch the kernels of one query over a cache, each until the next one."""
    call = calls(cupy)["attention_cached, room for more keys"]
    for _ in range(3):
        call()
    compiled = max(replay._entries.values(), key=lambda entry: entry.used).compiled.launches
    buffer = compiled._buffers.take()  # the addresses of the first call are in it
    kernels = compiled._kernels
    own = cupy.cuda.Stream(non_blocking=True)
    for stream, where in ((0, "default stream"), (own.ptr, "another stream")):
        for early in (False, True):
            for place in buffer.streams:
                buffer.words[place] = stream
                buffer.words[place - driver._STREAM + driver._COUNT] = int(early)
            how = f"{'early' if early else 'plain'}, {where}"
            for n in range(len(kernels)):
                yield f"  launch {n + 1}, {how}", functools.partial(queue.launch, buffer.one(n))
            yield f"  {len(kernels)} launches, {how}", functools.partial(_all, queue, buffer)
        pointers = buffer.launches[0][2]
        if by_cupy := getattr(cupy.cuda, "driver", None):
            kernel, one = kernels[0], (1, 1)
            sizes = kernel.grid, *one, kernel.threads, *one, kernel.shared_memory
            arguments = kernel.function, *sizes, stream, pointers, 0
            yield f"  by CuPy, plain, {where}", functools.partial(by_cupy.launchKernel, *arguments)
            yield f"  by cuda-bindings, early, {where}", _by_bindings(kernels[0], stream, pointers)


def _all(queue: driver.Queue, buffer: driver.Buffer) -> None:
    for n in range(len(buffer.launches)):
        queue.launch(buffer.one(n))


def _by_bindings(kernel: driver.Kernel, stream: int, pointers: int) -> Callable[[], Any]:
    """Return an early launch by the function that the package does not use."""
    from cuda.bindings import driver as bindings

    config = bindings.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = kernel.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes, config.hStream = kernel.shared_memory, stream
    overlaps, value = bindings.CUlaunchAttribute(), bindings.CUlaunchAttributeValue()
    kinds = bindings.CUlaunchAttributeID
    overlaps.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value.programmaticStreamSerializationAllowed = 1
    overlaps.value = value
    config.attrs, config.numAttrs = [overlaps], 1
    function = bindings.CUfunction(kernel.function)
    return functools.partial(bindings.cuLaunchKernelEx, config, function, pointers, 0)


def of_tensors(cupy: Any, torch: Any, tensors: Any, runs: int = RUNS) -> dict[str, list[float]]:
    """Return the times of calls on tensors q, k, v and do, with and without launches.

    PyTorch's own attention is beside them, and a function of PyTorch that launches nothing.
    """
    from cupyflash.torch import attention

    class Nothing(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            return tuple(map(torch.empty_like, ctx.saved_tensors))

    *arrays, do = tensors
    leaves = [x.detach().requires_grad_() for x in arrays]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    queue = driver.queue(cupy.cuda.runtime.getDevice())
    rows = {}
    for name, function in (
        ("cupyflash.torch", attention),
        ("PyTorch's attention", sdpa),
        ("a function that launches nothing", Nothing.apply),
    ):
        kinds = {
            "forward": functools.partial(function, *arrays),
            "forward for gradients": functools.partial(function, *leaves),
            "forward and gradients": lambda f=function: torch.autograd.grad(f(*leaves), leaves, do),
        }
        for kind, call in kinds.items():
            times = [microseconds(cupy, call, runs)]
            if function is attention:
                with launching_nothing(queue):
                    times.append(microseconds(cupy, call, runs))
            rows[f"{name}, {kind}"] = times
    return rows


def _show(rows: dict[str, list[float]], *columns: str) -> None:
    print(f"{'':50}" + "".join(f"{name:>8}" for name in columns))
    for name, times in rows.items():
        print(f"{name:50}" + "".join(f"{each:8.1f}" for each in times), flush=True)


def main() -> int:
    import cupy

    _show(table(cupy), "all", "plain", "python")
    try:
        import torch
    except ImportError:
        return 0
    if torch.cuda.is_available():
        tensors = [torch.randn(1, 8, 128, 64, device="cuda").half() for _ in range(4)]
        _show(of_tensors(cupy, torch, tensors), "all", "python")
    return 0


if __name__ == "__main__":
    sys.exit(main())
