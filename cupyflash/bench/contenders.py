"""What computes attention in a benchmark: this package, and standard attention for comparison."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import api, closures, masks, planning, scores
from ..testing.options import float_type
from .cases import CAP, CHANGES_SCORES, Case, hidden
from .measure import Gpu, Meter, Work
from .standard import standard_backward, standard_forward

Array = Any  # of the meter's array module


class RefusalError(Exception):
    """A contender cannot do a case; the message says why."""


class Inputs(NamedTuple):
    """Arrays of one dtype: (B, Hq, Lq, D), twice (B, Hkv, Lk, D), and the output's gradient."""

    q: Array
    k: Array
    v: Array
    do: Array


@dataclass(frozen=True)
class Job:
    """A case that a contender has prepared.

    Attributes
    ----------
    work : callable
        The function to time: a forward, or a backward whose forward has run.
    whole : callable
        The function whose memory is measured: the same, but a backward includes its forward.
    arrays : callable
        Turns what `work` returns into arrays of the meter's array module: o, or dq, dk, dv.
    peak_memory : callable or None
        Returns the bytes that a function holds at its peak; None if it is not measured.
    capture : callable or None
        Turns `work` into a replay of a CUDA graph, and returns it with the results that it writes,
        for `arrays`; None if that is not possible.
    expected : callable or None
        Returns the right results, which are those of the first contender if this is None.
    tolerance : float or None
        How far a result may be from that, as a share of its norm; None for that of the dtype.
    key_bytes : int or None
        Bytes that a step of decoding reads of keys and values; None for those of the case.
    count : int
        How often `work` does what a time is of: as many calls, tokens or steps.
    host : bool
        Whether the host's time is measured instead of the device's.
    """

    work: Work
    whole: Work
    arrays: Callable[[Any], Sequence[Array]]
    peak_memory: Callable[[Work], int] | None
    capture: Callable[[], tuple[Work, Any]] | None = None
    expected: Callable[[], Sequence[Array]] | None = None
    tolerance: float | None = None
    key_bytes: int | None = None
    count: int = 1
    host: bool = False


class Contender(ABC):
    """An implementation of attention that takes part in a benchmark.

    Attributes
    ----------
    name : str
        Its name on the command line.
    what : str
        What it is, in words.
    kinds : tuple of str
        Where it can be timed: cpu, gpu.
    """

    name: str
    what: str
    kinds: tuple[str, ...] = ("cpu", "gpu")

    def obstacle(self, kind: str) -> str:
        """Say why it cannot take part at all, and the remedy; nothing where it can."""
        return "" if kind in self.kinds else f"it is timed on a {self.kinds[0].upper()} only"

    def release(self, meter: Meter) -> None:  # noqa: B027 (most keep nothing)
        """Give back memory that it keeps between cases."""

    @abstractmethod
    def prepare(self, meter: Meter, case: Case, inputs: Inputs) -> Job:
        """Make a case ready, or raise `RefusalError`."""


class Cupyflash(Contender):
    """The package itself."""

    name = "cupyflash"
    what = "this package: attention and attention_backward"

    def prepare(self, meter: Meter, case: Case, inputs: Inputs) -> Job:
        """Make a case ready."""
        q, k, v, do = inputs
        options = options_of(case, meter.xp)

        def forward() -> Array:
            return api.attention(q, k, v, **options)

        def step() -> Any:
            o, vjp = closures.attention_vjp(q, k, v, **options)
            return o, vjp(do)

        o, lse = api.attention(q, k, v, return_lse=True, **options)

        def backward() -> Any:
            return api.attention_backward(do, q, k, v, o, lse, **options)

        def graph() -> tuple[Work, Any]:
            """Replay the same with a place for everything, which is emptied before."""
            assert isinstance(meter, Gpu)
            if not case.backward:
                work = meter.captured(
                    lambda: api.attention(q, k, v, out=o, lse_out=lse, return_lse=True, **options)
                )
                o.fill(0)
                return work, o
            grads = tuple(meter.xp.empty_like(x) for x in (q, k, v))
            size = planning.workspace_size(q, k, v, **options)
            places = {"grads_out": grads, "workspace": meter.xp.empty(max(size, 1), np.uint8)}
            work = meter.captured(
                lambda: api.attention_backward(do, q, k, v, o, lse, **places, **options)
            )
            for gradient in grads:
                gradient.fill(0)
            return work, grads

        capture = graph if isinstance(meter, Gpu) else None
        if case.backward:
            return Job(backward, step, lambda x: list(x[:3]), meter.peak_memory, capture)
        return Job(forward, forward, lambda x: [x], meter.peak_memory, capture)


