"""Expressions for masks and scores: what a function of (b, h, i, j) may be made of."""

from .functions import (
    absolute,
    clip,
    exp,
    floor,
    len_k,
    len_q,
    log,
    maximum,
    minimum,
    tanh,
    where,
)

__all__ = [
    "absolute",
    "clip",
    "exp",
    "floor",
    "len_k",
    "len_q",
    "log",
    "maximum",
    "minimum",
    "tanh",
    "where",
]
