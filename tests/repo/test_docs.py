"""The site of docs/: it builds without a warning, its links lead somewhere, every name is there."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from documents import FENCE, PAGES, ROOT

from cupyflash import bench

MODULES = [
    f"cupyflash.{x}"
    for x in "masks scores expr figures foreign analysis bench distributed streamed testing".split()
]
FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$]+?\$", re.DOTALL)
MEASURED = re.compile(
    r"^:::\{(measured|ratios|rates)\} (\S+)\n(.*?)^:::$", re.MULTILINE | re.DOTALL
)
BUILDERS = ("sphinx", "furo", "myst_parser", "numpydoc", "matplotlib")
REMEDY = 'the site is built by what pip install ".[docs]" brings'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    missing = [name for name in BUILDERS if importlib.util.find_spec(name) is None]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"{REMEDY}: {', '.join(missing)} is not there")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    command += ["-d", str(folder / "trees"), str(ROOT / "docs"), str(folder / "html")]
    # Away from the checkout, whose top folder has a part of the package only.
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{REMEDY}"
    return folder / "html"


class Page(HTMLParser):
    """A page's links and the places that links can lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.places.add(named.get("id") or "")
        for name in ("href", "src", "xlink:href"):
            if named.get(name):
                self.links.append(str(named[name]))


@pytest.mark.thorough("the whole site; the code of its pages is quick")
def test_links_lead_somewhere(site):
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    assert len(pages) > len(PAGES)
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            file, place = urldefrag(link)
            file = file.partition("?")[0]
            target = (path.parent / unquote(file)).resolve() if file else path
            assert target.is_file(), f"{path.relative_to(site)} links to {link}"
            if target in pages:
                known = pages[target].places
                assert unquote(place) in known, f"{path.relative_to(site)} links to {link}"


@pytest.mark.thorough("the whole site; the code of its pages is quick")
def test_every_public_name_is_there(site):
    content = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    documented = {line.split(" ")[0] for line in zlib.decompress(content).decode().splitlines()}
    for module in ("cupyflash", *MODULES):
        for name in importlib.import_module(module).__all__:
            assert f"{module}.{name}" in documented, f"{module}.{name} is not in docs/reference"


def test_measured_tables_show_every_row(monkeypatch):
    """Rows that lose are shown as well, and every file that is kept is on a page."""
    pytest.importorskip("docutils", reason=REMEDY)
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("tables")
    shown = [
        name
        for page in PAGES
        for name in MEASURED.findall((ROOT / page).read_text(encoding="utf-8"))
    ]
    kept = sorted(x.name for x in tables.MEASURED.iterdir())
    # Where a file is not there yet, words say how to make it.
    assert sorted(name for _, name, words in shown if name in kept or not words) == kept
    for directive, name, words in shown:
        if name not in kept:
            assert f"--device {Path(name).stem.split('_')[1]}" in words
            assert f"--suite {name.split('_')[0]} --json {name}`" in words
            continue
        report = bench.Report.from_json((tables.MEASURED / name).read_text(encoding="utf-8"))
        if directive == "ratios":
            head, rows = tables.ratios(report)
            cells = [x for row in rows for x in row[1:]]
            assert len(cells) == len(report.tasks)
            assert sorted(map(float, cells)) == sorted(
                round(row.ratio("standard"), 2) for row in report.tasks
            )
            continue
        if directive == "rates":
            head, rows = tables.rates(report)
            cells = [x for row in rows for x in row[1:]]
            assert len(cells) == len(report.rows) > 3
            assert all(len(x.split(" / ")) == len(report.contenders) for x in cells)
            continue
        head, rows = tables.measured(report)
        assert len(rows) == len(report.tasks) > 3
        assert head[1] == "cupyflash"
        for row, cells in zip(report.tasks, rows, strict=True):
            assert cells[0].startswith(row.task.name)
            assert len(cells) == len(head)
            if "fastest of the others" in head:
                others = [x for x in map(row.ratio, report.contenders[1:]) if x is not None]
                assert (cells[3] == "") == (not others)
                assert not others or float(cells[3]) == pytest.approx(max(others), 0.01)
                continue
            for other in report.contenders[1:]:
                ratio = row.ratio(other)
                title = tables.titles_of(report.suite)[other]
                told = cells[head.index(f"ratio to {title}")]
                assert told == "" if ratio is None else float(told) == pytest.approx(ratio, 0.01)


