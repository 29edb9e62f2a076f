"""FLOPs, arithmetic intensity, and the least time that a device's limits allow."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ArgumentError
from .devices import Device, device
from .tiles import rows_of
from .traffic import Traffic, check, itemsize


@dataclass(frozen=True)
class Problem:
    """Sizes of a call of attention.

    Attributes
    ----------
    n_q, n_k : int
        Queries and keys.
    d : int
        Columns of q and k.
    d_v : int or None
        Columns of v; by default as many as q has.
    batch, heads : int
        Number of batch entries, and of query heads in each.
    heads_kv : int or None
        Number of key and value heads; by default as many as query heads.
    dtype : str
        The dtype of q, k, v and out.
    causal : bool
        Whether query i sees only keys up to i + n_k - n_q.
    backward : bool
        Whether this is the backward instead of the forward.
    """

    n_q: int
    n_k: int
    d: int
    d_v: int | None = None
    batch: int = 1
    heads: int = 1
    heads_kv: int | None = None
    dtype: str = "float16"
    causal: bool = False
    backward: bool = False

    def __post_init__(self) -> None:
        check(n_q=self.n_q, n_k=self.n_k, d=self.d, batch=self.batch, heads=self.heads)
        check(d_v=self.columns, heads_kv=self.shared)
        itemsize(self.dtype)
        if self.heads % self.shared:
            raise ArgumentError(
                f"heads: got {self.heads}; expected a multiple of heads_kv={self.heads_kv}"
            )

    @property
    def columns(self) -> int:
        """Columns of v."""
        return self.d if self.d_v is None else self.d_v

    @property
    def shared(self) -> int:
        """Key and value heads."""
        return self.heads if self.heads_kv is None else self.heads_kv

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that attend, of one head."""
        offset = self.n_k - self.n_q if self.causal else None
        return sum(row.keys for row in rows_of(self.n_q, self.n_k, 1, 1, offset))

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products: see `flops`."""
        return flops(self)

    @property
    def compulsory_bytes(self) -> int:
        """Bytes if every array is read or written once, which no algorithm can go below."""
        size = itemsize(self.dtype)
        queries, keys = self.batch * self.heads * self.n_q, self.batch * self.shared * self.n_k
        lse = queries * max(size, 4)
        q_and_o, k_and_v = queries * (self.d + self.columns), keys * (self.d + self.columns)
        if not self.backward:
            return size * (q_and_o + k_and_v) + lse
        gradients = queries * self.d + k_and_v  # dq, dk, dv; do has the shape of o
        return size * (q_and_o + k_and_v + queries * self.columns + gradients) + lse


@dataclass(frozen=True)
class Roofline:
    """The least time that a device's limits allow, and which limit sets it.

    Attributes
    ----------
    seconds : float
        The larger of the two times below.
    bound : str
        "compute" or "memory".
    compute_seconds, memory_seconds : float
        The time for the arithmetic alone, and for the traffic alone.
    flops, bytes : int
        The operations to compute, and the bytes to move.
    intensity : float
        FLOP per byte.
    ridge : float
        The intensity from which arithmetic bounds the device.
    """

    seconds: float
    bound: str
    compute_seconds: float
    memory_seconds: float
    flops: int
    bytes: int
    intensity: float
    ridge: float


def flops(problem: Problem) -> int:
    """Count the floating-point operations of attention's matrix products.

    Parameters
    ----------
    problem : Problem
        The sizes.

    Returns
    -------
    int
        For each pair that attends, 2 (d + d_v) in the forward and 2 (3 d + 2 d_v) in the backward,
        whose five products recompute the scores; this is 2.5 times the forward if d_v = d. The
        exponentials and sums of the softmax are not counted, and neither are masked pairs. Some
        tables of other projects count exactly half of all pairs for a causal mask.
    """
    d, d_v = problem.d, problem.columns
    each = 2 * (3 * d + 2 * d_v) if problem.backward else 2 * (d + d_v)
    return each * problem.pairs * problem.batch * problem.heads


def roofline(
    problem: Problem, device: Device | str | None = None, traffic: Traffic | None = None
) -> Roofline:
    """Return the least time that a device needs for a problem, and what bounds it.

    Parameters
    ----------
    problem : Problem
        The sizes.
    device : Device or str, optional
        A device or its name in `DEVICES`; without it, the current device.
    traffic : Traffic, optional
        What an algorithm moves for one head; the roofline is then that algorithm's. Without it,
        every array moves once, the best case with perfect caches.

    Returns
    -------
    Roofline
        The time and its bound.

    References
    ----------
    S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009.
    """
    facts = _facts(device)
    work = flops(problem)
    moved = problem.compulsory_bytes
    if traffic is not None:
        moved = problem.batch * problem.heads * traffic.bytes(problem.dtype)
    return limits(work, moved, facts.peak_of(problem.dtype), facts.bandwidth)


def limits(flops: int, moved: int, peak: float, bandwidth: float) -> Roofline:
    """Return the roofline of so many FLOPs and bytes, given FLOP and bytes per second."""
    compute, memory = flops / peak, moved / bandwidth
    return Roofline(
        seconds=max(compute, memory),
        bound="compute" if compute >= memory else "memory",
        compute_seconds=compute,
        memory_seconds=memory,
        flops=flops,
        bytes=moved,
        intensity=flops / moved,
        ridge=peak / bandwidth,
    )


def _facts(given: Device | str | None) -> Device:
    return given if isinstance(given, Device) else device(given)
