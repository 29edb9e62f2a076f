"""Masks pair by pair, and what their tiles are."""

import numpy as np

from cupyflash import figures, masks

LENGTH, BLOCK = 48, 8
DOCUMENTS = np.repeat(np.arange(3), [14, 20, 14])
MASKS = {
    "causal()": masks.causal(),
    "window(9, 0) | prefix(3)": masks.window(9, 0) | masks.prefix(3),
    "segments(documents) & causal()": masks.segments(DOCUMENTS) & masks.causal(),
    "dilated(4) & causal()": masks.dilated(4) & masks.causal(),
}


def draw() -> list[str]:
    """Return an SVG of each mask."""
    return [
        figures.mask_pairs(mask, LENGTH, block_q=BLOCK, block_kv=BLOCK, title=title).svg
        for title, mask in MASKS.items()
    ]
