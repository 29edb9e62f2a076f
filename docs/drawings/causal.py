"""The classes of a causal mask's tiles."""

from cupyflash import figures, masks


def draw() -> str:
    """Return the SVG."""
    title = "masks.causal()"
    return figures.mask_tiles(masks.causal(), 1024, block_q=32, block_kv=32, title=title).svg