def options_of(case: Case, xp: Any = np) -> dict[str, Any]:
    """Return the options of `attention` that say a case's variant, tables as arrays of `xp`."""
    causal = masks.causal()
    if case.variant == "full":
        return {}
    if case.variant == "window":
        return {"mask": masks.window(case.size, 0)}
    if case.variant == "documents":
        of_keys = xp.asarray(document_ids(case))
        return {"mask": masks.segments(of_keys[case.len_k - case.len_q :], of_keys)}
    if case.variant == "prefix":
        return {"mask": causal | masks.prefix(case.size)}
    if case.variant == "alibi":
        return {"mask": causal, "score_mod": scores.alibi(xp.asarray(case.slopes))}
    if case.variant == "softcap":
        return {"mask": causal, "score_mod": scores.softcap(CAP)}
    return {"mask": causal}


def document_ids(case: Case) -> np.ndarray[Any, Any]:
    """Return the document of every key."""
    return np.arange(case.len_k, dtype=np.int32) // case.size


class Standard(Contender):
    """Standard attention in NumPy or CuPy."""

    name = "standard"
    what = "attention that holds all scores, in NumPy or CuPy; 16-bit types widened to float32"

    def prepare(self, meter: Meter, case: Case, inputs: Inputs) -> Job:
        """Make a case ready."""
        # p, in a backward ds too, what a changed score keeps; and half a matrix for all the rest.
        matrices = 1.5 + case.backward + (case.variant in CHANGES_SCORES)
        needs_memory(meter, matrices * case.score_bytes)
        xp, change = meter.xp, Change(meter.xp, case)
        q, do = (folded(x, case.heads_kv) for x in (inputs.q, inputs.do))
        k, v = inputs.k, inputs.v
        shapes = [x.shape for x in inputs[:3]]

        def forward() -> tuple[Array, Array]:
            return standard_forward(xp, q, k, v, change=change)

        def backward(o: Array, p: Array) -> Any:
            return standard_backward(xp, (q, k, v, do), o, p, change.slope)

        def arrays(results: Any) -> list[Array]:
            return [x.reshape(shape) for x, shape in zip(results, shapes, strict=False)]

        if not case.backward:
            return Job(lambda: forward()[:1], lambda: forward()[:1], arrays, meter.peak_memory)
        o, p = forward()
        return Job(lambda: backward(o, p), lambda: backward(*forward()), arrays, meter.peak_memory)


class Change:
    """What a variant does to the scores, in place; afterwards `slope` is its derivative or None."""

    def __init__(self, xp: Any, case: Case) -> None:
        self.xp, self.case = xp, case
        outside = hidden(case)
        self.hidden = None if outside is None else xp.asarray(outside)
        self.slope: Array | None = None
        if case.variant == "alibi":
            slopes, distance = (x.astype(np.float32) for x in (case.slopes, distances(case)))
            self.bias = xp.asarray(slopes)[:, None, None] * xp.asarray(-distance)

    def __call__(self, s: Array) -> None:
        """Change the scores."""
        case = self.case
        view = s.reshape(case.batch, case.heads, case.len_q, case.len_k)
        if case.variant == "alibi":
            view += self.bias
        if case.variant == "softcap":
            s /= CAP
            self.xp.tanh(s, out=s)
            self.slope = 1 - s * s if case.backward else None
            s *= CAP
        if self.hidden is not None:
            self.xp.copyto(view, -np.inf, where=self.hidden)


def distances(case: Case) -> np.ndarray[Any, Any]:
    """Return how far key j is from query i, (Lq, Lk)."""
    i = np.arange(case.len_q)[:, None] + case.len_k - case.len_q
    apart: np.ndarray[Any, Any] = np.abs(i - np.arange(case.len_k))
    return apart


def folded(x: Array, heads_kv: int) -> Array:
    """Lay the query heads that share keys below each other: (B, Hkv, Hq/Hkv · L, D)."""
    return x.reshape(x.shape[0], heads_kv, -1, x.shape[-1])


def needs_memory(meter: Meter, wanted: float) -> None:
    """Refuse what the device's memory cannot hold."""
    free = meter.free_memory()
    if free is not None and wanted > free:
        raise RefusalError(
            f"its scores would take some {wanted / 1e9:.1f} GB; {free / 1e9:.1f} GB are free"
        )


def draw(meter: Meter, case: Case) -> Inputs:
    """Return standard normal numbers, always the same, rounded to the case's dtype."""
    queries = (case.batch, case.heads, case.len_q, case.d)
    keys = (case.batch, case.heads_kv, case.len_k, case.d)

    def normal(seed: int, shape: tuple[int, ...]) -> Array:
        count = math.prod(shape)
        make = _kept_numbers if count <= KEPT else _numbers
        return meter.xp.asarray(make(seed, count, case.dtype).reshape(shape))

    return Inputs(normal(0, queries), normal(1, keys), normal(2, keys), normal(3, queries))


KEPT = 2**26  # numbers of an array, kept for the next case, which often needs as many


def _numbers(seed: int, count: int, name: str) -> np.ndarray[Any, Any]:
    dtype = float_type(name)
    wide = np.promote_types(dtype, np.float32).type
    drawn = np.random.default_rng(seed).standard_normal(count, dtype=wide)
    return drawn.astype(dtype, copy=False)


_kept_numbers = functools.lru_cache(maxsize=4)(_numbers)
