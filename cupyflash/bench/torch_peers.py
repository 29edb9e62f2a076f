"""PyTorch's attention, kernel by kernel, on the same numbers (shared by DLPack).

PyTorch is imported when one of these is first asked whether it can take part.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .cases import CAP, CHANGES_SCORES, Case, hidden
from .contenders import (
    Contender,
    Inputs,
    Job,
    RefusalError,
    distances,
    document_ids,
    needs_memory,
)
from .measure import Gpu, Meter, Work

Tensor = Any
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
INSTALL = "pip install torch"
_FLASH_4 = "flash_attn.cute.interface"
OLDEST = (2, 5)  # cuDNN's kernels, shared key heads and Flex


@functools.cache
def find() -> tuple[Any, str]:
    """Return PyTorch and no words, or None and in words what is missing, with the remedy."""
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch.nn.attention")
        version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "torch":
            return None, f"PyTorch is not installed, or is too old: {INSTALL}"
        return None, f"PyTorch lacks {error.name}: {INSTALL}"
    except Exception as error:  # noqa: BLE001 (libraries fail to load in many ways; all are told)
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        return None, f"PyTorch cannot be imported ({words}); reinstall it: {INSTALL}"
    if version < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        return (
            None,
            f"got PyTorch {torch.__version__}; expected {wanted} or newer: {INSTALL} --upgrade",
        )
    return torch, ""


class TorchPeer(Contender):
    """One way in which PyTorch computes attention.

    Attributes
    ----------
    matrices : int
        How many matrices of all scores it may hold.
    """

    matrices = 0

    def obstacle(self, kind: str) -> str:
        """Say why it cannot take part at all, and the remedy; nothing where it can."""
        other = super().obstacle(kind)
        if other:
            return other
        torch, why = find()
        if torch is None:
            return why
        if kind == "gpu" and not torch.cuda.is_available():
            return (
                f"PyTorch {torch.__version__} sees no GPU (torch.cuda.is_available() is False): "
                "install a build for this machine's driver, see pytorch.org"
            )
        return ""

    def release(self, meter: Meter) -> None:
        """Give back what PyTorch's allocator and its compiler keep."""
        torch, _ = find()
        if torch is not None and isinstance(meter, Gpu):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def prepare(self, meter: Meter, case: Case, inputs: Inputs) -> Job:
        """Make a case ready."""
        needs_memory(meter, self.matrices * case.score_bytes)
        torch, _ = find()
        xp, on_gpu = meter.xp, isinstance(meter, Gpu)
        q, k, v, do = (to_torch(torch, x) for x in inputs)
        if on_gpu:
            torch.cuda.set_device(q.device)
        with on_stream(torch, meter, q):
            attend = self.function(torch, case, q)

        leaves = [x.detach().requires_grad_(case.backward) for x in (q, k, v)]

        def forward() -> Tensor:
            with torch.set_grad_enabled(case.backward):
                return attend(*leaves)

        with on_stream(torch, meter, q), told_why():
            o = forward()  # a kernel refuses at its first call

        def gradients(o: Tensor, keep: bool) -> Any:
            return torch.autograd.grad(o, leaves, do, retain_graph=keep)

        here = functools.partial(on_its_stream, torch, meter, q)

        def arrays(found: Any) -> list[Any]:
            with on_stream(torch, meter, q):
                tensors = found if case.backward else (found,)
                return [from_torch(xp, x, case.dtype) for x in tensors]

        memory = functools.partial(peak_memory, torch, meter)
        if case.backward:
            # A graph of these would have to be captured on the stream of their forward.
            step = here(lambda: gradients(forward(), keep=False))
            return Job(here(lambda: gradients(o, keep=True)), step, arrays, memory)
        work = here(forward)

        def graph() -> tuple[Work, Tensor]:
            replay, place = captured(torch, forward)
            return here(replay), place

        return Job(work, work, arrays, memory, graph if on_gpu else None)

    @abstractmethod
    def function(self, torch: Any, case: Case, q: Tensor) -> Attend:
        """Return attention as a function of q, k and v, or raise `RefusalError`."""


