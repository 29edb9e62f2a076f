"""The gradient of a bias as a call has it: sums of parts of the work, and what adds these up."""

from __future__ import annotations

import math

import numpy as np

from .backward_work import bias_parts
from .bias_gradient import sum_bias_parts
from .calls import Bound
from .layout import Array, Layout
from .placed import Step
from .prepared import BYTES_PER_SECOND
from .sums import store
from .threads import parallel


class BiasTotals:
    """The gradient of a bias: sums of parts of the work, which are added up in their order."""

    def __init__(
        self, layout: Layout, kv_lead: tuple[int, ...], groups: tuple[Array, Array], dbias: Array
    ) -> None:
        shape = (1,) * (3 - dbias.ndim) + dbias.shape
        entries, axes = math.prod(shape[:-3]), shape[-3:]
        made = bias_parts(layout, kv_lead, groups, shape)
        self.parts, self.sums = made.parts, made.sums
        self._whole = np.empty((entries, *axes), layout.number)
        self._items = entries * axes[0] * made.columns
        self._add_up = Bound(
            sum_bias_parts,
            layout.number,
            made.columns,
            made.starts,
            made.slots,
            layout.block_q,
            made.sums,
            self._whole,
        )
        self.nbytes = made.sums.sums.nbytes + self._whole.nbytes

    @property
    def last_step(self) -> Step:
        """What adds up the sums, to an address of the gradient."""
        work = self.nbytes / BYTES_PER_SECOND
        return Step(self._add_up, self._items, work, "dbias")

    def clear(self) -> None:
        """Begin with 0."""
        self.sums.sums[...] = 0

    def finish(self, dbias: Array) -> None:
        """Write the gradient, rounded to its type."""
        step = self.last_step
        parallel(step.kernel, step.items, self, step.work)
        store(self._whole.reshape(dbias.shape), dbias)
