"""Wrong calls: each is refused before any kernel, in a sentence that names what is wrong."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake import BlockMask, _jax, hads, masks

B, T, S, N, K, H = 2, 32, 48, 4, 2, 8


pytestmark = pytest.mark.usefixtures("as_users_call_it")


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def attend(query=None, key=None, value=None, *args, **call):
    """A valid call, with the given arguments replaced."""
    query = zeros(B, T, N, H) if query is None else query
    key = zeros(B, S, K, H) if key is None else key
    value = zeros(B, S, K, H) if value is None else value
    return xsake.dot_product_attention(query, key, value, *args, **call)


def ints(*shape):
    return jnp.zeros(shape, jnp.int32)


def mask_of(T=T, S=S, **more):
    return BlockMask.from_rule(masks.causal(), (T, S), block=16, **more)


# What is wrong: (the call, the exception, words that the message must hold, in this order)
SHAPES_AND_DTYPES = {
    "query of two axes": (lambda: attend(zeros(T, H)), ValueError, r"query.*\(?32, 8"),
    "query of five axes": (lambda: attend(zeros(1, B, T, N, H)), ValueError, r"query.*1, 2, 32"),
    "key of another rank": (lambda: attend(key=zeros(S, K, H)), ValueError, r"key.*48, 2, 8"),
    "6 heads on 4": (
        lambda: attend(zeros(B, T, 6, H), zeros(B, S, 4, H), zeros(B, S, 4, H)),
        ValueError,
        r"6.*4",
    ),
    "fewer heads than kv heads": (
        lambda: attend(zeros(B, T, 2, H), zeros(B, S, 4, H), zeros(B, S, 4, H)),
        ValueError,
        r"2.*4",
    ),
    "batches differ": (lambda: attend(key=zeros(3, S, K, H)), ValueError, r"3"),
    "value of another batch": (lambda: attend(value=zeros(3, S, K, H)), ValueError, r"value.*3"),
    "value of another length": (lambda: attend(value=zeros(B, 47, K, H)), ValueError, r"47|48"),
    "value of other heads": (lambda: attend(value=zeros(B, S, 1, H)), ValueError, r"value"),
    "head sizes differ": (lambda: attend(key=zeros(B, S, K, 16)), ValueError, r"16|8"),
    "integer query": (lambda: attend(ints(B, T, N, H)), (TypeError, ValueError), r"query.*int32"),
    "key of another dtype": (
        lambda: attend(key=zeros(B, S, K, H, dtype=jnp.bfloat16)),
        (TypeError, ValueError),
        r"bfloat16",
    ),
    "a list for a query": (lambda: attend([[1.0]]), (TypeError, ValueError), r"query"),
}

ARGUMENTS = {
    "bias of other lengths": (
        lambda: attend(bias=zeros(B, N, T, 47)),
        ValueError,
        r"bias.*47",
    ),
    "bias of three heads": (lambda: attend(bias=zeros(1, 3, T, S)), ValueError, r"bias.*3"),
    "bool bias": (
        lambda: attend(bias=jnp.ones((1, 1, T, S), bool)),
        (TypeError, ValueError),
        r"bias.*bool",
    ),
    "float mask": (lambda: attend(mask=zeros(1, 1, T, S)), (TypeError, ValueError), r"mask.*float"),
    "bool mask of other lengths": (
        lambda: attend(mask=jnp.ones((1, 1, T, 47), bool)),
        ValueError,
        r"mask.*47",
    ),
    "a string for a mask": (lambda: attend(mask="causal"), TypeError, r"mask is 'causal'; give a"),
    "mask of other lengths": (
        lambda: attend(mask=mask_of(T=64)),
        ValueError,
        r"(?s)64.*32|32.*64",
    ),
    "mask of other heads": (
        lambda: attend(mask=BlockMask.from_dense(jnp.ones((3, 2, 3), bool), block=16)),
        ValueError,
        r"3.*heads|heads.*3",
    ),
    "mask of another batch": (
        lambda: attend(mask=BlockMask.from_dense(jnp.ones((3, 1, 2, 3), bool), block=16)),
        ValueError,
        r"3",
    ),
    "positions beside a BlockMask": (
        lambda: attend(mask=mask_of(), q_positions=ints(B, T)),
        ValueError,
        r"positions.*from_rule",
    ),
    "negative window": (
        lambda: attend(local_window_size=(-1, 3)),
        ValueError,
        r"-1",
    ),
    "window of three": (
        lambda: attend(local_window_size=(1, 2, 3)),
        ValueError,
        r"window.*1, 2, 3",
    ),
    "zero soft cap": (lambda: attend(logits_soft_cap=0.0), ValueError, r"logits_soft_cap.*0"),
    "negative soft cap": (lambda: attend(logits_soft_cap=-5.0), ValueError, r"soft_cap.*-5"),
    "sinks of three heads": (lambda: attend(sinks=zeros(3)), ValueError, r"sinks.*3"),
    "sinks of three axes": (lambda: attend(sinks=zeros(N, 1, 1)), ValueError, r"sinks.*4, 1, 1"),
    "integer sinks": (lambda: attend(sinks=ints(N)), (TypeError, ValueError), r"sinks.*int32"),
    "lengths of three rows": (
        lambda: attend(query_seq_lengths=ints(3)),
        ValueError,
        r"query_seq_lengths.*3",
    ),
    "float lengths": (
        lambda: attend(key_value_seq_lengths=zeros(B)),
        (TypeError, ValueError),
        r"key_value_seq_lengths.*float",
    ),
    "segment ids of other lengths": (
        lambda: attend(q_segment_ids=ints(B, 31), kv_segment_ids=ints(B, S)),
        ValueError,
        r"q_segment_ids.*31",
    ),
    "segment ids on one side only, T != S": (
        lambda: attend(q_segment_ids=ints(B, T)),
        ValueError,
        r"kv_segment_ids",
    ),
    "float segment ids": (
        lambda: attend(q_segment_ids=zeros(B, T), kv_segment_ids=zeros(B, S)),
        (TypeError, ValueError),
        r"segment_ids.*float",
    ),
    "positions of other lengths": (
        lambda: attend(is_causal=True, q_positions=ints(B, 31)),
        ValueError,
        r"q_positions.*31",
    ),
    "unknown backend": (
        lambda: attend(implementation="cudnn"),
        ValueError,
        r"cudnn.*xla",
    ),
    "a backend that cannot run here": (
        lambda: attend(implementation="hopper"),
        ValueError,
        r"hopper",
    ),
    "TPU kernels on a CPU": (lambda: attend(implementation="tpu"), ValueError, r"(?i)tpu"),
}

RULES = {
    "window of -3": (lambda: masks.sliding_window(-3), ValueError, r"-3"),
    "window of half a token": (lambda: masks.sliding_window(2.5), (TypeError, ValueError), r"2\.5"),
    "chunks of no token": (lambda: masks.chunked(0), ValueError, r"0"),
    "first -1": (lambda: masks.first(-1), ValueError, r"-1"),
    "stride of 0": (lambda: masks.strided(0), ValueError, r"0"),
    "dilation of 0": (lambda: masks.dilated(3, 0), ValueError, r"0"),
    "density of 1.5": (lambda: masks.random(1.5), ValueError, r"1\.5"),
    "random cells of 0": (lambda: masks.random(0.5, block=0), ValueError, r"0"),
    "-2 global tokens": (lambda: masks.global_tokens(-2), ValueError, r"-2"),
    "float document ids": (lambda: masks.documents(zeros(B, T)), (TypeError, ValueError), r"float"),
    "document ids of three axes": (lambda: masks.documents(ints(1, B, T)), ValueError, r"1, 2, 32"),
    "prefix lengths of two axes": (lambda: masks.prefix(ints(B, 1)), ValueError, r"2, 1"),
    "mask array of five axes": (
        lambda: masks.array(jnp.ones((1, 1, 1, T, S), bool)),
        ValueError,
        r"32, 48",
    ),
    "mask array of floats": (
        lambda: masks.array(zeros(1, 1, T, S)),
        (TypeError, ValueError),
        r"float",
    ),
    "a rule that is no function": (lambda: masks.rule(3), (TypeError, ValueError), r"3|int"),
    "a rule that reads tokens": (
        lambda: masks.rule(lambda b, n, q, k: k <= q, reads="tokens"),
        ValueError,
        r"tokens",
    ),
    "a rule and a number": (lambda: masks.causal() & 3, TypeError, r"(?i)int"),
    "a window of 2**40": (lambda: masks.sliding_window(2**40), ValueError, r"left.*2147483647"),
    "the first 2**31": (lambda: masks.first(2**31), ValueError, r"2147483647, got 2147483648"),
    "a dilated window of 2**32": (lambda: masks.dilated(2**30, 4), ValueError, r"4294967296"),
    "ids that do not fit": (
        lambda: masks.documents(np.array([[0, 2**31]], np.uint32)),
        ValueError,
        r"q_ids.*int32.*got 2147483648",
    ),
    "ids of 64 bits that do not fit": (
        lambda: attend(q_segment_ids=np.full((B, T), 2**40), kv_segment_ids=ints(B, S)),
        ValueError,
        r"q_segment_ids.*int32.*got 1099511627776",
    ),
    "a rule's table that does not fit": (
        lambda: masks.rule(lambda b, n, q, k, x: x[q] == x[k], np.array([2**40])),
        ValueError,
        r"array.*got 1099511627776",
    ),
    "one id for all keys": (
        lambda: BlockMask.from_rule(masks.documents(ints(1, T), ints(1, 1)), (T, S), block=16),
        ValueError,
        r"the rule's kv_ids has shape \[1, 1\], which does not fit",
    ),
    "`and` in a function": (
        lambda: BlockMask.from_rule(
            masks.rule(lambda b, n, q, k: (k <= q) and (q < 9)), (T, S), block=16
        ),
        TypeError,
        r"`and`.*&",
    ),
    "a function that returns floats": (
        lambda: BlockMask.from_rule(masks.rule(lambda b, n, q, k: q * 0.5), (T, S), block=16),
        TypeError,
        r"float32.*bools",
    ),
    "a negative prefix": (lambda: masks.prefix(-1), ValueError, r"prefix length.*negative, got -1"),
    "rules joined by and": (
        lambda: masks.causal() and masks.first(3),
        TypeError,
        r"Window is neither true nor false.*& \| ~.*`and`",
    ),
    "a rule negated by not": (lambda: not masks.first(3), TypeError, r"neither true nor false"),
    "a function of two arguments": (
        lambda: masks.rule(lambda q, k: k <= q),
        TypeError,
        r"takes \(b, n, q, k\), this one takes \(q, k\)",
    ),
    "a function of fewer arrays": (
        lambda: masks.rule(lambda b, n, q, k, x: k <= q),
        TypeError,
        r"takes \(b, n, q, k\), this one",
    ),
    "a function of another shape": (
        lambda: BlockMask.from_rule(
            masks.rule(lambda b, n, q, k: jnp.ones((3, 3), bool)), (T, S), block=16
        ),
        TypeError,
        r"returned \[3, 3\].*together \[1, 1, 16, 48\]",
    ),
    "float positions": (
        lambda: masks.at_positions(masks.causal(), zeros(T)),
        (TypeError, ValueError),
        r"float",
    ),
}

BLOCK_MASKS = {
    "blocks of 0": (lambda: BlockMask.from_rule(masks.causal(), (T, S), block=0), ValueError, r"0"),
    "no queries": (lambda: BlockMask.from_rule(masks.causal(), (0, S)), ValueError, r"0"),
    "data of another length": (
        lambda: BlockMask.from_rule(masks.documents(ints(B, 31), ints(B, S)), (T, S), batch=B),
        ValueError,
        r"31.*32|32.*31",
    ),
    "data of another batch": (
        lambda: BlockMask.from_rule(masks.prefix(ints(3)), (T, S), batch=B),
        ValueError,
        r"3.*2|2.*3",
    ),
    "capacity too small": (lambda: mask_of(capacity=1), ValueError, r"3.*1|1.*3"),
    "a negative capacity": (lambda: mask_of(capacity=-1), ValueError, r"-1"),
    "integer blocks": (
        lambda: BlockMask.from_dense(ints(2, 3)),
        (TypeError, ValueError),
        r"bool.*int32|int32.*bool",
    ),
    "blocks of one axis": (
        lambda: BlockMask.from_dense(jnp.ones(4, bool)),
        ValueError,
        r"4",
    ),
    "blocks that do not cover the lengths": (
        lambda: BlockMask.from_dense(jnp.ones((2, 3), bool), shape=(64, 48), block=16),
        ValueError,
        r"64",
    ),
    "kv blocks of another rank": (
        lambda: BlockMask.from_kv_blocks(ints(4), ints(4, 4)),
        ValueError,
        r"4",
    ),
    "full counts without their lists": (
        lambda: BlockMask.from_kv_blocks(ints(1, 1, 2), ints(1, 1, 2, 2), ints(1, 1, 2)),
        ValueError,
        r"full_kv",
    ),
    "a mask and a number": (lambda: mask_of() & 3, TypeError, r"int"),
    "masks of unequal blocks": (
        lambda: mask_of() & BlockMask.from_rule(masks.causal(), (T, S), block=32),
        ValueError,
        r"\(16, 16\).*\(32, 32\).*same block",
    ),
    "float counts": (
        lambda: BlockMask.from_kv_blocks(zeros(1, 1, 2), ints(1, 1, 2, 2)),
        TypeError,
        r"kv_num_blocks.*float32",
    ),
    "a count beyond the width": (
        lambda: BlockMask.from_kv_blocks(ints(1, 1, 2) + 3, ints(1, 1, 2, 2)),
        ValueError,
        r"kv_num_blocks.*0 to 2, got 3",
    ),
    "a block that is not there": (
        lambda: BlockMask.from_kv_blocks(ints(1, 1, 2) + 1, ints(1, 1, 2, 2) + 7),
        ValueError,
        r"kv_indices.*0 to 1, got 7",
    ),
    "full lists of another shape": (
        lambda: BlockMask.from_kv_blocks(
            ints(1, 1, 2), ints(1, 1, 2, 2), ints(1, 1, 3), ints(1, 1, 3, 2)
        ),
        ValueError,
        r"full_kv_num_blocks must be \[1, 1, 2\].*1, 1, 3",
    ),
    "masks joined by and": (lambda: mask_of() and mask_of(), TypeError, r"neither true nor false"),
    "a mask or a rule": (lambda: mask_of() | masks.first(3), TypeError, r"has & only.*from_rule"),
    "an inverted mask": (lambda: ~mask_of(), TypeError, r"has & only.*from_rule"),
    "one index": (lambda: mask_of()[0], TypeError, r"mask\[b, n\] with two integers, got 0"),
    "a slice": (lambda: mask_of()[:, 1], TypeError, r"mask\[b, n\] with two integers.*slice"),
    "negative heads": (lambda: mask_of(heads=-1), ValueError, r"not be negative, got 1 and -1"),
    "a head that is not there": (
        lambda: BlockMask.from_dense(jnp.ones((3, 2, 2), bool))[0, 5],
        IndexError,
        r"5.*3|3.*5",
    ),
}

# Arguments of a wrong type: with jaxtyping's checks, jaxtyping would raise before xsake does.
TYPES = {
    "options that are a dict": (
        lambda: attend(options={"deterministic": True}),
        (TypeError, ValueError),
        r"options.*dict",
    ),
    "three block sizes": (
        lambda: BlockMask.from_rule(masks.causal(), (T, S), block=(16, 16, 16)),
        (TypeError, ValueError),
        r"16, 16, 16",
    ),
    "a shape of one number": (
        lambda: BlockMask.from_rule(masks.causal(), T),
        (TypeError, ValueError),
        r"32",
    ),
    "a rule that is not called": (
        lambda: attend(mask=masks.causal),
        TypeError,
        r"mask is a function; call it: masks\.causal",
    ),
    "a bool for a mask": (lambda: attend(mask=False), TypeError, r"mask is False; give a rule"),
    "a word for is_causal": (
        lambda: attend(is_causal="no"),
        TypeError,
        r"is_causal must be True or False, got 'no'",
    ),
    "is_causal traced": (
        lambda: jax.jit(lambda x: attend(is_causal=x))(True),
        TypeError,
        r"is_causal must be known.*static_argnames",
    ),
    "a block of a float": (
        lambda: BlockMask.from_rule(masks.causal(), (T, S), block=16.0),
        ValueError,
        r"block must be a positive number or .*16\.0",
    ),
    "a profile by its name": (
        lambda: hads.make("profile", 0.5),
        TypeError,
        r"must be a Profile, got str; hads\.Profile\.load",
    ),
    "two keys for a key": (
        lambda: hads.certified_attention(
            zeros(1, 32, 2, 8),
            *[zeros(1, 32, 2, 8)] * 2,
            mask_of(32, 32),
            jax.random.split(jax.random.key(0)),
            every=16,
            window=16,
        ),
        TypeError,
        r"rng must be one key, such as jax\.random\.key\(0\), got Array",
    ),
    "a rule for a corrected mask": (
        lambda: hads.corrected_attention(*[zeros(1, 32, 2, 8)] * 3, masks.causal()),
        TypeError,
        r"mask must be a BlockMask, got Window; .* plan\.mask\(layer, q, k\)",
    ),
    "a plan for a mask": (
        lambda: attend(mask=types.SimpleNamespace(mask=lambda layer: None)),
        TypeError,
        r"mask is a SimpleNamespace; give .*a plan's mask is plan\.mask\(layer, q, k\)",
    ),
    "a number for a key": (
        lambda: hads.certified_attention(
            zeros(1, 32, 2, 8), *[zeros(1, 32, 2, 8)] * 2, mask_of(32, 32), 0, every=16, window=16
        ),
        TypeError,
        r"rng must be one key, such as jax\.random\.key\(0\), got 0",
    ),
    "a function for a rule": (
        lambda: BlockMask.from_rule(lambda b, n, q, k: k <= q, (T, S)),
        (TypeError, ValueError),
        r"masks\.rule",
    ),
}

WRONG = SHAPES_AND_DTYPES | ARGUMENTS | RULES | BLOCK_MASKS


def refuse(call, exception, words):
    with pytest.raises(exception, match=words) as caught:
        call()
    assert len(str(caught.value)) < 400, "one sentence"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_with_its_value(name):
    refuse(*WRONG[name])


def test_a_wrong_type_is_refused_as_users_see_it():
    """In a process of its own, without the type checks that tests run with."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_bad_input"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["6 heads on 4", "mask of other lengths", "head sizes differ"])
