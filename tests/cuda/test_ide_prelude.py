"""kernels_cu/ide_prelude.cuh, by which editors read kernels, has what the generated prelude has."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from cuda_specialisations import cases, specialisation
from halves import mostly_thorough

from cupyflash import kernels_cu
from cupyflash.gpu import source

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import sass_diff
from cuda_table import CannotCompile, nvrtc_version

FOLDER = Path(kernels_cu.__file__).parent
HEADERS = sorted(x.relative_to(FOLDER).as_posix() for x in FOLDER.glob("*/*.cuh"))
CONSTANT = re.compile(r"^constexpr (int|bool) (\w+) = [\w-]+;$", re.MULTILINE)


def test_it_has_the_constants_of_the_generated_prelude():
    generated = source.prelude(specialisation(cases()[0], "sm_80"))
    written = source.read("ide_prelude.cuh")
    assert len(CONSTANT.findall(generated)) == generated.count("constexpr")
    assert CONSTANT.findall(written) == CONSTANT.findall(generated)
    assert "\n#define KERNEL_NAME " in written


def test_the_page_about_the_sources_names_each():
    page = source.read("README.md")
    names = [name for _, name in CONSTANT.findall(source.read("ide_prelude.cuh"))]
    assert [name for name in names if not re.search(rf"\b{name}\b", page)] == []


def test_the_configuration_of_clangd_names_it():
    text = (Path(__file__).parents[2] / "kernels_cu" / ".clangd").read_text()
    assert "- -include\n    - ../ide_prelude.cuh\n" in text
    macros = set(re.findall(r"-D(\w+)", text))
    assert macros == set(re.findall(r"#ifn?def (IDE_\w+)", source.read("ide_prelude.cuh")))


def test_no_kernel_includes_it():
    for path in FOLDER.glob("*/*.cu*"):
        assert "ide_prelude" not in path.read_text(), path


@mostly_thorough(
    "header",
    HEADERS,
    quick=["common/lookup.cuh", "warp/decode_leaf.cuh", "sm90/forward_storage.cuh"],
    why="one of many headers; some are quick",
)
def test_a_header_can_be_read_behind_it(header):
    try:
        nvrtc_version()
    except CannotCompile as error:
        pytest.skip(f"NVRTC cannot be used: {error}")
    codes = "#define IDE_CODES 1\n" if "fp8" in header else ""
    storage = "#define IDE_STORAGE 3\n" if "f64" in header else ""
    text = codes + storage + source.flatten(("ide_prelude.cuh", header))
    ptx, _, _ = sass_diff.nvrtc(sass_diff.Kernel(header, text, "sm_90a"), "compute_90a")
    assert ".target sm_90a" in ptx
