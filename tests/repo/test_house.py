"""Rules that hold for every file: its length, and what it must not say."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

from each import holds_for_each

ROOT = Path(__file__).resolve().parents[2]
CODE = ["cupyflash", "reference", "kernels_cu", "tests", "examples", "docs", "backend"]
MAX_LINES = 500
TEXT = {
    ".py",
    ".cu",
    ".cuh",
    ".md",
    ".rst",
    ".css",
    ".toml",
    ".yaml",
    ".yml",
    ".cfg",
    ".txt",
    ".sh",
    "",
}
NOT_OURS = {"LICENSE", ".git"}  # the latter is a file in a worktree
SKIPPED_FOLDERS = {".git", ".venv", "venv", "build", "dist", "__pycache__"}


def files() -> list[Path]:
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(
            name
            for name in folders
            if name not in SKIPPED_FOLDERS and not name.endswith(("_cache", ".egg-info"))
        )
        found += [Path(folder, name).relative_to(ROOT) for name in sorted(names)]
    return [path for path in found if path.suffix in TEXT and path.name not in NOT_OURS]


FILES = [path for path in files() if path.parts[0] != ".hypothesis"]
SOURCES = [
    path for path in FILES if path.parts[0] in CODE and path.suffix in {".py", ".cu", ".cuh"}
]

FORBIDDEN = {
    # Written so that this file does not match itself.
    "unfinished work": re.compile(r"\b(?:TO[D]O|FIX[M]E|X{3}|HA[C]K)\b|Not[I]mplementedError"),
    "a path of one machine": re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt|tmp|opt)/\w"),
    "a conflict marker": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
    "a test that cannot fail": re.compile(r"\bassert True\b"),
    "a tab or a carriage return": re.compile(r"[\t\r]"),
    "trailing space": re.compile(r"[ \t]+$", re.MULTILINE),
}
SILENCED = re.compile(r"#\s*(?:type:\s*ignore|noqa)(?P<codes>\[[\w\-, ]+\]|:\s*[A-Z]+\d+)?")


def test_there_is_something_to_check():
    assert {path.parts[0] for path in SOURCES} >= {"cupyflash", "reference", "kernels_cu", "tests"}


def test_files_are_short():
    def rule(path):
        lines = (ROOT / path).read_text().count("\n")
        assert lines <= MAX_LINES, f"{path} has {lines} lines: split it by job"

    holds_for_each(SOURCES, rule)


def test_files_say_nothing_forbidden():
    def rule(path):
        text = (ROOT / path).read_text()
        for what, pattern in FORBIDDEN.items():
            match = pattern.search(text)
            if match:
                line = text.count("\n", 0, match.start()) + 1
                raise AssertionError(f"{path}:{line} has {what}: {match.group()!r}")
        assert not text or text.endswith("\n"), f"{path} does not end with a newline"

    holds_for_each(FILES, rule)


def test_silenced_checks_name_their_rule():
    def rule(path):
        for match in SILENCED.finditer((ROOT / path).read_text()):
            assert match["codes"], f"{path}: {match.group()!r} silences everything"

    holds_for_each(SOURCES, rule)


def test_modules_say_what_they_are():
    def rule(path):
        text = (ROOT / path).read_text()
        assert text.startswith(('"""', 'r"""', "#!")), f"{path} has no docstring"

    holds_for_each([p for p in SOURCES if p.suffix == ".py"], rule)


def _runs_python(call: ast.Call) -> bool:
    words = call.args[0].elts if call.args and isinstance(call.args[0], ast.List) else []
    code = any(isinstance(x, ast.Constant) and x.value == "-c" for x in words)
    return code and any(ast.unparse(x) == "sys.executable" for x in words)


def test_programs_of_tests_run_outside_the_checkout():
    """`python -c` imports from its folder first: there, the package has no `reference`."""

    def rule(path):
        for call in (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Call)):
            if _runs_python(call):
                given = {x.arg for x in call.keywords}
                assert "cwd" in given, (
                    f"{path.name}:{call.lineno} runs Python wherever pytest stands"
                )

    holds_for_each(sorted((ROOT / "tests").rglob("test_*.py")), rule)
