"""docs/peers.md: it is what libraries were seen to do, and cupyflash gives the same as it says."""

from __future__ import annotations

import importlib.metadata
import json
import re

import numpy as np
import peer_questions as asked
import pytest

ANSWERS = json.loads(asked.ANSWERS.read_text(encoding="utf-8"))
QUESTIONS = asked.questions()
# Answers that name a type of numbers, of which only the size can be compared.
SIZES = {"double"}


@pytest.fixture(scope="module")
def ours():
    """The names of the programs of cupyflash."""
    return asked.namespace_of(asked.OURS)


def cells():
    """Yield each question and library with what it answered."""
    for name in asked.shown(ANSWERS):
        for key in QUESTIONS:
            found = asked.answer_of(name, key, ANSWERS)
            if found is not None:
                yield name, key, found


def test_the_page_is_made_of_the_answers():
    assert asked.PAGE.read_text(encoding="utf-8") == asked.page(ANSWERS), (
        "python tests/tools/peer_questions.py writes it"
    )


def test_answers_are_those_of_the_programs():
    assert set(QUESTIONS) == set(asked.WORDS)
    assert set(asked.on(gpu=False)) <= set(ANSWERS) <= set(asked.names())
    for name in asked.shown(ANSWERS):
        programs = {key for key in QUESTIONS if asked.program_of(name, key)}
        answered = set(ANSWERS[name]["answers"])
        # A GPU may have been asked less.
        assert answered == programs or (answered < programs and name in asked.on(gpu=True))
        assert (ANSWERS[name]["machine"] == asked.CPU) == (name in asked.on(gpu=False))
        assert set(asked.read(name)["programs"]) <= set(QUESTIONS)
    for name, key, found in cells():
        if "error" not in found:
            assert asked.WORDS[key](asked.restored(found["result"])) == found["answer"], (name, key)


def test_cupyflash_does_what_is_stored():
    for key, found in asked.ask_here(asked.OURS)["answers"].items():
        stored = ANSWERS[asked.OURS]["answers"][key]
        assert found["answer"] == stored["answer"], key
        if key not in SIZES:
            assert "error" in found or same(found["result"], stored["result"]), key


def same(a, b, tolerance=1e-5):
    """Whether two results from JSON are the same up to rounding."""
    a, b = asked.restored(a), asked.restored(b)
    if isinstance(a, str):
        return a == b
    return a.shape == b.shape and np.allclose(a, b, tolerance, tolerance / 10, equal_nan=True)


@pytest.mark.parametrize("key", QUESTIONS)
def test_cupyflash_gives_the_same(ours, key):
    """Each answer of a library can be had, or the page says what is here instead."""
    programs, texts = QUESTIONS[key]["same"], QUESTIONS[key].get("instead", {})
    given = {found["answer"] for _, each, found in cells() if each == key} - {"error"}
    assert given <= {*programs, *texts}
    for word, program in programs.items():
        result = asked.evaluate(program, ours)
        assert asked.WORDS[key](result) == word
        for name, each, found in cells():
            if each == key and found["answer"] == word and key not in SIZES:
                tolerance = asked.read(name).get("tolerance", 1e-5)
                assert same(asked.stored(result), found["result"], tolerance), (name, program)


@pytest.mark.thorough("asks libraries again, in a process each")
@pytest.mark.parametrize("name", [x for x in asked.on(gpu=False) if x.startswith(("torch", "jax"))])
def test_libraries_do_what_is_stored(name):
    package = asked.read(name)["package"]
    stored = ANSWERS[name]
    try:
        version = importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {package}")
    if version != stored["version"]:
        pytest.skip(f"{package} is {version}; {stored['version']} was asked")
    found = asked.ask(name)["answers"]
    assert {key: x["answer"] for key, x in found.items()} == {
        key: x["answer"] for key, x in stored["answers"].items()
    }


def test_answers_of_another_machine_are_read(tmp_path, monkeypatch):
    """Those of a GPU stand beside those of a CPU; words are found again."""
    answers, other = tmp_path / "answers.json", tmp_path / "gpu.json"
    answers.write_text(json.dumps(ANSWERS), encoding="utf-8")
    row = {"result": [[0.333252] * 3, [0.333252] * 3], "answer": "another"}
    made = {
        "version": "9.9",
        "machine": "NVIDIA X",
        "date": "2030-01-01",
        "answers": {"empty": row},
    }
    other.write_text(json.dumps({"torch-cudnn": made}), encoding="utf-8")
    monkeypatch.setattr(asked, "ANSWERS", answers)
    monkeypatch.setattr(asked, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr("sys.argv", ["peer_questions.py", "--read", str(other)])
    asked.main()
    after = json.loads(answers.read_text(encoding="utf-8"))
    assert after.pop("torch-cudnn")["answers"]["empty"]["answer"] == "mean"
    assert after == {name: x for name, x in ANSWERS.items() if name != "torch-cudnn"}
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert ", cuDNN, GPU (9.9) |" in page
    assert "- NVIDIA X: 2030-01-01" in page
    assert f"- {asked.CPU}: " in page


def test_a_run_elsewhere_writes_a_file_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(asked, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(asked, "ask", lambda name: {"name": name})
    file = tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", ["peer_questions.py", "--ask", "gpu", "--to", str(file)])
    asked.main()
    assert set(json.loads(file.read_text(encoding="utf-8"))) == set(asked.on(gpu=True))
    assert not (tmp_path / "page.md").exists()


BACK_ENDS = {"FLASH": "flash", "EFFICIENT": "mem_efficient", "MATH": "math", "CUDNN": "cudnn"}
OF_BACK_ENDS = [name for name in asked.names() if "SDPBackend" in asked.read(name)["setup"]]


@pytest.mark.parametrize("name", OF_BACK_ENDS)
def test_programs_of_a_back_end_leave_no_other_on(name):
    torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

    def enabled():
        return [x for x in BACK_ENDS.values() if getattr(torch.backends.cuda, f"{x}_sdp_enabled")()]

    before = enabled()
    wanted = re.findall(r"SDPBackend\.([A-Z]+)", asked.read(name)["setup"])
    only = asked.namespace_of(name)["only"]
    try:
        assert enabled() == [BACK_ENDS[x] for x in wanted]
    finally:
        only.__exit__(None, None, None)
    assert enabled() == before


def test_words_tell_answers_apart():
    words = asked.WORDS
    assert words["empty"](np.array([[np.nan, 1]])) == "another"
    assert words["empty"](np.array([[0.5, 0.5]])) == "mean"
    assert words["more_keys"](np.array([[1, 0], [0.5, 0.5]])) == "1, 2"
    assert words["cap_bias"](np.array([[0.5, 0.5]])) == "before it"
    assert words["scale"](np.array([np.e**4, 1])) == "1"
    assert words["lse"](np.array([2.0])) == "base 2"
    assert words["rotary"](np.array([0.5, 0.8, 0, 0])) == "neighbours: 0 with 1"
    assert words["cache"](np.array([[[[2.0], [1.0]]]])) == "before them, B H L D"
    assert words["axes"](np.zeros((1, 2, 3, 4))) == "another"
