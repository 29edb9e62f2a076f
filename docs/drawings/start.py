"""The mask of the start page, by tiles."""

from cupyflash import figures, masks


def draw() -> str:
    """Return the SVG."""
    title = "masks.window(64, 0) | masks.prefix(16)"
    mask = masks.window(64, 0) | masks.prefix(16)
    return figures.mask_tiles(mask, 1024, block_q=32, block_kv=32, title=title).svg
