"""Recognises calls of tensors on the CPU that look like an earlier one, as `recognised` on a GPU.

A call is recognised by its tensors' own attributes and made again by their addresses
(`host_quick`): no array of NumPy is made. What `host_replay` keeps of the call on arrays is
what computes it, so a call that it forgets is forgotten here. PyTorch's own functions use the CPU's
caches between two calls, and to read a function, a dictionary or an object anew takes as long as
many operations; so there are few of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..arrays.device_arrays import address
from ..backends import host_recent, host_replay
from ..backends.cpu_tiles import FEWEST_KEYS
from ..backends.host_quick import NUMBERS_OF_KEYS, Quick
from ..masks import Mask
from ..problem import replay
from ..problem.replay import UnlikeError
from . import recognised, tensors
from .operands import Operands, Settings
from .tensors import PLAIN, array_of

_FEW = (FEWEST_KEYS - 1,)
_ONE, _AXES = (1,), 4
_STEPS = NUMBERS_OF_KEYS[1:]


def signature(kind: Hashable, settings: Settings, x: Operands) -> Signature | None:
    """Return the signature of a call on the CPU, or None if it must be checked every time."""
    try:
        return Signature(kind, settings, x)
    except UNLIKE:
        return None


def one_query(settings: Settings, x: Operands) -> torch.Tensor | None:
    """Compute a call of one query, without a gradient, as a recent one; None if there is none."""
    q, k, v, *others = x
    mask, changes, scale, dropout, seed, precision, *_ = settings
    if not k.shape[-2:-1] > _FEW:
        return None  # as many have another kernel
    if mask is not None and type(mask) is not Mask:
        return None
    if not changes is seed is precision is None or any(y is not None for y in others):
        return None
    if type(dropout) is not float or dropout:
        return None
    if scale is not None and not (type(scale) is float and scale == 1.0 / math.sqrt(q.shape[-1])):
        return None
    arrays = _arrays(q, k, v)
    made = None if arrays is None else host_recent.of_one_query(*arrays, mask)
    return None if made is None else torch.from_numpy(made)


def cached_query(q: Any, k: Any, v: Any, lengths: Any, mask: Any) -> torch.Tensor | None:
    """Compute a call of one query over a cache likewise."""
    if mask is not None and type(mask) is not Mask:
        return None
    if tensors.is_transforming() or torch.is_autocast_enabled("cpu"):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if type(lengths) in PLAIN and lengths.is_cpu:
        lengths = array_of(lengths)
    arrays = _arrays(q, k, v)
    made = None if arrays is None else host_recent.of_cache(*arrays, lengths, mask)
    return None if made is None else torch.from_numpy(made)


def _arrays(*qkv: Any) -> tuple[Any, Any, Any] | None:
    """Return tensors on the CPU as arrays, or None if NumPy does not have their dtype."""
    for x in qkv:
        if type(x) not in PLAIN or x.dtype not in _OF_NUMPY or not x.is_cpu:
            return None
    q, k, v = (x.numpy(force=True) for x in qkv)
    return q, k, v


_UNKNOWN: tuple[Any, Any] = None, True  # a structure, and whether it reads arrays
_OF_NUMPY = torch.float32, torch.float64
UNLIKE = UnlikeError, RuntimeError


class Signature(host_replay.HostSignature):
    """The signature of a call of tensors on the CPU, which need not have been checked.

    Parameters
    ----------
    kind : hashable
        Which function, and what else tells calls of it apart.
    settings : Settings
        The options that are not tensors.
    x : Operands
        The tensors of the call.

    Raises
    ------
    UnlikeError, RuntimeError
        These are `UNLIKE`: the call must be checked every time. PyTorch raises the latter of a
        tensor without memory.

    Attributes
    ----------
    known : Known or None
        What is kept of calls like this one.
    has_gradients : bool
        Whether its gradients can be computed from addresses.
    """

    __slots__ = ("_rows_first", "_strides", "_strides_of_others", "has_gradients", "known")

    def __init__(self, kind: Hashable, settings: Settings, x: Operands) -> None:
        q, k, v, bias, sink, mask, of_seed, offsets_q, _ = x
        made, changes, scale, dropout, seed, precision, _, check, _, rows_first, _ = settings
        if of_seed is not None:
            seed = recognised.number_of(of_seed)
        if not (check is None or check is False):
            raise UnlikeError  # it may be wrong
        if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
            raise UnlikeError
        dtype = q.dtype
        if sink is not None or not k.dtype is dtype is v.dtype:
            raise UnlikeError
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not (at_q and at_k and at_v and k.is_cpu and v.is_cpu):
            raise UnlikeError
        if q.is_neg() or k.is_neg() or v.is_neg():
            raise UnlikeError
        self._strides = of_q, of_k, of_v = q.stride(), k.stride(), v.stride()
        self.addresses = {"q": at_q, "k": at_k, "v": at_v}
        self._parts = parts = [kind, dtype, q.shape, of_q, k.shape, of_k, v.shape, of_v]
        if q.shape[-2:-1] == _ONE and mask is bias is made is changes is seed is None:
            self._grow(k, v)
        self.read = ()
        if made is not None:
            structure, read = made.structure if type(made) is Mask else _UNKNOWN
            if not read:
                parts.append(structure)
            else:
                self._take("mask", made)
        if mask is not None:
            self._take("mask", mask)
        if changes is not None:
            self._take("score_mod", changes)
        if bias is not None:
            if type(bias) not in PLAIN:
                raise UnlikeError
            self._take("bias", bias)
        if scale is not None:
            is_usual = type(scale) is float and scale
            parts.append(("scale", scale if is_usual else self._number(scale)))
        if type(dropout) is not float or dropout:
            parts.append(("dropout", self._probability(dropout)))
        if seed is not None:
            parts.append(("seed", self._seed(seed)))
        if precision is not None:
            parts.append(("precision", self._word(precision)))
        if offsets_q is not None:
            self._take_offsets(x)
        self._rows_first = rows_first
        if rows_first:
            parts.append("rows first")
        if dtype.itemsize == 2:  # as in `host_replay`
            parts.append(os.environ.get("CUPYFLASH_AMX"))
        self.key = tuple(parts)
        self.has_gradients = False
        self._strides_of_others = (
            None if bias is None else bias.stride(), None if mask is None else mask.stride()
        )  # fmt: skip
        self.known = _known.get(self.key)

    def _grow(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Let a call of one query of each entry be known for any number of keys."""
        shape, of_k, of_v, parts = k.shape, self._strides[1], self._strides[2], self._parts
        if len(shape) != _AXES or len(parts[2]) != _AXES or not shape[-2] < FEWEST_KEYS:
            return
        if shape[:-1] != v.shape[:-1] or shape[0] != parts[2][0] or not of_k[-1] == 1 == of_v[-1]:
            return
        # Of k and v, there are the sizes of other axes than that of keys.
        parts[4:] = (shape[:2], shape[3], v.shape[3])
        self.addresses["len_k"] = shape[-2]
        for name, strides in zip(_STEPS, of_k[:3] + of_v[:3], strict=True):
            self.addresses[name] = strides

    def _take(self, option: str, value: Any) -> None:
        """Take an option that may read arrays."""
        self._option, self._extremes, self.nbytes = option, [], 0
        self._conditions = {id(value)}
        self._parts += (option, self._expression(value))

    def _take_offsets(self, x: Operands) -> None:
        self._option, self._extremes, self.nbytes = "offsets", [], 0
        both: tuple[Any, Any] = x.offsets_q, x.offsets_k
        for offsets in both:
            if type(offsets) not in PLAIN or not offsets.is_cpu:
                raise UnlikeError
            array = array_of(offsets)
            self._parts += (array.dtype, array.shape)
            self.take_contents(array)

    def _take_arrays(self, named: Mapping[str, Any]) -> None:
        """Take tensors, and arrays of masks and score changes."""
        for name, x in named.items():
            if type(x) in PLAIN:
                place = x.data_ptr()
                if not (place and x.is_cpu) or x.is_neg():
                    raise UnlikeError
                self._parts += (x.dtype, x.shape, x.stride())
            elif type(x) is np.ndarray:
                place = address(x)
                self._parts += (x.dtype, x.shape, x.strides, x.flags.num)
            else:
                raise UnlikeError
            self.addresses[name] = place

    def _take_read(self, name: str, array: Any) -> None:
        """Take a tensor or an array; contents as in `host_replay`."""
        if type(array) not in PLAIN:
            super()._take_read(name, array)
        elif array.dtype is torch.bool and self._option == "mask":
            self._take_arrays({name: array})
            self._parts.append(host_replay.extremes(array_of(array)))
        elif self._option == "bias" and array.is_floating_point():
            self._take_arrays({name: array})
        else:
            raise UnlikeError

    def _seed(self, value: Any) -> Hashable:
        if type(value) is not int or not 0 <= value < 2**64:
            raise UnlikeError
        self.addresses["seed"] = value
        return False

    def pending(self, how: tuple[bool, bool], out: torch.Tensor) -> Pending | None:  # noqa: ARG002, a GPU's
        """Return how gradients of the call, which was launched, are computed; None if unknown.

        `how` says whether they are deterministic, and whether they have that of the bias.
        """
        known = self.known
        if known is None or not self.has_gradients:
            return None
        found = known.gradients.get(how)
        if found is None:
            return None
        addresses = self.addresses
        at = addresses["q"], addresses["k"], addresses["v"], addresses["out"]
        return Pending(found, at, [*map(addresses.__getitem__, found.names)])

    def keep_forward(
        self, host: Any, results: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        """Keep a call that was computed, whose signature with arrays was `host`.

        `dtype` is that of its queries.
        """
        if self.known is not None and self.known.is_never:
            return
        quick, names = self._quick(host, "lse" in results)
        if "len_k" in self.addresses and "len_k" not in names:
            quick = None  # it is for one number of keys
        if len(_known) >= MOST:
            for oldest in list(_known)[: MOST // 4]:  # a copy: other threads keep calls, too
                _known.pop(oldest, None)
        _known[self.key] = self.known = Known(quick, names, results, dtype, self._rows_first)

    def keep_gradients(
        self, how: tuple[bool, bool], do: torch.Tensor, host: Any, results: Sequence[torch.Tensor]
    ) -> None:
        """Keep gradients of this call that were computed, for later calls like it."""
        known = self.known
        if known is None or not self.has_gradients or how in known.gradients:
            return
        known.gradients[how] = None
        if known.has_rows_first:
            do = do.transpose(1, 2)
        quick, names = self._quick(host, True)
        if quick is None:
            return
        rest = names[len(_GRADIENTS) :]
        if rest[-1:] == ("dbias",):
            rest = rest[:-1]
            if results[-1].dtype is not known.dtype_of_lse:
                return
        if names[: len(_GRADIENTS)] == _GRADIENTS and all(x in self.addresses for x in rest):
            strides = *self._strides, known.out_stride, *self._strides_of_others
            known.gradients[how] = Gradients(quick, rest, results, do, strides)

    def _quick(self, host: Any, wants_lse: bool) -> tuple[Quick | None, tuple[str, ...]]:
        """Return what makes a call on arrays again, and the names here of what it is told."""
        nothing = None, ()
        if not isinstance(host, host_replay.HostSignature):
            return nothing
        named = host.named
        if any(self.addresses[name] != address(named[name]) for name in ("q", "k", "v")):
            return nothing  # of copies
        places = [(f"read {n}", self.addresses[f"read {n}"]) for n in range(len(self.read))]
        if len(dict(places).values()) != len({place for _, place in places}):
            return nothing  # which one is read is not sure
        entry = replay.find(host)
        quick = None if entry is None else Quick.of(entry, host.numbers, wants_lse, by_team=False)
        if quick is None:
            return nothing
        here = {place: name for name, place in places}
        names = []
        for name in quick.names:
            is_read = name.startswith("read ")
            names.append(here.get(address(named[name]), "") if is_read else name)
        return (quick, tuple(names)) if all(names) else nothing


class Known:
    """What is kept about a call.

    Parameters
    ----------
    quick : Quick or None
        What computes it from addresses, if something does.
    names : tuple of str
        The names of those addresses here.
    results : mapping of str to torch.Tensor
        What it writes, by the kernels' names.
    dtype : torch.dtype
        That of its queries.
    rows_first : bool
        Whether out is wanted as (B, L, H, D).

    Attributes
    ----------
    is_never : bool
        Whether nothing computes such calls from addresses.
    has_rows_first : bool
        Whether later calls return out as (B, L, H, D). It lies as the queries do, but is no view,
        of which PyTorch would record a derivative.
    out_stride : tuple of int
        The strides of out.
    dtype_of_lse : torch.dtype or None
        That of lse, if it is wanted.
    gradients : dict
        What is kept about the gradients of such calls, by `how` of `Signature.pending`.
    """

    __slots__ = (
        "_forms", "_names", "_run", "dtype_of_lse", "gradients", "has_rows_first", "is_never",
        "out_stride",
    )  # fmt: skip

    def __init__(
        self,
        quick: Quick | None,
        names: tuple[str, ...],
        results: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        rows_first: bool = False,
    ) -> None:
        self.is_never = quick is None
        self.has_rows_first = rows_first and not self.is_never
        if self.has_rows_first:
            results = {**results, "out": results["out"].transpose(-3, -2)}
        self._run, self._names = None if quick is None else quick.run, names
        self._forms = [
            (name, tuple(x.shape), x.stride(), None if x.dtype is dtype else x.dtype)
            for name, x in results.items()
        ]
        self.out_stride = results["out"].stride()
        lse = results.get("lse")
        self.dtype_of_lse = None if lse is None else lse.dtype
        self.gradients: dict[tuple[bool, bool], Gradients | None] = {}

    def launch(self, addresses: dict[str, int], q: torch.Tensor) -> list[torch.Tensor] | None:
        """Compute a call into new tensors; None if it must go another way."""
        run = self._run
        if run is None:
            return None
        empty = q.new_empty_strided
        made = []
        for name, shape, strides, dtype in self._forms:
            x = empty(shape, strides) if dtype is None else empty(shape, strides, dtype=dtype)
            addresses[name] = x.data_ptr()
            made.append(x)
        told = [*map(addresses.__getitem__, self._names)]  # a comprehension is a function
        return made if run(told, True) else None


class Pending:
    """The gradients of one call, which are computed later.

    Parameters
    ----------
    gradients : Gradients
        What computes them.
    places : tuple of int
        The addresses of q, k, v and out.
    rest : list of int
        That of lse, and further addresses.
    """

    __slots__ = ("gradients", "places", "rest")

    def __init__(self, gradients: Gradients, places: tuple[int, ...], rest: list[int]) -> None:
        self.gradients, self.places, self.rest = gradients, places, rest


class Gradients:
    """Gradients of calls with one signature, which need no signature of their own.

    Parameters
    ----------
    quick : Quick
        What computes them from addresses.
    names : tuple of str
        The names of addresses, in the signature of the call, that are told in addition.
    results : sequence of torch.Tensor
        dq, dk and dv, and that of the bias if it is wanted.
    do : torch.Tensor
        What they were computed of.
    strides : sequence of tuple of int
        Those of q, k, v and out, and of a bias and a mask.
    """

    __slots__ = ("_do", "_forms", "_run", "_strides", "names")

    def __init__(
        self,
        quick: Quick,
        names: tuple[str, ...],
        results: Sequence[torch.Tensor],
        do: torch.Tensor,
        strides: Sequence[Any],
    ) -> None:
        self._run, self.names = quick.run, ("lse", *names)
        self._do, self._strides = (do.dtype, do.stride()), tuple(strides)
        self._forms = [(x.shape, x.stride(), x.dtype) for x in results[:3]]
        # The kernel that adds up sums of a bias writes them one after the other.
        self._forms += [(x.shape, x.new_empty(x.shape).stride(), x.dtype) for x in results[3:]]

    def compute(self, pending: Pending, saved: Sequence[Any], do: Any) -> list[torch.Tensor] | None:
        """Compute gradients, given the operands of a call and out; None if they are unlike.

        PyTorch has checked the versions of saved tensors, and that `do` has the shape of out and is
        on its device. Users' hooks may have put other tensors in place of the saved ones, elsewhere
        or with other strides.
        """
        if type(do) not in PLAIN or (do.dtype, do.stride()) != self._do:
            return None
        place = do.data_ptr()
        if not place or do.is_neg():
            return None
        rest = pending.rest
        if len(saved) == _FEWEST:
            q, k, v, out = saved
            strides: tuple[Any, ...] = q.stride(), k.stride(), v.stride(), out.stride(), None, None
        else:
            q, k, v, bias, _, mask, *_, out = saved
            strides = q.stride(), k.stride(), v.stride(), out.stride()
            for other in bias, mask:
                if other is None:
                    strides += (None,)
                elif other.data_ptr() in rest:
                    strides += (other.stride(),)
                else:
                    return None
        if strides != self._strides:
            return None
        at = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        if at != pending.places:
            return None
        lse, *rest = rest
        empty = q.new_empty_strided
        made = [empty(shape, stride, dtype=dtype) for shape, stride, dtype in self._forms]
        of_made = [x.data_ptr() for x in made]
        told = [place, *at, lse, *of_made[:3], *rest, *of_made[3:]]
        return made if self._run(told, True) else None


_GRADIENTS = "d_out", "q", "k", "v", "out", "lse", "dq", "dk", "dv"
_FEWEST = 4  # tensors that are saved: q, k, v and out
MOST = 1024  # signatures that are remembered
_known: dict[Hashable, Known] = {}
