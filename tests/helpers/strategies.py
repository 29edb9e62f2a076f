"""The strategies of `cupyflash.testing` under the short names that tests use."""

from cupyflash.testing.cases import Problem
from cupyflash.testing.options import MASKS, SCORES, Sizes, float_type, known_floats
from cupyflash.testing.strategies import plain, problems

__all__ = ["BFLOAT16", "DTYPES", "MASKS", "SCORES", "Problem", "Sizes", "plain", "problems"]

BFLOAT16 = float_type("bfloat16")
DTYPES = known_floats()
