"""Test a kernel for every property that applies: this package's, or any with the same signature."""

from __future__ import annotations

import contextlib
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cupyflash.arrays.dtypes import FLOATS
from cupyflash.hints.did_you_mean import nearest
from cupyflash.hints.install import CUPY

from .cases import Problem
from .copies import CuPyMemory, HostMemory, Memory
from .families import FAMILIES
from .features import FEATURES
from .judge import NotClaimedError, PropertyError
from .options import float_type, known_floats
from .precision import Precision
from .properties import NOT_APPLICABLE, PROPERTIES, Property
from .report import FAILED, PASSED, Failure, Report, Result
from .report import NOT_APPLICABLE as IDLE
from .subject import Call, EmptyRows, Subject

EXAMPLES = 40
SHRINKING = 10.0  # seconds
REFUSALS = 40  # problems in a row; a property whose calls a kernel never serves has no more
LATE = "no time was left"
FUNCTIONS = {
    "backward": "no backward_fn was given",
    "varlen": "no varlen function was given",
    "varlen_backward": "no varlen_backward function was given",
    "combine": "no combine function was given",
    "cached": "no cached function was given",
    "append": "no append function was given",
    "rope": "no rope function was given",
    "jvp": "no jvp function was given",
    "varlen_jvp": "no varlen_jvp function was given",
    "backward_jvp": "no backward_jvp function was given",
}


class _FailedError(Exception):
    """One exception for all failures, so that hypothesis shrinks them as one."""


def memory_of(device: str) -> Memory:
    """Return where a device's arrays live; an error says what is missing."""
    if device == "cpu":
        return HostMemory()
    if device != "gpu":
        raise ValueError(f"device: got {device!r}; expected 'cpu' or 'gpu'")
    try:
        memory = CuPyMemory()
    except ImportError as error:
        raise ImportError(f"device gpu needs CuPy, which is not installed: {CUPY}") from error
    if not memory.available():
        raise RuntimeError("device gpu: CuPy finds no usable NVIDIA GPU")
    return memory


def strategy_of(
    prop: Property,
    dtypes: Sequence[np.dtype[Any]],
    features: Iterable[str],
    tiles: tuple[int, int] | None,
    families: Sequence[str] | None = None,
    shapes: int | None = None,
) -> Any:
    """Return the hypothesis strategy that draws a property's problems.

    Parameters
    ----------
    prop : Property
        The property to try.
    dtypes : sequence of dtype
        Types of q, k and v.
    features : iterable of str
        What the kernel supports.
    tiles : tuple of 2 int or None
        Rows and keys of its tiles; for None, small ones are drawn.
    families : sequence of str, optional
        The families of elements to draw from; by default all that the property allows.
    shapes : int, optional
        How many shapes there are at most.

    Returns
    -------
    SearchStrategy
        Of `Problem`.
    """
    from .hypothesis_needed import st
    from .strategies import plain, problems

    chosen = [x for x in dtypes if prop.dtypes is None or x.name in prop.dtypes]
    if prop.draws == "plain":
        return plain(chosen, features=features, tiles=tiles, shapes=shapes, **prop.more)
    more = prop.more | {"packed": prop.draws == "packed"}
    if families is not None:
        allowed = more.get("families", tuple(FAMILIES))
        more["families"] = [x for x in families if x in allowed]

    def of_dtype(dtype: Any) -> Any:
        return problems(dtype, features=features, tiles=tiles, shapes=shapes, **more)

    return st.sampled_from(chosen).flatmap(of_dtype)


def why_not(
    prop: Property,
    subject: Subject,
    dtypes: Sequence[np.dtype[Any]],
    families: Sequence[str] | None = None,
) -> str:
    """Say why a property does not apply to a kernel; nothing where it does."""
    missing = prop.needs - subject.knows
    for name in sorted(missing & set(FUNCTIONS)):
        return FUNCTIONS[name]
    if missing:
        return f"the kernel lacks {', '.join(sorted(missing))}"
    if prop.dtypes is not None and not {x.name for x in dtypes} & set(prop.dtypes):
        return f"it is about {', '.join(prop.dtypes)}"
    own = prop.more.get("families", FAMILIES)
    if families is not None and prop.draws != "plain" and not set(families) & set(own):
        return f"it is about the families {', '.join(own)}"
    return ""


