"""FlashAttention's Theorem 2: the order of HBM accesses, and the block sizes it rests on."""

from __future__ import annotations

from typing import NamedTuple

from ...errors import ArgumentError
from .traffic import check, parts


class IOComplexity(NamedTuple):
    """The expressions inside Theta of Theorem 2, in elements and without constants.

    Attributes
    ----------
    standard : int
        N d + N**2.
    flash : float
        N**2 d**2 / M.
    """

    standard: int
    flash: float

    @property
    def ratio(self) -> float:
        """Standard divided by flash: some M / d**2, where N is much larger than d."""
        return self.standard / self.flash


def block_sizes(sram: int, d: int) -> tuple[int, int]:
    """Return FlashAttention's block sizes for an SRAM.

    Parameters
    ----------
    sram : int
        M, in elements: bytes of shared memory divided by the size of an element.
    d : int
        Columns of q, k and v.

    Returns
    -------
    block_q, block_kv : int
        B_r = min(ceil(M / 4 d), d) and B_c = ceil(M / 4 d). Blocks of K and V then take M / 2
        elements, blocks of Q and O up to another M / 2, and a tile of S up to M / 4 more, all
        rounded up to whole rows. So M bounds what is on chip up to a constant (see `Traffic.peak`).

    Raises
    ------
    ArgumentError
        If M is below 4 d: one row of each of Q, K, V and O.

    References
    ----------
    T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Re, "FlashAttention", 2022, Algorithm 1, line 1.
    """
    check(sram=sram, d=d)
    if sram < 4 * d:
        raise ArgumentError(
            f"sram: got {sram} with d={d}; expected at least 4 d = {4 * d} elements, for one row "
            "of each of Q, K, V and O"
        )
    block_kv = parts(sram, 4 * d)
    return min(block_kv, d), block_kv


def theorem_2(n: int, d: int, sram: int) -> IOComplexity:
    """Return the orders of HBM accesses of standard attention and of FlashAttention.

    Parameters
    ----------
    n : int
        N, queries and keys.
    d : int
        Columns of q, k and v.
    sram : int
        M, in elements.

    Returns
    -------
    IOComplexity
        FlashAttention's order is the least of any exact attention for all M from d to N d
        (Proposition 3).

    Raises
    ------
    ArgumentError
        If not d <= M <= N d, which the theorem assumes.

    References
    ----------
    T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Re, "FlashAttention", 2022, Theorem 2, Proposition 3.
    """
    check(n=n, d=d, sram=sram)
    if not d <= sram <= n * d:
        raise ArgumentError(
            f"sram: got {sram}; expected {d} to {n * d}, because Theorem 2 assumes d <= M <= N d"
        )
    return IOComplexity(n * d + n * n, n * n * d * d / sram)
