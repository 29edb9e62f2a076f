"""The one module that imports Hypothesis; without it, the error says what to install."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_type_hints

from cupyflash.hints.install import extra

try:
    import hypothesis
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "this part of cupyflash.testing draws its problems by hypothesis, which is not installed: "
        f"pip install hypothesis (or {extra('verify')})"
    ) from error

__all__ = ["composite", "hypothesis", "st"]

if TYPE_CHECKING:
    composite = st.composite
else:

    def composite(function: Any) -> Any:
        """Make a strategy as `st.composite` does, with annotations that can be read.

        That makes a function in a module of its own, where our names have no meaning.
        """
        made = st.composite(function)
        hints = get_type_hints(function)
        del hints["draw"]
        made.__annotations__ = hints | {"return": st.SearchStrategy[hints["return"]]}
        return made
