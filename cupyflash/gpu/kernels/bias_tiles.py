"""A bias that a kernel loads in tiles: whether TMA can, its strides, and its tensor map."""

from __future__ import annotations

from dataclasses import replace

from ...arrays import device_arrays
from .. import strides, tma
from ..params import Operand
from .spec import Request, Tiles, row_bytes

NAME = "bias"  # of its address
LARGEST_HEAD = 256
KIND_NAMES = ("float16", "bfloat16", "float32")


def obstacle(request: Request) -> str | None:
    """Return in words why a bias cannot be loaded in tiles, or None."""
    call = request.call
    assert call is not None
    bias = call.bias
    assert bias is not None
    if bias.dtype.name not in KIND_NAMES:
        return f"it is {bias.dtype}"
    why = has_other_rows(request)
    if why is not None:
        return why
    if sizes(request)[-1] != call.k.shape[-2]:
        return "all keys have the same"
    return tma.obstacle(_in_halves(request), device_arrays.address(bias), _sizes_in_halves(request))


def has_other_rows(request: Request) -> str | None:
    """Return in words why places in a launch are not those of the bias, or None."""
    call = request.call
    assert call is not None
    if any(call.rows.flags.values()) or call.problem.heads_in_rows > 1:
        return "rows of queries are not those of the bias"
    if lead_of(request) is None:
        return "its leading axes cannot be joined as those of q, k and v"
    return None


def lead_of(request: Request) -> strides.Strides | None:
    """Return its strides along the leading axes of the launch, or None if it has none there."""
    found: strides.Strides | None = request.lead.strides.get(NAME) if request.lead else None
    return found


def kind(request: Request) -> str:
    """Return the name of its type."""
    assert request.call is not None
    assert request.call.bias is not None
    return str(request.call.bias.dtype.name)


def itemsize(request: Request) -> int:
    """Return the bytes of an element."""
    assert request.call is not None
    assert request.call.bias is not None
    return int(request.call.bias.dtype.itemsize)


def sizes(request: Request) -> tuple[int, ...]:
    """Return its lengths: the launch's leading axes, heads, rows and columns."""
    assert request.call is not None
    assert request.call.bias is not None
    assert request.lead is not None
    shape = request.call.bias.shape
    return (*request.lead.sizes, *(1,) * (3 - len(shape)), *shape[-3:])


def operand(request: Request) -> Operand:
    """Return its strides in elements, 0 along axes of length 1."""
    assert request.call is not None
    bias, lead = request.call.bias, lead_of(request)
    assert bias is not None
    assert lead is not None
    own = [
        0 if size == 1 else step // bias.itemsize
        for size, step in zip(bias.shape, bias.strides, strict=True)
    ][-3:]
    head, row, col = (*(0,) * (3 - len(own)), *own)
    return Operand(0, lead, head, row, col)


def _in_halves(request: Request) -> Operand:
    """Return the strides in elements of 2 bytes, of which one of 4 bytes is two columns."""
    held, times = operand(request), itemsize(request) // 2
    return Operand(
        lead=tuple(step * times for step in held.lead),
        head=held.head * times,
        row=held.row * times,
        col=held.col,
    )


def _sizes_in_halves(request: Request) -> tuple[int, ...]:
    *rest, columns = sizes(request)
    return (*rest, columns * (itemsize(request) // 2))


def tensor_map(request: Request, rows: int) -> tma.TensorMap:
    """Return the map of a bias for which there is no obstacle; `rows` are those of a tile."""
    held = _in_halves(request)
    rows = rows if held.row else 1
    return tma.of(NAME, "bfloat16", held, _sizes_in_halves(request), rows)


def beside_queries(request: Request, tiles: Tiles) -> Tiles | None:
    """Return tiles of a backward kernel with a bias beside each stage of queries.

    None if the bias has no map or more than 16 bits, if scores change otherwise, too, or if the
    consumers share keys, which leaves no room.
    """
    call = request.call
    if call is None or call.bias is None or call.score_mod is not None or tiles.block_kv <= 64:
        return None
    if itemsize(request) != 2 or obstacle(request) is not None:
        return None
    found = with_stages(tiles)
    return found if found.shared_memory <= request.device.shared_memory else None


def with_stages(tiles: Tiles) -> Tiles:
    """Return tiles with a bias of 16 bits beside each stage of queries."""
    assert tiles.stages is not None
    stage = tiles.block_q * row_bytes(tiles.block_kv)
    shared = tiles.shared_memory + tiles.stages * stage
    return replace(tiles, shared_memory=shared, bias_stages=tiles.stages, bias_bytes=stage)


def in_block(request: Request, tiles: Tiles) -> Tiles | None:
    """Return tiles of a kernel of dbias with the block's tile of the bias, or None.

    None if the bias has other than 16 bits, if scores change otherwise, too, or without room; or if
    each pair has its own: who reads a tile once gains nothing by keeping it.
    """
    call, device = request.call, request.device
    if call is None or call.bias is None or call.score_mod is not None:
        return None
    if max(request.problem.d, request.problem.d_v) > LARGEST_HEAD:
        return None  # whose warps have other columns
    if kind(request) not in KIND_NAMES[:2] or has_other_rows(request) is not None:
        return None
    if not _is_shared(request):
        return None
    found = with_whole(tiles)
    return found if found.share_memory(device.shared_memory) else None


def _is_shared(request: Request) -> bool:
    """Whether several batch entries or heads have the same bias."""
    held = operand(request)
    assert request.lead is not None
    sizes_of = *request.lead.sizes, request.problem.heads
    steps = *held.lead, held.head
    return any(size > 1 and not step for size, step in zip(sizes_of, steps, strict=True))


def with_whole(tiles: Tiles) -> Tiles:
    """Return tiles with the block's tile of a bias of 16 bits, whose rows are padded."""
    held = 2 * tiles.block_q * (tiles.block_kv + 8)
    return replace(tiles, shared_memory=tiles.shared_memory + held, bias_stages=1, bias_bytes=held)
