"""`cupyflash.analysis`: Theorem 2, block sizes, FLOPs, devices and rooflines."""

from __future__ import annotations

import itertools
import re
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from cupyflash import ArgumentError, analysis
from cupyflash.analysis import Problem
from cupyflash.arrays import cuda_device

ROOT = Path(__file__).resolve().parents[2]

# -- Theorem 2 ------------------------------------------------------------------------------------


def flash_total(n: int, d: int, sram: int) -> int:
    block_q, block_kv = analysis.block_sizes(sram, d)
    return analysis.flash_attention(n, n, d, block_q=block_q, block_kv=block_kv).total


def test_block_sizes_of_the_paper():
    # 100 KiB of float32: M = 25600. 25600 / (4 * 64) = 100, so B_c = 100 and B_r = min(100, 64).
    assert analysis.block_sizes(25600, 64) == (64, 100)
    # One element more begins another row: ceil(25601 / 256) = 101.
    assert analysis.block_sizes(25601, 64) == (64, 101)
    # Small M: B_r = B_c.
    assert analysis.block_sizes(1024, 64) == (4, 4)


def test_theorem_2_at_concrete_numbers():
    # N = 1024, d = 64, M = 25600: N d + N^2 = 65536 + 1048576; N^2 d^2 / M = 2^20 * 2^12 / 25600.
    order = analysis.theorem_2(1024, 64, 25600)
    assert order.standard == 1114112
    assert order.flash == pytest.approx(167772.16)
    assert order.ratio == pytest.approx(6.6406, rel=1e-4)


@pytest.mark.parametrize("d", [16, 64, 128])
@pytest.mark.parametrize("n", [1024, 4096, 16384])
@pytest.mark.parametrize("rows", [4, 16, 100, 1000])
def test_exact_counts_lie_in_theorem_2s_regimes(n, d, rows):
    sram = rows * d
    order = analysis.theorem_2(n, d, sram)
    # Q, K, V, O once; S and P written and read: exactly 4 N d + 4 N^2.
    assert analysis.standard_attention(n, n, d).total == 4 * order.standard
    # Q and O read, O written in each of ceil(N / B_c) passes, B_c = ceil(M / 4d): some 12 times
    # the order. B_c rounds up, at most to twice M / 4d; l, m, the last pass, K, V and O = 0 add up
    # to 8.
    assert 6 <= flash_total(n, d, sram) / order.flash <= 20


def test_twice_the_sram_halves_the_traffic():
    totals = [flash_total(16384, 64, sram) for sram in (4096, 8192, 16384, 32768)]
    for before, after in itertools.pairwise(totals):
        assert 1.85 < before / after <= 2.05


def test_standard_attention_by_blocks_of_d_rows_has_the_same_order():
    order = analysis.theorem_2(4096, 64, 16384)
    made = analysis.standard_attention(4096, 4096, 64, block_q=64, block_kv=64)
    assert order.standard <= made.total <= 6 * order.standard


@pytest.mark.parametrize("d", [1, 16, 64, 128])
@pytest.mark.parametrize("rows", [4, 7, 100, 1000])
def test_the_blocks_fill_the_sram_and_the_scores_come_on_top(d, rows):
    sram = rows * d
    block_q, block_kv = analysis.block_sizes(sram, d)
    made = analysis.flash_attention(10**5, 10**5, d, block_q=block_q, block_kv=block_kv)
    # Q, K, V, O: 4 d ceil(M / 4d) at most, then S of d rows at most, and six vectors.
    assert made.peak <= (sram + 4 * d) * 5 / 4 + 6 * block_q


# -- tiles and order of loops ---------------------------------------------------------------------


def test_causal_tiles():
    made = analysis.causal_tiles(1024, 1024, 32, 32)
    assert (made.visited, made.total) == (528, 1024)
    assert made == (496, 32, 496)
    # More keys than queries: 2 x 4 tiles, the last query sees all.
    assert analysis.causal_tiles(4, 8, 2, 2) == (1, 2, 5)


