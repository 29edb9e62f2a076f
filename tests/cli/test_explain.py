"""`explain`: what it says is what the dispatch, the compiler and `analysis` say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from unittest import mock
from xml.etree import ElementTree as ET

import cuda_table
import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, cases, runs_on, specialisation
from halves import mostly_thorough

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, analysis, masks, scores
from cupyflash.analysis import DEVICES, Problem
from cupyflash.arrays import cuda_device, device_arrays
from cupyflash.arrays.cuda_device import Target
from cupyflash.commands.main import main
from cupyflash.costs.explanation.occupancy import LIMITS, occupancy
from cupyflash.costs.explanation.registers import UnknownError, registers
from cupyflash.gpu.kernels.spec import Tiles

SHAPE = (2, 4, 1000, 64)


def explain(*shapes, **options):
    return cupyflash.explain(*shapes, **{"device": "H200", "compile": False} | options)


# -- what runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_cpus_plan_is_what_runs(dtype):
    q = np.zeros((2, 1, 300, 136), dtype)
    plan = cupyflash.plan(q, q, q, mask=masks.causal())
    made = explain(q.shape, dtype=dtype, mask=masks.causal(), device="cpu")
    assert (made.main.name, made.main.block_q, made.main.block_kv, made.reason) == (
        plan.kernel, plan.block_q, plan.block_kv, plan.reason,
    )  # fmt: skip
    assert made.roofline is None
    assert any("limits of CPU are not known" in words for words in made.unknown)


@pytest.mark.parametrize(
    ("device", "options", "kernels"),
    [
        ("h200", {}, ["forward_sm90"]),
        ("a100-80gb", {"mask": masks.causal()}, ["forward_sm80"]),
        ("A100-40GB", {"dtype": np.float64}, ["forward_sm80"]),
        ("T4", {}, ["forward_simt"]),
        ("H200", {"dtype": "float32"}, ["forward_simt"]),
        ("H200", {"dtype": "float32", "precision": "tf32x3"}, ["forward_sm90_tf32"]),
        ("A100-80GB", {"dtype": "float32", "precision": "tf32x3"}, ["forward_sm80"]),
        ("T4", {"backward": True},
         ["backward_delta", "backward_simt_dkdv", "backward_simt_dq"]),
        ("A100-80GB", {"backward": True, "dtype": "bfloat16"},
         ["backward_delta", "backward_sm80_dkdv", "backward_dq_rows"]),
        ("A100-80GB", {"backward": True, "deterministic": True},
         ["backward_delta", "backward_sm80_dkdv", "backward_sm80_dq"]),
        ("A100-80GB", {"backward": True, "dtype": "float64"},
         ["backward_delta", "backward_f64_dkdv"]),
    ],
)  # fmt: skip
def test_kernels(device, options, kernels):
    made = explain(SHAPE, device=device, **options)
    assert [kernel.name for kernel in made.kernels] == kernels
    assert made.main.shared_memory <= 1024 * 227
    assert f"{made.main.block_q} x {made.main.block_kv} tiles take" in made.reason


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float16", {}),
        ("float16", {"mask": masks.causal()}),
        ("float32", {"mask": masks.window(100, 0)}),
        ("float64", {"score_mod": scores.softcap(20.0)}),
    ],
)
def test_the_launches_are_those_of_a_call(cupy, dtype, options, deterministic):
    shapes = (2, 4, 600, 64), (2, 2, 700, 64), (2, 2, 700, 40)
    q, k, v = (cupy.asarray(np.zeros(shape, dtype)) for shape in shapes)
    plan = cupyflash.plan(q, k, v, **options)
    made = explain(*shapes, dtype=dtype, device="gpu", **options)
    assert cupyflash.explain(q, k, v, compile=False, **options).to_dict() == made.to_dict()
    assert (made.reason, made.main.name) == (plan.reason, plan.kernel)
    assert (made.main.block_q, made.main.block_kv) == (plan.block_q, plan.block_kv)
    out = cupyflash.attention(q, k, v, **options)
    backward = explain(
        *shapes, dtype=dtype, device="gpu", backward=True, deterministic=deterministic, **options
    )
    lse = cupy.asarray(np.zeros(out.shape[:-1], np.float64 if dtype == "float64" else np.float32))
    cupyflash.attention_backward(out, q, k, v, out, lse, deterministic=deterministic, **options)
    told = [(x.kernel.partition("__")[0], *x[2:5]) for x in cupy.launches]
    wanted = [
        (x.name, x.blocks, 32 * x.warps, x.shared_memory)
        for x in (*made.kernels, *backward.kernels)
    ]
    assert told == wanted


def test_masks_whose_arrays_lie_on_a_gpu(cupy, monkeypatch):
    monkeypatch.setattr(device_arrays, "read_back", lambda array: array.host)
    ids = np.arange(600) // 150
    shape = (2, 600, 64)
    theirs, ours = (masks.segments(x) & masks.causal() for x in (cupy.asarray(ids), ids))
    made = explain(shape, mask=theirs, device="gpu")
    assert made.pairs == 2 * 4 * 150 * 151 // 2
    assert made.main.tiles == explain(shape, mask=ours).main.tiles
    assert theirs._repr_svg_() == ours._repr_svg_()


def test_the_device_at_hand():
    unknown = Target(0, "NVIDIA Something", (8, 9), 128, 101376)
    with mock.patch.object(cuda_device, "here", return_value=unknown):
        made = explain(SHAPE, device="gpu")
        assert explain(SHAPE, device=None).device == made.device
    assert "NVIDIA Something" in made.device
    assert "the current GPU" in made.device
    assert made.main.name == "forward_sm80"
    assert made.roofline is made.share is None
    assert any("limits of NVIDIA Something are not known" in words for words in made.unknown)
    known = Target(0, "NVIDIA H200", (9, 0), 132, 232448)
    with mock.patch.object(cuda_device, "here", return_value=known):
        assert explain(SHAPE, device="gpu").roofline == explain(SHAPE).roofline
    with mock.patch.object(cuda_device, "here", side_effect=ImportError("no cupy")):
        assert "CPU, because no GPU is available (ImportError: no cupy)" in explain(
            SHAPE, device=None
        ).device  # fmt: skip
        with pytest.raises(ArgumentError, match=r'got "gpu", but no GPU is available .*no cupy'):
            explain(SHAPE, device="gpu")


@pytest.mark.parametrize("n_q", [1100, 1152])
def test_tiles_end_with_the_last_query_on_hopper(n_q):
    q = (1, 1, n_q, 64)
    found = explain(q, q, q, mask=masks.causal(), dtype="bfloat16", device="H100", compile=False)
    assert (found.main.name, found.main.block_q, found.main.block_kv) == ("forward_sm90", 192, 128)
    over = -(-(n_q % 192) // 16) * 16  # queries of the first tile, unless it is as long as others
    ends = [*range(over or 192, n_q, 192), n_q]
    assert found.main.tiles.visited == sum(-(-end // 128) for end in ends)
    assert found.figure is not None


# -- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n_q", "n_k"), [(1000, 1000), (256, 1000)])
def test_costs_are_those_of_the_analysis(n_q, n_k, causal):
    q, k, v = (2, 4, n_q, 64), (2, 2, n_k, 64), (2, 2, n_k, 40)
    mask = masks.causal() if causal else None
    for backward in (False, True):
        made = explain(q, k, v, mask=mask, backward=backward)
        problem = Problem(
            n_q, n_k, 64, 40, batch=2, heads=4, heads_kv=2, causal=causal, backward=backward
        )
        assert made.least.total == problem.compulsory_bytes
        assert made.flops == problem.flops
        assert made.pairs == 8 * problem.pairs
        assert made.roofline == analysis.roofline(problem, "H200")
        of_head = (
            analysis.standard_attention_backward if backward else analysis.standard_attention
        )(n_q, n_k, 64, 40)
        assert made.standard.traffic.total == of_head.times(8).bytes("float16")
    made = explain(q, k, v, mask=mask)
    blocks = {"block_q": made.main.block_q, "block_kv": made.main.block_kv}
    tiled = analysis.flash_attention_2(n_q, n_k, 64, 40, causal=causal, **blocks).times(8)
    assert made.most.total == tiled.bytes("float16")
    assert made.memory == 8 * n_q * (2 * 40 + 4)
    assert made.standard.memory == made.memory + 2 * 2 * 8 * n_q * n_k


# Run in a process of its own: what others left on the heap would count as the call's.
MEASURED = """
import sys
import numpy as np
import cupyflash
from cupyflash import masks
from cupyflash.bench import measure

