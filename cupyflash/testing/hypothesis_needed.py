"""The one module that imports Hypothesis; without it, the error says what to install."""

from cupyflash.install import extra

try:
    import hypothesis
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "this part of cupyflash.testing draws its problems by hypothesis, which is not installed: "
        f"pip install hypothesis (or {extra('verify')})"
    ) from error

__all__ = ["hypothesis", "st"]
