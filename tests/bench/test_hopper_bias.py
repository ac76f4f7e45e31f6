"""The suite `hopper-bias` on a CPU, with other backends in place of the kernels, and its table."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from tools import bias_tables
from xsake.attention import dot_product_attention
from xsake.bench.checks import WrongResultError
from xsake.bench.suites import hopper_bias


@pytest.fixture
def measured(monkeypatch):
    """records(xsake, kind) of a small case; times are of no interest here."""
    times = {"xsake": 1.0, "jax_nn_xla": 3.0}
    monkeypatch.setattr(hopper_bias, "HEADS", 2)
    monkeypatch.setattr(hopper_bias, "CHECKED", (0, 1))
    monkeypatch.setattr(hopper_bias, "times_of", lambda runs, given: {x: times[x] for x in runs})

    def missing(*args, **named):
        raise NotImplementedError("no cuDNN")

    def records(xsake, kind):
        by_xla = functools.partial(jax.nn.dot_product_attention, implementation="xla")
        those = {"xsake": xsake, "jax_nn_xla": by_xla, "jax_nn_cudnn": missing}
        monkeypatch.setattr(hopper_bias, "IMPLEMENTATIONS", those)
        return list(hopper_bias.records(hopper_bias.Case(kind, 256, 8), []))

    return records


reference = functools.partial(dot_product_attention, implementation="reference")


@pytest.mark.second_python
def test_every_direction_is_checked_and_compared(measured):
    """A peer that fails is recorded with its reason; the table names the faster of the others."""
    found = measured(reference, "bias, shared")
    assert len(found) == 3 * 3
    assert {x["direction"] for x in found if "missing" not in x} == {
        "forward",
        "forward+backward",
        "forward+backward with the bias",
    }
    missing = [x["missing"] for x in found if x["implementation"] == "jax_nn_cudnn"]
    assert missing == ["NotImplementedError: no cuDNN"] * 3
    head, [row] = bias_tables.hopper_bias(found)
    assert len(head) == len(row) == 7
    assert row[2] == row[4] == row[6] == "3.00 (XLA)"


@pytest.mark.second_python
def test_empty_blocks_do_not_count_as_work(measured):
    """Two row blocks: both diagonal blocks are kept, at most one or two others."""
    found = measured(reference, "blocks of tokens")
    pairs = found[0]["density_ratio"] * 2 * 256**2
    assert pairs in {2 * x * 128**2 for x in (2, 3, 4)}
    assert {x["direction"] for x in found} == {"forward", "forward+backward"}


def test_a_wrong_gradient_of_the_bias_has_no_time(measured):
    """The output and the other gradients are right."""

    def wrong(q, k, v, bias):
        return reference(q, k, v, bias + (bias - jax.lax.stop_gradient(bias)) * jnp.bfloat16(0.1))

    with pytest.raises(WrongResultError, match=r"forward\+backward with the bias: error 0\.1"):
        measured(wrong, "bias per head")
