"""Look-up arrays of which this process has some positions; the others are with other ranks."""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentError


class ShardedArray:
    """One rank's part of a look-up array, as a user gives it: nobody knows yet of which layout.

    Attributes
    ----------
    own : array
        The part. Its last axis is that of positions.
    """

    __slots__ = ("own",)

    def __init__(self, own: Any) -> None:
        self.own = own

    @property
    def dtype(self) -> Any:
        """The dtype of all parts."""
        return self.own.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this part."""
        return tuple(self.own.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return int(self.own.ndim)


class HeldArray(ShardedArray):
    """A look-up array of all positions, of which this rank holds a part.

    Attributes
    ----------
    axis : str
        The symbol that reads its last axis: "i" or "j".
    length : int
        The positions of all ranks.
    """

    __slots__ = ("axis", "length")

    def __init__(self, own: Any, axis: str, length: int) -> None:
        super().__init__(own)
        self.axis, self.length = axis, length

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return (*self.own.shape[:-1], self.length)


def check_whole(array: Any, argument: str) -> None:
    """Refuse a part where all elements have to be here."""
    if type(array) is ShardedArray:
        raise ArgumentError(
            f"{argument}: got distributed.sharded(...), a part of a look-up array whose others "
            "are with other ranks; expected the whole array. Only calls of cupyflash.distributed "
            "take parts; its layout, and all else, takes whole arrays or masks without them."
        )
