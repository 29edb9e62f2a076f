"""Which instructions kernels may have: those of the CPU for which Numba compiles."""

from __future__ import annotations

from collections.abc import Mapping

from llvmlite import binding
from numba.core import config


def features() -> Mapping[str, bool]:
    """Return the features by LLVM's names: the host's, or what Numba's settings say instead."""
    chosen: str | None = config.CPU_FEATURES  # those of the setting NUMBA_CPU_NAME, too
    if chosen is None:
        of_host: Mapping[str, bool] = binding.get_host_cpu_features()
        return of_host
    return {word[1:]: word[0] == "+" for word in chosen.split(",") if word}
