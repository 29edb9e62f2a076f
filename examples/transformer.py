"""A transformer language model of bytes in NumPy or CuPy, with every gradient written out.

A layer is a function that returns its value and a second function, which takes the gradient of
that value back to the inputs (a vector-Jacobian product). `cupyflash.attention_vjp` is made that
way, so attention is one layer among others. `check_gradients` holds all of them against central
differences.

T is the number of bytes in a batch, B windows of L bytes; C the width, H the heads, D = C / H.
Every array operation belongs to the module ``xp`` of the arrays, ``numpy`` or ``cupy``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

import cupyflash
from cupyflash import masks, scores

BYTES = 256  # the vocabulary
OF_A_LAYER = tuple(
    "attention norm,qkv,attention out,perceptron norm,perceptron in,perceptron out".split(",")
)
EPSILON = 1e-5  # of a norm
STEP = 1e-5  # of the central differences
ROUNDING = 100 * np.finfo(np.float64).eps  # of a loss, generously

Array = Any  # a NumPy or a CuPy array
Weights = dict[str, Array]
Vjp = Callable[[Array], Any]  # gradient of a value -> gradients of what it was made from
# The number of a layer, and its queries, keys and values, shape (T, 3 C), to shape (T, C).
Attend = Callable[[int, Array], tuple[Array, Vjp]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of the model and of its training; `attention` is the dtype that attention runs in."""

    width: int = 128
    layers: int = 3
    heads: int = 4
    context: int = 128
    batch: int = 16
    steps: int = 500
    rate: float = 4e-3
    attention: str = "float32"


def linear(x: Array, w: Array) -> tuple[Array, Vjp]:
    """Return x @ w for x of shape (T, inputs), one row for each of the T = B L bytes."""
    return x @ w, lambda dy: (dy @ w.T, x.T @ dy)


def rms_norm(x: Array, gain: Array) -> tuple[Array, Vjp]:
    """Divide each row by its root mean square, and multiply it by a gain."""
    inverse = ((x * x).mean(axis=-1, keepdims=True) + EPSILON) ** -0.5
    unit = x * inverse

    def vjp(dy: Array) -> tuple[Array, Array]:
        dunit = dy * gain
        along = (dunit * unit).mean(axis=-1, keepdims=True)  # what changes the length alone
        return (dunit - unit * along) * inverse, (dy * unit).sum(axis=0)

    return unit * gain, vjp


def swiglu(x: Array, xp: Any) -> tuple[Array, Vjp]:
    """Gate one half of the columns by the other: silu(a) b for x = [a, b]."""
    a, b = xp.split(x, 2, axis=-1)
    sigmoid = 0.5 + 0.5 * xp.tanh(0.5 * a)  # 1 / (1 + exp(-a)), which does not overflow
    silu = a * sigmoid

    def vjp(dy: Array) -> Array:
        da = dy * b * (sigmoid + silu * (1 - sigmoid))
        return xp.concatenate([da, dy * silu], axis=-1)

    return silu * b, vjp


@functools.cache
def penalty(heads: int, xp: Any) -> scores.Score:
    """ALiBi: take from a score what grows with the distance, in the first head fastest.

    That head's slope of 2 leaves hardly more than the last two bytes, and pairs of letters are what
    is learnt first: after 100 steps on the CPU the loss is 2.2, and 2.4 with the paper's slopes.
    """
    return scores.alibi(xp.asarray(2.0 ** (1 - 8.0 * np.arange(heads) / heads)))


