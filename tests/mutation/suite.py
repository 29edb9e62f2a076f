"""All problems that mutants are tried with."""

from __future__ import annotations

from . import hopper_problems, tensor_problems
from .problems import Case, cases


def problems() -> list[Case]:
    """Return the problems, those of the portable kernels first."""
    return [*cases(), *tensor_problems.cases(), *hopper_problems.cases()]