def test_a_wrong_call_is_refused_while_tracing(name):
    """Under jit as well, where no value is at hand."""
    call, exception, words = WRONG[name]
    with pytest.raises(exception, match=words):
        jax.eval_shape(call)


def test_the_right_call_passes():
    """The valid call that each wrong call above changes in one argument."""
    assert attend(mask=mask_of()).shape == (B, T, N, H)


def test_dropout_does_not_exist():
    with pytest.raises(TypeError, match="dropout"):
        attend(dropout_rate=0.1)


def test_explain_gives_every_reason():
    reasons = xsake.explain(zeros(B, T, N, H), zeros(B, S, K, H), zeros(B, S, K, H)).reasons
    assert reasons["xla"] is None
    assert reasons["reference"] is None
    assert set(reasons) >= {"xla", "reference"}
    for name, reason in reasons.items():
        if reason is not None:
            with pytest.raises(ValueError, match=name):
                attend(implementation=name)


def test_explain_explains_a_backend_that_cannot_run():
    """The call raises; the question about it does not."""
    x = zeros(B, T, N, H)
    explanation = xsake.explain(x, x, x, implementation="hopper")
    assert explanation.chosen is None
    assert "asked for, but needs a Hopper GPU" in str(explanation)
    with pytest.raises(ValueError, match="cudnn"):
        xsake.explain(x, x, x, implementation="cudnn")


def test_a_gpu_that_does_not_report_its_multiprocessors_is_refused(monkeypatch):
    """Instead of being scheduled as an H200; without a GPU, kernels are lowered for one."""
    assert _jax.platform() == "gpu" or _jax.multiprocessors() == _jax.H200_MULTIPROCESSORS
    devices = [types.SimpleNamespace(device_kind="NVIDIA H100", core_count=114)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert _jax.multiprocessors() == 114
    for count in ({}, {"core_count": None}, {"core_count": 0}):
        devices[0] = types.SimpleNamespace(device_kind="NVIDIA H100", **count)
        with pytest.raises(RuntimeError, match=r"core_count of this NVIDIA H100.*'xla'"):
            _jax.multiprocessors()


def test_explain_names_the_backend_that_is_used():
    explanation = xsake.explain(zeros(B, T, N, H), zeros(B, S, K, H), zeros(B, S, K, H))
    assert explanation.reasons[explanation.chosen] is None
    for name in explanation.reasons:
        assert name in str(explanation)


if __name__ == "__main__":
    for case in TYPES.values():
        refuse(*case)