class Sdpa(TorchPeer):
    """`scaled_dot_product_attention`, held to one of its kernels, or to none."""

    def __init__(self, name: str, backend: str, what: str, kinds: tuple[str, ...]) -> None:
        self.name, self.backend, self.what, self.kinds = name, backend, what, kinds
        self.matrices = 4 if backend in ("MATH", "") else 0

    def obstacle(self, kind: str) -> str:
        """Say why it cannot take part at all, and the remedy; nothing where it can."""
        other = super().obstacle(kind)
        if (
            not other
            and self.backend
            and not hasattr(find()[0].nn.attention.SDPBackend, self.backend)
        ):
            return f"this PyTorch has no {self.backend}: {INSTALL} --upgrade"
        return other

    def function(self, torch: Any, case: Case, q: Tensor) -> Attend:
        """Return attention by one kernel."""
        if case.variant == "softcap":
            raise RefusalError("scaled_dot_product_attention has no soft cap")
        options: dict[str, Any] = {"attn_mask": torch_mask(torch, case, q)}
        if case.variant == "causal" and case.len_q == case.len_k:
            options = {"is_causal": True}
        if case.heads != case.heads_kv:
            options["enable_gqa"] = True
        return functools.partial(self.attention(torch), **options)

    def attention(self, torch: Any) -> Callable[..., Tensor]:
        """Return `scaled_dot_product_attention` by this kernel."""
        attend: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
        if not self.backend:
            return attend
        backend = getattr(torch.nn.attention.SDPBackend, self.backend)

        def by_one_kernel(*tensors: Tensor, **options: Any) -> Tensor:
            with torch.nn.attention.sdpa_kernel(backend):
                return attend(*tensors, **options)

        return by_one_kernel


class Flex(TorchPeer):
    """FlexAttention, compiled."""

    name = "torch-flex"
    what = "PyTorch's flex_attention, compiled; its block mask is made before"
    kinds = ("gpu",)

    def release(self, meter: Meter) -> None:
        """Forget what was compiled: after some shapes PyTorch would compile no more."""
        torch, _ = find()
        if torch is not None:
            torch.compiler.reset()
        super().release(meter)

    def function(self, torch: Any, case: Case, q: Tensor) -> Attend:
        """Return attention compiled for a mask and a score change."""
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        options: dict[str, Any] = {"score_mod": flex_score(torch, case, q)}
        if case.variant != "full":
            options["block_mask"] = flex.create_block_mask(
                flex_mask(torch, case, q), None, None, case.len_q, case.len_k, device=q.device
            )
        if case.heads != case.heads_kv:
            options["enable_gqa"] = True
        return functools.partial(torch.compile(flex.flex_attention, dynamic=False), **options)


class Varlen(TorchPeer):
    """FlashAttention over packed sequences, which the suite `models` times."""

    name = "torch-varlen"
    what = "PyTorch's varlen_attn, FlashAttention over packed sequences"
    kinds = ("gpu",)

    def obstacle(self, kind: str) -> str:
        """Say why it cannot take part at all, and the remedy; nothing where it can."""
        other = super().obstacle(kind)
        if other:
            return other
        try:
            importlib.import_module("torch.nn.attention.varlen")
        except ImportError:
            return f"this PyTorch has no varlen_attn: {INSTALL} --upgrade"
        return ""

    def function(self, torch: Any, case: Case, q: Tensor) -> Attend:  # noqa: ARG002, others need them
        """Refuse: cases are not packed."""
        raise RefusalError("it is timed on packed sequences, by --suite models")


class FlashAttention4(TorchPeer):
    """The function of the package flash-attn-4, on tensors."""

    name = "flash-attn-4"
    what = "FlashAttention-4, on PyTorch's tensors"
    kinds = ("gpu",)

    def obstacle(self, kind: str) -> str:
        """Say why it cannot take part at all, and the remedy; nothing where it can."""
        other = super().obstacle(kind)
        if other:
            return other
        try:
            importlib.import_module(_FLASH_4)
        except Exception as error:  # noqa: BLE001 (libraries fail to load in many ways; all are told)
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            return f"flash-attn-4 cannot be imported ({words}): pip install --pre flash-attn-4"
        return ""

    def function(self, torch: Any, case: Case, q: Tensor) -> Attend:  # noqa: ARG002, others need them
        """Return attention of heads before rows."""
        known: dict[str, dict[str, Any]] = {
            "full": {},
            "causal": {"causal": True},
            "window": {"window_size": (case.size, 0)},
            "softcap": {"causal": True, "softcap": CAP},
        }
        if case.variant not in known:
            raise RefusalError(f"it has no argument for {case.variant}")
        if case.dtype not in ("float16", "bfloat16"):
            raise RefusalError(f"it takes float16 and bfloat16, not {case.dtype}")
        attend = importlib.import_module(_FLASH_4).flash_attn_func
        options = known[case.variant]

        def turned(*tensors: Tensor) -> Tensor:
            made = attend(*(x.transpose(1, 2) for x in tensors), **options)
            return (made[0] if isinstance(made, tuple) else made).transpose(1, 2)

        return turned


def flex_mask(torch: Any, case: Case, q: Tensor) -> Callable[..., Tensor]:
    """Return when query i sees key j, as FlexAttention asks."""
    shift, size = case.len_k - case.len_q, case.size
    if case.variant == "window":
        return lambda b, h, i, j: (j <= i + shift) & (j >= i + shift - size)
    if case.variant == "documents":
        ids = torch.from_numpy(document_ids(case)).to(q.device)
        return lambda b, h, i, j: ids[i + shift] == ids[j]
    if case.variant == "prefix":
        return lambda b, h, i, j: (j <= i + shift) | (j < size)
    return lambda b, h, i, j: j <= i + shift