def test_a_grid_of_ratios(monkeypatch):
    pytest.importorskip("docutils", reason=REMEDY)
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("tables")

    def row(name, ours, theirs):
        times = {"cupyflash": ours, "standard": theirs}
        made = [bench.Result(x, "measured", seconds=t) for x, t in times.items()]
        return bench.TaskRow(bench.Task("short", name, "float32"), tuple(made))

    rows = (row("3 heads, 8 tokens, forward", 3e-5, 2e-5), row("3 heads, 16 tokens, forward", 1, 2))
    rows += (row("9 heads, 16 tokens, backward", 2e-5, 1e-5),)
    head, cells = tables.ratios(bench.Report("short", "cpu", "", {}, "", (), {}, rows))
    assert head == ["ratio to NumPy", "8 tokens", "16 tokens"]
    assert cells == [["forward, 3 heads", "1.50", "0.50"], ["backward, 9 heads", "", "2.00"]]


def test_tables_show_the_memory_that_was_measured(monkeypatch):
    pytest.importorskip("docutils", reason=REMEDY)
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("tables")
    rows = []
    for name, ours, theirs in (("a", 2_000_000, 40_000_000), ("b", None, 5_000_000)):
        results = [
            bench.Result(contender, "measured", seconds=1e-3, peak_bytes=peak)
            for contender, peak in (("cupyflash", ours), ("torch-math", theirs))
        ]
        task = bench.Task("derivatives", name, "float32")
        rows.append(bench.TaskRow(task, tuple(results)))
    report = bench.Report("derivatives", "cpu", "", {}, "", (), {}, tuple(rows))
    head, cells = tables.measured(report)
    assert head[2:] == [
        "PyTorch's math", "ratio to PyTorch's math", "MB of cupyflash", "MB of PyTorch's math",
    ]  # fmt: skip
    assert [x[4:] for x in cells] == [["2.00", "40.0"], ["", "5.00"]]


def test_of_many_contenders_the_fastest_is_shown(monkeypatch):
    pytest.importorskip("docutils", reason=REMEDY)
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("tables")

    def row(name, **seconds):
        made = [
            bench.Result(f"torch-{key}" if key != "cupyflash" else key, "measured", seconds=x)
            for key, x in seconds.items()
        ]
        refused = bench.Result("torch-flash", "refused", "no")
        return bench.TaskRow(bench.Task("models", name, "bfloat16"), (*made, refused))

    rows = (
        row("a", cupyflash=2e-3, cudnn=3e-3, efficient=1e-3),
        row("b", cupyflash=2e-3, cudnn=4e-3),
        row("c", cupyflash=2e-3),
        row("d", cupyflash=2e-3, flex=1e-3, varlen=2e-3),
    )
    head, cells = tables.measured(bench.Report("models", "gpu", "", {}, "", (), {}, rows))
    assert head == ["models", "cupyflash", "fastest of the others", "ratio"]
    assert [x[2:] for x in cells] == [
        ["1.00 ms (memory-efficient)", "2.00"],
        ["4.00 ms (cuDNN)", "0.500"],
        ["", ""],
        ["1.00 ms (FlexAttention)", "2.00"],
    ]
    assert {"cupyflash", "standard"} | {
        name for kind in ("cpu", "gpu") for name in bench.TASKS[kind]["models"].contenders
    } | set(bench.SUITES["gpu"]["peers"].contenders) == tables.TITLES.keys()


