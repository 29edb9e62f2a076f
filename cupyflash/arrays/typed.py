"""Types in the signatures of public functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # type checkers know it without the package; only they read the default
    from typing_extensions import TypeVar

    F = TypeVar("F", bound=np.floating[Any], default=Any)
    A = TypeVar("A", default=Any)
    B = TypeVar("B", default=Any)
else:
    from typing import TypeVar

    F = TypeVar("F", bound=np.floating)
    A = TypeVar("A")
    B = TypeVar("B")

Array: TypeAlias = np.ndarray[Any, Any]
FloatArray: TypeAlias = NDArray[np.floating[Any]]
Booleans: TypeAlias = NDArray[np.bool_]
Number: TypeAlias = float | np.floating[Any] | np.integer[Any]
DType: TypeAlias = str | type[Any] | np.dtype[Any] | None
# Of keys and values of a cache: one for both, or a pair.
CacheDType: TypeAlias = DType | tuple[DType, DType]
