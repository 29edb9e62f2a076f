"""Reads and writes a trained model as safetensors: its weights, its sizes and its tokens."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from program import UnusableError, require
from transformer import Setting, Weights, weight_shapes

MADE_BY = "cupyflash examples/train_lm.py"
TOKENS = "bytes"  # token n is the byte n, so no tokenizer and no vocabulary are needed
REMEDY = "Write one with train_lm.py --save FILE."


def writable(path: Path) -> Path:
    """Return the path if a model can be written there. This is checked before the training."""
    require("safetensors.numpy")
    if not path.parent.is_dir():
        raise UnusableError(f"--save {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise UnusableError(f"--save {path}: got a folder; expected a file")
    return path


def save(path: Path, weights: Weights, setting: Setting, xp: Any) -> None:
    """Write a model to a file."""
    metadata = {
        "made by": MADE_BY,
        "tokens": TOKENS,
        "setting": json.dumps(dataclasses.asdict(setting)),
    }
    # The writer takes memory as it lies, whatever the strides say.
    on_host = {
        name: np.ascontiguousarray(w if xp is np else w.get()) for name, w in weights.items()
    }
    require("safetensors.numpy").save_file(on_host, path, metadata)


def load(path: Path, xp: Any) -> tuple[Weights, Setting]:
    """Read a model that `save` wrote, or say what is wrong with the file."""
    safetensors = require("safetensors")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if (metadata.get("made by"), metadata.get("tokens")) != (MADE_BY, TOKENS):
                raise UnusableError(f"{path} does not contain a model of train_lm.py. {REMEDY}")
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except OSError as error:
        raise UnusableError(f"{path} cannot be read ({error}). {REMEDY}") from error
    except safetensors.SafetensorError as error:
        raise UnusableError(f"{path} is not a safetensors file ({error}). {REMEDY}") from error
    setting = _setting(path, metadata)
    got = {name: f"{w.dtype} of shape {w.shape}" for name, w in weights.items()}
    expected = {name: f"float32 of shape {x}" for name, x in weight_shapes(setting).items()}
    for name in sorted(got.keys() | expected):
        if got.get(name) != expected.get(name):
            raise UnusableError(
                f"{path}: got {got.get(name, 'nothing')} for the weights {name!r}; expected "
                f"{expected.get(name, 'nothing')}. {REMEDY}"
            )
    return {name: xp.asarray(w) for name, w in weights.items()}, setting


def _setting(path: Path, metadata: dict[str, str]) -> Setting:
    """Return the sizes in a file's metadata."""
    told = metadata.get("setting", "nothing")
    try:
        setting = Setting(**json.loads(told))
        sizes = (setting.width, setting.layers, setting.heads, setting.context)
        if all(isinstance(n, int) and n >= 1 for n in sizes) and not sizes[0] % sizes[2]:
            return setting
    except (TypeError, ValueError):
        pass
    raise UnusableError(f"{path}: got the sizes {told!r}; expected those of a model. {REMEDY}")
