"""The programs of examples/ as modules, and a small model for them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    """Import an example as a script of that folder does."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


transformer = load("transformer")
SETTING = transformer.Setting(width=12, layers=2, heads=3, context=21)


def some_weights(setting=SETTING, xp=np, seed=0):
    """Weights whose logits differ, which those before a training do not."""
    rng = np.random.default_rng(seed)
    weights = transformer.initial_weights(setting, rng, xp, np.float32)
    return {
        name: w + 0.5 * xp.asarray(rng.standard_normal(w.shape, dtype=np.float32))
        for name, w in weights.items()
    }