def flex_score(torch: Any, case: Case, q: Tensor) -> Callable[..., Tensor] | None:
    """Return what happens to a score, as FlexAttention asks."""
    if case.variant == "alibi":
        shift = case.len_k - case.len_q
        slopes = torch.from_numpy(case.slopes.astype(np.float32)).to(q.device)
        return lambda s, b, h, i, j: s - slopes[h] * (i + shift - j).abs()
    if case.variant == "softcap":
        return lambda s, b, h, i, j: CAP * torch.tanh(s / CAP)
    return None


def torch_mask(torch: Any, case: Case, q: Tensor) -> Tensor | None:
    """Return the mask, and ALiBi's penalties, as `scaled_dot_product_attention` takes them."""
    outside = hidden(case)
    if outside is None:
        return None
    if case.variant not in CHANGES_SCORES:
        return torch.from_numpy(~outside).to(q.device)
    slopes, distance = (
        torch.from_numpy(x.astype(np.float32)).to(q.device) for x in (case.slopes, distances(case))
    )
    bias = slopes[:, None, None] * -distance
    return bias.masked_fill_(torch.from_numpy(outside).to(q.device), -np.inf).to(q.dtype)[None]


def to_torch(torch: Any, array: Any) -> Tensor:
    """Return an array as a tensor on the same memory, which keeps it alive.

    bfloat16 is passed as 16-bit integers, which every DLPack supports.
    """
    if array.dtype.name != "bfloat16":
        return torch.from_dlpack(array)
    return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)


def from_torch(xp: Any, tensor: Tensor, dtype: str) -> Any:
    """Return a tensor of a dtype as an array of `xp`; bfloat16 becomes float32."""
    wide = tensor.detach().float() if dtype == "bfloat16" else tensor.detach()
    return xp.from_dlpack(wide.contiguous())


@contextlib.contextmanager
def on_stream(torch: Any, meter: Meter, tensor: Tensor) -> Iterator[None]:
    """Let PyTorch work on CuPy's current stream, where the events are recorded."""
    if not isinstance(meter, Gpu):
        yield
        return
    wanted = meter.xp.cuda.get_current_stream().ptr
    if torch.cuda.current_stream(tensor.device).cuda_stream == wanted:
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(wanted, device=tensor.device)):
        yield


def on_its_stream(torch: Any, meter: Meter, tensor: Tensor, work: Work) -> Work:
    """Return a function that does something where `on_stream` lets PyTorch work."""

    def run() -> Any:
        with on_stream(torch, meter, tensor):
            return work()

    return run


@contextlib.contextmanager
def told_why() -> Iterator[None]:
    """Turn PyTorch's refusal of a kernel into ours, with the reasons that it gives as warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            if "OutOfMemory" in type(error).__name__:
                raise
            reasons = [str(warning.message).partition("(Triggered")[0].strip() for warning in told]
            words = [*dict.fromkeys(reasons), str(error).partition("\n")[0]]
            raise RefusalError("PyTorch: " + " ".join(words)) from error


def peak_memory(torch: Any, meter: Meter, work: Work) -> int:
    """Bytes that a call of PyTorch holds at its peak: on a GPU those of PyTorch's own pool."""
    if not isinstance(meter, Gpu):
        return meter.peak_memory(work)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    peak = int(torch.cuda.max_memory_allocated() - before)
    del result
    return peak


def captured(torch: Any, work: Work) -> tuple[Work, Any]:
    """Return a function that replays a call as a CUDA graph, and the results that it writes."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):  # as PyTorch's documentation asks
            work()
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        result = work()

    def replay(_: Work = work) -> None:  # which holds what the graph reads
        recorded.replay()

    return replay, result


PEERS: tuple[TorchPeer, ...] = (
    Sdpa("torch-cudnn", "CUDNN_ATTENTION", "PyTorch's SDPA by cuDNN", ("gpu",)),
    Sdpa("torch-flash", "FLASH_ATTENTION", "PyTorch's SDPA by FlashAttention", ("gpu",)),
    Sdpa("torch-efficient", "EFFICIENT_ATTENTION", "PyTorch's SDPA, memory-efficient", ("gpu",)),
    Flex(),
    Varlen(),
    FlashAttention4(),
    Sdpa("torch-cpu", "FLASH_ATTENTION", "PyTorch's SDPA by its CPU kernel", ("cpu",)),
    Sdpa("torch-math", "MATH", "PyTorch's SDPA by matrix products", ("cpu", "gpu")),
    Sdpa("torch-sdpa", "", "PyTorch's SDPA by a kernel of its choice", ("cpu", "gpu")),
)
