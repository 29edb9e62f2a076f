"""`explain` and the command say what a call on codes of float8 does."""

from __future__ import annotations

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, analysis, masks
from cupyflash.commands.main import main

FP8 = "float8_e4m3fn"


def explain(*shapes, **options):
    options = {"device": "H200", "compile": False, "dtype": FP8} | options
    return cupyflash.explain(*shapes, **options)


def coded(xp, *shapes):
    """Return arrays of codes, and the options of a call."""
    raw = [xp.asarray(np.zeros(shape, np.uint8)) for shape in shapes]
    scales = [xp.asarray(np.ones((*shape[:-1], 1), np.float32)) for shape in shapes]
    names = ("q_scale", "k_scale", "v_scale")
    return raw, dict(zip(names, scales, strict=True)) | {"qkv_dtype": FP8}


@pytest.mark.parametrize(
    ("queries", "options", "main_kernel"),
    [
        (600, {}, "forward_sm90_fp8"),
        (600, {"mask": masks.causal()}, "forward_sm90_fp8"),
        (70, {"mask": masks.causal()}, "forward_sm90"),  # too few: numbers first
        (1, {}, "decode_sm80"),
    ],
)
def test_the_launches_are_those_of_a_call(cupy, queries, options, main_kernel):
    shapes = (2, 8, queries, 64), (2, 2, 700, 64), (2, 2, 700, 128)
    raw, given = coded(cupy, *shapes)
    plan = cupyflash.plan(*raw, **given, **options)
    made = explain(*shapes, device="gpu", **options)
    assert (made.reason, made.main.name) == (plan.reason, plan.kernel)
    assert made.main.name == main_kernel
    assert (made.main.block_q, made.main.block_kv) == (plan.block_q, plan.block_kv)
    assert made.axes == plan.axes
    assert not cupy.launches
    cupyflash.attention(*raw, **given, **options)
    told = [(x.kernel.partition("__")[0], *x[2:5]) for x in cupy.launches]
    if main_kernel != "forward_sm90_fp8":
        widened, told = told[:3], told[3:]
        first = made.kernels[0]
        assert {name for name, *_ in widened} == {first.name} == {"dequantize"}
        assert sum(blocks for _, blocks, *_ in widened) == first.blocks
        assert {threads for *_, threads, _ in widened} == {32 * first.warps}
        made = made.kernels[1:]
    else:
        made = made.kernels
    assert told == [(x.name, x.blocks, 32 * x.warps, x.shared_memory) for x in made]


def test_the_least_time_is_by_the_rate_of_float8():
    shape = (4, 32, 8192, 128)
    ours, numbers = explain(shape), explain(shape, dtype="bfloat16")
    device = analysis.device("H200")
    assert ours.roofline.compute_seconds == ours.flops / device.matrix_peak["float8"]
    assert ours.flops == numbers.flops
    assert 1.99 < numbers.roofline.seconds / ours.roofline.seconds < 2.01
    assert 1.9 < numbers.kernels_roofline.seconds / ours.kernels_roofline.seconds < 2.1
    # Standard attention is that of numbers.
    assert ours.standard.roofline == numbers.standard.roofline
    # Without units for codes, all that is saved are bytes, and it costs a kernel.
    a100 = [explain(shape, device="A100-80GB", dtype=x) for x in (FP8, "bfloat16")]
    assert a100[0].roofline.compute_seconds == a100[1].roofline.compute_seconds
    assert a100[0].kernels_roofline.seconds > a100[1].kernels_roofline.seconds
    assert all(
        ("float8" in each.matrix_peak) == (each.capability >= (8, 9))
        for each in analysis.DEVICES.values()
    )


@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_bytes(out_dtype):
    q, k, v = (1, 4, 1024, 64), (1, 2, 2048, 64), (1, 2, 2048, 128)
    item = 2 if out_dtype is None else 4
    codes = {"q": 4 * 1024 * (64 + 4), "k": 2 * 2048 * (64 + 4), "v": 2 * 2048 * (128 + 4)}
    numbers = {"q": 4 * 1024 * 64, "k": 2 * 2048 * 64, "v": 2 * 2048 * 128}
    result = {"o": 4 * 1024 * 128 * item, "lse": 4 * 1024 * 4}
    made = explain(q, k, v, out_dtype=out_dtype)
    assert made.least.reads == made.main.once.reads == codes
    assert made.least.writes == result
    assert made.memory == sum(result.values())
    assert made.dtype == f"{FP8}, results in {out_dtype or 'bfloat16'}"
    for device, size in (("A100-80GB", item), ("cpu", 4)):
        made = explain(q, k, v, out_dtype=out_dtype, device=device)
        first, second = made.kernels
        wide = {name: size * n for name, n in numbers.items()}
        assert made.least.reads == first.once.reads == codes
        assert made.least.writes == result
        assert first.once.writes == second.once.reads == wide
        assert first.flops == 0
        more = 4 * result["o"] // item if device == "cpu" and item == 2 else 0
        assert made.memory == sum(result.values()) + sum(wide.values()) + more