def run(
    prop: Property,
    subject: Subject,
    dtypes: Sequence[np.dtype[Any]],
    examples: int,
    seed: int,
    *,
    shrink: bool = True,
    climb: bool = False,
    families: Sequence[str] | None = None,
    keep_going: bool = False,
    shapes: int | None = None,
    deadline: float = float("inf"),
) -> Result:
    """Try a property on problems that hypothesis draws.

    Parameters
    ----------
    prop : Property
        The property.
    subject : Subject
        The kernel.
    dtypes : sequence of dtype
        Types of q, k and v.
    examples, seed : int
        The number of problems, and their seed.
    shrink : bool
        Whether to look for a smaller problem after a failure, for a few seconds.
    climb : bool
        Whether to search where the ratios of error to bound are large.
    families : sequence of str, optional
        The families of elements to draw from.
    keep_going : bool
        Whether to try all problems after a failure, instead of looking for a smaller one.
    shapes : int, optional
        How many shapes are drawn at most.
    deadline : float
        No further problem is begun when `time.perf_counter` is beyond it.

    Returns
    -------
    Result
        The result, with the smallest failure that was found, or the first one of each family.
    """
    from .hypothesis_needed import hypothesis

    reason, begin = why_not(prop, subject, dtypes, families), time.perf_counter()
    if reason:
        return Result(prop.name, prop.formula, IDLE, reason)
    phases = [hypothesis.Phase.generate]
    phases += [hypothesis.Phase.target] if climb else []
    phases += [hypothesis.Phase.shrink] if shrink and not keep_going else []
    settings = hypothesis.settings(
        max_examples=max(2, round(examples * prop.weight)), phases=phases, database=None,
        deadline=None, suppress_health_check=list(hypothesis.HealthCheck), print_blob=False,
        report_multiple_bugs=False, verbosity=hypothesis.Verbosity.quiet,
    )  # fmt: skip
    subject.start()
    failed: dict[str, Failure] = {}
    tried, refused, until, last = 0, 0, deadline, ""

    def attempt(problem: Problem) -> None:
        nonlocal tried, refused, until, last
        if problem.line not in failed:
            if time.perf_counter() > until or (refused >= REFUSALS and not tried):
                return
            subject.highest, subject.family = 0.0, problem.family
            try:
                prop.check(subject, problem)
            except NotClaimedError:
                refused += 1
                hypothesis.reject()
            except Exception as error:  # noqa: BLE001 (whatever a kernel raises is a failure)
                failed[problem.line] = failure_of(error, problem)
                if not keep_going:
                    until = min(until, time.perf_counter() + SHRINKING)
            tried += keep_going or len(failed) <= 1
            if climb and np.isfinite(subject.highest):
                hypothesis.target(subject.highest)
        if problem.line in failed and not keep_going:
            last = problem.line
            raise _FailedError

    drawn = strategy_of(prop, dtypes, subject.features, subject.tiles, families, shapes)
    number = (zlib.crc32(prop.name.encode()) ^ seed) & (2**64 - 1)
    given: Any = hypothesis.given(drawn)
    test = hypothesis.seed(number)(settings(given(attempt)))
    try:
        with np.errstate(all="ignore"):  # whatever the program has set
            test()
    except (_FailedError, hypothesis.errors.Flaky, BaseExceptionGroup):
        if not failed:
            raise
    except hypothesis.errors.Unsatisfiable:
        pass  # the kernel serves none of the calls
    if not tried and not failed:
        late = time.perf_counter() > deadline and refused < REFUSALS
        reason = LATE if late else "the kernel serves none of its calls"
        return Result(prop.name, prop.formula, IDLE, reason)
    first = {each.family: each for each in reversed(failed.values())} if keep_going else {}
    found = tuple(reversed(first.values())) if keep_going else (failed[last],) if failed else ()
    return Result(
        prop.name, prop.formula, FAILED if failed else PASSED, examples=tried,
        seconds=time.perf_counter() - begin, worst=subject.worst_ratios(), failures=found,
        families=dict(subject.families),
    )  # fmt: skip


def failure_of(error: Exception, problem: Problem) -> Failure:
    """Say what went wrong in one line, and where, if it is an exception of the kernel's."""
    text = " ".join(str(error).split())
    if isinstance(error, PropertyError):
        return Failure(text, problem.line, problem.family)
    frames = traceback.extract_tb(error.__traceback__)
    own = [x for x in frames if not _of_the_kit(Path(x.filename))]
    where = "".join(traceback.format_list(own or list(frames)))
    return Failure(f"{type(error).__name__}: {text}", problem.line, problem.family, where)


def _of_the_kit(file: Path) -> bool:
    kit = Path(__file__).parent
    return file.is_relative_to(kit) and not file.is_relative_to(kit / "peers")


