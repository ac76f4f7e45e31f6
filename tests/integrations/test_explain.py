"""explain_calls: the backend behind every entrance to XSAKE."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xsake
from tests.integrations.test_levanter import AttentionMask, named
from xsake.backends import choice
from xsake.integrations import easydel, ejkernel, levanter
from xsake.integrations.flax import attention

Q, K = (jax.ShapeDtypeStruct((1, 32, heads, 8), jnp.float32) for heads in (4, 2))
BY_HEAD = [jax.ShapeDtypeStruct((1, heads, 32, 8), jnp.float32) for heads in (4, 2, 2)]


def of_easydel(**settings):
    operation = easydel.BlockSparseAttn(easydel.OperationMetadata(**settings))
    return xsake.explain_calls(operation, Q, K, K)


def of_levanter():
    q, k = np.zeros((32, 4, 8), np.float32), np.zeros((32, 2, 8), np.float32)
    arrays = [named(q, "position", "heads", "head_size")]
    arrays += [named(k[:, 0], "key_position", "head_size")] * 2
    arguments = ("position", "key_position", "head_size", *arrays, AttentionMask(is_causal=True))
    return xsake.explain_calls(levanter.dot_product_attention, *arguments, use_flash=False)


def of_flax():
    module = nnx.MultiHeadAttention(
        2, 8, decode=False, keep_rngs=False, rngs=nnx.Rngs(0),
        attention_fn=attention(xsake.masks.causal(), implementation="reference"),
    )  # fmt: skip
    return xsake.explain_calls(lambda x: module(module(x)), jnp.zeros((1, 16, 8)))


def of_native_sparse():
    x = jax.ShapeDtypeStruct((1, 32, 2, 8), jnp.float32)
    blocks = jax.ShapeDtypeStruct((1, 32, 2, 1), jnp.int32)
    return xsake.explain_calls(ejkernel.apply_native_sparse_attention, x, x, x, blocks, 1, 16)


@pytest.mark.parametrize(
    ("calls", "chosen"),
    [
        (lambda: xsake.explain_calls(ejkernel.blocksparse_attention, *BY_HEAD), [None]),
        (of_native_sparse, ["xla"]),
        (of_easydel, [None]),
        (lambda: of_easydel(blocksize_q=48), [None]),
        (of_levanter, ["reference"]),
        (of_flax, ["reference", "reference"]),
    ],
)
def test_the_backend_behind_an_entrance_is_reported(calls, chosen):
    """None: whichever is chosen here, which can run; the Hopper kernels cannot."""
    found = calls()
    assert len(found) == len(chosen)
    for one, name in zip(found, chosen, strict=True):
        assert one.chosen == name or (name is None and one.reasons[one.chosen] is None)
        assert one.reasons["hopper"] is not None


def test_nothing_is_reported_after_an_error():
    with pytest.raises(ValueError, match="implementation 'cudnn' is not one of"):
        xsake.explain_calls(xsake.dot_product_attention, Q, K, K, implementation="cudnn")
    reported = []
    assert xsake.explain_calls(lambda: reported.append(choice._LISTENER.get())) == []
    assert reported != [None]
    assert choice._LISTENER.get() is None
