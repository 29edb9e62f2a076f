"""Forks of a process that has threads, for children that call nothing of those."""

from __future__ import annotations

import os
import warnings


def fork() -> int:
    """Fork as `os.fork` does, without the warnings that Python and JAX have of other threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, from 3.12 on
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)  # JAX's
        return os.fork()
