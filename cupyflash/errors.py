"""The exceptions of cupyflash. Each names the argument, what was expected, and the remedy."""

from __future__ import annotations


class ArgumentError(ValueError):
    """An argument's value cannot be served."""


class ArgumentTypeError(TypeError):
    """An argument is of the wrong kind."""


class TraceError(TypeError):
    """A mask or score function does something that an expression cannot record."""


class DistributedError(RuntimeError):
    """A call over many ranks cannot go on. Every rank gets it; it names the rank and the cause."""
