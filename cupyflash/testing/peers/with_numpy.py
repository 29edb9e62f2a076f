"""Libraries that take and return NumPy arrays or convert them: ONNX, OpenVINO, MLX and others."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyflash import masks

from ..options import mask_array
from .base import (
    Array,
    Documented,
    Functions,
    Peer,
    additive,
    no_gradient_of_more,
    positive_scale,
    rounded_weights,
    scale_of,
    scale_of_float32,
    small,
)

if TYPE_CHECKING:
    from ..subject import Call

BASIC = ("masks", "scale", "lengths", "strides", "finite")


def _onnx_model(dtype: str, masked: bool, scale: float, opset: int) -> Any:
    import onnx
    from onnx import TensorProto, helper

    kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16,
            "float64": TensorProto.DOUBLE}[dtype]  # fmt: skip
    names = ["q", "k", "v", *(["mask"] if masked else [])]
    node = helper.make_node("Attention", names, ["out"], scale=scale)
    inputs = [helper.make_tensor_value_info(x, kind, [None] * 4) for x in names[:3]]
    if masked:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, [None] * 4))
    outputs = [helper.make_tensor_value_info("out", kind, [None] * 4)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 11
    onnx.checker.check_model(model)
    return model


def _fed(q: Array, k: Array, v: Array, mask: Any) -> dict[str, Array]:
    fed = {"q": q, "k": k, "v": v}
    if mask is not None:
        allowed = np.array(mask_array(mask, q, k))
        fed["mask"] = np.broadcast_to(allowed, (*q.shape[:-1], k.shape[-2]))
    return {name: np.ascontiguousarray(x) for name, x in fed.items()}


def _onnx_evaluator(opset: int) -> Functions:
    from onnx.reference import ReferenceEvaluator

    def forward(
        q: Array, k: Array, v: Array, *, mask: Any = None, scale: float | None = None,
        **_: Any,
    ) -> Any:  # fmt: skip
        model = _onnx_model(q.dtype.name, mask is not None, scale_of(q, scale), opset)
        return ReferenceEvaluator(model).run(None, _fed(q, k, v, mask))[0], None

    return Functions(forward)


def _onnxruntime() -> Functions:
    import onnxruntime

    @functools.lru_cache(maxsize=64)
    def session(dtype: str, masked: bool, scale: float) -> Any:
        onnxruntime.set_default_logger_severity(4)
        model = _onnx_model(dtype, masked, scale, 23)
        return onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )

    def forward(
        q: Array, k: Array, v: Array, *, mask: Any = None, scale: float | None = None,
        **_: Any,
    ) -> Any:  # fmt: skip
        run = session(q.dtype.name, mask is not None, scale_of(q, scale))
        return run.run(None, _fed(q, k, v, mask))[0], None

    return Functions(forward)


def _of_a_prompt(call: Call) -> bool:
    """Serve causal calls of as many queries as keys, whose values are as wide as keys."""
    mask = call.options.get("mask")
    same = call.q.shape[-2] == call.k.shape[-2] and call.k.shape == call.v.shape
    return mask is not None and mask == masks.causal() and same and positive_scale(call)


def _group_query() -> Functions:
    """ONNX Runtime's own GroupQueryAttention, whose heads have multiples of 8 columns."""
    import onnxruntime
    from onnx import TensorProto, helper

    @functools.lru_cache(maxsize=64)
    def session(heads: int, shared: int, scale: float) -> Any:
        onnxruntime.set_default_logger_severity(4)
        node = helper.make_node(
            "GroupQueryAttention", ["q", "k", "v", "", "", "last", "total"],
            ["out", "keys", "values"], domain="com.microsoft", num_heads=heads,
            kv_num_heads=shared, scale=scale,
        )  # fmt: skip
        value, rows = helper.make_tensor_value_info, [None] * 3
        given = [value(name, TensorProto.FLOAT, rows) for name in "qkv"]
        given += [value("last", TensorProto.INT32, [None]), value("total", TensorProto.INT32, [])]
        made = [value("out", TensorProto.FLOAT, rows)]
        made += [value(name, TensorProto.FLOAT, [None] * 4) for name in ("keys", "values")]
        domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(
            helper.make_graph([node], "attention", given, made),
            opset_imports=domains,
            ir_version=10,
        )
        providers = ["CPUExecutionProvider"]
        return onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)

    def forward(q: Array, k: Array, v: Array, *, scale: float | None = None, **_: Any) -> Any:
        batch, heads, length, width = q.shape
        more = [(0, 0)] * 3 + [(0, -width % 8)]
        flat = [np.pad(x, more).swapaxes(1, 2).reshape(batch, length, -1) for x in (q, k, v)]
        fed = dict(zip("qkv", map(np.ascontiguousarray, flat), strict=True))
        fed |= {"last": np.full(batch, length - 1, np.int32), "total": np.array(length, np.int32)}
        run = session(heads, k.shape[1], scale_of(q, scale))
        out = run.run(["out"], fed)[0].reshape(batch, length, heads, -1)
        return out.swapaxes(1, 2)[..., :width], None

    return Functions(forward)


