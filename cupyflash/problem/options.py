"""The options of a call, as users pass them: one list, over which everything else iterates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, SupportsIndex

from ..arrays.interop import DLPackArray
from ..arrays.typed import Number
from ..masks import Mask
from ..scores import Score


@dataclass(frozen=True, eq=False)
class Options:
    """What a call of attention may specify in addition to q, k and v. Nothing is checked yet.

    The public functions have these fields as keywords, with these types and defaults; a test
    compares them. A new option is a field here, a keyword there, its check in `validate` and its
    part of a signature in `replay`, both of which fail for a field that they do not know.
    """

    mask: Mask | DLPackArray | None = None
    score_mod: Score | Sequence[Score] | None = None
    bias: DLPackArray | None = None
    sink: DLPackArray | None = None
    scale: Number | None = None
    dropout: Number = 0.0
    seed: SupportsIndex | DLPackArray | None = None
    precision: Literal["tf32x3"] | None = None

    @staticmethod
    def of(**named: Any) -> Options:
        """Return options from the values of all fields, in their order.

        Every call makes options, and the constructor of a frozen class, which sets the fields one
        by one, takes 0.7 us longer.
        """
        options = _new(Options)
        _set(options, "__dict__", named)
        return options

    @property
    def has_mask_alone(self) -> bool:
        """Whether nothing but a mask differs from the defaults."""
        dropout, rest = self.dropout, vars(self).keys() - {"mask", "dropout"}
        return (
            type(dropout) is float
            and not dropout
            and not any(getattr(self, name) is not None for name in rest)
        )


_new, _set = object.__new__, object.__setattr__
NAMES = tuple(field.name for field in fields(Options))
DEFAULTS = Options()
