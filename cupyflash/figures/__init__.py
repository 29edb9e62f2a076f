"""Pictures of masks: which tiles of the score matrix are skipped, masked, or computed as they are.

A figure is an SVG document, shown by notebooks, and the same in characters for a terminal.
"""

from .example_size import example
from .mask import Figure, mask_pairs, mask_tiles

__all__ = ["Figure", "example", "mask_pairs", "mask_tiles"]
