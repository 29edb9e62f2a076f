"""The public names: all there, all documented, and cheap to import."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
import textwrap
import types
from dataclasses import fields

import numpydoc.validate
import pytest

import cupyflash
import cupyflash.analysis
import cupyflash.bench
import cupyflash.distributed
import cupyflash.figures
import cupyflash.foreign
import cupyflash.masks
import cupyflash.scores
from cupyflash.problem import validate
from cupyflash.problem.options import Options

FUNCTIONS = {
    "append",
    "attention",
    "attention_backward",
    "attention_backward_jvp",
    "attention_cached",
    "attention_jvp",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_backward_jvp",
    "attention_varlen_jvp",
    "attention_varlen_vjp",
    "attention_vjp",
    "combine",
    "convert",
    "explain",
    "explain_cached",
    "hadamard",
    "lookup",
    "plan",
    "plan_cached",
    "quantize",
    "reduce",
    "reduce_vjp",
    "rope",
    "workspace_size",
    "workspace_size_cached",
}
MODULES = {
    "analysis",
    "distributed",
    "expr",
    "figures",
    "foreign",
    "masks",
    "reductions",
    "scores",
    "streamed",
}
TYPES = {
    "ArgumentError",
    "ArgumentTypeError",
    "Explanation",
    "Gradients",
    "Plan",
    "ReductionGradients",
    "Rotary",
    "Second",
    "TraceError",
}
MASKS = {
    "blocks",
    "chosen",
    "causal",
    "dense",
    "dilated",
    "lengths",
    "mask",
    "prefix",
    "segments",
    "tree",
    "window",
}
ANALYSIS = {
    "DEVICES",
    "Device",
    "IOComplexity",
    "Problem",
    "Roofline",
    "TileCount",
    "Traffic",
    "block_sizes",
    "block_sparse_attention",
    "causal_tiles",
    "device",
    "flash_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_backward",
    "flops",
    "one_pass_attention",
    "online_softmax",
    "packed_qkv",
    "rabe_staats",
    "rabe_staats_backward",
    "roofline",
    "safe_softmax",
    "split_kv",
    "standard_attention",
    "standard_attention_backward",
    "theorem_2",
}
FIGURES = {"Figure", "example", "mask_pairs", "mask_tiles"}
SCORES = {"alibi", "alibi_slopes", "relative_bias", "score", "softcap"}

# numpydoc's checks that every public docstring passes: a summary that is one sentence, the
# parameters of the signature in its order, each with a description, and what is returned.
SUMMARY = {"GL03", "GL05", "GL06", "GL07", "GL08", "GL10", "SS01", "SS02", "SS03", "SS04", "SS06"}
PARAMETERS = {"PR01", "PR02", "PR03", "PR05", "PR07", "PR10", "RT01", "YD01"}
# What those take that may get codes of float8.
CODES = {"q_scale", "k_scale", "v_scale", "qkv_dtype", "out_dtype"}
# What the functions that compute a call take in addition to its options.
TAKES_OPTIONS = {
    "attention": {"return_lse", "out", "lse_out", *CODES},
    "attention_backward": {"dlse", "deterministic", "bias_gradient", "grads_out", "workspace"},
    "attention_backward_jvp": {
        "tbias",
        "tsink",
        "dlse",
        "tdo",
        "tdlse",
        "deterministic",
        "bias_gradient",
        "grads_out",
        "workspace",
    },
    "attention_jvp": {"tbias", "tsink", "return_lse", "out", "tout_out", "lse_out", "tlse_out"},
    "attention_vjp": {"check", "deterministic", "bias_gradient", "return_lse"},
    "plan": {"offsets_q", "offsets_k", "tangents", *CODES},
    "workspace_size": {"offsets_q", "offsets_k", "second"},
}
TAKES_OPTIONS |= {
    name.replace("attention", "attention_varlen"): {*keywords, "check"}
    for name, keywords in TAKES_OPTIONS.items()
    if name.startswith("attention")
}
TAKES_OPTIONS["attention"].add("reductions")  # of arrays that are not packed


def public(module: types.ModuleType) -> dict[str, object]:
    return {name: getattr(module, name) for name in module.__all__}


def documented() -> list[str]:
    names = [f"cupyflash.{name}" for name in sorted(FUNCTIONS | TYPES)]
    for module in (
        cupyflash.analysis, cupyflash.bench, cupyflash.distributed, cupyflash.figures,
        cupyflash.foreign, cupyflash.masks, cupyflash.reductions, cupyflash.scores,
    ):  # fmt: skip
        found = sorted(name for name in module.__all__ if callable(getattr(module, name)))
        names += [f"{module.__name__}.{name}" for name in found]
    return names


def resolve(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_all_of_the_package():
    assert set(cupyflash.__all__) == FUNCTIONS | MODULES | TYPES
    assert len(set(cupyflash.__all__)) == len(cupyflash.__all__)
    for name, value in public(cupyflash).items():
        assert inspect.ismodule(value) == (name in MODULES)


@pytest.mark.parametrize(
    "module",
    [cupyflash, cupyflash.masks, cupyflash.scores],
    ids=lambda module: module.__name__,
)
def test_dir_lists_the_public_names_only(module):
    assert dir(module) == sorted(module.__all__)


def test_nothing_public_is_missing_from_all():
    for name, value in vars(cupyflash).items():
        if not name.startswith("_") and not inspect.ismodule(value):
            assert name in cupyflash.__all__ or name in {"annotations", "TYPE_CHECKING"}, name


@pytest.mark.parametrize(
    ("module", "wanted"), [(cupyflash.analysis, ANALYSIS), (cupyflash.figures, FIGURES)]
)
def test_all_of_the_packages(module, wanted):
    assert set(module.__all__) == wanted
    for name, value in vars(module).items():
        if not name.startswith("_") and not inspect.ismodule(value):
            assert name in wanted, name


@pytest.mark.parametrize(("module", "wanted"), [("masks", MASKS), ("scores", SCORES)])
def test_all_of_the_constructors(module, wanted):
    module = getattr(cupyflash, module)
    names = set(module.__all__)
    assert names >= wanted
    # Beside the constructors only the types of what they return.
    assert all(inspect.isclass(getattr(module, name)) for name in names - wanted)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="atention"):
        _ = cupyflash.atention


def test_the_version_is_a_string():
    assert cupyflash.__version__.count(".") == 2


@pytest.mark.parametrize("name", documented())
def test_docstrings(name):
    # A class documents its fields as attributes, which these checks do not look at.
    checks = SUMMARY if isinstance(resolve(name), type) else SUMMARY | PARAMETERS
    faults = [
        f"{code}: {text}"
        for code, text in numpydoc.validate.validate(name)["errors"]
        if code in checks
    ]
    assert not faults, f"{name}:\n" + "\n".join(faults)


@pytest.mark.parametrize("name", TAKES_OPTIONS)
def test_options_are_keywords(name):
    """Every function takes the fields of `Options`, in their order, and passes all of them on."""
    function = getattr(cupyflash, name)
    keywords = {
        parameter.name: (parameter.annotation, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    of_options = {field.name: (field.type, field.default) for field in fields(Options)}
    assert keywords.keys() == of_options.keys() | TAKES_OPTIONS[name]
    assert [item for item in keywords.items() if item[0] in of_options] == list(of_options.items())
    passed = {
        tuple(keyword.arg for keyword in node.keywords)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Options.of"
    }
    assert passed == {tuple(of_options)}


def test_only_these_functions_take_options():
    for name in FUNCTIONS:
        parameters = inspect.signature(getattr(cupyflash, name)).parameters.values()
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters)
        assert ("dropout" in {p.name for p in parameters}) == (name in TAKES_OPTIONS)


def test_every_option_is_checked():
    assert set(validate._CHECKS) == {field.name for field in fields(Options)}


def in_a_fresh_process(program: str, folder: object) -> object:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_import_is_light(tmp_path):
    program = "import cupyflash, sys, json; print(json.dumps(sorted(sys.modules)))"
    loaded = {name.partition(".")[0] for name in in_a_fresh_process(program, tmp_path)}
    heavy = {"numba", "llvmlite", "cupy", "hypothesis", "ml_dtypes", "typer", "rich", "scipy"}
    heavy |= {"torch", "jax", "transformers"}
    assert loaded & heavy == set()


def test_import_is_quick(tmp_path):
    """In units of the import of NumPy, of which no machine changes much.

    That of this thread alone: the threads of NumPy's BLAS take as much again where a core is free.
    """
    program = (
        "from time import thread_time as now; begin = now(); import numpy; middle = now(); "
        "import cupyflash; cupyflash.masks, cupyflash.scores; "
        "print((now() - middle) / (middle - begin))"
    )
    # The best of some: other processes can only add to it.
    assert any(in_a_fresh_process(program, tmp_path) < 7 for _ in range(5))