def _openvino() -> Functions:
    import openvino
    import openvino.opset13 as ops

    core = openvino.Core()

    @functools.lru_cache(maxsize=64)
    def compiled(masked: bool, scale: float) -> Any:
        nodes = [ops.parameter([-1] * 4, np.float32) for _ in "qkv"]
        mask = ops.parameter([-1] * 4, bool) if masked else None
        constant = ops.constant(np.float32(scale))
        if masked:
            node = ops.scaled_dot_product_attention(*nodes, mask, constant)
        else:
            node = ops.scaled_dot_product_attention(
                *nodes, ops.constant(np.zeros((1, 1, 1, 1), np.float32)), constant
            )
        model = openvino.Model([node], [*nodes, *([mask] if masked else [])])
        exact = {"INFERENCE_PRECISION_HINT": "f32"}
        return core.compile_model(model, "CPU", exact)

    def forward(
        q: Array, k: Array, v: Array, *, mask: Any = None, scale: float | None = None,
        **_: Any,
    ) -> Any:  # fmt: skip
        run = compiled(mask is not None, scale_of(q, scale))
        return np.array(run(list(_fed(q, k, v, mask).values()))[0]), None

    return Functions(forward)


def _mlx() -> Functions:
    import mlx.core as mx

    def attend(given: Any, scale: float, mask: Any, sinks: Any = None) -> Any:
        return mx.fast.scaled_dot_product_attention(*given, scale=scale, mask=mask, sinks=sinks)

    def read(q: Array, k: Array, mask: Any, bias: Any) -> Any:
        if bias is not None:
            return mx.array(np.array(additive(mask, bias, q, k), np.float32))
        return None if mask is None else mx.array(np.array(mask_array(mask, q, k)))

    def forward(
        q: Array, k: Array, v: Array, *, mask: Any = None, bias: Any = None, sink: Any = None,
        scale: float | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        given = [mx.array(np.array(x, order="C")) for x in (q, k, v)]
        sinks = None if sink is None else mx.array(np.array(sink, np.float32, order="C"))
        out = attend(given, scale_of(q, scale), read(q, k, mask, bias), sinks)
        return np.array(out), None

    def backward(
        do: Array, q: Array, k: Array, v: Array, *_: Any, mask: Any = None,
        scale: float | None = None,
    ) -> Any:  # fmt: skip
        given = [mx.array(np.array(x, order="C")) for x in (q, k, v)]
        factor, allowed = scale_of(q, scale), read(q, k, mask, None)
        seeds = [mx.array(np.array(do, order="C"))]
        made = mx.vjp(lambda *x: attend(x, factor, allowed), given, seeds)[1]
        return tuple(np.array(x) for x in made)

    return Functions(forward, backward)


def _tinygrad() -> Functions:
    os.environ.setdefault("DEV", "PYTHON")  # its other devices need a compiler
    import tinygrad

    def attend(tensors: Any, mask: Any, q: Array, k: Array) -> Any:
        allowed = None if mask is None else tinygrad.Tensor(np.array(mask_array(mask, q, k)))
        grouped = q.shape[1] != k.shape[1]
        return tensors[0].scaled_dot_product_attention(
            *tensors[1:], attn_mask=allowed, enable_gqa=grouped
        )

    def forward(q: Array, k: Array, v: Array, *, mask: Any = None, **_: Any) -> Any:
        tensors = [tinygrad.Tensor(np.ascontiguousarray(x)) for x in (q, k, v)]
        return attend(tensors, mask, q, k).numpy(), None

    def backward(do: Array, q: Array, k: Array, v: Array, *_: Any, mask: Any = None) -> Any:
        tensors = [tinygrad.Tensor(np.ascontiguousarray(x)) for x in (q, k, v)]
        made = attend(tensors, mask, q, k)
        found = made.gradient(*tensors, gradient=tinygrad.Tensor(np.ascontiguousarray(do)))
        return tuple(x.numpy() for x in found)

    return Functions(forward, backward)


def _paddle() -> Functions:
    import paddle

    def attend(tensors: Any, mask: Any, bias: Any, q: Array, k: Array) -> Any:
        added = additive(mask, bias, q, k)
        shape = (*q.shape[:-1], k.shape[-2])
        given = None
        if added is not None:
            given = paddle.to_tensor(np.array(np.broadcast_to(added, shape), q.dtype))
        turned = [x.transpose([0, 2, 1, 3]) for x in tensors]
        made = paddle.nn.functional.scaled_dot_product_attention(*turned, attn_mask=given)
        return made.transpose([0, 2, 1, 3])

    def forward(
        q: Array, k: Array, v: Array, *, mask: Any = None, bias: Any = None,
        **_: Any,
    ) -> Any:  # fmt: skip
        tensors = [paddle.to_tensor(np.ascontiguousarray(x)) for x in (q, k, v)]
        return attend(tensors, mask, bias, q, k).numpy(), None

    def backward(
        do: Array, q: Array, k: Array, v: Array, *_: Any, mask: Any = None,
    ) -> Any:  # fmt: skip
        tensors = [paddle.to_tensor(np.ascontiguousarray(x), stop_gradient=False)
                   for x in (q, k, v)]  # fmt: skip
        made = attend(tensors, mask, None, q, k)
        found = paddle.grad(made, tensors, [paddle.to_tensor(np.ascontiguousarray(do))])
        return tuple(x.numpy() for x in found)

    return Functions(forward, backward)


FIRST = "is_causal at the first key"
ATTENTION = {"precision": scale_of_float32, "empty_rows": "any", "serves": positive_scale}
PEERS = (
    Peer(
        "onnx", "onnx", "onnx", "pip install onnx", lambda: _onnx_evaluator(24),
        ("float32", "float64"), (*BASIC, "gqa", "widths"), ATTENTION,
        Documented("(B, H, L, D) or (B, L, H D)", alignment=FIRST),
    ),
    Peer(
        "onnx-25", "onnx", "onnx", "pip install onnx", lambda: _onnx_evaluator(25),
        ("float32", "float64"), (*BASIC, "gqa", "widths"), ATTENTION,
        Documented("(B, H, L, D) or (B, L, H D)", alignment=FIRST),
    ),
    Peer(
        "onnxruntime", "onnxruntime", "onnxruntime", "pip install onnxruntime onnx", _onnxruntime,
        ("float32", "float64"), (*BASIC, "gqa", "widths"), ATTENTION,
        Documented("(B, H, L, D) or (B, L, H D)", alignment=FIRST),
    ),
    Peer(
        "onnxruntime-gqa", "onnxruntime", "onnxruntime", "pip install onnxruntime onnx",
        _group_query, ("float32",), ("causal", "scale", "gqa", "strides"),
        {"precision": rounded_weights, "serves": _of_a_prompt},
        Documented("(B, L, H D)", alignment="always causal, at the last key"),
    ),
    Peer(
        "openvino", "openvino", "openvino", "pip install openvino", _openvino, ("float32",),
        BASIC, {"precision": rounded_weights, "empty_rows": "nan"},
        Documented(alignment="causal at the first key"),
        {"exact_mean": "A compiled model with one number as the mask of all keys, which was run "
                       "with one key first, gives 1/16 of the mean of 16 keys or more."},
    ),
    Peer(
        "mlx", "mlx", "mlx", "pip install 'mlx[cpu]'", _mlx, ("float32",),
        (*BASIC, "bias", "sink", "gqa"),
        {"precision": rounded_weights, "empty_rows": "any", "serves": no_gradient_of_more},
        Documented(alignment="'causal' at the last key"),
    ),
    Peer(
        "tinygrad", "tinygrad", "tinygrad", "pip install tinygrad", _tinygrad, ("float32",),
        ("masks", "gqa", "lengths", "widths", "strides", "finite"),
        {"precision": rounded_weights, "empty_rows": "nan", "serves": small},
        Documented(alignment=FIRST),
    ),
    Peer(
        "paddle", "paddlepaddle", "paddle", "pip install paddlepaddle", _paddle,
        ("float32", "float64"), ("masks", "bias", "lengths", "strides", "finite"),
        {"precision": rounded_weights, "empty_rows": "nan", "serves": no_gradient_of_more},
        Documented("(B, L, H, D)"),
        dict.fromkeys(
            ("gradients_within_bound", "masked_keys_get_zeros", "later_keys_get_nothing"),
            "Its softmax takes no score as lower than 64 below the maximum, so that hidden keys "
            "keep weights of exp(-64).",
        ),
    ),
)  # fmt: skip
