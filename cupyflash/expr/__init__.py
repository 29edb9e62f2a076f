"""Expressions for masks and scores: the parts from which a function of (b, h, i, j) is made."""

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