def test_queries_outside_move_less_of_what_is_written():
    blocks = {"block_q": 64, "block_kv": 64}
    first = analysis.flash_attention(4096, 4096, 64, **blocks)
    second = analysis.flash_attention_2(4096, 4096, 64, **blocks)
    assert sum(second.writes.values()) * 60 < sum(first.writes.values())
    assert second.total < first.total
    half = analysis.flash_attention_2(4096, 4096, 64, **blocks, causal=True)
    assert half.reads["k"] / second.reads["k"] == pytest.approx(65 / 128)  # 2080 of 4096 tiles


def test_bytes_count_statistics_in_float32():
    made = analysis.flash_attention_2(8, 8, 4, block_q=8, block_kv=8)
    # q, k, v, o of 8 x 4 and the log-sum-exp of 8.
    assert made.bytes("float16") == 4 * 32 * 2 + 8 * 4
    assert made.bytes("float64") == 4 * 32 * 8 + 8 * 8
    dropped = analysis.flash_attention(8, 8, 4, block_q=8, block_kv=8, padding=True, dropout=True)
    plain = analysis.flash_attention(8, 8, 4, block_q=8, block_kv=8)
    assert dropped.bytes("float32") - plain.bytes("float32") == 8 + 8  # flags, and a 64-bit state
    assert made.times(3).total == 3 * made.total
    assert made.times(3).peak == made.peak


