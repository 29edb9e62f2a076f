"""`cupyflash bench` on the command line: its table, files and pictures, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from cupyflash import bench
from cupyflash.bench import measure, plot
from cupyflash.commands import bench as command
from cupyflash.commands import bench_table
from cupyflash.commands.main import main, parser

pytest.importorskip("rich", reason='pip install ".[bench]"')
TINY = ["--device", "cpu", "--shape", "1,2,24,8", "--shape", "1,2,48,8", "--runs", "2"]
ONLY = ["--only", "cupyflash", "--only", "standard"]


def squeezed(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """What a run of the command wrote, measured once."""
    file = tmp_path_factory.mktemp("bench") / "found.json"
    assert main(["bench", *TINY, *ONLY, "--pass", "backward", "--json", str(file)]) == 0
    return file


def test_the_table(stored, capsys):
    assert main(["bench", "--load", str(stored)]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 100
    report = bench.Report.from_json(stored.read_text())
    assert [row.case.shape for row in report.rows] == ["1,2,24,8", "1,2,48,8"]
    assert report.contenders == ["cupyflash", "standard"]
    lines = [x.split() for x in out.splitlines() if re.search("(cupyflash|standard) .* MB", x)]
    assert f"({report.rows[0].case.shape.replace(',', ', ')})" in out
    results = [(row.case, result) for row in report.rows for result in row.results]
    for (case, result), line in zip(results, lines, strict=True):
        assert result.contender in line
        assert bench_table.three_digits(result.seconds * 1e3) in line
        assert bench_table.three_digits(case.flops / result.seconds / 1e9) in line
    assert "full, backward" in out
    assert "cupyflash: time, memory" in out
    for words in ("numpy 2", "load average", "of cupyflash", "Medians of at most 2 runs"):
        assert words in squeezed(out)


@pytest.mark.parametrize("number", [1234.6, 100.0, 99.96, 12.3, 0.012345, 0.0000123])
def test_three_digits(number):
    text = bench_table.three_digits(number)
    assert "e" not in text
    assert float(text) == pytest.approx(number, rel=0.006, abs=1e-4)


def report_of(*cases):
    """A report with made-up numbers; torch-flash does not do the last case."""
    rows = []
    for n, case in enumerate(cases):
        results = [
            bench.Result(name, "measured", "", t * 1e-3, t * 0.9e-3, t * 1.2e-3, 30, peak, 0.001)
            for name, t, peak in (
                ("cupyflash", n + 1, 10**7),
                ("standard", 5 * (n + 1) ** 2, 10**8 * (n + 1) ** 2),
            )
        ]
        third = dataclasses.replace(results[0], contender="torch-flash")
        if n == len(cases) - 1:
            third = bench.Result("torch-flash", "refused", "PyTorch: no masks, since it has none")
        rows.append(bench.Row(case, (*results, third)))
    versions = {"cupyflash": "0.1.0", "CuPy": "14.2.0"}
    absent = {"torch-flex": "no"}
    return bench.Report("own shapes", "gpu", "a GPU", versions, "Medians.", tuple(rows), absent)


ARTICLE = list(bench.SUITES["gpu"]["article"].cases())


def test_reasons_stand_below_the_table(tmp_path, capsys):
    file = tmp_path / "found.json"
    file.write_text(report_of(*ARTICLE).to_json())
    assert main(["bench", "--load", str(file)]) == 0
    out = capsys.readouterr().out
    assert "TFLOP/s" in out
    assert "refused (1)" in out
    assert "(1) PyTorch: no masks, since it has none" in squeezed(out)
    assert "torch-flex did not take part: no" in squeezed(out)
    assert "25x faster, 250x less" in squeezed(out)  # the last row: 125 ms against 5 ms


def test_a_step_of_decoding_is_told_in_bytes(tmp_path, capsys):
    (case, *_) = bench.SUITES["gpu"]["decode"].cases()
    file = tmp_path / "found.json"
    file.write_text(report_of(case).to_json())
    assert main(["bench", "--load", str(file)]) == 0
    out = capsys.readouterr().out
    assert "GB/s" in out
    assert f"{2 * 8 * 4096 * 128 * 2 / 1e-3 / 1e9:.1f}" in out


def test_a_wrong_result_gives_exit_status_1(monkeypatch, capsys):
    right = bench.Standard.prepare

    def wrong(self, meter, case, inputs):
        job = right(self, meter, case, inputs)
        return dataclasses.replace(job, arrays=lambda x: [0.9 * y for y in job.arrays(x)])

    monkeypatch.setattr(bench.Standard, "prepare", wrong)
    assert main(["bench", *TINY, *ONLY]) == 1
    out = squeezed(capsys.readouterr().out)
    assert "WRONG (1)" in out
    assert "differs by 0.1 of its norm" in out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the GPU is gone")], ids=repr)
def test_ended_early_it_shows_what_there_is(error, monkeypatch, capsys):
    right = bench.run_case

    def ended(meter, case, *arguments, **options):
        if case.len_q == 48:
            raise error
        return right(meter, case, *arguments, **options)

    monkeypatch.setattr(bench, "run_case", ended)
    assert main(["bench", *TINY, *ONLY]) == 2
    captured = capsys.readouterr()
    assert "(1, 2, 24, 8)" in captured.out
    words = "Ended after 1 of 2 problems: " + (str(error) and f"RuntimeError: {error}")
    assert words in squeezed(captured.out)
    assert words in squeezed(captured.err)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--only", "torch"], "contender: got 'torch'; expected one of cupyflash, standard"),
        (["--against", "xformers"], "contender: got 'xformers'"),
        (["--only", "torch-flash"], "on a GPU only"),
        (["--shape", "1,2"], "shape: got '1,2'"),
        (["--shape", "1,2,8,8", "--suite", "quick"], "got --suite and --shape"),
        (["--variant", "causal=3"], "variant: got 'causal=3'"),
        (["--graphs"], "on a GPU only"),
        (["--plot", "picture.pdf"], "ends in .svg or .png"),
        (["--plot", "nowhere/picture.svg"], "--plot: there is no folder nowhere"),
        (["--json", "nowhere/found.json"], "--json: there is no folder nowhere"),
        (["--picture", "rate"], "got --picture without --plot"),
        (["--load", "absent.json"], "absent.json"),
        (["--load", "absent.json", "--suite", "quick"], "got --suite, --device with --load"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_is_measured(
    arguments, wanted, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "run_case", None)
    device = [] if arguments == ["--load", "absent.json"] else ["--device", "cpu"]
    assert main(["bench", *device, *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert wanted in squeezed(captured.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("library", ["rich", "matplotlib"])
def test_an_absent_library_is_named_with_the_extra(library, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["bench", *TINY, "--plot", "x.svg"]) == 2
    captured = capsys.readouterr()
    assert f"needs {library}" in captured.err
    assert 'pip install ".[bench]"' in squeezed(captured.err)
    assert not captured.out


def test_what_is_no_report_is_told(tmp_path, capsys):
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"format": 7}))
    assert main(["bench", "--load", str(file)]) == 2
    assert "not what --json writes" in squeezed(capsys.readouterr().err)


def texts(file):
    """All words of an SVG whose text is text."""
    return [x.text for x in ET.parse(file).iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def words_in_svg(monkeypatch):
    pytest.importorskip("matplotlib", reason='pip install ".[bench]"')
    monkeypatch.setitem(plot.STYLE, "svg.fonttype", "none")


def test_the_pictures_of_the_article(words_in_svg, tmp_path):
    file, again = tmp_path / "article.svg", tmp_path / "again.svg"
    plot.draw(report_of(*ARTICLE), file, "standard")
    plot.draw(report_of(*ARTICLE), again, "standard")
    assert file.read_bytes() == again.read_bytes()  # no date, no random names
    words = texts(file)
    for wanted in ("512", "8192", "cupyflash", "standard", "torch-flash", "TFLOP/s",
                   "sequence length", "times as fast as standard", "peak memory beyond the inputs",
                   "100 MB", "forward, full, D = 64, float16"):  # fmt: skip
        assert wanted in words, wanted
    assert any(word.startswith("a GPU. cupyflash 0.1.0, CuPy 14.2.0. Medians.") for word in words)
    heights = [f"{case.flops / (n + 1) / 1e9:.0f}" for n, case in enumerate(ARTICLE)]
    assert [word for word in words if word in heights[-2:]]


@pytest.mark.thorough("another number of pictures; those of the article are quick")
def test_many_groups_are_drawn_by_their_rates(words_in_svg, tmp_path):
    cases = [c for c in bench.SUITES["gpu"]["peers"].cases() if c.len_q in (512, 1024)]
    file = tmp_path / "peers.svg"
    plot.draw(report_of(*cases), file, "standard")
    words = texts(file)
    assert words.count("sequence length") == words.count("TFLOP/s") == 12
    assert not any("memory" in word for word in words)
    variants = tmp_path / "variants.svg"
    plot.draw(report_of(*bench.SUITES["gpu"]["variants"].cases()), variants, "standard", ["memory"])
    words = texts(variants)
    assert words.count("documents") == words.count("1000") == 2
    assert "TFLOP/s" not in words
    png = tmp_path / "decode.png"
    plot.draw(report_of(*bench.SUITES["gpu"]["decode"].cases()), png, "standard")
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_lengths_stand_in_order_and_shapes_where_they_would_not_do():
    (group,) = plot.groups(report_of(*reversed(ARTICLE)))
    assert group.labels == ("512", "1024", "2048", "4096", "8192")
    assert [row.case.len_k for row in group.rows] == [512, 1024, 2048, 4096, 8192]
    assert group.grows
    twice = [bench.made((b, 2, 2, 64, 64, 8), "float32", "full", None, "forward") for b in (1, 2)]
    (group,) = plot.groups(report_of(*twice))
    assert group.labels == ("1,2,\n64,8", "2,2,\n64,8")
    assert not group.grows


def test_nothing_to_draw_is_told(tmp_path):
    report = report_of(ARTICLE[0])
    nothing = dataclasses.replace(report, rows=())
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.draw(nothing, tmp_path / "x.svg", "standard")
    with pytest.raises(ValueError, match="a speed-up needs measurements of torch-math"):
        plot.draw(report, tmp_path / "x.svg", "torch-math", ["speed-up"])


def test_the_command_knows_the_names():
    from cupyflash.bench import cases

    assert set(command.SUITE_NAMES) == set(bench.SUITES["cpu"]) == set(bench.SUITES["gpu"])
    assert set(command.TASK_NAMES) == set(bench.TASKS["cpu"]) > set(bench.TASKS["gpu"])
    assert list(command.VARIANT_NAMES) == list(cases.VARIANTS)
    assert command.PASS_NAMES == cases.PASSES
    assert list(command.PICTURE_NAMES) == list(plot.PICTURES)
    assert set(plot.COLOURS) == {contender.name for contender in bench.CONTENDERS}
    assert len(set(plot.COLOURS.values())) == len(plot.COLOURS)


def test_the_documentation_shows_what_the_command_knows():
    page = Path(__file__).parents[2] / "docs" / "howto" / "bench.md"
    shown = re.findall(r"^cupyflash (bench .+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) == 8
    for line in shown:
        options = parser().parse_args(shlex.split(line))
        for shape in options.shape or ():
            bench.shape_of(shape)
        for variant in options.variant or ():
            bench.variant_of(variant)


def test_bench_from_python():
    suite = bench.own_shapes("cpu", [(1, 2, 1, 9, 9, 4)])
    (case,) = suite.cases(["float64"], [("window", 3)], ["backward"])
    assert (case.kind, case.dtype, case.backward) == ("window 3", "float64", True)
    row = bench.run_case(measure.Cpu(), case, bench.CONTENDERS[:2], runs=1, seconds=1.0)
    assert np.isfinite(row.results[1].difference)