dtype, backward = sys.argv[1], sys.argv[2] == "True"
mask = masks.window(64, 0)
q = np.random.default_rng(0).standard_normal((16, 4096, 64)).astype(dtype)
out, lse = cupyflash.attention(q, q, q, mask=mask, return_lse=True)

def call():
    if backward:
        return cupyflash.attention_backward(out, q, q, q, out, lse, mask=mask)
    return cupyflash.attention(q, q, q, mask=mask, return_lse=True)

call()  # loads its kernels
print(min(measure.Cpu().peak_memory(call) for _ in range(2)))
"""


@mostly_thorough("backward", [False, True], quick=[True], why="a forward is a part of it")
@mostly_thorough(
    "dtype", ["float16", "float64"], quick=["float16"], why="the other type by the same rule"
)
def test_memory_is_what_a_call_takes(dtype, backward, monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "1")  # threads may not overlap, scratches neither
    made = explain(
        (16, 4096, 64), dtype=dtype, mask=masks.window(64, 0), device="cpu", backward=backward
    )
    command = [sys.executable, "-c", MEASURED, dtype, str(backward)]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    measured = int(done.stdout)
    # Pages come and go with the allocator's moods; all scores would take 512 MiB.
    assert abs(measured - made.memory) <= 0.02 * made.memory + 2_000_000


def test_keys_that_nobody_sees_are_not_read():
    # The last query sees the second half of the keys, and eight heads share two of keys.
    q, k = (8, 1, 64), (2, 4096, 64)
    made = explain(q, k, mask=masks.mask(lambda b, h, i, j: j >= 2048))
    assert made.least.reads == {"q": 8 * 64 * 2, "k": 2 * 2048 * 64 * 2, "v": 2 * 2048 * 64 * 2}
    main, join = made.kernels  # four heads are four rows of a tile
    assert main.once.reads == main.most.reads == made.least.reads
    for moved, of, n in ((main.once, join.once, 1), (main.most, join.most, 64)):
        assert moved.writes == of.reads == {"pieces": n * 8 * (64 + 4) * 4}  # o, m and l
    assert (join.once.writes, join.flops) == (made.least.writes, 0)
    apart = explain((8, 65, 64), k, mask=masks.mask(lambda b, h, i, j: j >= 2048))
    assert apart.main.most.reads["k"] == 4 * apart.least.reads["k"]
    each = explain(q, k, mask=masks.mask(lambda b, h, i, j: j // 512 == h))
    assert each.least.reads["k"] == 8 * 512 * 64 * 2


def test_gradients_by_hand():
    # One head of 256: two tiles of 128 along each side, of which the mask skips one.
    made = explain((256, 64), mask=masks.causal(), backward=True, device="A100-80GB")
    delta, dkdv, rows = made.kernels
    assert (dkdv.block_q, dkdv.block_kv, dkdv.tiles) == (128, 128, (1, 2, 1))
    item, wide, columns = 2, 4, 64
    assert delta.most.reads == {"o": 256 * columns * item, "do": 256 * columns * item}
    assert delta.most.writes == {"delta": 256 * wide, "dq_accum": 256 * columns * wide}  # 0
    passed = 3 * 128  # rows of three tiles
    assert dkdv.most.reads == {
        "k": 256 * columns * item, "v": 256 * columns * item,
        "q": passed * columns * item, "do": passed * columns * item,
        "lse": passed * wide, "delta": passed * wide, "dq_accum": passed * columns * wide,
    }  # fmt: skip
    sums = {"dq_accum": passed * columns * wide}
    assert dkdv.most.writes == dict.fromkeys(("dk", "dv"), 256 * columns * item) | sums
    assert rows.once.total == 256 * columns * (wide + item)
    assert dkdv.flops == 2 * 3 * 128 * 128 * 5 * 64
    # dq, dk, dv; delta and the sums of dq.
    assert made.memory == 3 * 256 * columns * item + 256 * wide + 256 * columns * wide
    assert made.share == made.roofline.seconds / made.kernels_roofline.seconds < 1


def test_few_blocks_leave_multiprocessors_idle():
    one, many = (explain((heads, 32, 64), (heads, 4096, 64)) for heads in (1, 132))
    assert one.kernels_roofline.compute_seconds == pytest.approx(
        many.kernels_roofline.compute_seconds
    )


def test_a_cache_that_is_too_small():
    fits = explain((1, 8, 4096, 64), mask=masks.causal())
    assert fits.main.in_cache
    assert fits.expected == fits.main.once
    large = explain((1, 1, 400_000, 64), mask=masks.causal())  # 102 MB of keys and values
    assert not large.main.in_cache
    assert large.expected == large.main.most
    assert large.pairs == 400_000 * 400_001 // 2


# -- the compiler ---------------------------------------------------------------------------------


WITHOUT_STAGES = (
    "backward_bias", "backward_lookup", "backward_tangent_bias", "decode_simt", "reduce_distance",
)  # fmt: skip


def test_stages_of_every_kernel():
    for arch in ("sm_75", "sm_80", "sm_90"):
        for case in cases():
            if runs_on(case, arch):
                special = specialisation(case, arch)
                no_stages = special.kernel in WITHOUT_STAGES
                no_stages |= special.spec.part in ("lists", "order", "singles")
                on_tiles = special.tiles.block_kv and not no_stages
                assert not on_tiles or special.tiles.stages in (1, 2, 3, 4), (case, arch)


@pytest.mark.parametrize(
    ("device", "arch", "options", "row"),
    [
        ("H200", "sm_90", {"dtype": "float32"}, ("forward_simt", "float32", 64, 64, "plain")),
        ("T4", "sm_75", {"dtype": "float32"}, ("forward_simt", "float32", 64, 64, "plain")),
    ],
)
def test_registers_are_those_of_the_table(device, arch, options, row):
    try:
        version = cuda_table.nvrtc_version()
    except cuda_table.CannotCompile as error:
        pytest.skip(str(error))
    made_with, rows = cuda_table.read()
    wanted = rows[cuda_table.Key(*row, False, "", arch)]
    main = cupyflash.explain(SHAPE, device=device, **options).main
    assert (main.block_q, main.block_kv, 32 * main.warps, main.shared_memory) == wanted[:4]
    if version == made_with:
        assert main.registers.count == wanted.registers
    assert main.registers.compiler == f"NVRTC {version}, {arch}"
    assert main.occupancy.blocks >= 1


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    special = specialisation(cases()[0], "sm_80")
    with pytest.raises(
        UnknownError, match=r"cuda-bindings is not installed .*: pip install cuda-b"
    ):
        registers(special, (8, 1))
    made = explain(SHAPE, dtype="float64", device="T4", compile=True)
    assert made.main.registers is made.main.occupancy is None
    assert any("pip install cuda-bindings nvidia-cuda-nvrtc" in words for words in made.unknown)


def test_occupancy_by_hand():
    # 255 registers are 8160 a warp, given out as 8192: of 16384 two a part, eight in all.
    found = occupancy(Tiles(128, 64, 128, 65_640), 255, (9, 0), 1024, 132)
    assert (found.blocks, found.warps, found.limited_by) == (2, 8, "registers")
    assert found.waves == 1024 / 264
    # (228 - 1) / (64.1 + 1): 3 blocks of shared memory, 4 with fewer bytes.
    assert occupancy(Tiles(8, 8, 64, 65_640), 32, (9, 0), 1, 1).limited_by == "shared memory"
    assert occupancy(Tiles(8, 8, 64, 65_640), 32, (9, 0), 1, 1).blocks == 3
    turing = occupancy(Tiles(8, 8, 1024, 0), 32, (7, 5), 1, 1)
    assert (turing.blocks, turing.warps, turing.limited_by) == (1, 32, "warps")
    assert occupancy(Tiles(8, 8, 32, 0), 16, (8, 0), 1, 1).blocks == 32


def test_limits_are_those_of_the_tables():
    for capability, has in LIMITS.items():
        arch = f"sm_{capability[0]}{capability[1]}"
        assert has.shared_memory - has.reserved == SHARED_MEMORY[arch]
    for device in DEVICES.values():
        assert LIMITS[device.capability].shared_memory == device.sram


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "options", "error", "words"),
    [
        (
            ((2, 0, 64),),
            {},
            ArgumentError,
            r"q: got \(2, 0, 64\); expected an array, or integers of 1",
        ),
        (("2,3",), {}, ArgumentTypeError, "q: got '2,3'; expected an array"),
        (((8, 64), (8, 32)), {}, ArgumentError, "64"),
        (((3, 8, 64), (2, 8, 64)), {}, ArgumentError, "grouped-query"),
        (((8, 64),), {"dtype": "int8"}, ArgumentTypeError, "dtype: got 'int8'; expected one of"),
        (((8, 64),), {"device": "V100"}, ArgumentError, r"got 'V100'; expected .*T4, A10,"),
        (((8, 64),), {"device": "A100"}, ArgumentError, "did you mean A100-40GB or A100-80GB"),
        (((8, 64),), {"device": "H2"}, ArgumentError, r"got 'H2'; .*did you mean H20 or H200\?"),
        (((8, 64),), {"device": 3}, ArgumentTypeError, "device: got int"),
        (((8, 64),), {"mask": "causal"}, ArgumentTypeError, "mask: got str; expected a mask"),
        (((8, 64),), {"mask": masks.segments(np.arange(7))}, ArgumentError, "shape"),
    ],
)
def test_errors(shapes, options, error, words):
    with pytest.raises(error, match=words):
        explain(*shapes, **options)


# -- the command ----------------------------------------------------------------------------------


def command(capsys, *words):
    status = main(["explain", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_readmes_command(capsys):
    words = "cupyflash explain 2,16,4096,128 --mask causal --device H200".split()
    status, out, _ = command(capsys, *words[2:])
    assert status == 0
    assert "forward_sm" in out
    assert ("a thread" in out) != ("not told" in out)  # registers, or why there are none


def test_the_command(capsys, tmp_path):
    svg, file = tmp_path / "tiles.svg", tmp_path / "explained.json"
    status, out, err = command(
        capsys, "2,16,4096,128", "--mask", "causal", "--device", "A100-80GB", "--no-compile",
        "--svg", str(svg), "--json", str(file),
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    for words in ("forward_sm80", "128 queries x 64 keys", "31,744 FULL, 2,048 PARTIAL, 31,744",
                  "268,500,992 pairs attend: 137 GFLOP", "standard attention 2.18 GB",
                  "441 us (bound by compute) at least for the problem"):  # fmt: skip
        assert words in out
    assert out.count("██▒▒") == 31
    told = json.loads(file.read_text())
    made = explain((2, 16, 4096, 128), mask=masks.causal(), device="A100-80GB")
    assert told == json.loads(made.to_json())
    assert told["kernels"][0]["tiles"]["visited"] == 33792
    assert told["roofline"]["seconds"] == made.roofline.seconds
    assert svg.read_text(encoding="utf-8") == made._repr_svg_()
    ET.fromstring(made._repr_svg_())


MASKS = {
    "causal": masks.causal(),
    "window(100, 0)": masks.window(100, 0),
    "window(None, right=5)": masks.window(None, 5),
    "~prefix(30) | causal(-3)": ~masks.prefix(30) | masks.causal(-3),
    "lengths(200) ^ dilated(2)": masks.lengths(200) ^ masks.dilated(2),
    "documents(64) & causal": masks.segments(np.arange(256) // 64) & masks.causal(),
    "mine_of_a_test:nested.mask": masks.prefix(9),
}


@pytest.mark.parametrize("text", MASKS)
def test_masks_by_name(text, capsys, tmp_path, monkeypatch):
    module = "from cupyflash import masks\n\n\nclass nested:\n    mask = masks.prefix(9)\n"
    (tmp_path / "mine_of_a_test.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    status, out, err = command(
        capsys, "256,64", "--mask", text, "--device", "T4", "--json", "x.json", "--no-compile"
    )
    assert (status, err) == (0, "")
    told = json.loads((tmp_path / "x.json").read_text())
    assert told["pairs"] == MASKS[text].to_array(1, 1, 256, 256).sum()
    assert "PARTIAL" in out
    if ":" in text:  # the folder may be a clone, and must not hide the package that is installed
        assert sys.path.index(str(tmp_path)) == len(sys.path) - 1


def test_other_options(capsys):
    status, out, _ = command(
        capsys, "1,8,64,64", "--heads-kv", "2", "--keys", "4096", "--dv", "32", "--ascii",
        "--score", "alibi", "--backward", "--device", "H200", "--no-compile",
    )  # fmt: skip
    assert status == 0
    assert out.isascii()
    assert "k (1, 2, 4096, 64), v (1, 2, 4096, 32)" in out
    assert "score " in out
    slopes = [2.0 ** -(head + 1) for head in range(8)]
    made = explain(
        (1, 8, 64, 64), (1, 2, 4096, 64), (1, 2, 4096, 32),
        score_mod=scores.alibi(slopes), backward=True,
    )  # fmt: skip
    assert re.search(rf"{made.main.name}", out)


def test_a_terminal_without_block_characters(capsys, monkeypatch):
    monkeypatch.setattr("cupyflash.commands.explain.can_show", lambda text: text.isascii())
    _, out, _ = command(capsys, "256,64", "--mask", "causal", "--device", "T4", "--no-compile")
    assert out.isascii()
    assert "## FULL  ++ PARTIAL  .. EMPTY, skipped" in out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["256,64", "--mask", "cusal"], "--mask: got 'cusal'; expected causal, window, prefix"),
        (["256,64", "--mask", "causl"], "or module:name; did you mean causal?"),
        (["256,64", "--mask", "window(1"], "--mask: got 'window(1'; expected causal"),
        (["256,64", "--mask", "window(1)"], "missing 1 required positional argument: 'right'"),
        (["256,64", "--mask", "dilated(0)"], "dilated: step is 0; expected an integer of 1"),
        (["256,64", "--mask", "documents(0)"], "documents: got 0"),
        (["256,64", "--mask", "causal(open('x'))"], "--mask: \"causal(open('x'))\""),
        (["256,64", "--mask", "no_module:x"], "cannot be imported (No module named 'no_module')"),
        (["256,64", "--mask", "cupyflash.masks:causal"], "masks.causal()"),
        (["256,64", "--score", "softcap(0)"], "softcap"),
        (["256,64", "--device", "B300"], "device: got 'B300'; expected \"cpu\", \"gpu\""),
        (["256,64", "--svg", "no/folder/x.svg", "--device", "cpu"], "no/folder"),
    ],
)  # fmt: skip
def test_wrong_words(capsys, words, wanted):
    status, _, err = command(capsys, *words, "--no-compile")
    assert status == 2
    assert err.startswith("error: ")
    assert wanted in err


@pytest.mark.parametrize("shape", ["256", "2,x,64", "2,0,64"])
def test_wrong_shapes(capsys, shape):
    with pytest.raises(SystemExit) as error:
        main(["explain", shape])
    assert error.value.code == 2
    assert f"got '{shape}'; expected lengths of 1 or more" in capsys.readouterr().err
