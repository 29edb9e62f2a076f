"""Small tiles of kernels for heads beyond 256."""


def wide_tiles(kernel: str, block_q: int, block_kv: int, warps: int) -> tuple[int, int, int]:
    """Return queries, keys and warps of a small tile for heads beyond 256."""
    warps = max(warps, 2)
    if kernel == "backward_sm80_bias":
        return 16, 16 * warps, warps
    if kernel == "backward_sm80_dq":  # two warps share 16 queries
        return 8 * warps, 16 * -(-block_kv // 16), warps
    # Two warps or more share 16 keys, of which each has 8 queries or more.
    keys = 16 * (warps // 2)
    return max(16, block_q // 2), keys, warps