def test_a_grid_of_rates(monkeypatch):
    pytest.importorskip("docutils", reason=REMEDY)
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("tables")
    rows = []
    for variant, direction, times in (
        ("full", "forward", (1e-3, 2e-3)), ("causal", "forward", (1e-3, None)),
        ("full", "backward", (1e-3, 1e-3)),
    ):  # fmt: skip
        case = bench.made((1, 16, 16, 1024, 1024, 64), "bfloat16", variant, None, direction)
        names = "cupyflash", "flash-attn-4"
        results = [
            bench.Result(name, "refused" if x is None else "measured", seconds=x)
            for name, x in zip(names, times, strict=True)
        ]
        rows.append(bench.Row(case, tuple(results)))
    head, cells = tables.rates(bench.Report("peers", "gpu", "", {}, "", tuple(rows), {}))
    assert head[1:] == ["forward full", "forward causal", "backward full"]
    assert head[0].endswith("cupyflash / FlashAttention-4")
    assert cells == [["64, 1024", "4 / 2", "2 / ", "11 / 11"]]


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("torch", "cupyflash.torch"),
        ("torch", "cupyflash.torch.cute"),
        ("torch", "cupyflash.torch.transformers"),
        ("jax", "cupyflash.jax"),
    ],
)
def test_pages_of_other_libraries_are_as_their_docstrings(page, module):
    """The site is built without these libraries, so that these pages are written by hand."""
    pytest.importorskip(page, reason=f"{module} needs {page}")
    text = (ROOT / "docs" / "reference" / f"{page}.rst").read_text()
    described = importlib.import_module(module)
    for name in described.__all__:
        function = getattr(described, name)
        words = []
        for each in inspect.signature(function).parameters.values():
            if each.kind is each.KEYWORD_ONLY and "*" not in words:
                words.append("*")
            stars = "**" if each.kind is each.VAR_KEYWORD else ""
            default = "" if each.default is each.empty else f"={each.default!r}"
            words.append(f"{stars}{each.name}{default}")
        summary = " ".join(inspect.getdoc(function).partition("\n\n")[0].split())
        kind = "class" if inspect.isclass(function) else "function"
        wanted = f".. py:{kind}:: {module}.{name}({', '.join(words)})\n\n   {summary}\n"
        assert wanted in text, wanted
    assert text.count(f":: {module}.") >= len(described.__all__)


@pytest.mark.thorough("the whole site; the code of its pages is quick")
def test_formulas_are_mathml(site):
    """Every formula is in its page as MathML, and none as TeX that a script has to typeset."""
    seen = 0
    for page in PAGES:
        prose = re.sub(r"`[^`]*`", "", FENCE.sub("", (ROOT / page).read_text()))
        formulas = len(FORMULA.findall(prose))
        html = (site / page[5:-3]).with_suffix(".html").read_text()
        assert html.count("<math") == html.count("</math>") == formulas, page
        assert r"\(" not in html, page
        assert "MathJax" not in html, page
        seen += formulas
    assert seen > 100


@pytest.mark.thorough("the whole site; the code of its pages is quick")
def test_pages_need_no_network(site):
    """No page loads a script, a style, a font or a picture from elsewhere."""
    loaded = re.compile(r"""<(?:script|img|iframe|source)[^>]*\bsrc="(?:https?:)?//""")
    linked = re.compile(r"""<link[^>]*\bhref="(?:https?:)?//""")
    for path in sorted(site.rglob("*.html")):
        html = path.read_text()
        assert not loaded.search(html), path.relative_to(site)
        assert not linked.search(html), path.relative_to(site)
    for path in sorted((site / "_static").rglob("*.css")):
        assert not re.search(r"""url\(["']?(?:https?:)?//|@import""", path.read_text()), path.name


@pytest.mark.thorough("the whole site; the code of its pages is quick")
def test_no_drawing_is_lost(site):
    """Pictures are in the pages as SVG, in the page's colours and with a text for the blind."""
    found = "".join((site / page[5:-3]).with_suffix(".html").read_text() for page in PAGES)
    figures = list((ROOT / "docs" / "drawings").glob("[!_]*.py"))
    assert figures
    assert len(figures) == found.count('<div class="drawing-picture">')
    assert "#010203" not in found


def test_pictures_of_the_readme_are_those_that_are_drawn(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    readme = (ROOT / "README.md").read_text()
    for name, svg in importlib.import_module("pictures").pictures().items():
        drawn = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
        assert drawn == svg, f"docs/pictures/{name} is old: python docs/pictures.py"
        assert f"(docs/pictures/{name})" in readme


def test_examples_in_docstrings():
    """Those that the site shows; tests/kit/test_verify.py has those of cupyflash.testing."""
    names = {"cupyflash", *MODULES} - {"cupyflash.testing"}
    public = [(importlib.import_module(name), name) for name in names]
    homes = {getattr(getattr(m, x), "__module__", name) for m, name in public for x in m.__all__}
    found = [doctest.testmod(importlib.import_module(name)) for name in sorted(homes)]
    assert sum(each.attempted for each in found) > 20
    assert not sum(each.failed for each in found)