def verify(
    attention_fn: Callable[..., Any],
    backward_fn: Callable[..., Any] | None = None,
    *,
    device: str = "cpu",
    precision: Precision | Callable[[np.dtype[Any]], Precision] | None = None,
    dtypes: Iterable[Any] | None = None,
    features: Iterable[str] | None = None,
    examples: int = EXAMPLES,
    seed: int = 0,
    tiles: tuple[int, int] = (64, 64),
    float8: Literal["float32", "out_dtype", "codes"] = "float32",
    varlen: Callable[..., Any] | None = None,
    varlen_backward: Callable[..., Any] | None = None,
    combine: Callable[..., Any] | None = None,
    cached: Callable[..., Any] | None = None,
    append: Callable[..., Any] | None = None,
    rope: Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
    varlen_jvp: Callable[..., Any] | None = None,
    backward_jvp: Callable[..., Any] | None = None,
    empty_rows: EmptyRows = "zero",
    serves: Callable[[Call], bool] | None = None,
    shapes: int | None = None,
    seconds: float | None = None,
    families: str | Iterable[str] | None = None,
    keep_going: bool = False,
    only: str | Iterable[str] | None = None,
    stop: bool = False,
    progress: Callable[[int, int, Result], None] | None = None,
) -> Report:
    """Verify an attention kernel: run every property that applies to it.

    Parameters
    ----------
    attention_fn : callable
        ``attention_fn(q, k, v, *, mask, score_mod, bias, sink, scale, dropout, seed,
        return_lse=True) -> (out, lse)``, as in `cupyflash.attention`. An option is passed only if
        a problem uses it and ``features`` includes it.
    backward_fn : callable, optional
        ``backward_fn(do, q, k, v, out, lse, *, dlse, ...) -> (dq, dk, dv, dbias, dsink)``, as in
        `cupyflash.attention_backward`; the last two may be left out if there is no such input.
    device : str
        "cpu" for NumPy arrays, "gpu" for CuPy arrays. In both cases, they have guards of NaN around
        them.
    precision : Precision or callable, optional
        What the bound may assume about the kernel's arithmetic, such as
        ``Precision.stated("float32", p="bfloat16", truncates=True)``; or a function of the dtype.
        Default: ``Precision.of``.
    dtypes : iterable of dtype_like, optional
        Types of q, k and v; by default all four, or without ml_dtypes those of NumPy.
    features : iterable of str, optional
        What the kernel supports, among ``cupyflash.testing.FEATURES``; by default everything.
    examples : int
        Number of problems for each property; the most telling ones get several times as many.
    seed : int
        The seed of the problems: the same seed gives the same ones.
    tiles : tuple of 2 int
        Rows and keys of the kernel's tiles, as far as you know them. Lengths are drawn around their
        multiples, and the bound allows for one rescaling per tile.
    float8 : {"float32", "out_dtype", "codes"}
        What the kernel multiplies for queries, keys and values of float8: see
        `Precision.of_codes`.
    varlen, varlen_backward, combine : callable, optional
        Functions like `cupyflash.attention_varlen`, `attention_varlen_backward` and `combine`.
    cached, append, rope : callable, optional
        Functions like `cupyflash.attention_cached`, `append` and `rope`.
    jvp, varlen_jvp, backward_jvp : callable, optional
        Functions like `cupyflash.attention_jvp`, `attention_varlen_jvp` and
        `attention_backward_jvp`.
    empty_rows : {"zero", "mean", "nan", "any"}
        What a row without keys gives: 0 and a log-sum-exp of -inf, the mean of all values, NaN, or
        nothing in particular. But for "zero", properties are about the other rows.
    serves : callable, optional
        ``serves(call) -> bool``, for kernels that a list of features does not describe: whether a
        call, with its q, k, v, options and gradients, is one that the kernel serves, such as
        ``lambda call: call.options.get("mask") == masks.causal()``. Others are not tried.
    shapes : int, optional
        How many shapes are drawn for each property, for kernels that compile for each of them. By
        default there is no limit. Properties that make shapes of their own add those.
    seconds : float, optional
        After this time no further problem is begun. Properties that are left out are listed.
    families : str or iterable of str, optional
        Names of ``cupyflash.testing.FAMILIES``: the kinds of numbers that are drawn.
    keep_going : bool
        Whether to try all problems of a property that fails, and to report the first failure of
        each family, instead of looking for a smaller problem.
    only : str or iterable of str, optional
        Names of the properties to run; the others are left out.
    stop : bool
        Whether to stop at the first property that fails, without looking for a smaller problem.
    progress : callable, optional
        ``progress(done, total, result)``, called after each property.

    Returns
    -------
    Report
        It has `passed`, and for each property its name, examples and worst ratio of error to bound;
        for a failure, also a minimal problem as a line of Python.

    Raises
    ------
    ImportError
        If hypothesis is not installed, or if CuPy is not installed and the device is a GPU.

    Examples
    --------
    A kernel that supports only q, k, v and causal is verified through an adapter:

    >>> import numpy as np
    >>> from cupyflash import testing
    >>> def mine(q, k, v, causal):  # (B, H, L, D) in float32
    ...     s = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
    ...     if causal:
    ...         s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
    ...     p = np.exp(s - s.max(axis=-1, keepdims=True))
    ...     return p @ v / p.sum(axis=-1, keepdims=True)
    >>> def adapter(q, k, v, *, mask=None, return_lse=True):
    ...     return mine(q, k, v, causal=mask is not None), None
    >>> report = testing.verify(adapter, features=["causal"], dtypes=["float32"], examples=2)
    >>> report.passed
    True
    """
    memory = memory_of(device)
    subject = Subject(
        attention_fn, backward_fn, varlen=varlen, varlen_backward=varlen_backward,
        combine=combine, cached=cached, append=append, rope=rope, features=features,
        precision=precision, tiles=tiles, float8=float8, memory=memory, empty_rows=empty_rows,
        serves=serves, jvp=jvp, varlen_jvp=varlen_jvp, backward_jvp=backward_jvp,
    )  # fmt: skip
    of_families = chosen_families(families)
    given = [float_type(x) for x in dtypes] if dtypes is not None else list(known_floats())
    unknown = [x.name for x in given if x.name not in FLOATS]
    if unknown or not given:
        raise ValueError(f"dtypes: got {unknown}; expected some of {', '.join(FLOATS)}")
    if examples < 1:
        raise ValueError(f"examples: got {examples}; expected a whole number of 1 or more")
    chosen = chosen_properties(only)
    report = Report(
        seed, examples, device, tuple(x.name for x in given),
        tuple(name for name in FEATURES if name in subject.features),
    )  # fmt: skip
    deadline = float("inf") if seconds is None else time.perf_counter() + seconds
    for number, prop in enumerate(chosen):
        if time.perf_counter() > deadline:
            reason = why_not(prop, subject, given, of_families) or LATE
            report.results.append(Result(prop.name, prop.formula, IDLE, reason))
            continue
        result = run(
            prop, subject, given, examples, seed, shrink=not stop, families=of_families,
            keep_going=keep_going, shapes=shapes, deadline=deadline,
        )  # fmt: skip
        report.results.append(result)
        if progress is not None:
            progress(number + 1, len(chosen), result)
        if stop and result.status == FAILED:
            break
    if only is None:
        report.results += [Result(name, "", IDLE, why) for name, why in NOT_APPLICABLE.items()]
    return report