def test_the_table_of_the_algorithms_readme():
    n, d = 4096, 64
    block_q, block_kv = analysis.block_sizes(25600, d)
    blocks = {"block_q": block_q, "block_kv": block_kv}
    made = {
        "standard attention, whole matrices on chip": analysis.standard_attention(n, n, d),
        "standard attention, the same blocks": analysis.standard_attention(n, n, d, **blocks),
        "one pass, a query at a time": analysis.one_pass_attention(n, n, d),
        "chunked, 1024 x 4096": analysis.rabe_staats(n, n, d),
        "FlashAttention": analysis.flash_attention(n, n, d, **blocks),
        "FlashAttention-2": analysis.flash_attention_2(n, n, d, **blocks),
        "FlashAttention-2, causal": analysis.flash_attention_2(n, n, d, **blocks, causal=True),
        "FlashAttention-3": analysis.flash_attention_3(n, n, d, **blocks),
        "split keys, 8 parts": analysis.split_kv(n, n, d, splits=8, **blocks),
        "standard attention's gradients": analysis.standard_attention_backward(n, n, d),
        "FlashAttention's gradients": analysis.flash_attention_backward(n, n, d, **blocks),
    }
    text = (ROOT / "reference" / "algorithms" / "README.md").read_text()
    shown = re.findall(r"^\| (.+) \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert [row[0] for row in shown] == list(made)
    for name, *numbers in shown:
        reads, writes = (sum(x.values()) for x in (made[name].reads, made[name].writes))
        wanted = [f"{reads / 1e6:.1f}", f"{writes / 1e6:.1f}", f"{made[name].peak:,}"]
        assert numbers == wanted, name


# -- FLOPs ----------------------------------------------------------------------------------------


def test_flops():
    # 2 * 16 heads of 4096^2 pairs, 4 * 64 each.
    full = Problem(4096, 4096, 64, batch=2, heads=16)
    assert full.flops == 4 * 64 * 4096**2 * 32
    assert Problem(4096, 4096, 64, batch=2, heads=16, backward=True).flops == 2.5 * full.flops
    assert Problem(3, 5, 2, d_v=1).flops == 2 * 3 * 15
    # Queries 0, 1, 2 see 3, 4, 5 of 5 keys.
    assert Problem(3, 5, 2, d_v=1, causal=True).flops == 2 * 3 * 12
    assert Problem(3, 5, 2, d_v=1, backward=True).flops == 2 * 8 * 15
    assert Problem(5, 3, 2, causal=True).pairs == 0 + 0 + 1 + 2 + 3


def test_compulsory_bytes():
    # q, o: 2 heads x 3 x (2 + 1); k, v: 1 head x 5 x 3; the log-sum-exp in float32.
    problem = Problem(3, 5, 2, d_v=1, heads=2, heads_kv=1)
    assert problem.compulsory_bytes == 2 * (18 + 15) + 4 * 6
    # and do, dq, dk, dv.
    back = Problem(3, 5, 2, d_v=1, heads=2, heads_kv=1, backward=True)
    assert back.compulsory_bytes == 2 * (18 + 15 + 6 + 12 + 15) + 4 * 6


# -- devices and rooflines ------------------------------------------------------------------------


def test_the_devices():
    assert list(analysis.DEVICES) == [
        "T4", "A10", "A100-40GB", "A100-80GB", "L40S", "RTX 4090",
        "H20", "H100-SXM", "H200", "B200",
    ]  # fmt: skip
    for name, facts in analysis.DEVICES.items():
        assert facts.name == name
        assert "data sheet" in facts.source or "white paper" in facts.source
        assert set(facts.peak) <= {"float16", "bfloat16", "float32", "float64"}
        assert facts.peak["float16"] > facts.peak["float32"] > facts.peak["float64"]
        if facts.matrix_peak:  # tensor cores take half as many numbers of 32 bits
            assert facts.matrix_peak["tf32"] == pytest.approx(facts.peak["float16"] / 2, rel=0.02)
        assert 1.4e9 < facts.clock < 2.6e9
        assert facts.sram_bandwidth > 4 * facts.bandwidth
        assert 60 * facts.l2 < facts.memory
        # Arithmetic has grown faster than memory: a hundred operations a byte, but for the H20.
        assert 35 < facts.ridge("float16") < 450
        with pytest.raises(AttributeError):
            facts.sram = 0
        with pytest.raises(TypeError):
            facts.peak["float16"] = 0.0


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("h20", "H20"),
        ("H200", "H200"),
        ("H100", "H100-SXM"),
        ("h100 sxm", "H100-SXM"),
        ("A10", "A10"),
        ("a100_80gb", "A100-80GB"),
        ("RTX4090", "RTX 4090"),
        ("rtx-4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
    ],
)
def test_names_of_devices(name, known):
    assert analysis.device(name) is analysis.DEVICES[known]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("H2", r"which is not known; expected one of .*; did you mean H20 or H200\?$"),
        ("RTX", r"which is not known; expected one of .*B200; did you mean RTX 4090\?$"),
        ("A100-80", r"which is not known; .*did you mean A100-80GB\?$"),
        ("A100", "which several devices are called; expected A100-40GB or A100-80GB$"),
        ("", "which is not known"),
    ],
)
def test_parts_of_names_are_no_names(name, words):
    with pytest.raises(ArgumentError, match=f"device: got '{name}', {words}"):
        analysis.device(name)


def test_the_ridge_of_an_h200():
    # 989.4 TFLOP/s over 4.8 TB/s.
    assert analysis.device("h200").ridge("bfloat16") == pytest.approx(206.1, abs=0.1)


def test_the_sram_in_elements():
    # 64 KiB of float32, and 228 KiB of float16.
    assert analysis.device("t4").sram_elements("float32") == 16384
    assert analysis.device("H100-SXM").sram_elements("float16") == 116736


def test_roofline_of_a_long_forward_is_the_arithmetic():
    problem = Problem(4096, 4096, 64, batch=2, heads=16)
    made = analysis.roofline(problem, "H200")
    assert made.bound == "compute"
    assert made.seconds == made.compute_seconds == pytest.approx(137438953472 / 989.4e12)
    assert made.intensity == pytest.approx(made.flops / made.bytes)
    assert made.intensity > made.ridge


