"""A covering set of specialisations, for tests that compile kernels without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from kernel_options import BFLOAT16, MORE_OPTIONS, OPTIONS

from cupyflash.arrays.cuda_device import Target
from cupyflash.expr.cuda import generate
from cupyflash.expr.derivative import derivative
from cupyflash.expr.functions import SCORE
from cupyflash.expr.key_range import key_range
from cupyflash.expr.nodes import convert
from cupyflash.gpu.kernels import (
    bias_tiles,
    decode,
    simt,
    sm80,
    sm80_f64,
    sm80_second,
    sm90,
    sm90_dkdv,
    sm90_fp8,
    sm90_tangent,
)
from cupyflash.gpu.kernels.registry import SPECS
from cupyflash.gpu.kernels.spec import KernelSpec, Request, Tiles
from cupyflash.gpu.specialisation import NONE, Specialisation
from cupyflash.problem import cached, coded, codes, validate
from cupyflash.problem.bound_exprs import added, trees
from cupyflash.problem.call import Problem
from cupyflash.problem.formats import FORMATS, Format
from cupyflash.problem.options import Options

# Bytes of shared memory that a block may have.
SHARED_MEMORY = {
    "sm_75": 65536, "sm_80": 166912, "sm_86": 101376, "sm_87": 166912, "sm_89": 101376,
    "sm_90": 232448, "sm_100": 232448, "sm_103": 232448, "sm_110": 232448, "sm_120": 101376,
    "sm_121": 101376,
}  # fmt: skip

# Of backward_sm90_dkdv: sizes, options, and whether packed.
HOPPER_GRADIENTS: list[tuple[tuple[int, int], str, bool]] = [
    ((128, 128), "plain", False), ((64, 64), "causal", False), ((96, 104), "everything", True),
    ((256, 256), "segments", False), ((128, 128), "causal", False), ((192, 128), "alibi", True),
    ((192, 128), "causal", True), ((192, 128), "causal", False), ((136, 72), "plain", False),
]  # fmt: skip

# Of forward_sm90 for short rows: sizes, options, queries and keys.
SHORT_ROWS: list[tuple[tuple[int, int], str, int, int]] = [
    ((64, 64), "plain", 197, 197),
    ((40, 40), "plain", 4096, 77),
    ((32, 32), "causal", 64, 64),
    ((64, 64), "segments", 128, 128),
    ((80, 80), "plain", 257, 257),
    ((128, 128), "causal", 128, 128),
    ((160, 160), "plain", 256, 256),
    ((40, 40), "plain", 64, 77),
    ((32, 32), "pair bias", 49, 49),
    ((64, 64), "pair bias", 512, 512),
    ((128, 128), "causal", 64, 64),
]
_OF_BIAS = "backward_bias", "backward_tangent_bias"
_OF_SECOND = "backward_simt_tangent_dkdv", "backward_simt_tangent_dq"


class Case(NamedTuple):
    kernel: str
    dtype: Any
    sizes: tuple[int, int]
    options: str
    packed: bool
    # "cached", or "paged" where it lies in pages, "paged16" where these have a multiple of 16 rows,
    # and the format of its codes if it has some, those of keys and of values joined by +, of which
    # one may be "numbers", or "few" if it has so few leaves, or "whole" if a block has all of them.
    # Of codes without a cache "rows", if rows have scales, and their format; dtype is the result's.
    # Of gradients "parts", "whole dq", or "few keys" and more. "lists" if they are read or written,
    # "singles" if tiles of one block of keys are marked in them,
    # "only short" or "only long" if these have kernels of their own, "only" for what lists them,
    # "short" and the number of a row of `SHORT_ROWS`, or "tiles" and the type of a bias in them.
    cache: str = ""


def cases() -> list[Case]:
    """Every kernel with every dtype, head size, option and layout: pairs, not products."""
    dtypes = [np.dtype(np.float32), BFLOAT16, np.dtype(np.float16), np.dtype(np.float64)]
    sizes = [(64, 64), (128, 128), (256, 256), (512, 512), (40, 72), (1, 3)]
    found = []
    for k, kernel in enumerate(simt.KERNELS):
        # Steps without a common factor meet every pair soon.
        if kernel.startswith("reduce_"):  # they are dense
            continue
        for n in range(8 if kernel in (*_OF_SECOND, _OF_BIAS[1]) else 12):
            options = list(OPTIONS)[(n + k) % len(OPTIONS)]
            if kernel in _OF_BIAS and "bias" not in OPTIONS[options]:
                options = "bias" if (n if kernel == _OF_BIAS[0] else n // 6) % 2 else "everything"
            dtype = dtypes[(n + n // 4) % 4]
            found.append(Case(kernel, dtype, sizes[(n + k) % 6], options, bool((n // 3) % 2)))
    # Reductions: without an expression and with one.
    for n, (of, own, options) in enumerate([
        ("keys", (128, 128), "causal"), ("blocks", (128, 128), "plain"),
        ("blocks", (64, 64), "alibi"), ("keys", (40, 72), "softcap"),
        ("distance", (512, 512), "everything"), ("distance", (1, 3), "segments"),
    ]):  # fmt: skip
        found.append(Case(f"reduce_{of}", dtypes[n % 4], own, options, False))
    for n, (own, options) in enumerate([
        ((128, 128), "plain"), ((64, 64), "causal"), ((256, 256), "segments"),
        ((40, 72), "softcap"), ((512, 512), "causal"), ((128, 128), "everything"), ((1, 3), "bias"),
    ]):  # fmt: skip
        found.append(Case("reduce_sm80_weights", dtypes[1 + n % 2], own, options, False))
    # Tensor cores: the types, sizes and options that have tiles or code of their own.
    tensor_sizes = [(64, 64), (128, 128), (256, 256), (40, 72), (1, 3), (192, 128)]
    for n in range(14):
        dtype, options = dtypes[1 + n % 2], list(OPTIONS)[n % 7]
        kernels = ["forward_sm80", list(sm80.BACKWARD_TILES)[n // 7]]
        more = tensor_sizes[n % 6], options, bool(n // 3 % 2)
        found += [Case(kernel, dtype, *more) for kernel in kernels]
    # Heads whose rows warps share: each way to share them, and what takes most registers.
    for n, (kernel, own, options) in enumerate([
        ("forward_sm80", (512, 512), "plain"), ("forward_sm80", (320, 320), "causal"),
        ("forward_sm80", (512, 264), "everything"), ("backward_sm80_dkdv", (512, 512), "causal"),
        ("backward_sm80_dkdv", (320, 320), "everything"), ("backward_sm80_dq", (512, 512), "plain"),
        ("backward_sm80_dq", (320, 320), "everything"), ("backward_sm80_bias", (512, 512), "bias"),
    ]):  # fmt: skip
        found.append(Case(kernel, dtypes[1 + n % 2], own, options, n % 3 == 2))
    # Forward mode: each way to share rows and none, and what takes most registers.
    for n, (own, options) in enumerate([
        ((64, 64), "plain"), ((128, 128), "causal"), ((256, 256), "plain"),
        ((40, 72), "everything"), ((128, 128), "everything"), ((192, 128), "alibi"),
        ((1, 3), "bias"),
        ((64, 64), "everything"), ((128, 128), "plain"), ((256, 256), "everything"),
        ((96, 104), "segments"), ((128, 128), "softcap"), ((64, 64), "causal"),
    ]):  # fmt: skip
        case = Case("forward_sm80_tangent", dtypes[1 + n % 2], own, options, n % 3 == 2)
        found.append(case)
    for n, (own, options) in enumerate([
        ((128, 128), "plain"), ((64, 64), "causal"), ((96, 104), "segments"),
        ((128, 128), "everything"), ((64, 64), "plain"), ((40, 72), "bias"),
        ((128, 128), "causal"), ((64, 64), "alibi"),
    ]):  # fmt: skip
        case = Case("forward_sm90_tangent", dtypes[1 + n % 2], own, options, n % 3 == 2)
        found.append(case)
    found.append(Case("forward_simt_tangent", dtypes[0], (128, 128), "causal", False))
    # Second derivatives: each table of tiles, and what takes most registers.
    for n, (own, options) in enumerate([
        ((128, 128), "plain"), ((64, 64), "causal"), ((40, 72), "segments"),
        ((128, 128), "causal"), ((1, 3), "plain"),
    ]):  # fmt: skip
        for kernel in sm80_second.TILES:
            found.append(Case(kernel, dtypes[1 + n % 2], own, options, n == 2))
    for n, own in enumerate([(64, 64), (256, 256), (40, 72), (128, 128)]):
        options = list(OPTIONS)[5 + n % 2]
        found.append(Case("backward_sm80_bias", dtypes[1 + n % 2], own, options, n == 2))
        found.append(Case("backward_sm90_bias", dtypes[2 - n % 2], own, options, n == 1))
    for n, own in enumerate([(64, 64), (128, 128), (256, 256), (192, 192), (96, 104)]):
        found.append(Case("forward_sm90", dtypes[1 + n % 2], own, "plain", False))
    for n, (own, options) in enumerate([
        ((64, 64), "causal"), ((128, 128), "alibi"), ((256, 256), "causal"),
        ((64, 64), "everything"), ((192, 192), "bias"), ((96, 104), "segments"),
        ((64, 64), "segments"),
    ]):  # fmt: skip
        found.append(Case("forward_sm90", dtypes[1 + n % 2], own, options, n in (4, 5)))
    for n, (own, options) in enumerate([
        ((320, 320), "plain"), ((320, 264), "causal"), ((304, 320), "everything"),
        ((512, 512), "plain"), ((512, 512), "causal"), ((384, 384), "everything"),
        ((64, 328), "segments"),
    ]):  # fmt: skip
        found.append(Case("forward_sm90", dtypes[1 + n % 2], own, options, n == 6))
    for n, (own, options, _, _) in enumerate(SHORT_ROWS):
        found.append(Case("forward_sm90", dtypes[1 + n % 2], own, options, False, f"short {n}"))
        if n in (7, 10):
            found.append(Case("forward_sm90", BFLOAT16, own, options, True, f"short {n}"))
    for n, (own, options, kind) in enumerate([
        ((64, 64), "pair bias", "bfloat16"), ((64, 64), "pair bias", "float32"),
        ((128, 128), "everything", "float16"), ((128, 128), "pair bias", "float32"),
        ((256, 256), "pair bias", "float16"),
    ]):  # fmt: skip
        found.append(Case("forward_sm90", dtypes[1 + n % 2], own, options, False, f"tiles {kind}"))
    for kernel, own in [
        ("backward_sm90_dkdv", (64, 64)), ("backward_sm90_dkdv", (128, 128)),
        ("backward_sm90_bias", (64, 64)), ("backward_sm80_bias", (32, 32)),
        ("backward_sm80_dkdv_dbias", (32, 32)), ("backward_sm80_dkdv_dbias", (20, 9)),
    ]:  # fmt: skip
        which = "tiles bfloat16" + " whole dq" * kernel.endswith("_dbias")
        found.append(Case(kernel, BFLOAT16, own, "pair bias", False, which))
    for n, (own, options, packed) in enumerate(HOPPER_GRADIENTS):
        found.append(Case("backward_sm90_dkdv", dtypes[1 + n % 2], own, options, packed))
    for n, (kernel, own, options) in enumerate([
        ("sm90_dkdv", (128, 128), "causal"), ("sm90_dkdv", (64, 64), "causal"),
        ("sm80_dkdv", (64, 64), "plain"), ("sm90_dkdv", (64, 64), "causal"),
        ("sm80_dkdv", (64, 64), "bias"), ("sm80_dkdv_tile", (64, 64), "causal"),
    ]):  # fmt: skip
        which = "parts" if n < 3 else "whole dq"
        found.append(Case(f"backward_{kernel}", dtypes[1 + n % 2], own, options, False, which))
    found.append(Case("backward_sm90_dkdv", BFLOAT16, (128, 128), "causal", True, "whole dq"))
    for n, (own, options, packed, kind) in enumerate([
        ((128, 128), "causal", True, "whole dq"), ((128, 128), "causal", True, "whole dq"),
        ((64, 64), "plain", True, "whole dq"), ((128, 128), "segments", False, "sums"),
        ((96, 104), "everything", True, "whole dq"), ((128, 128), "causal", False, "whole dq"),
    ]):  # fmt: skip
        dtype = dtypes[2 - n % 2]
        found.append(Case("backward_sm90_dkdv", dtype, own, options, packed, f"few keys, {kind}"))
    # float64, and float32 in three products.
    wide_sizes = {8: [(64, 64), (128, 128), (40, 72), (1, 3)], 4: tensor_sizes}
    for n in range(14):
        dtype, options = dtypes[3 * (n % 2)], list(OPTIONS)[n // 2]
        own = wide_sizes[dtype.itemsize]
        found.append(Case("forward_sm80", dtype, own[n // 2 % len(own)], options, n % 3 == 2))
    for kernel, dtype, own in [
        ("forward_simt", BFLOAT16, (64, 64)), ("forward_sm80", BFLOAT16, (128, 128)),
        ("forward_sm80", dtypes[3], (64, 64)), ("forward_sm90", BFLOAT16, (128, 128)),
        ("forward_sm90", dtypes[1], (256, 256)), ("forward_sm90_tf32", dtypes[0], (64, 64)),
    ]:  # fmt: skip
        found.append(Case(kernel, dtype, own, "causal", False, "resumes"))
    for n, (own, options) in enumerate([
        ((64, 64), "plain"), ((128, 128), "causal"), ((40, 72), "everything"),
        ((128, 128), "plain"), ((1, 3), "bias"), ((64, 64), "segments"),
    ]):  # fmt: skip
        found.append(Case("forward_sm90_tf32", dtypes[0], own, options, n % 3 == 2))
    f64_sizes = [(64, 64), (128, 128), (40, 72), (1, 3)]
    for n in range(14):
        kernel, options = list(sm80_f64.BACKWARD_TILES)[n % 2], list(OPTIONS)[n // 2]
        found.append(Case(kernel, dtypes[3], f64_sizes[n // 2 % 4], options, n % 3 == 2))
    # Kernels that take long to compile: few of them.
    for n, (own, options) in enumerate([((128, 128), "causal"), ((40, 72), "softcap")]):
        for kernel, dtype, packed in (
            ("decode_sm80", dtypes[1 + n], n == 1),
            ("decode_simt", dtypes[3 * n], n == 0),
            ("decode_combine", dtypes[1 + 2 * n], n == 1),
        ):
            found.append(Case(kernel, dtype, own, options, packed, "paged" if packed else ""))
    for kernel, dtype, own, options, packed, cache in [
        ("forward_sm80", BFLOAT16, (128, 128), "causal", False, "cached"),
        ("forward_sm80", BFLOAT16, (64, 64), "plain", True, "paged"),
        ("forward_sm80", dtypes[3], (64, 64), "causal", False, "paged"),
        ("forward_sm90", BFLOAT16, (128, 128), "causal", False, "cached"),
        ("forward_sm90", BFLOAT16, (128, 128), "plain", False, "paged"),
        ("forward_sm90", BFLOAT16, (64, 64), "causal", True, "paged"),
        ("forward_sm90", BFLOAT16, (256, 256), "causal", False, "paged"),
    ]:
        found.append(Case(kernel, dtype, own, options, packed, cache))
    for n, (options, cache) in enumerate([
        ("plain", "cached"), ("causal", "paged"), ("segments", "cached"), ("alibi", "paged"),
        ("plain", "cached 4 parts"), ("plain", "cached 2 parts"),  # of the columns, a block each
    ]):  # fmt: skip
        found.append(Case("decode_sm90", dtypes[1 + n % 2], (576, 512), options, False, cache))
    for cache in ("paged16", "cached few", "paged16 few", "paged few"):
        found.append(Case("decode_sm80", BFLOAT16, (128, 128), "plain", False, cache))
    found.append(Case("decode_sm80", BFLOAT16, (128, 128), "plain", False, "cached whole"))
    found.append(Case("decode_sm80", BFLOAT16, (128, 128), "plain", False, "paged16 2 nodes"))
    found.append(Case("decode_sm80", dtypes[2], (64, 64), "plain", False, "cached 8 nodes"))
    found.append(Case("decode_simt", dtypes[0], (64, 64), "plain", False, "paged whole"))
    for n, (own, options, cache) in enumerate([
        ((128, 128), "plain", "cached"), ((128, 128), "causal", "paged"),
        ((64, 64), "softcap", "cached"), ((128, 128), "plain", "paged int8"),
    ]):  # fmt: skip
        found.append(Case("decode_sm80_shared", dtypes[1 + n // 2], own, options, False, cache))
    # Heads whose rows do not fill a stage of shared memory.
    found.append(Case("decode_sm80", dtypes[2], (192, 128), "causal", False, "paged"))
    # Caches of codes: each format, each type of queries.
    for n, form in enumerate(FORMATS):
        own = (128, 128), "causal" if n % 2 else "plain", n == 3, f"paged {form}"
        found.append(Case("decode_simt", dtypes[n % 3], *own))
        found.append(Case("decode_sm80", dtypes[1 + n // 2], *own))
        found.append(Case("append", dtypes[n % 3], sizes[0], "plain", n == 3, f"paged {form}"))
    # Formats of keys and of values: those that compute most, and each beside numbers.
    for n, (forms, dtype) in enumerate([
        ("int8+int4", BFLOAT16), ("numbers+int4", dtypes[2]), ("int4+numbers", dtypes[2]),
        ("float8_e4m3fn+numbers", BFLOAT16), ("numbers+float8_e5m2", dtypes[2]),
        ("float8_e5m2+int4", dtypes[2]),
    ]):  # fmt: skip
        own = (128, 128), "causal" if n % 2 else "plain", False, f"paged {forms}"
        found.append(Case("decode_sm80", dtype, *own))
        if n < 2:
            found.append(Case("decode_simt", dtypes[n], *own))
            found.append(Case("append", dtype, sizes[0], "plain", False, f"paged {forms}"))
            found.append(Case("decode_sm80_shared", dtype, *own))
    # Codes: each format, type of the result and tile.
    for n, (own, options, packed, scales) in enumerate([
        ((64, 64), "plain", False, ""), ((128, 128), "plain", False, ""),
        ((256, 256), "plain", False, ""), ((128, 128), "causal", False, ""),
        ((64, 64), "causal", False, "rows "), ((256, 256), "causal", True, ""),
        ((192, 80), "alibi", False, "rows "), ((96, 112), "everything", True, "rows "),
    ]):  # fmt: skip
        form = f"{scales}float8_{'e5m2' if n % 3 == 1 else 'e4m3fn'}"
        dtype = dtypes[(1, 1, 2, 1, 0)[n % 5]]
        found.append(Case("forward_sm90_fp8", dtype, own, options, packed, form))
    found += [Case("dequantize", dtype, sizes[0], "plain", False) for dtype in dtypes[1::2]]
    for n, kernel in enumerate(("backward_delta", "backward_sink", "combine", "backward_sums")):
        found += [Case(kernel, dtype, sizes[n], "plain", bool(n % 2)) for dtype in dtypes]
    for n, kernel in enumerate(("backward_tangent_delta", "backward_tangent_sink")):
        found += [Case(kernel, dtype, sizes[n], "plain", bool(n % 2)) for dtype in dtypes[n::2]]
    for size in (128, 96, 288):
        found += [Case("hadamard", dtype, (size, size), "plain", False) for dtype in dtypes]
    found += [Case(name, dtypes[0], sizes[0], "plain", False) for name in ("checksum", "offsets")]
    for kernel in ("append", "rope", "quantize"):
        found += [Case(kernel, dtype, sizes[0], "plain", False) for dtype in dtypes]
    for kernel, dtype in [
        ("list_tiles", dtypes[0]), ("order_tiles", dtypes[0]), ("forward_sm90", BFLOAT16),
        ("backward_sm90_dkdv", BFLOAT16), ("forward_simt", dtypes[0]),
    ]:  # fmt: skip
        found.append(Case(kernel, dtype, (128, 128), "segments", False, "lists"))
    found.append(Case("forward_sm90", BFLOAT16, (64, 64), "image", False))
    for kernel, dtype in [
        ("single_tiles", dtypes[0]), ("backward_delta", BFLOAT16),
        ("backward_sm90_dkdv", BFLOAT16), ("backward_dq_rows", dtypes[2]),
    ]:  # fmt: skip
        found.append(Case(kernel, dtype, (128, 128), "segments", False, "singles"))
    for n, size in enumerate(((64, 64), (40, 72))):
        found.append(Case("backward_dq_rows", dtypes[1 + n], size, "plain", bool(n)))
    for kernel, dtype, which in [
        ("list_long", dtypes[0], "only"), ("forward_sm90", BFLOAT16, "only short"),
        ("forward_sm90", BFLOAT16, "only long"), ("backward_delta", BFLOAT16, "only long"),
        ("backward_sm90_dkdv", dtypes[2], "few keys, only short, whole dq"),
        ("backward_sm90_dkdv", dtypes[2], "only long"),
        ("backward_sm90_dkdv", BFLOAT16, "only long"), ("backward_dq_rows", BFLOAT16, "only long"),
    ]:  # fmt: skip
        found.append(Case(kernel, dtype, (128, 128), "causal", True, which))
    return found


def formats_of(case: Case) -> tuple[Format | None, Format | None]:
    """Return the formats of keys and of values."""
    k, _, v = case.cache.rpartition(" ")[2].partition("+")
    return FORMATS.get(k), FORMATS.get(v or k)


def capability(arch: str) -> tuple[int, int]:
    """sm_120 -> (12, 0)."""
    return int(arch[3:-1]), int(arch[-1])


def target_of(arch: str, lacks: str = "") -> Target:
    """Return a GPU that is nowhere."""
    return Target(0, arch, capability(arch), 1, SHARED_MEMORY[arch], lacks)


def runs_on(case: Case, arch: str) -> bool:
    """Whether there is such a kernel for a GPU, and tiles for these sizes."""
    spec = SPECS[case.kernel]
    if spec.architecture is not None:
        return capability(arch) == spec.capability
    if case.kernel in sm80_f64.BACKWARD_TILES:
        has = capability(arch) >= spec.capability
        return has and sm80_f64.fit(case.kernel, *case.sizes, SHARED_MEMORY[arch]) is not None
    if case.kernel in _OF_SECOND:  # their widest rows in float64 have no room on the oldest
        sizes = max(case.dtype.itemsize, 4), case.dtype.itemsize, *case.sizes
        return simt.fit(case.kernel, *sizes, 1, SHARED_MEMORY[arch]) is not None
    if case.kernel == "decode_sm80" and case.cache.endswith(" whole"):
        sizes = decode.WHOLE_WARPS, 2, *case.sizes
        return sm80.decode_bytes(*sizes) <= SHARED_MEMORY[arch]
    if case.cache.endswith(" nodes"):
        return SHARED_MEMORY[arch] == SHARED_MEMORY["sm_90"]
    return capability(arch) >= spec.capability


def _tma_stores(spec: KernelSpec, problem: Problem, tiles: Tiles) -> bool:
    if spec is sm90.FORWARD:
        return sm90.results_have_room(tiles, problem.d, problem.d_v)
    if spec is sm90_fp8.FORWARD:
        return sm90_fp8.results_have_room(tiles, problem)
    return spec.tma is not None and spec is not sm90_tangent.TANGENTS


def _tiles(spec: KernelSpec, case: Case, request: Request) -> Tiles:
    """Return the configuration of a kernel, whether or not a better one serves."""
    if spec is sm90.FORWARD:
        assert request.call is not None
        registers = sm90.register_class(request.call)
        if case.cache.startswith("tiles"):
            kind = np.dtype(case.cache.split()[1].replace("bfloat16", "float16"))
            sees = kind.itemsize, request.call.mask is not None, 512, 512
            return sm90.choose_forward_bias(*case.sizes, registers, *sees)
        if case.cache.startswith("short"):
            _, _, len_q, len_k = SHORT_ROWS[int(case.cache.split()[1])]
            has_bias = request.call.bias is not None
            return sm90.choose_forward(*case.sizes, registers, has_bias, len_q, len_k)
        if case.cache == "only short":
            return sm90.choose_forward(*case.sizes, registers, False, 64, 64)
        # Some have the tiles of longer rows, all others those of short ones.
        if case.options == "causal":
            registers = "masks"
        elif case.options == "plain" and case.sizes != (96, 104):
            registers = "plain"
        return sm90.fit_forward(*case.sizes, registers)
    if spec is sm90.DKDV:
        few, own = case.cache.startswith("few keys"), (*case.sizes, sm90_dkdv.is_plain(request))
        made = sm90_dkdv.fit_few_keys(*case.sizes) if few else sm90_dkdv.fit_dkdv(*own)
        return bias_tiles.with_stages(made) if case.cache.startswith("tiles") else made
    if spec is sm80.DKDV and case.cache != "whole dq":  # those of longer rows
        tiles = sm80.fit_backward(spec.name, *case.sizes, request.device.shared_memory)
        assert tiles is not None
        return tiles
    if spec is sm90_fp8.FORWARD and case.options in ("plain", "causal"):
        return sm90_fp8.fit(*case.sizes)  # those of longer rows
    tiles, whole = spec.configure(request), case.cache.endswith(" whole")
    if spec is sm80.DECODE:
        few, codes = case.cache.endswith(" few"), formats_of(case) != (None, None)
        tiles = sm80.whole_tiles(request) if whole else sm80.decode_tiles(request, few, codes)
    if case.cache.endswith(" nodes"):
        whole, tiles = True, sm80.nodes_tiles(request, int(case.cache.split()[1]))
    assert tiles is not None
    if case.cache.startswith("tiles") and spec.part == "bias":
        return bias_tiles.with_whole(tiles)
    parts = int(case.cache.split()[1]) if case.cache.endswith(" parts") else tiles.v_parts
    return dataclasses.replace(tiles, whole=whole, v_parts=parts)


def specialisation(case: Case, arch: str) -> Specialisation:
    """Return what a case is compiled for on a GPU."""
    cores = case.kernel in ("forward_sm80", "forward_sm90_tf32") and case.dtype == np.float32
    options = (OPTIONS | MORE_OPTIONS)[case.options] | {"precision": "tf32x3" if cores else None}
    form, (k_codes, v_codes) = case.cache.rpartition(" ")[2], formats_of(case)
    resumes, parts = (case.cache == x for x in ("resumes", "parts"))
    whole_dq = case.cache.endswith("whole dq")
    only_short, only_long = ("only short" in case.cache, "only long" in case.cache)
    plain = "rows", "float8", "short", "tiles", "lists", "singles", "few keys", "only"
    held = "" if resumes or parts or whole_dq or case.cache.startswith(plain) else case.cache
    of_codes = case.kernel == "forward_sm90_fp8"
    stored, given = case.dtype, codes.NONE
    if of_codes:
        ones = (np.ones((1, 1), np.float32),) * 3
        stored, given = np.uint8, coded.Fp8(*ones, form, case.dtype)
    q = np.zeros((4, 24, case.sizes[0]), stored)
    v = np.zeros((4, 24, case.sizes[1]), stored)
    if case.packed:
        more = {"check": True, "options": Options(**options), "given": given}
        call = validate.varlen_call(q, q, v, [0, 24], [0, 24], **more)
    elif case.kernel == "decode_sm90":  # only a cache has heads of this size
        call = cached.call(q[None], q[None], v[None], 24, None, None, Options(**options))
    else:
        call = validate.call(q, q, v, Options(**options), given=given)
    spec, problem = SPECS[case.kernel], call.problem
    in_tiles = case.cache.startswith("tiles")
    made = trees(dataclasses.replace(call, bias=None) if in_tiles else call)
    keys = None if made.allowed is None else key_range(made.allowed, problem)
    slope = (
        made.slope if spec.part not in ("forward", "forward_codes", "decode", "shared") else None
    )
    given_trees = made.allowed, made.classes, made.changed, slope, keys
    is_second = spec.part.startswith("tangent_")
    has_tangents, tangent, curve = spec.part == "tangents" or is_second, None, None
    if is_second and made.slope is not None:
        curve = convert(derivative(made.slope), "float")
    if has_tangents and call.bias is not None:
        tangent = added(SCORE, call.bias, "tbias", problem)
    functions = NONE
    if spec.scores:
        functions = generate(*given_trees, short=True, tangent=tangent, curve=curve).functions
    if not spec.slope:
        functions = dataclasses.replace(functions, has_dscore=False)
    lists, singles = case.cache in ("lists", "singles"), case.cache == "singles"
    if lists:  # the last table
        functions = dataclasses.replace(functions, num_tables=functions.num_tables + 1)
    blocks = (16, 64) if spec.part == "join" else None  # those of a decode kernel
    request = Request(problem, target_of(arch), call, slope=functions.has_dscore, blocks=blocks)
    assert spec.is_for(problem, request.device)
    tiles = _tiles(spec, case, request)
    sums_dq = only_long or not case.packed
    adds_dq = sums_dq and not whole_dq and problem.dtype.name in spec.atomic_dq
    wide = (of_codes and case.dtype == np.float32) or (resumes and case.dtype.itemsize == 2)
    return Specialisation(
        spec,
        "bfloat16" if of_codes and wide else problem.dtype.name,
        problem.d if "d" in spec.sizes else 0,
        problem.d_v if "d_v" in spec.sizes else 0,
        tiles,
        packed=case.packed,
        cached=held != "",
        paged=held.startswith("paged"),
        page_rows=16 if held.startswith("paged16") else 1,
        k_codes=k_codes,
        v_codes=v_codes,
        wide_result=wide,
        resumes=resumes,
        aligned=spec.aligned and held != "",
        k_rows=case.cache.startswith("rows"),
        v_rows=case.cache.startswith("rows"),
        lists=lists and spec.lists != "",
        singles=singles and spec.part != "singles",
        dropout=problem.dropout > 0 and spec.scores,
        functions=functions,
        bias=case.cache.split()[1] if in_tiles else "",
        tma_store=not (case.packed or resumes or parts) and _tma_stores(spec, problem, tiles),
        parts=parts,
        whole_dq=whole_dq,
        only_short=only_short,
        only_long=only_long,
        atomic_dq=(whole_dq or sums_dq) and problem.dtype.name in spec.atomic_dq,
        adjacent_dq=adds_dq and capability(arch) >= spec.adjacent_dq,
        team=decode.team_of(tiles, 8) if spec.part == "shared" else 0,
        tq=has_tangents,
        tk=has_tangents,
        tv=has_tangents,
        tdo=is_second,
    )