def chosen_families(families: str | Iterable[str] | None) -> list[str] | None:
    """Return names of families; an unknown one is an error."""
    if families is None:
        return None
    names = [families] if isinstance(families, str) else list(families)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown or not names:
        raise ValueError(f"families: got {unknown}; expected some of {', '.join(FAMILIES)}")
    return names


def chosen_properties(only: str | Iterable[str] | None) -> list[Property]:
    """Return all properties, or those of some names; an unknown name is an error."""
    if only is None:
        return list(PROPERTIES.values())
    names = [only] if isinstance(only, str) else list(only)
    for name in names:
        if name not in PROPERTIES:
            near = nearest(name, PROPERTIES, 3) or _sharing_a_word(name)
            hint = f"did you mean {' or '.join(near)}?"
            if not near:
                hint = f"there are {', '.join(PROPERTIES)}."
            raise ValueError(
                f"only: got {name!r}, which is not a property; {hint} `cupyflash verify --list` "
                "says what each of them means."
            )
    return [PROPERTIES[name] for name in names]


def _sharing_a_word(name: str) -> list[str]:
    words = {word for word in name.split("_") if len(word) > 2}
    return [each for each in PROPERTIES if words & set(each.split("_"))]


def check(
    name: str,
    problem: Problem,
    attention_fn: Callable[..., Any],
    backward_fn: Callable[..., Any] | None = None,
    *,
    device: str = "cpu",
    **options: Any,
) -> None:
    """Try one property on one problem, as a report's last lines do. Hypothesis is not needed.

    Parameters
    ----------
    name : str
        The property's name.
    problem : Problem
        A fresh result of `problem`: its generator draws everything that its line does not say.
    attention_fn, backward_fn : callable
        As given to `verify`.
    device : str
        As given to `verify`.
    **options
        precision, features, tiles, float8, varlen, varlen_backward, combine, cached, append, rope,
        jvp, varlen_jvp, backward_jvp, empty_rows and serves, as given to `verify`.

    Raises
    ------
    PropertyError
        If the property does not hold.
    """
    (prop,) = chosen_properties(name)
    subject = Subject(attention_fn, backward_fn, memory=memory_of(device), **options)
    with np.errstate(all="ignore"), contextlib.suppress(NotClaimedError):
        prop.check(subject, problem)
