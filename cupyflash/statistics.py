"""The public functions of statistics: reductions of attention's weights, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple

import numpy as np

from . import execute
from .arrays import cuda_device, interop
from .arrays.interop import DLPackArray
from .arrays.typed import A, B, FloatArray, Number
from .errors import ArgumentError, ArgumentTypeError
from .expr.bind import Alignment, Axis, aligned
from .expr.functions import POSITIONS, len_k, where
from .expr.nodes import Expr
from .masks import Mask
from .problem import validate
from .problem.bound_exprs import by_query
from .problem.call import Array
from .problem.keywords import explained
from .problem.options import Options
from .reduced_call import ReducedCall, without_values
from .reductions import WEIGHT, Reduction
from .request import Request
from .scores import Score

_, _H, _I, _J = POSITIONS


class ReductionGradients(NamedTuple, Generic[A, B]):
    """Gradients of reductions, each with the shape and dtype of its array.

    Attributes
    ----------
    dq, dk : array
        Summed over the axes along which q or k was broadcast, and over the query heads that share
        a key-value head.
    dbias, dsink : array or None
        None if the call had no bias or no sink.
    """

    dq: A
    dk: A
    dbias: B
    dsink: B


@explained
def reduce(
    q: DLPackArray,
    k: DLPackArray,
    reductions: Mapping[str, Reduction],
    *,
    lse: DLPackArray | None = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: Number | None = None,
) -> dict[str, Any]:
    """Compute statistics of attention's weights and logits, without storing either.

    Memory grows with the queries and keys, as in `attention`. Each reduction is a pass over the
    scores, and the log-sum-exp is one more if it is needed and not given. Results have the same
    bits in every run and in any batch.

    Parameters
    ----------
    q, k : array
        As in `attention`. CuPy arrays are reduced on their GPU, by a portable kernel.
    reductions : mapping of str to Reduction
        What to compute, by names of your own: see `cupyflash.reductions`.
    lse : array, shape (..., Hq, Lq), optional
        The log-sum-exp that `attention` returned for the same arrays and options.
    mask, score_mod, bias, sink, scale
        As in `attention`.

    Returns
    -------
    dict of str to array
        By the same names: arrays of float32, or float64 if `q` is; of int64 by "argmax", and a
        `TopKeys` by "top". If q and k are matrices, results have no axis of heads.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    See Also
    --------
    reduce_vjp : The same with gradients.

    Notes
    -----
    A weight is ``p = exp(t - lse)``, where t is the logit and the log-sum-exp includes the sink.
    Dropout has no part in it. A pair that does not attend is left out of every reduction.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import masks, reduce, reductions
    >>> q, k = np.random.default_rng(0).standard_normal((2, 4, 50, 8))
    >>> found = reduce(q, k, {"mass": reductions.mass()}, mask=masks.causal())
    >>> bool(np.allclose(found["mass"].sum(axis=-1), 50))  # one for each query
    True
    """
    options = _options(mask, score_mod, bias, sink, scale)
    named = _named(reductions)
    return ReducedCall.of(q, k, options, lse, named).found(named)


def with_reductions(
    request: Request, reductions: Any, return_lse: Any, out: Any, lse_out: Any
) -> tuple[Any, ...]:
    """Compute a call of `attention` and reductions of it, which read its log-sum-exp."""
    execute.check_flag(return_lse, "return_lse")
    named = _named(reductions)
    names = ", ".join(map(repr, named))
    request.call.encoding.check_numbers(f"reductions: got {names}")
    given = request.options
    options = _options(given.mask, given.score_mod, given.bias, given.sink, given.scale)
    # Entries are counted along the leading axes of all three arrays.
    q, k, v = request.operands
    q, k, v = (interop.array(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    prepared = ReducedCall.of_call(without_values(q, k, v, options).call, named)
    *shown, lse = execute.forward(request, True, out, lse_out)
    found = prepared.with_lse(lse).found(named)
    return (*shown, lse, found) if return_lse else (*shown, found)


@explained
def reduce_vjp(
    q: DLPackArray,
    k: DLPackArray,
    reductions: Mapping[str, Reduction],
    *,
    lse: DLPackArray | None = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: DLPackArray | None = None,
    sink: DLPackArray | None = None,
    scale: Number | None = None,
) -> tuple[dict[str, Any], ReduceVjp]:
    """Compute reductions, and a function that computes gradients of them.

    Parameters
    ----------
    q, k, reductions, lse, mask, score_mod, bias, sink, scale
        As in `reduce`. Reductions with gradients are `entropy`, `mass`, `distance`, `blocks` of
        weights, and every sum of an expression of p and positions alone.

    Returns
    -------
    found : dict of str to array
        As returned by `reduce`.
    vjp : callable
        ``vjp({name: gradient})`` takes an array of the shape and dtype of each result, or of some,
        and returns `ReductionGradients`: those of ``sum(gradient * result)``. The log-sum-exp is
        differentiated, too, also if it was given.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `reduce`; and if a reduction has no gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import reduce_vjp, reductions
    >>> q, k = np.random.default_rng(0).standard_normal((2, 4, 50, 8))
    >>> found, vjp = reduce_vjp(q, k, {"entropy": reductions.entropy()})
    >>> dq, dk, _, _ = vjp({"entropy": np.ones((4, 50))})  # towards more even weights
    >>> dq.shape, dk.shape
    ((4, 50, 8), (4, 50, 8))
    """
    options = _options(mask, score_mod, bias, sink, scale)
    named = _named(reductions)
    for name, each in named.items():
        if each.slope is None:
            raise ArgumentError(
                f"reductions: {name!r} is {each}, which has no gradient; expected sums of weights "
                "(entropy, mass, distance, blocks) or of an expression of p and positions alone. "
                "Compute it with reduce instead."
            )
    prepared = ReducedCall.of(q, k, options, lse, named)
    found = prepared.found(named)
    return found, ReduceVjp(prepared, named, {name: x.shape for name, x in found.items()})


def _options(mask: Any, score_mod: Any, bias: Any, sink: Any, scale: Any) -> Options:
    return Options.of(
        mask=mask, score_mod=score_mod, bias=bias, sink=sink, scale=scale,
        dropout=0.0, seed=None, precision=None,
    )  # fmt: skip


def _named(reductions: Any) -> dict[str, Reduction]:
    wanted = 'expected a mapping of names to reductions, as in {"mass": reductions.mass()}'
    if not isinstance(reductions, Mapping):
        raise ArgumentTypeError(f"reductions: got {type(reductions).__name__}; {wanted}.")
    for name, each in reductions.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"reductions: got the name {name!r}; {wanted}.")
        if not isinstance(each, Reduction):
            hint = " Call the function." if callable(each) else ""
            raise ArgumentTypeError(
                f"reductions: {name!r} is {type(each).__name__}; {wanted}.{hint}"
            )
    if not reductions:
        raise ArgumentError(f"reductions: got none; {wanted}.")
    return dict(reductions)


class ReduceVjp:
    """The function that computes gradients of reductions."""

    __slots__ = ("_named", "_prepared", "_shapes")

    def __init__(
        self,
        prepared: ReducedCall,
        named: dict[str, Reduction],
        shapes: dict[str, tuple[int, ...]],
    ) -> None:
        self._prepared, self._named, self._shapes = prepared, named, shapes

    def __call__(
        self, gradients: Mapping[str, DLPackArray], *, bias_gradient: bool = True
    ) -> ReductionGradients[Array, FloatArray | None]:
        """Return gradients of q, k, bias and sink, given those of results.

        Parameters
        ----------
        gradients : mapping of str to array
            Of the shape and dtype of results, by their names; those that are missing are 0.
        bias_gradient : bool
            Whether that of the bias is computed, which is one more pass.

        Returns
        -------
        ReductionGradients

        Raises
        ------
        ArgumentError, ArgumentTypeError
            If an array does not fit its result or is elsewhere; in host memory, if heads or entries
            share a bias that has an element for each pair, whose gradients would take memory for
            all of them; and on a GPU, if a CUDA graph is being captured.
        """
        call = self._prepared.call
        execute.check_flag(bias_gradient, "bias_gradient")
        checked = self._checked(gradients)
        with nullcontext() if call.device is None else cuda_device.current(call.device):
            dq, dk, dbias, dsink = self._computed(checked, bias_gradient)
        matrix_q, matrix_k, _ = call.were_matrices
        return ReductionGradients(
            dq[0] if matrix_q else dq, dk[0] if matrix_k else dk, dbias, dsink
        )

    def _computed(self, checked: dict[str, Array], of_bias: bool) -> tuple[Any, ...]:
        """Return dq, dk, dbias and dsink; the device must be the current one."""
        prepared = self._prepared
        if prepared.call.device is not None and cuda_device.is_capturing():
            raise ArgumentError(
                "gradients: got those of reductions while a CUDA graph is being captured; expected "
                "none, because they need memory that the graph would not keep. Compute them before "
                "or after the capture."
            )
        # dT = p (sum of c f'(p) - R), where R is the sum of p c f'(p) over a row's keys.
        factor: Expr | None = None
        for name, array in checked.items():
            reduction = self._named[name]
            slope = reduction.slope
            assert slope is not None, "the function was not made otherwise"
            term = self._cotangent(reduction, array, name) * slope
            factor = term if factor is None else factor + term
        if factor is None:
            factor = WEIGHT * 0.0
        of_keys, of_sink = prepared.over_keys(prepared.of_logits(factor * WEIGHT)), None
        if prepared.call.sink is not None:
            of_sink = self._worth_of_sink(checked)
        total = of_keys if of_sink is None else of_keys + of_sink
        made = prepared.of_logits(factor) - by_query(total, "the gradient of reductions")
        dsink = None if prepared.call.sink is None else self._sink(of_sink, total)
        return *prepared.gradients(made, of_bias), dsink

    def _checked(self, gradients: Any) -> dict[str, Array]:
        """Return gradients of results as arrays that fit them."""
        if not isinstance(gradients, Mapping):
            raise ArgumentTypeError(
                f"gradients: got {type(gradients).__name__}; expected a mapping of names to arrays."
            )
        checked = {}
        for name, value in gradients.items():
            if name not in self._named:
                known = ", ".join(map(repr, self._named))
                raise ArgumentError(f"gradients: got {name!r}; expected names among {known}.")
            call, place = self._prepared.call, f"gradients: {name!r}"
            number = call.problem.accumulator
            checked[name] = validate.given(value, place, self._shapes[name], number)
            interop.one_home({"q": call.q, place: checked[name]})
        return checked

    def _cotangent(self, reduction: Reduction, array: Array, name: str) -> Expr:
        """Return what reads the gradient of the result to which a pair belongs."""
        call = self._prepared.call
        if call.matrices:
            array = array[None]
        problem = call.problem
        first, last = reduction.rows_seen(int(problem.len_q))
        axes: tuple[Axis, ...]
        if reduction.along == "keys":
            axes = (Axis(_I, "len_q"),)
        elif reduction.along == "queries":
            axes = (Axis(_J, "len_k"),)
        elif reduction.along == "distance":
            axes = (Axis(_I - _J + (len_k - 1), "distance", exact=array.shape[-1]),)
        else:
            (size_q, size_k), (rows, columns) = reduction.block, array.shape[-2:]
            axes = (
                Axis(_I // size_q, "block of queries", exact=rows),
                Axis(_J // size_k, "block of keys", exact=columns),
            )
        read = aligned(Alignment(array, f"gradients: {name!r}", (Axis(_H, "heads"), *axes)))
        if reduction.queries is not None:
            read = where((_I >= first) & (_I < last), read, 0.0)  # noqa: SIM300, of expressions
        return read

    def _worth_of_sink(self, checked: dict[str, Array]) -> Array | None:
        """Return the sink's weights times what they are worth, (..., Hq, Lq); None: nothing."""
        prepared, worth = self._prepared, None
        for name, array in checked.items():
            if self._named[name].name == "entropy":
                own = prepared.of_sink(lambda gap: gap - 1) * array.reshape(prepared.rows)
                worth = own if worth is None else worth + own
        return worth

    def _sink(self, worth: Array | None, total: Array) -> Array:
        """Return the gradient of the sink, given what its weights are worth."""
        prepared = self._prepared
        summed = -(prepared.of_sink(np.ones_like) * total)
        if worth is not None:
            summed = worth + summed
        axes = tuple(n for n in range(summed.ndim) if n != summed.ndim - 2)
        sink: Any = prepared.call.sink
        made: Array = summed.sum(axis=axes).astype(sink.dtype)
        return made
