"""`cupyflash bench` on a real GPU: everybody is right, times and memory are the GPU's."""

from __future__ import annotations

import pytest

from cupyflash import bench
from cupyflash.bench import measure
from cupyflash.bench.cases import VARIANTS
from cupyflash.commands.main import main

# PyTorch's compiler of Flex warns of a part of PyTorch.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def of_this_machine(flex=False):
    """Who can take part; Flex compiles for longer than all the others run."""
    found = [contender for contender in bench.CONTENDERS if not contender.obstacle("gpu")]
    return [contender for contender in found if flex or contender.name != "torch-flex"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nobody_is_wrong(gpu, dtype, direction):
    for variant in VARIANTS:
        case = bench.made((1, 4, 4, 512, 512, 64), dtype, variant, None, direction)
        flex = (dtype, variant) in (("float16", "documents"), ("bfloat16", "softcap"))
        row = bench.run_case(measure.Gpu(), case, of_this_machine(flex), runs=2, seconds=5.0)
        assert {x.status for x in row.results} <= {"measured", "refused"}, row
        assert {x.status for x in row.results[:2]} == {"measured"}, row  # ours and standard


def test_replays_are_right_and_not_slower(gpu):
    case = bench.made((1, 4, 4, 512, 512, 64), "float16", "full", None, "forward")
    found = [
        bench.run_case(measure.Gpu(), case, of_this_machine(), runs=20, seconds=5.0, graphs=graphs)
        for graphs in (False, True)
    ]
    calls, replays = (row.results[0] for row in found)
    assert replays.status == "measured", replays
    assert replays.seconds < 1.5 * calls.seconds
    assert not any(x.status == "WRONG" for x in found[1].results)


def test_times_and_memory_are_those_of_the_gpu(gpu):
    case = bench.made((2, 8, 8, 4096, 4096, 64), "float16", "full", None, "forward")
    contenders = [bench.Cupyflash(), bench.Standard()]
    row = bench.run_case(measure.Gpu(), case, contenders, runs=5, seconds=5.0)
    ours, standard = row.results
    assert 1e12 < case.flops / ours.seconds < 2e15
    assert standard.peak_bytes > case.score_bytes
    assert ours.peak_bytes < 0.1 * case.score_bytes
    assert ours.seconds < standard.seconds


def test_the_command(gpu, tmp_path, capsys):
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    file = tmp_path / "found.json"
    arguments = ["--shape", "1,4,512,64", "--shape", "1,8/2,1/4096,64", "--runs", "3"]
    assert main(["bench", "--device", "gpu", *arguments, "--json", str(file)]) == 0
    assert bench.Report.from_json(file.read_text()).contenders[0] == "cupyflash"
    assert "CUDA events" in " ".join(capsys.readouterr().out.split())
