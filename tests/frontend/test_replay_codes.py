"""Recognised calls on codes of float8, without a GPU: what kernels are told."""

from __future__ import annotations

import numpy as np
import pytest
from recognised import draw, fields

import cupyflash
from cupyflash import ArgumentError
from cupyflash.gpu import params, tma
from cupyflash.problem import validate

NAMES = "q", "k", "v"


@pytest.fixture
def maps(monkeypatch):
    """Tensor maps that were encoded; the driver tells them addresses later."""
    made = []

    def encode(each, _):
        made.append(each)
        return bytes(tma.BYTES)

    monkeypatch.setattr(tma, "encode", encode)
    return made


def codes(cupy, shape=(2, 4, 600, 64), scale=(4, 1, 1)):
    arrays = draw(cupy, shape, np.uint8)
    scales = draw(cupy, scale, np.float32)
    named = {f"{name}_scale": x for name, x in zip(NAMES, scales, strict=True)}
    return arrays, named | {"qkv_dtype": "float8_e4m3fn"}


def test_what_codes_are_is_a_part_of_what_is_recognised(cupy, maps):
    arrays, options = codes(cupy)
    kernels = []
    for more in ({}, {"qkv_dtype": "float8_e5m2"}, {"out_dtype": "float32"}, {}):
        cupyflash.attention(*arrays, **options | more)
        kernels.append(cupy.launches[-1].kernel)
    assert kernels[0] == kernels[3]
    assert len(set(kernels)) == 3
    with pytest.raises(ArgumentError, match="qkv_dtype: got None"):
        cupyflash.attention(*arrays, **options | {"qkv_dtype": None})


def test_rows_with_scales_have_a_kernel_of_their_own(cupy, maps):
    arrays, options = codes(cupy, scale=(2, 4, 600, 1))
    cupyflash.attention(*arrays, **options)
    assert "_krows_vrows_" in cupy.launches[-1].kernel
    found = fields(cupy.launches[-1], params.params(0, 0, 0))
    for name in NAMES:
        scale = found[f"{name}_scale"]
        assert (list(scale["lead"]), scale["head"], scale["row"]) == ([0, 0, 0, 2400], 600, 1)


def test_tensor_maps_describe_pairs_of_codes(cupy, maps):
    arrays, options = codes(cupy)
    for _ in range(3):
        cupyflash.attention(*arrays, **options)
    assert len(maps) == 4
    words = cupy.launches[-1].words[-len(maps) * tma.BYTES // 8 :]
    for n, (made, name, array) in enumerate(zip(maps, NAMES, arrays, strict=False)):
        assert (made.name, words[n * tma.BYTES // 8]) == (name, array.data.ptr)
        assert made.shape == (32, 600, 4, 2, 1)
        assert made.strides[:3] == (64, 64 * 600, 64 * 600 * 4)


def test_few_codes_become_numbers_before_another_kernel(cupy):
    arrays, options = codes(cupy, (2, 4, 40, 24))
    out = cupyflash.attention(*arrays, **options, out_dtype="float16")
    assert [x.kernel.split("__")[0] for x in cupy.launches[:3]] == ["dequantize"] * 3
    widened = [fields(x, params.rowwise("quantize")) for x in cupy.launches[:3]]
    found = fields(cupy.launches[-1], params.params(0, 0, 0))
    assert found["out"]["data"] == out.data.ptr
    for name, array, told in zip(NAMES, arrays, widened, strict=True):
        assert told["codes"]["data"] == array.data.ptr
        assert told["scale"]["data"] == options[f"{name}_scale"].data.ptr
        assert found[name]["data"] == told["x"]["data"]
        assert (told["rows"], told["columns"], told["format"]) == (320, 24, 1)


@pytest.mark.parametrize(
    ("columns", "kernels"),
    [(64, ["forward_sm90_fp8"]), (24, [*["dequantize"] * 3, "forward_sm90"])],
)
@pytest.mark.parametrize("kind", ["host", "int32", "int64"])
def test_packed_codes_are_recognised(cupy, maps, monkeypatch, columns, kernels, kind):
    ends = np.array([0, 40, 600])
    with monkeypatch.context() as patch:
        for n in range(2):
            arrays, options = codes(cupy, (4, 600, columns))
            offsets = ends if kind == "host" else cupy.asarray(ends.astype(kind))
            cupy.launches.clear()
            cupyflash.attention_varlen(*arrays, offsets, offsets, **options)
            found = [x.kernel.split("__")[0] for x in cupy.launches]
            assert found == ["offsets"] * (kind != "host") + kernels
            told = fields(cupy.launches[-1], params.params(0, 0, 0))
            assert told["offsets_q"] == told["offsets_k"] or kind == "host"
            if kind == "int64":
                assert told["offsets_q"] == offsets.data.ptr
            if kind == "int32":
                made = fields(cupy.launches[0], params.rowwise("offsets"))
                assert made["results"].tolist() == [told["offsets_q"], 0]
            if n == 0:
                patch.setattr(validate, "varlen_call", None)