def test_roofline_of_decoding_is_the_memory():
    problem = Problem(1, 32768, 128, heads=32, heads_kv=8)
    made = analysis.roofline(problem, analysis.DEVICES["A100-80GB"])
    assert made.bound == "memory"
    assert made.seconds == pytest.approx(problem.compulsory_bytes / 2039e9)
    assert made.intensity < made.ridge


def test_roofline_of_standard_attention_is_the_memory():
    problem = Problem(4096, 4096, 64, batch=2, heads=16)
    made = analysis.roofline(problem, "H200", analysis.standard_attention(4096, 4096, 64))
    assert made.bound == "memory"
    assert made.bytes == 32 * 2 * 4 * (4096 * 64 + 4096**2)
    assert made.seconds > 6 * analysis.roofline(problem, "H200").seconds


def here(name: str) -> mock.Mock:
    return mock.Mock(return_value=types.SimpleNamespace(name=name))


@pytest.mark.parametrize(
    ("driver", "known"),
    [
        ("NVIDIA H200", "H200"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
    ],
)
def test_the_device_at_hand(driver, known):
    with mock.patch.object(cuda_device, "here", here(driver)):
        assert analysis.device() is analysis.DEVICES[known]
        assert analysis.roofline(Problem(8, 8, 8)).ridge == analysis.device(known).ridge("float16")


# -- errors ---------------------------------------------------------------------------------------


def test_errors_say_what_would_do():
    with pytest.raises(ArgumentError, match=r"'V100'.*expected one of T4, A10, A100-40GB, .*H200"):
        analysis.device("V100")
    with (
        mock.patch.object(cuda_device, "here", here("NVIDIA H200 NVL")),
        pytest.raises(
            ArgumentError, match=r"got None, .* 'NVIDIA H200 NVL', is not known; expected one of T4"
        ),
    ):
        analysis.device()
    with (
        mock.patch.object(cuda_device, "here", mock.Mock(side_effect=ImportError("no cupy"))),
        pytest.raises(ArgumentError, match=r"no GPU is available \(no cupy\); expected one of"),
    ):
        analysis.device()
    with pytest.raises(
        ArgumentError, match=r"no peak of the T4 is known; expected one of float16, float32"
    ):
        analysis.roofline(Problem(8, 8, 8, dtype="bfloat16"), "T4")
    with pytest.raises(ArgumentError, match=r"sram: got 255 with d=64; .* 4 d = 256 elements"):
        analysis.block_sizes(255, 64)
    with pytest.raises(ArgumentError, match=r"expected 64 to 65536, .* d <= M <= N d"):
        analysis.theorem_2(1024, 64, 65537)
    with pytest.raises(ArgumentError, match="n_q: got 0; expected a positive integer"):
        analysis.flash_attention_2(0, 8, 8, block_q=1, block_kv=1)
    with pytest.raises(ArgumentError, match=r"block_kv: got 2\.5; expected a positive integer"):
        analysis.causal_tiles(8, 8, 2, 2.5)
    with pytest.raises(ArgumentError, match="dtype: got 'int8'; expected one of float16"):
        Problem(8, 8, 8, dtype="int8")
    with pytest.raises(ArgumentError, match="heads: got 3; expected a multiple of heads_kv=2"):
        Problem(8, 8, 8, heads=3, heads_kv=2)
    with pytest.raises(ArgumentError, match=r"layout: got shape \(2, 2\); expected \(2, 4\)"):
        analysis.block_sparse_attention(np.ones((2, 2)), 4, 8, 8, block_q=2, block_kv=2)


@pytest.mark.parametrize("name", ["standard_attention", "rabe_staats", "one_pass_attention"])
def test_zero_is_not_what_was_left_out(name):
    with pytest.raises(ArgumentError, match="d_v: got 0"):
        getattr(analysis, name)(8, 8, 8, 0)
    with pytest.raises(ArgumentError, match="block_q: got 0"):
        analysis.standard_attention(8, 8, 8, block_q=0)