MEASURED = """
import numpy as np
import cupyflash
from cupyflash.bench import measure

x, scale = np.zeros((16, 2048, 64), np.uint8), np.ones((16, 2048, 1), np.float32)
given = {"q_scale": scale, "k_scale": scale, "v_scale": scale, "qkv_dtype": "float8_e4m3fn"}

def call():
    return cupyflash.attention(x, x, x, **given, return_lse=True)

call()  # loads its kernels
print(min(measure.Cpu().peak_memory(call) for _ in range(2)))
"""


@pytest.mark.thorough("the memory of other calls is quick; bytes of codes are, too")
def test_memory_is_what_a_call_takes(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "1")
    made = explain((16, 2048, 64), device="cpu")
    command = [sys.executable, "-c", MEASURED]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert abs(int(done.stdout) - made.memory) <= 0.02 * made.memory + 2_000_000


def test_arrays_are_as_good_as_their_shapes():
    raw, given = coded(np, (1, 4, 40, 64), (1, 4, 50, 64), (1, 4, 50, 64))
    plan = cupyflash.plan(*raw, **given)
    made = explain(*raw, device=None)
    assert made.reason == plan.reason
    typed = [x.view(ml_dtypes.float8_e4m3fn) for x in raw]
    assert explain(*typed, device="cpu", dtype=None).to_dict() == made.to_dict()
    assert explain(*(x.shape for x in raw), device="cpu").to_dict() == made.to_dict()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"backward": True}, ArgumentError, "backward: .* keep numbers of 16 bits"),
        ({"ranks": 8}, ArgumentError, "ranks: .* Ranks send numbers"),
        ({"out_dtype": "float64"}, ArgumentTypeError, "out_dtype: got float64"),
        (
            {"out_dtype": "float16", "dtype": "float16"},
            ArgumentError,
            "out_dtype: .* without codes",
        ),
        ({"dtype": "int8"}, ArgumentTypeError, "dtype: got 'int8'"),
    ],
)
def test_what_calls_on_codes_do_not_have(options, error, words):
    with pytest.raises(error, match=words):
        explain((2, 8, 600, 64), **options)


def test_bytes_have_to_be_named():
    x = np.zeros((2, 600, 64), np.uint8)
    with pytest.raises(ArgumentTypeError, match="dtype: got None with q of uint8"):
        explain(x, dtype=None)


def test_the_command(capsys):
    documented = "explain 4,32,8192,128 --mask causal --dtype float8_e4m3fn --device H200"
    assert main([*documented.split(), "--no-compile"]) == 0
    out = capsys.readouterr().out
    assert "forward_sm90_fp8" in out
    assert "float8_e4m3fn,\n        results in bfloat16" in out
    small = ["explain", "2,4,600,64", "--no-compile", "--dtype", FP8]
    assert main([*small, "--device", "L40S", "--out-dtype", "float16"]) == 0
    out = capsys.readouterr().out
    assert "turns codes of float8_e4m3fn into float16 first" in out
    assert "numbers of the codes" in out
    for more, wanted in (
        (["--page", "16"], "--dtype float8_e4m3fn: got it with --page"),
        (["--backward"], "backward: got it with dtype float8_e4m3fn"),
    ):
        assert main([*small, *more]) == 2
        assert wanted in capsys.readouterr().err
    assert main(["explain", "2,4,600,64", "--cache", "--out-dtype", "float16"]) == 2
    assert "--out-dtype: got it with --cache" in capsys.readouterr().err


def test_json(capsys, tmp_path):
    path = tmp_path / "x.json"
    assert main(["explain", "2,4,600,64", "--no-compile", "--dtype", FP8, "--device", "H100",
                 "--json", str(path)]) == 0  # fmt: skip
    content = json.loads(path.read_text())
    assert content["dtype"] == f"{FP8}, results in bfloat16"
    assert content["kernels"][0]["name"] == "forward_sm90_fp8"
    assert "forward_sm90_fp8" in capsys.readouterr().out
