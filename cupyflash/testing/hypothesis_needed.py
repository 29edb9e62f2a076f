"""Hypothesis, or what to install where it is missing: the one module that imports it."""

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
