"""The code that an error tells users to write works: each case fails, and does what the error says.

A search over the package's source finds the errors that hold code; each has a case, or a reason.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reduction_remedies
import remedies

import cupyflash
from cupyflash import masks, scores

PACKAGE = Path(cupyflash.__file__).parent
CASES = (*remedies.CASES, *reduction_remedies.CASES)
CODE = re.compile(
    r"""(?:[A-Za-z_][\w.]*)?\.?[A-Za-z_]\w*\((?:[^()]|\([^()]*\))*\)"""  # name(...), .name(...)
    r"""|\b(?:np|cupy|jnp|torch|masks|scores|cupyflash)\.[\w.]*\w"""
    r"""|\b[a-z_]+=(?:[A-Za-z]\w*|[\d.]+|['"]\w*['"]?)"""
    r"""|pip install [\w-]+"""
)


# Errors with code that have no case above: the fragment, and why, or the test that applies it.
GPU = "a GPU computes, or a CUDA graph is being captured"
RANKS = "../distributed/test_rank_remedies.py::test_"
CLONE = "a clone is there, whose examples are timed"
NOT_DONE = "it says what holds, and not what to write"
INSTALL = "a package is installed"
WORKS = "test_the_remedy_of_an_error_works_as_it_is_written"
TORCH = f"test_torch_remedies.py::{WORKS}"
JAX = f"test_jax_remedies.py::{WORKS}"
SUBCLASSES = "test_torch_subclasses.py::test_no_function_takes_an_unknown_subclass"
LEARNED = "test_learned_lookups.py::test_remedies_work"
OF_TENSORS = "test_torch_learned.py::test_"
NEWEST = "test_torch_newest_names.py::test_errors_have_a_remedy"
GROWING = "test_torch_generation.py::test_room_from_the_start"
WITHOUT_CASE: dict[tuple[str, str], str] = {
    ("torch/cute.py", ".diff()"): NEWEST,
    ("torch/cute.py", "cupyflash.scores.softcap({})"): NEWEST,
    ("torch/cute.py", "mask_mod=cupyflash"): NEWEST,
    ("torch/cute.py", "masks.causal()"): NEWEST,
    ("torch/cute.py", "seqused_k=cu_seqlens_k"): NEWEST,
    ("torch/cute.py", "torch.arange(B + 1)"): NEWEST,
    ("torch/cute.py", "x.flatten(0, 1)"): NEWEST,
    ("torch/varlen.py", ".diff()"): NEWEST,
    ("torch/varlen.py", "cu_seq_k=cu_seq_q"): NEWEST,
    ("torch/varlen.py", "enable_gqa=True"): NEWEST,
    ("torch/varlen.py", "seqused_k=cu_seq_k"): NEWEST,
    ("torch/growing_cache.py", "transformers.DynamicCache(config=config)"): GROWING,
    (
        "torch/static_cache.py",
        "transformers.StaticCache(config=config, max_cache_len=rows)",
    ): "test_torch_static_cache.py::test_models_without_layers_of_all_keys_are_refused",
    (
        "torch/implementation.py",
        "torch.nn.attention.restore_flash_attention_impl()",
    ): "test_torch_newest_names.py::test_what_the_hook_refuses",
    ("expr/arguments.py", ".astype()"): LEARNED,
    ("expr/arguments.py", "learned=True"): LEARNED,
    ("problem/lookups.py", "cupyflash.lookup(array, learned=True)"): LEARNED,
    ("problem/validate.py", "learned=True"): LEARNED,
    ("arrays/interop.py", "cupyflash.lookup(tensor, learned=True)"): OF_TENSORS
    + "what_has_no_gradient",
    ("torch/learned.py", ".to()"): OF_TENSORS + "other_memory_is_an_error",
    ("torch/learned.py", "create_graph=False"): NOT_DONE,
    ("torch/learned.py", "cupyflash.lookup(tensor, learned=True)"): OF_TENSORS
    + "other_memory_is_an_error",
    ("torch/learned.py", "torch.func"): NOT_DONE,
    ("torch/operators.py", "torch.compile"): NOT_DONE,
    ("torch/operators.py", "torch.compiler.disable"): OF_TENSORS + "compiled_functions_refuse_them",
    ("arrays/device_arrays.py", "cupy.asarray([[{}]], cupy.float32)"): GPU,
    ("bench/programs.py", "pip install -e"): CLONE,
    ("arrays/interop.py", ".as_subclass(torch.Tensor)"): SUBCLASSES,
    ("arrays/interop.py", ".detach()"): TORCH,
    ("distributed/partition/schemes.py", 'scheme="rounds"'): RANKS + "another_scheme",
    ("distributed/partition/layouts.py", "axis=."): RANKS + "another_axis",
    ("distributed/sharded.py", "layout.take(whole array, axis=-1)"): RANKS + "a_sharded_array",
    ("distributed/executor.py", "communicator(MPI.COMM_WORLD)"): RANKS + "a_communicator_of_mpi",
    ("distributed/executor.py", "communicator(ranks, device=...)"): GPU,
    ("distributed/executor.py", "layout(comm, length, mask=mask)"): RANKS + "a_layout",
    ("distributed/executor.py", "layout.take(whole array)"): RANKS + "rows_of_the_rank",
    ("expr/sharded.py", "distributed.sharded(...)"): NOT_DONE,
    ("costs/explanation/dense.py", "dtype='"): NOT_DONE,
    ("gpu/launch.py", "cupy.empty({}, cupy.uint8)"): GPU,
    ("gpu/kernels/registry.py", "cupy.asnumpy"): GPU,
    ("jax/arguments.py", "bias=."): JAX,
    ("jax/arguments.py", "jax.device_put(x, jax.devices('cpu')[0])"): "a TPU has the array",
    ("jax/target.py", "jax.device_put(x, jax.devices('cpu')[0])"): GPU,
    ("jax/target.py", "jax.device_put(x, jax.devices()[0])"): GPU,
    ("arrays/reports.py", "check=True"): GPU,
    ("jax/arguments.py", "jax.jit(function, static_argnames={})"): JAX,
    ("problem/coded.py", "out_dtype='float16'"): INSTALL,
    ("problem/coded.py", "pip install ml_dtypes"): INSTALL,
    ("problem/scalars.py", "sqrt(D)"): NOT_DONE,
    ("problem/validate.py", "bias_gradient=False"): NOT_DONE,
    ("testing/hypothesis_needed.py", "pip install hypothesis"): INSTALL,
    ("torch/functions.py", "bias=."): TORCH,
    ("torch/operators.py", "create_graph=False"): NOT_DONE,
    ("torch/sdpa.py", ".tril()"): TORCH,
    ("torch/sdpa.py", "torch.ones(L, S, dtype=torch.bool)"): TORCH,
    ("torch/tensors.py", '.to("cpu")'): "a tensor is on a device that is no NVIDIA GPU",
    ("torch/tensors.py", '.to("{}")'): GPU,
    ("torch/tensors.py", ".to(dtype)"): TORCH,
    ("torch/tensors.py", ".to({})"): TORCH,
    ("torch/flash_cache.py", ".detach()"): TORCH,
    ("torch/heads.py", "enable_gqa=True"): TORCH,
    ("torch/tensors.py", ".as_subclass(torch.Tensor)"): SUBCLASSES,
    ("torch/tensors.py", "torch.as_tensor"): TORCH,
    ("torch/tensors.py", "torch.Tensor"): NOT_DONE,
    ("arrays/interop.py", "torch.Tensor"): NOT_DONE,
    ("arrays/interop.py", "cupy.asarray"): GPU,
    ("jax/arguments.py", "jnp.asarray"): JAX,
    ("jax/seeds.py", ".astype('uint32')"): JAX,
    ("jax/seeds.py", "seed=seed"): JAX,
    ("jax/seeds.py", "seed=int"): JAX,
    (
        "torch/transformers.py",
        "is_causal=False",
    ): "test_torch_transformers.py::test_no_mask_means_the_last_queries",
}


def raises(node: ast.AST) -> bool:
    """Return whether a part of the source raises an error, or makes one."""
    return isinstance(node, ast.Raise) or (
        isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error")
    )


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of errors, and of functions that raise; `{}` is what is filled in."""
    for function in ast.walk(tree):
        body: list[Any] = [function] if raises(function) else []
        if isinstance(function, ast.FunctionDef) and any(map(raises, ast.walk(function))):
            body = function.body[1:] if ast.get_docstring(function) else function.body
        filled: set[int] = set()
        for each in (node for part in body for node in ast.walk(part)):
            if isinstance(each, ast.JoinedStr):
                filled |= {id(part) for part in each.values}
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "{}"
                    for part in each.values
                )
            elif (
                isinstance(each, ast.Constant)
                and isinstance(each.value, str)
                and id(each) not in filled
                and (" " in each.value or raises(function))
            ):
                yield each.value


@functools.cache
def fragments() -> set[tuple[str, str]]:
    """Return each file and the code in its errors."""
    return {
        (str(path.relative_to(PACKAGE)), code)
        for path in PACKAGE.rglob("*.py")
        for text in texts(ast.parse(path.read_text()))
        for code in CODE.findall(text)
    }


def exists(name: str) -> bool:
    """Return whether a dotted name without a call, such as `np.asarray`, is one of a library."""
    module, _, rest = name.partition(".")
    roots = {"np": np, "masks": masks, "scores": scores, "cupyflash": cupyflash}
    if module not in roots or re.fullmatch(r"[\w.]+", rest) is None:
        return False
    folder, _, own = rest.partition(".")
    if module == "cupyflash" and (PACKAGE / folder / "__init__.py").is_file():
        text = (PACKAGE / folder / "__init__.py").read_text()  # PyTorch need not be there
        return not own or re.search(rf"\b{own}\b", text) is not None
    parts = rest.split(".")
    return (
        functools.reduce(lambda x, part: getattr(x, part, None), parts, roots[module]) is not None
    )


def applied(file: str, fragment: str) -> bool:
    return exists(fragment) or any((c.file, c.fragment) == (file, fragment) for c in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.file}-{c.fragment}")
def test_the_remedy_of_an_error_works_as_it_is_written(case):
    with pytest.raises(
        (cupyflash.ArgumentError, cupyflash.ArgumentTypeError, TypeError)
    ) as failure:
        case.fails()
    code = re.search(case.found, str(failure.value))
    assert code, f"the message does not say {case.found}: {failure.value}"
    case.remedy(code[0])


def test_every_error_with_code_has_a_case_or_a_reason():
    missing = {each for each in fragments() if not applied(*each)} - WITHOUT_CASE.keys()
    assert not missing, f"errors with code that nothing applies: {sorted(missing)}"


def test_no_reason_outlives_its_error():
    stale = WITHOUT_CASE.keys() - {each for each in fragments() if not applied(*each)}
    assert not stale, f"these errors are gone, or have a case: {sorted(stale)}"


@pytest.mark.parametrize("name", sorted({w for w in WITHOUT_CASE.values() if "::" in w}))
def test_the_tests_that_apply_other_remedies_exist(name):
    file, _, test = name.partition("::")
    assert f"def {test}(" in (Path(__file__).parent / file).read_text()
