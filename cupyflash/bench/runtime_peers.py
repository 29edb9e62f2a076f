"""ONNX Runtime's and OpenVINO's attention on a CPU: contenders of the suite `models`.

Each has a graph of one operator, as many threads as this package, and memory for its results that
is bound before it is timed. Where a library has several operators for a task, the fastest one
counts.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..reference.cpu.thread_limits import num_threads
from .cases import Case
from .contenders import Array, Contender, Inputs, Job, RefusalError
from .measure import Meter, Work
from .model_rows import Model

ONNX, OPENVINO = "onnxruntime", "openvino"
TRIALS = 5  # runs, of which the fastest decides which operator counts
IR, OPSET = 10, 23  # versions of the format and of its operators
Ways = Mapping[str, Callable[[], Work]]  # by an operator's name, what makes its work


class Runtime(Contender):
    """A library that runs graphs on a CPU."""

    kinds = ("cpu",)

    def __init__(self, name: str, title: str, what: str, modules: tuple[str, ...]) -> None:
        self.name, self.title, self.what, self.modules = name, title, what, modules
        self.install = f"pip install {' '.join(modules)}"

    def obstacle(self, kind: str) -> str:
        """Say why it cannot take part at all, and the remedy; nothing where it can."""
        other = super().obstacle(kind)
        if other:
            return other
        for name in self.modules:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                return f"{error.name} is not installed: {self.install}"
            except Exception as error:  # noqa: BLE001 (libraries fail to load in many ways)
                words = f"{type(error).__name__}: {error}".splitlines()[0]
                return f"{name} cannot be imported ({words}); reinstall it: {self.install}"
        return ""

    def prepare(self, meter: Meter, case: Case, inputs: Inputs) -> Job:  # noqa: ARG002
        """Refuse: it has a graph for each row of the suite `models`."""
        raise RefusalError("it is timed on shapes that models run, by --suite models")


RUNTIMES = (
    Runtime(ONNX, "ONNX Runtime", "ONNX Runtime's fastest operator", ("onnxruntime", "onnx")),
    Runtime(OPENVINO, "OpenVINO", "OpenVINO's ScaledDotProductAttention", ("openvino",)),
)


def of_dense(model: Model, arrays: list[Array], lengths: Array | None) -> Ways:
    """Return the work of both for a forward of q, k, v and perhaps a bias."""
    return {
        ONNX: lambda: fastest(by_onnx(model, arrays, lengths)),
        OPENVINO: lambda: fastest(by_openvino(model, arrays, lengths)),
    }


def fastest(ways: Ways) -> Work:
    """Return the fastest of several ways; a RefusalError says why there is none."""
    found: dict[str, Work] = {}
    errors: list[str] = []
    for name, make in ways.items():
        try:
            found[name] = make()
        except RefusalError:
            raise
        except Exception as error:  # noqa: BLE001 (libraries refuse in many ways; all are told)
            words = str(error).strip().partition("\n")[0]
            errors.append(f"{name}: {words}")
    if not found:
        raise RefusalError("; ".join(errors))

    def seconds(name: str) -> float:
        times = []
        for _ in range(TRIALS):
            start = time.perf_counter()
            found[name]()
            times.append(time.perf_counter() - start)
        return min(times)

    return found[min(found, key=seconds)]


# --- ONNX Runtime ---


def by_onnx(model: Model, arrays: list[Array], lengths: Array | None) -> Ways:
    """Return its operators that have a form for this task."""
    q, k, v, *bias = arrays
    b, heads, len_q, d = q.shape
    columns = v.shape[-1]
    flat = (b, len_q, heads * columns)

    def rows(x: Array) -> Array:
        """The heads of a token side by side, as operators of the domain com.microsoft want them."""
        return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(x.shape[0], x.shape[2], -1)

    def turned(x: Array) -> Array:
        return x.reshape(b, len_q, heads, columns).swapaxes(1, 2)

    def multi_head() -> Work:
        inputs = {"q": rows(q), "k": rows(k), "v": rows(v)}
        if lengths is not None:
            inputs["key_padding_mask"] = lengths
        if bias:
            inputs["attention_bias"] = bias[0]
        places = ("q", "k", "v", "", "key_padding_mask", "attention_bias")
        words = {"num_heads": heads, "scale": d**-0.5, "unidirectional": int(model.causal)}
        run = graph("MultiHeadAttention", places, inputs, {"o": flat}, words, "com.microsoft")
        return lambda: turned(run())

    def grouped() -> Work:
        past = (b, k.shape[1], 0, d)
        inputs = {"q": rows(q), "k": rows(k), "v": rows(v)}
        inputs |= {"past_k": np.empty(past, k.dtype), "past_v": np.empty(past, v.dtype)}
        inputs["last"] = np.full(b, len_q - 1, np.int32)
        inputs["total"] = np.array([len_q], np.int32)
        words = {"num_heads": heads, "kv_num_heads": k.shape[1], "scale": d**-0.5}
        outputs = {"o": flat, "new_k": k.shape, "new_v": v.shape}
        run = graph("GroupQueryAttention", tuple(inputs), inputs, outputs, words, "com.microsoft")
        return lambda: turned(run())

    def standard() -> Work:
        inputs = {"q": q, "k": k, "v": v}
        if lengths is not None:
            seen = np.arange(k.shape[2]) < lengths[:, None, None, None]
            inputs["mask"] = np.broadcast_to(seen, (b, 1, len_q, k.shape[2]))
        if bias:
            inputs["mask"] = bias[0]
        words = {"scale": d**-0.5, "is_causal": int(model.causal)}
        return graph("Attention", tuple(inputs), inputs, {"o": (*q.shape[:3], columns)}, words)

    ways = {"Attention": standard}
    if k.shape[1] == heads:
        ways["MultiHeadAttention"] = multi_head
    if model.causal and not bias and lengths is None and len_q == k.shape[2]:
        ways["GroupQueryAttention"] = grouped
    return ways


def graph(
    operator: str,
    places: tuple[str, ...],
    inputs: dict[str, Array],
    outputs: dict[str, tuple[int, ...]],
    attributes: dict[str, Any],
    domain: str = "",
) -> Work:
    """Return a run of one operator, whose first output it returns; `places` are its operands."""
    onnx, ort = (importlib.import_module(name) for name in ("onnx", "onnxruntime"))
    helper = onnx.helper
    dtype = inputs["q"].dtype
    if dtype.name == "bfloat16":
        raise RefusalError("it has no bfloat16 on a CPU")

    def info(name: str, kind: Any, shape: tuple[int, ...]) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(kind), shape)

    node = helper.make_node(
        operator, [x if x in inputs else "" for x in places], [*outputs], domain=domain,
        **attributes,
    )  # fmt: skip
    made = helper.make_model(
        helper.make_graph(
            [node],
            operator,
            [info(name, x.dtype, x.shape) for name, x in inputs.items()],
            [info(name, dtype, shape) for name, shape in outputs.items()],
        ),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)],
        ir_version=IR,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads()
    options.log_severity_level = 4  # a refusal is told by the error
    session = ort.InferenceSession(
        made.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    results = {name: np.empty(shape, dtype) for name, shape in outputs.items()}
    held = {name: np.ascontiguousarray(x) for name, x in inputs.items()}
    for name, x in held.items():
        binding.bind_input(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
    for name, x in results.items():
        binding.bind_output(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
    (first, *_) = results.values()

    def run(_: Any = (held, results)) -> Array:  # which the binding reads and writes
        session.run_with_iobinding(binding)
        return first

    run()  # an operator refuses at its first call
    return run


# --- OpenVINO ---


@functools.cache
def _core() -> Any:
    return importlib.import_module("openvino").Core()


def by_openvino(model: Model, arrays: list[Array], lengths: Array | None) -> Ways:
    """Return its operator, and the three that it is short for, which OpenVINO joins."""
    q, k = arrays[:2]
    if q.dtype == np.float64:
        raise RefusalError("it computes float64 in float32")
    held = [np.ascontiguousarray(x) for x in arrays]
    if lengths is not None:
        held.append(np.arange(k.shape[2]) < lengths[:, None, None, None])
    shares = k.shape[1] != model.heads

    def as_one(ops: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        keys, values = (repeated(ops, x, arrays[1], model.heads) for x in (k, v))
        return ops.scaled_dot_product_attention(q, keys, values, *rest, causal=model.causal)

    def as_three(ops: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        b, heads, _, d = arrays[1].shape
        folds = shares and not (model.causal or rest)
        if folds:  # the query heads that share keys, below each other
            q = ops.reshape(q, [b, heads, -1, d], special_zero=False)
        elif shares:
            k, v = (repeated(ops, x, arrays[1], model.heads) for x in (k, v))
        scale, hidden = (ops.convert_like(np.float32(x), q) for x in (d**-0.5, -np.inf))
        s = ops.matmul(ops.multiply(q, scale), k, False, True)
        for x in rest:
            s = ops.add(s, x) if lengths is None else ops.select(x, s, hidden)
        if model.causal:
            s = ops.select(np.tri(model.len_q, model.keys, dtype=bool), s, hidden)
        o = ops.matmul(ops.softmax(s, -1), v, False, False)
        if folds:
            o = ops.reshape(o, [b, model.heads, model.len_q, -1], special_zero=False)
        return o

    return {
        "ScaledDotProductAttention": functools.partial(compiled, held, as_one),
        "MatMul, Softmax, MatMul": functools.partial(compiled, held, as_three),
    }


def repeated(ops: Any, x: Any, keys: Array, heads: int) -> Any:
    """Repeat the heads of keys or values in the graph, until there are as many as wanted."""
    b, own, length, columns = keys.shape
    if own == heads:
        return x
    x = ops.broadcast(ops.unsqueeze(x, ops.constant(2)), [b, own, heads // own, length, columns])
    return ops.reshape(x, [b, heads, length, columns], special_zero=False)


def compiled(held: list[Array], build: Callable[..., Any]) -> Work:
    """Return a run of a graph over arrays, which the request reads where they are."""
    ov, ops = (importlib.import_module(name) for name in ("openvino", "openvino.opset13"))
    dtype = held[0].dtype
    kind = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}[dtype.name]
    kinds = [ov.Type.boolean if x.dtype == bool else kind for x in held]
    parameters = [ops.parameter(x.shape, of) for x, of in zip(held, kinds, strict=True)]
    options = {
        "INFERENCE_NUM_THREADS": num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": kind.to_string(),
    }
    request = (
        _core()
        .compile_model(ov.Model([build(ops, *parameters)], parameters), "CPU", options)
        .create_infer_request()
    )
    plain = [x.view(np.uint16) if x.dtype.name == "bfloat16" else x for x in held]
    for n, (x, of) in enumerate(zip(plain, kinds, strict=True)):
        shared = ov.Tensor(x, x.shape, of) if x.dtype == np.uint16 else ov.Tensor(x, True)
        request.set_input_tensor(n, shared)

    def run(_: Any = plain) -> Array:  # which it reads
        request.infer()
        o = request.get_output_tensor(0).data
        return o if o.dtype == dtype else o.view(dtype)

    run()
    return run
