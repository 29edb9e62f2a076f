"""Pictures of masks: which tiles of the score matrix are skipped, masked, or computed in full.

A figure is an SVG document, which notebooks show, and the same picture in characters, for a
terminal.
"""

from .example_size import example
from .mask import Figure, mask_pairs, mask_tiles

__all__ = ["Figure", "example", "mask_pairs", "mask_tiles"]
