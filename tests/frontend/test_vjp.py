"""The function of gradients that a forward call returns: what it passes on, and what it is not."""

import copy
import pickle

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentTypeError
from cupyflash.backends.cpu import Cpu

KINDS = pytest.mark.parametrize("packed", [False, True])


def vjp_of(packed, **options):
    q, k, v = (np.random.default_rng(n).standard_normal((2, 5, 8), np.float32) for n in range(3))
    if not packed:
        return cupyflash.attention_vjp(q, k, v, **options)
    offsets = [np.array([0, 2, 5])] * 2
    return cupyflash.attention_varlen_vjp(q, k, v, *offsets, **options)


@KINDS
def test_it_says_what_to_save_instead_of_it(packed):
    out, vjp = vjp_of(packed)
    name = "attention_varlen_backward" if packed else "attention_backward"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ArgumentTypeError, match=f"save q, k, v, .* and lse .*call {name} with"):
            pickle.dumps(vjp, protocol)
    assert copy.deepcopy([vjp])[0] is copy.copy(vjp) is vjp  # as of any function
    assert vjp(out).dq.shape == out.shape  # still of use


@KINDS
@pytest.mark.parametrize("wanted", [False, True])
def test_it_asks_for_what_it_was_made_with(packed, wanted, monkeypatch):
    asked = []
    backward = Cpu.backward

    def noted(*arguments, deterministic, **options):
        asked.append(deterministic)
        return backward(*arguments, deterministic=deterministic, **options)

    monkeypatch.setattr(Cpu, "backward", noted)
    out, vjp = vjp_of(packed, deterministic=wanted)
    vjp(out)
    assert asked == [wanted]


@KINDS
def test_deterministic_is_a_truth_value(packed):
    with pytest.raises(ArgumentTypeError, match="deterministic: got 'yes'"):
        vjp_of(packed, deterministic="yes")
