"""How to install what is missing: the package comes from its repository, not from an index."""

from __future__ import annotations


def extra(*names: str) -> str:
    """Return the command that installs an extra, or one of several.

    Parameters
    ----------
    *names : str
        Extras of ``pyproject.toml``.
    """
    spelt = " or ".join(f'".[{name}]"' for name in names)
    return f"pip install {spelt} in the clone of cupyflash"


CUPY = extra("cuda12", "cuda13")
ML_DTYPES = "pip install ml_dtypes"
