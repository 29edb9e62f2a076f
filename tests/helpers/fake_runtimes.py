"""Stand-ins for ONNX Runtime and OpenVINO: their operators for attention, computed by NumPy."""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace

import numpy as np


def attend(q, k, v, scale, bias=0.0, seen=True):
    """Attention by its formula, in float64."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (x.astype(float) for x in (q, k.repeat(group, 1), v.repeat(group, 1)))
    s = np.where(seen, q @ k.swapaxes(-1, -2) * scale + bias, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True) @ v).astype(dtype)


def lower(causal, q, k):
    return np.tri(q.shape[2], k.shape[2], dtype=bool) if causal else True


# --- ONNX Runtime ---


def heads_first(x, heads):
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def heads_last(x):
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def standard(q, k, v, mask=None, *, scale, is_causal):
    bias, seen = 0.0, lower(is_causal, q, k)
    if mask is not None and mask.dtype == bool:
        seen = seen & mask
    elif mask is not None:
        bias = mask.astype(float)
    return (attend(q, k, v, scale, bias, seen),)


def multi_head(q, k, v, bias, padding=None, scores=None, *, num_heads, scale, unidirectional):
    assert bias is None
    q, k, v = (heads_first(x, num_heads) for x in (q, k, v))
    seen = lower(unidirectional, q, k)
    if padding is not None:
        assert padding.dtype == np.int32
        seen = seen & (np.arange(k.shape[2]) < padding[:, None, None, None])
    added = 0.0 if scores is None else scores.astype(float)
    return (heads_last(attend(q, k, v, scale, added, seen)),)


def grouped(q, k, v, past_k, past_v, last, total, *, num_heads, kv_num_heads, scale):
    assert past_k.size == past_v.size == 0
    assert (last + 1 == total).all()
    assert total[0] == q.shape[1]
    q, k, v = (heads_first(x, n) for x, n in ((q, num_heads), (k, kv_num_heads), (v, kv_num_heads)))
    return heads_last(attend(q, k, v, scale, seen=lower(True, q, k))), k, v


OPERATORS = {
    ("", "Attention"): standard,
    ("com.microsoft", "MultiHeadAttention"): multi_head,
    ("com.microsoft", "GroupQueryAttention"): grouped,
}


class Session:
    """Runs a model of one operator on memory that is bound."""

    def __init__(self, model, options, providers):
        assert providers == ["CPUExecutionProvider"]
        assert options.intra_op_num_threads > 0
        self.model, self.bound = model, {}

    def io_binding(self):
        return SimpleNamespace(bind_input=self.bind, bind_output=self.bind)

    def bind(self, name, device, number, dtype, shape, address):
        assert (device, number) == ("cpu", 0)
        held = {x[0]: x[1:] for x in (*self.model.inputs, *self.model.outputs)}
        assert held[name] == (np.dtype(dtype), tuple(shape))
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        room = (ctypes.c_char * max(size, 1)).from_address(address) if size else b""
        self.bound[name] = np.frombuffer(room, dtype)[: int(np.prod(shape))].reshape(shape)

    def run_with_iobinding(self, binding):
        node = self.model.node
        operands = [self.bound[name] if name else None for name in node.inputs]
        found = OPERATORS[node.domain, node.operator](*operands, **node.attributes)
        for name, x in zip(node.outputs, found, strict=True):
            self.bound[name][...] = x


def make_node(operator, inputs, outputs, domain, **attributes):
    assert (domain, operator) in OPERATORS
    return SimpleNamespace(
        operator=operator, inputs=inputs, outputs=outputs, domain=domain, attributes=attributes
    )


def make_graph(nodes, name, inputs, outputs):
    (node,) = nodes
    return SimpleNamespace(node=node, inputs=inputs, outputs=outputs)


def make_model(graph, opset_imports, ir_version):
    assert dict(opset_imports)[""] >= 23  # has Attention
    assert ir_version >= 10
    graph.SerializeToString = lambda: graph
    return graph


def fake_onnx():
    """The modules, by name."""
    onnx, ort = ModuleType("onnx"), ModuleType("onnxruntime")
    onnx.helper = SimpleNamespace(
        np_dtype_to_tensor_dtype=np.dtype,
        make_tensor_value_info=lambda name, kind, shape: (name, kind, tuple(shape)),
        make_node=make_node, make_graph=make_graph, make_model=make_model,
        make_opsetid=lambda domain, version: (domain, version),
    )  # fmt: skip
    ort.SessionOptions, ort.InferenceSession = SimpleNamespace, Session
    return {"onnx": onnx, "onnxruntime": ort}


# --- OpenVINO: a node is a function of the request's arrays ---


def node(function):
    def make(*operands, **options):
        def value(arrays):
            found = [x(arrays) if callable(x) else x for x in operands]
            return function(*found, **options)

        return value

    return make


def sdpa(q, k, v, mask=None, *, causal):
    masks = {"mask": mask} if mask is not None else {}
    return standard(q, k, v, scale=q.shape[-1] ** -0.5, is_causal=causal, **masks)[0]


def softmax(s, axis):
    p = np.exp(s.astype(float) - s.astype(float).max(axis=axis, keepdims=True))
    return (p / p.sum(axis=axis, keepdims=True)).astype(s.dtype)


def matmul(a, b, turns_a, turns_b):
    assert a.ndim == b.ndim == 4
    assert not turns_a
    wide = a.astype(float) @ (b.astype(float).swapaxes(-1, -2) if turns_b else b.astype(float))
    return wide.astype(a.dtype)


def reshape(x, shape, special_zero):
    assert not special_zero
    return x.reshape(shape)


def parameter(shape, kind):
    places = []

    def value(arrays):
        x = arrays[places[0]]
        assert x.shape == tuple(shape)
        return x

    value.kind, value.places = kind, places
    return value


class Request:
    """Computes the results of a model."""

    def __init__(self, model):
        self.model, self.arrays = model, [None] * len(model.parameters)

    def set_input_tensor(self, number, tensor):
        assert tensor.kind == self.model.parameters[number].kind
        self.arrays[number] = tensor.array

    def infer(self):
        (result,) = self.model.results
        found = result(self.arrays)
        self.found = found.view(np.uint16) if found.dtype.name == "bfloat16" else found

    def get_output_tensor(self, number):
        assert number == 0
        return SimpleNamespace(data=self.found)


class Kind(str):
    __slots__ = ()

    def to_string(self):
        return str(self)


KINDS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "boolean": "bool"}


def fake_openvino(bfloat16):
    """The modules, by name."""
    ov, ops = ModuleType("openvino"), ModuleType("openvino.opset13")
    ov.Type = SimpleNamespace(**{name: Kind(name) for name in KINDS})

    def tensor(array, shape_or_shared, kind=None):
        if kind is None:
            assert shape_or_shared is True
            (kind,) = (Kind(x) for x, name in KINDS.items() if array.dtype.name == name)
            return SimpleNamespace(array=array, kind=kind)
        assert kind == "bf16"
        return SimpleNamespace(array=array.view(bfloat16).reshape(shape_or_shared), kind=kind)

    def model(results, parameters):
        for n, x in enumerate(parameters):
            x.places[:] = [n]
        return SimpleNamespace(results=results, parameters=parameters)

    def compile_model(model, device, options):
        assert device == "CPU"
        assert options["INFERENCE_NUM_THREADS"] > 0
        assert options["INFERENCE_PRECISION_HINT"] == model.parameters[0].kind
        return SimpleNamespace(create_infer_request=lambda: Request(model))

    ov.Tensor, ov.Model = tensor, model
    ov.Core = lambda: SimpleNamespace(compile_model=compile_model)
    ops.parameter, ops.constant = parameter, np.asarray
    functions = {
        "unsqueeze": lambda x, axis: np.expand_dims(x, int(axis)),
        "broadcast": np.broadcast_to,
        "reshape": reshape,
        "scaled_dot_product_attention": sdpa,
        "convert_like": lambda x, y: np.asarray(x).astype(y.dtype),
        "multiply": np.multiply,
        "matmul": matmul,
        "add": np.add,
        "select": np.where,
        "softmax": softmax,
    }
    for name, function in functions.items():
        setattr(ops, name, node(function))
    return {"openvino": ov, "openvino.opset13": ops}
