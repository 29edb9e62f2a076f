"""Every property of tangents and of second derivatives finds a kernel that lacks it."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash import testing
from cupyflash.testing import PROPERTIES, problem
from cupyflash.testing.judge import PropertyError
from cupyflash.testing.properties import tangents


def larger(out, tout, lse, tlse):
    return out, (1.01 * tout).astype(tout.dtype), lse, tlse


def not_centred(out, tout, lse, tlse):
    return out, (tout + tlse[..., None] * out).astype(tout.dtype), lse, tlse


def positive(out, tout, lse, tlse):
    return out, abs(tout), lse, tlse


def moved_lse(out, tout, lse, tlse):
    return out, tout, lse, np.where(np.isfinite(lse), tlse + 0.01, 0).astype(tlse.dtype)


def larger_dq(second):
    dq = (1.05 * second.gradients.dq).astype(second.gradients.dq.dtype)
    return second._replace(gradients=second.gradients._replace(dq=dq))


def no_dk(second):
    dk = np.zeros_like(second.gradients.dk)
    return second._replace(gradients=second.gradients._replace(dk=dk))


FAULTS = {
    "tangents_within_bound": [larger, not_centred, moved_lse],
    "tangents_are_linear": [positive],
    "constant_tangent_of_a_bias": [not_centred, moved_lse],
    "tangents_of_parts_are_joined": [not_centred],
    "tangents_are_adjoint_to_gradients": [larger],
    "second_derivatives_within_bound": [larger_dq, no_dk],
    "second_derivatives_are_symmetric": [no_dk],
}
CASES = [(name, fault) for name, faults in FAULTS.items() for fault in faults]


def run(name, fault):
    def jvp(*args, **options):
        made = cupyflash.attention_jvp(*args, **options)
        return fault(*made) if "second" not in name and fault else made

    def backward_jvp(*args, **options):
        made = cupyflash.attention_backward_jvp(*args, **options)
        return fault(made) if "second" in name and fault else made

    testing.check(
        name,
        problem("float32", (2, 2, 9, 5)),
        cupyflash.attention,
        cupyflash.attention_backward,
        combine=cupyflash.combine,
        jvp=jvp,
        backward_jvp=backward_jvp,
    )


def test_every_property_has_a_fault():
    own = {name for name, each in PROPERTIES.items() if each in vars(tangents).values()}
    assert own == set(FAULTS)


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_a_fault_is_found(name, fault):
    run(name, None)
    with pytest.raises(PropertyError):
        run(name, fault)
