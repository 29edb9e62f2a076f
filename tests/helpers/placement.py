"""The placement of `cupyflash.testing` under the short name that tests use."""

from cupyflash.testing.placement import (
    GUARD,
    PLAIN,
    POISON,
    Layout,
    Placed,
    bits,
    random_layout,
    same_bits,
)

__all__ = ["GUARD", "PLAIN", "POISON", "Layout", "Placed", "bits", "random_layout", "same_bits"]