def split_heads(qkv: Array, batch: int, heads: int) -> list[Array]:
    """Views of the queries, keys and values in (T, 3 C): three of shape (B, H, L, D)."""
    rows = qkv.reshape(batch, -1, 3, heads, qkv.shape[-1] // (3 * heads))
    return [rows[:, :, n].swapaxes(1, 2) for n in range(3)]


def join_heads(o: Array) -> Array:
    """Rows of shape (T, C) of (B, H, L, D), without a copy where o has the memory order of q."""
    return o.swapaxes(1, 2).reshape(o.shape[0] * o.shape[2], -1)


def attend(
    qkv: Array,
    batch: int,
    heads: int,
    dtype: str,
    xp: Any,
    function: Callable[..., Any] = cupyflash.attention_vjp,
) -> tuple[Array, Vjp]:
    """Causal attention of packed queries, keys and values, shape (T, 3 C), to shape (T, C).

    The model knows positions from the mask and from the penalty on distance alone.
    """
    q, k, v = split_heads(qkv.astype(dtype, copy=False), batch, heads)
    o, attention_vjp = function(q, k, v, mask=masks.causal(), score_mod=penalty(heads, xp))

    def vjp(dy: Array) -> Array:
        do = dy.reshape(batch, -1, heads, o.shape[-1]).swapaxes(1, 2).astype(dtype, copy=False)
        dqkv = xp.empty_like(qkv)
        places = split_heads(dqkv, batch, heads)
        for place, gradient in zip(places, attention_vjp(do)[:3], strict=True):
            place[...] = gradient.astype(qkv.dtype, copy=False)
        return dqkv

    return join_heads(o).astype(qkv.dtype, copy=False), vjp


def cross_entropy(logits: Array, targets: Array, xp: Any) -> tuple[Array, Callable[[], Array]]:
    """Mean over the rows of -ln softmax(logits)[target]."""
    rows = xp.arange(len(targets))
    shifted = logits - logits.max(axis=-1, keepdims=True)
    p = xp.exp(shifted)
    l = p.sum(axis=-1, keepdims=True)
    loss = (xp.log(l[:, 0]) - shifted[rows, targets]).mean()

    def vjp() -> Array:
        dlogits = p / l
        dlogits[rows, targets] -= 1
        return dlogits / len(targets)

    return loss, vjp


def weight_shapes(setting: Setting) -> dict[str, tuple[int, ...]]:
    """Name the arrays of weights, and give their shapes: a gain has one axis, a matrix two."""
    width = setting.width
    inner = 8 * -(-width // 3)  # two halves for swiglu, each 4/3 of the width
    of_a_layer = (
        (width,),
        (width, 3 * width),
        (width, width),
        (width,),
        (width, inner),
        (inner // 2, width),
    )
    shapes: dict[str, tuple[int, ...]] = {"embedding": (BYTES, width)}
    for n in range(setting.layers):
        names = (f"{n}.{name}" for name in OF_A_LAYER)
        shapes |= dict(zip(names, of_a_layer, strict=True))
    return shapes | {"norm": (width,), "logits": (width, BYTES)}


def initial_weights(setting: Setting, rng: np.random.Generator, xp: Any, dtype: Any) -> Weights:
    """Draw the weights; the last matrix is 0, so that the first loss is ln 256 = 5.545."""
    # What a layer adds to its input starts small, so that depth changes no size.
    small = 1 / math.sqrt(2 * setting.layers)
    scales = {"embedding": math.sqrt(BYTES), "logits": 0.0}
    weights = {}
    for name, shape in weight_shapes(setting).items():
        if len(shape) == 1:
            weights[name] = xp.ones(shape, dtype)
            continue
        scale = small if name.endswith(" out") else scales.get(name, 1.0)
        drawn = rng.standard_normal(shape) * (scale / math.sqrt(shape[0]))
        weights[name] = xp.asarray(drawn.astype(dtype))
    return weights


def layer(x: Array, weights: Weights, n: int, attend: Attend, xp: Any) -> tuple[Array, Vjp]:
    """Add attention, then a perceptron, each of the normalised sum before it."""
    gain1, qkv, out1, gain2, in2, out2 = (weights[f"{n}.{name}"] for name in OF_A_LAYER)

    y, norm1_vjp = rms_norm(x, gain1)
    y, qkv_vjp = linear(y, qkv)
    y, attend_vjp = attend(n, y)
    y, out1_vjp = linear(y, out1)
    x = x + y
    y, norm2_vjp = rms_norm(x, gain2)
    y, in2_vjp = linear(y, in2)
    y, swiglu_vjp = swiglu(y, xp)
    y, out2_vjp = linear(y, out2)

    def vjp(dx: Array) -> tuple[Array, Weights]:
        # The same lines, backwards. A sum hands its gradient to both of its terms.
        dy, dout2 = out2_vjp(dx)
        dy, din2 = in2_vjp(swiglu_vjp(dy))
        dy, dgain2 = norm2_vjp(dy)
        dx = dx + dy
        dy, dout1 = out1_vjp(dx)
        dy, dqkv = qkv_vjp(attend_vjp(dy))
        dy, dgain1 = norm1_vjp(dy)
        gradients = (dgain1, dqkv, dout1, dgain2, din2, dout2)
        named = zip(OF_A_LAYER, gradients, strict=True)
        return dx + dy, {f"{n}.{name}": gradient for name, gradient in named}

    return x + y, vjp


def model(
    tokens: Array, weights: Weights, layers: int, attend: Attend, xp: Any
) -> tuple[Array, Vjp]:
    """Logits of the byte that follows each of the T `tokens`, shape (T, 256).

    Attention alone knows which of them belong together.
    """
    x, layer_vjps = weights["embedding"][tokens], []
    for n in range(layers):
        x, layer_vjp = layer(x, weights, n, attend, xp)
        layer_vjps.append(layer_vjp)
    x, norm_vjp = rms_norm(x, weights["norm"])
    logits, logits_vjp = linear(x, weights["logits"])

    def vjp(dlogits: Array) -> Weights:
        gradients: Weights = {}
        dx, gradients["logits"] = logits_vjp(dlogits)
        dx, gradients["norm"] = norm_vjp(dx)
        for layer_vjp in reversed(layer_vjps):
            dx, named = layer_vjp(dx)
            gradients |= named
        dembedding = xp.zeros_like(weights["embedding"])
        xp.add.at(dembedding, tokens, dx)  # a byte that comes twice adds twice
        return gradients | {"embedding": dembedding}

    return logits, vjp


def loss_vjp(
    windows: Array, weights: Weights, setting: Setting, xp: Any
) -> tuple[Array, Callable[[], Weights]]:
    """Mean loss of windows of text, shape (B, L + 1): each byte but the first is predicted."""
    windows = windows.astype(np.int64, copy=False)

    def attend_windows(_: int, qkv: Array) -> tuple[Array, Vjp]:
        return attend(qkv, len(windows), setting.heads, setting.attention, xp)

    tokens = windows[:, :-1].ravel()
    logits, model_vjp = model(tokens, weights, setting.layers, attend_windows, xp)
    loss, entropy_vjp = cross_entropy(logits, windows[:, 1:].ravel(), xp)
    return loss, lambda: model_vjp(entropy_vjp())


@dataclasses.dataclass(frozen=True)
class Checked:
    """One gradient against a central difference; both numbers are shares of the gradient's norm.

    `bound` is what the difference may be off by: its truncation, which falls with the square of
    the step and so shows in the difference of twice the step, and the rounding of the loss.
    """

    name: str
    error: float
    bound: float


def check_gradients(setting: Setting, rng: np.random.Generator, xp: Any) -> list[Checked]:
    """Compare the gradient of each array of weights along a random direction, in float64."""
    weights = initial_weights(setting, rng, xp, np.float64)
    for name, w in weights.items():  # so that no gain is 1 and no matrix 0
        weights[name] = w + 0.2 * xp.asarray(rng.standard_normal(w.shape))
    windows = xp.asarray(rng.integers(0, BYTES, (setting.batch, setting.context + 1)))
    loss, vjp = loss_vjp(windows, weights, setting, xp)
    gradients, checked = vjp(), []
    for name, w in weights.items():
        u = xp.asarray(rng.choice([-1.0, 1.0], w.shape))

        def difference(step: float, name: str = name, w: Array = w, u: Array = u) -> float:
            up, down = (
                float(loss_vjp(windows, weights | {name: w + sign * step * u}, setting, xp)[0])
                for sign in (1, -1)
            )
            return (up - down) / (2 * step)

        once, twice = difference(STEP), difference(2 * STEP)
        norm = float(xp.sqrt((gradients[name] ** 2).sum()))
        error = abs(float((gradients[name] * u).sum()) - once)
        bound = abs(twice - once) + ROUNDING * float(loss) / STEP
        checked.append(Checked(name, error / norm, bound / norm))
    return checked
