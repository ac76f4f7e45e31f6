"""EasyDeL's operation: its example runs, on every platform's method, and every argument counts."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests import oracle
from tests.integrations.test_blocksparse import some_on_both
from xsake.attention import dot_product_attention
from xsake.integrations import easydel
from xsake.integrations.easydel import (
    AttentionOutput,
    BlockSparseAttn,
    MaskInfo,
    OperationMetadata,
    OperationRegistry,
)
from xsake.integrations.easydel import operation as easydel_operation
from xsake.integrations.ejkernel import FwdParams, blocksparse

B, T, N, K, H = 2, 12, 4, 2, 8
CLOSE = 2e-6
# as EasyDeL's documentation prints it, without its imports
EXAMPLE = """
>>> # Configure for TPU execution
>>> metadata = OperationMetadata(
...     runtime_dtype=jnp.bfloat16,
...     softmax_scale=1.0 / math.sqrt(head_dim),
...     blocksize_q=256,
...     blocksize_k=512
... )
>>> splash_attn = BlockSparseAttn(metadata)
>>>
>>> # Use with sequences divisible by 128
>>> output = splash_attn(query, key, value, causal=True)
"""
RNG = np.random.default_rng(0)
X = {name: np.float32(x) for name, x in oracle.random_inputs(RNG, B, T, T, N, K, H).items()}
IDS = RNG.integers(-1, 2, (B, T)).astype(np.int32)
SEEN = RNG.random((B, N, T, T)) < 0.5
AT = RNG.permuted(np.tile(np.arange(T), (B, 1)), axis=1).astype(np.int32)
SINKS = RNG.standard_normal((K, 2)).astype(np.float32)
BIAS = RNG.standard_normal((1, N, T, T)).astype(np.float32)
CAUSAL = ("causal",)


def both(spec):
    return ("and", CAUSAL, spec)


def attend(metadata=None, **arguments):
    operation = OperationRegistry.create("blocksparse", metadata or OperationMetadata())
    return operation(X["q"], X["k"], X["v"], **arguments).attention_outputs


def expected(spec, **more):
    allowed = oracle.allowed(spec, B, N, T, T)
    return oracle.attention(X["q"], X["k"], X["v"], allowed=allowed, **more)[0]


@pytest.fixture
def by_definition(monkeypatch):
    """The backend `reference`: what is tested is the mask, and compiling the others takes long."""
    door = functools.partial(dot_product_attention, implementation="reference")
    monkeypatch.setattr(blocksparse, "dot_product_attention", door)


def test_the_example_runs_as_written():
    code = re.sub(r"^(>>>|\.\.\.) ?", "", EXAMPLE, flags=re.MULTILINE)
    ones = jnp.ones((1, 256, 2, 16))
    names = {"jnp": jnp, "math": math, "head_dim": 16, "query": ones, "key": ones, "value": ones}
    exec(code, names | {name: getattr(easydel, name) for name in easydel.__all__}, scope := {})
    output = scope["output"]
    assert isinstance(output, AttentionOutput)
    assert output.attention_weights is None
    assert output.attention_outputs.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(output.attention_outputs, np.float32), 1, atol=1e-6)


def test_it_is_registered_by_name_and_has_a_method_for_every_platform(monkeypatch):
    metadata = OperationMetadata(softmax_scale=0.2)
    operation = OperationRegistry.create("blocksparse", metadata)
    assert type(operation) is OperationRegistry.get("blocksparse") is BlockSparseAttn
    assert operation.get_impl_name() == "blocksparse"
    assert operation.get_impl_metadata() is metadata
    output = AttentionOutput()
    calls = []

    def keep(self, *args, **more):
        calls.append((args, more))
        return output

    monkeypatch.setattr(BlockSparseAttn, "forward_native", keep)
    platforms = ("cpu", "gpu", "cuda", "rocm", "tpu", "tt")
    for platform in platforms:
        assert getattr(operation, f"forward_{platform}")(1, causal=False) is output
    assert operation(1, causal=False) is output
    assert calls == [((1,), {"causal": False})] * (len(platforms) + 1)
    with pytest.raises(ValueError, match="operation 'flash' is not one of"):
        OperationRegistry.get("flash")


THEIRS = SimpleNamespace(  # as ejkernel's class keeps them; its properties derive the others
    _attention_mask=SEEN, _q_segment_ids=None, _kv_segment_ids=None, q_positions=None,
    kv_positions=None, attention_mask=SEEN, q_segment_ids=IDS, kv_segment_ids=IDS,
)  # fmt: skip
ARGUMENTS = {
    "metadata's scale": (
        {"metadata": OperationMetadata(softmax_scale=0.2)},
        CAUSAL,
        {"scale": 0.2},
    ),
    "segments": ({"mask_info": MaskInfo.from_segments(IDS)}, both(("documents", IDS)), {}),
    "padding": (
        {"mask_info": MaskInfo.from_attention_mask(IDS >= 0)},
        both(("documents", np.where(IDS >= 0, 0, -1))),
        {},
    ),
    "attention mask": (
        {"mask_info": MaskInfo.from_attention_mask(SEEN)},
        both(("array", SEEN)),
        {},
    ),
    "ejkernel's MaskInfo": ({"mask_info": THEIRS}, both(("array", SEEN)), {}),
    "positions": (
        {"mask_info": MaskInfo(q_positions=AT, kv_positions=AT), "sliding_window": (2, -1)},
        ("positions", both(("sliding_window", 2, None)), AT, AT),
        {},
    ),
    "bias": ({"bias": BIAS, "mask_info": MaskInfo()}, CAUSAL, {"bias": BIAS}),
    "init_bias": ({"init_bias": lambda: BIAS}, CAUSAL, {"bias": BIAS}),
    "softmax_aux": (
        {"softmax_aux": SINKS},
        CAUSAL,
        {"sinks": np.repeat(SINKS, N // K, axis=0)},
    ),
    "logits_soft_cap": ({"logits_soft_cap": 0.5}, CAUSAL, {"soft_cap": 0.5}),
    "softmax_scale": ({"softmax_scale": 0.1}, CAUSAL, {"scale": 0.1}),
    "causal": ({"causal": False}, ("everything",), {}),
}


@pytest.mark.parametrize("name", some_on_both(ARGUMENTS, "segments", "ejkernel's MaskInfo"))
def test_an_argument_does_what_its_documentation_says(name, by_definition):
    arguments, spec, settings = ARGUMENTS[name]
    found = expected(spec, **settings)
    assert oracle.relative_error(found, expected(CAUSAL)) > 1e-2, "the case changes nothing"
    assert oracle.relative_error(attend(**arguments), found) <= CLOSE


def test_metadata_sets_blocks_and_the_fused_backward(monkeypatch):
    calls = []
    monkeypatch.setattr(
        easydel_operation, "blocksparse_attention", lambda q, k, v, **rest: calls.append(rest) or q
    )
    attend(OperationMetadata(blocksize_q=64, blocksize_k=128), fused_backward=True)
    assert calls[0]["q_blocksize"] == 64
    assert calls[0]["kv_blocksize"] == 128
    assert calls[0]["fused_backward"] is True
    config = SimpleNamespace(fwd_params=FwdParams(q_blocksize=32), bwd_params=None)
    attend(OperationMetadata(operation_configs={"blocksparse": config}))
    assert calls[1]["fwd_params"].q_blocksize == 32


# ---------------------------------------------------------------- EasyDeL's own metadata and models


def a_config(**more):
    """The attributes of EasyDeL's base config that an operation reads, and some others."""
    axes = SimpleNamespace(batch_axis=("fsdp", "dp"), head_axis="tp", decode_head_axis=None)
    fields = dict(
        attn_dtype=jnp.bfloat16, attn_softmax_dtype=jnp.float32, blocksize_q=512, blocksize_k=512,
        platform="jax", backend="cpu", sequence_axis_name="sp", partition_axis=axes,
        mesh=a_mesh(2), operation_configs=None,
    )  # fmt: skip
    return SimpleNamespace(**fields | more)


def test_metadata_of_a_config_has_its_dtypes_mesh_and_axes():
    metadata = OperationMetadata.from_config(a_config())
    assert metadata.runtime_dtype == jnp.bfloat16
    assert metadata.blocksize_q is None  # 512 is EasyDeL's default for every operation
    mesh = SimpleNamespace(shape={"dp": 2, "fsdp": 4, "tp": 2})
    metadata = OperationMetadata(runtime_dtype=jnp.float32, base_config=a_config(mesh=mesh))
    assert metadata.runtime_dtype == jnp.float32
    assert metadata.axes(8, 16, 4) == (("fsdp", "dp"), ("tp",))
    assert metadata.axes(2, 1, 1) == (("dp",), None)  # what does not divide stays whole


def test_easydels_metadata_is_read_by_name(by_definition):
    """As its models make it: no blocksize_q, no softmax_scale, settings of other operations."""
    theirs = SimpleNamespace(
        runtime_dtype=jnp.float32, runtime_softmax_dtype=jnp.float32, platform="triton",
        backend="gpu", sequence_axis_name="sp", partition_axis={"batch_axis": "dp"},
        partition_manager=object(), base_config=None, operation_configs=None, mesh=None,
        requires_cache=True, get_shardings=lambda **how: None,
    )  # fmt: skip
    operation = BlockSparseAttn(theirs)
    assert operation.get_impl_metadata() is theirs
    given = dict(
        softmax_scale=None, bias=None, init_bias=lambda: 1 / 0, deterministic=True,
        dropout_rng=None, dropout_prob=0.0, precision=jax.lax.Precision.DEFAULT,
        prevent_cse=True, cache_view=None,
        cum_seqlens_q=None, cum_seqlens_k=None, normalize_output=True, optimized=False,
        compute_dtype=None, mask_value=None, vmem_limit_bytes=None, policy=jax.checkpoint_policies,
        mask_info=MaskInfo(SEEN), cache_metadata=SimpleNamespace(starts=None, indexs=None),
    )  # fmt: skip
    found = operation(query=X["q"], key=X["k"], value=X["v"], **given).attention_outputs
    assert oracle.relative_error(found, expected(both(("array", SEEN)))) <= CLOSE


def test_a_registry_of_easydel_may_ask_for_a_cache():
    operation = OperationRegistry.create("blocksparse", OperationMetadata(), requires_cache=False)
    assert operation.get_impl_metadata().requires_cache is False
    assert OperationRegistry.list_implementations() == ["blocksparse"]


@pytest.mark.second_python
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), (3, 0)], ids=str)
def test_one_query_decodes_at_the_last_key_that_it_is_shown(window, by_definition):
    """The last row of the whole sequence, from a cache with unfilled slots behind its keys."""
    whole = both(("sliding_window", *window)) if window else CAUSAL
    found = expected(whole)[:, -1:]
    cached = [np.pad(X[x], ((0, 0), (0, 5), (0, 0), (0, 0)), constant_values=9) for x in "kv"]
    filled = np.tile(np.arange(T + 5) < T, (B, 1))[:, None, None]
    query = X["q"][:, -1:]
    for keys, info in (
        ([X["k"], X["v"]], None),
        (cached, MaskInfo.from_attention_mask(filled)),
        (cached, MaskInfo.from_segments(np.zeros((B, 1), int), np.where(filled[:, 0, 0], 0, -1))),
    ):
        out = BlockSparseAttn(OperationMetadata())(
            query, *keys, mask_info=info, sliding_window=window
        )
        assert oracle.relative_error(out.attention_outputs, found) <= CLOSE


def one_query(**arguments):
    return BlockSparseAttn(OperationMetadata())(X["q"][:, -1:], X["k"], X["v"], **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attend(cache_metadata=1), "cache_metadata is int, and pages of a cache are not"),
        (lambda: attend(cache_view=object()), "cache_view is object, and pages of a cache are not"),
        (lambda: attend(compute_dtype=1), "compute_dtype is not an argument of this operation"),
        (
            lambda: attend(cum_seqlens_q=IDS),
            "cum_seqlens_q is not read here; give packed sequences",
        ),
        (lambda: attend(dropout_prob=0.1), "dropout_prob=0.1 would drop attention weights"),
        (lambda: attend(normalize_output=False), "normalize_output=False asks for sums that"),
        (lambda: attend(precision="BF16_BF16_F32"), "selects an algorithm for products"),
        (lambda: attend(bias=BIAS[..., :3]), r"bias must be broadcastable to \[B, N, T, S\]"),
        (lambda: attend(mask_info=3), "mask_info must be a MaskInfo, got int"),
        (
            lambda: BlockSparseAttn(None),
            "metadata must be an OperationMetadata, of .* got NoneType",
        ),
        (lambda: BlockSparseAttn(object()), "metadata must be an OperationMetadata, .* got object"),
        (lambda: OperationMetadata.from_config({}), "config must be a model's config with attn_dt"),
        (
            lambda: OperationMetadata(runtime_dtype="x"),
            "runtime_dtype must be a floating dtype, got",
        ),
        (
            lambda: OperationMetadata(runtime_softmax_dtype=jnp.bfloat16),
            "runtime_softmax_dtype is bfloat16, but the softmax is always in float32; give float32",
        ),
        (lambda: OperationMetadata(dropout_prob=0.1), "dropout_prob=0.1 would drop attention weig"),
        (
            lambda: OperationMetadata(softmax_scale=math.nan),
            "softmax_scale must be a finite number",
        ),
        (
            lambda: attend(OperationMetadata(operation_configs=[])),
            "operation_configs must be a dict",
        ),
        (
            lambda: OperationMetadata(mesh=a_mesh(2), partition_spec=P("x", None, None, None, "x")),
            r"partition_spec must be a PartitionSpec of up to 4 axes, those of \[B, T, N, H\], got",
        ),
        (
            lambda: OperationMetadata(mesh=a_mesh(2), partition_spec=("x",)),
            "partition_spec must be a PartitionSpec of up to 4 axes",
        ),
        (
            lambda: OperationMetadata(mesh=a_mesh(2), partition_spec=P("y")),
            r"names the axis 'y', but the mesh has \['x'\]",
        ),
        (
            lambda: attend(OperationMetadata(mesh=a_mesh(4), partition_spec=P("x"))),
            "2 batch rows cannot be sharded over 4 devices of mesh axis 'x'; pad them, or shard",
        ),
        (
            lambda: attend(mask_info=MaskInfo(SEEN[:, :, :, :3])),
            r"mask_info.attention_mask must be .* = \[2, 4, 12, 12\], got shape \[2, 4, 12, 3\]",
        ),
        (
            lambda: MaskInfo.from_attention_mask(np.where(IDS == 0, 0, -1e9)),
            r"attention_mask is .* of an additive mask \(0 = attend\) give attention_mask == 0",
        ),
        (lambda: attend(mask_info=MaskInfo("x")), "mask_info.attention_mask must be an array, got"),
        (
            lambda: one_query(mask_info=MaskInfo(kv_segment_ids=IDS[:, :5])),
            r"mask_info.kv_segment_ids must be \[2, 12\], got shape \[2, 5\]",
        ),
        (
            lambda: one_query(mask_info=MaskInfo(SEEN[0])),
            r"mask_info.attention_mask must be .* got shape \[4, 12, 12\]",
        ),
        (lambda: one_query(mask_info=MaskInfo(SEEN[0, 0])), r"got shape \[12, 12\]"),
        (
            lambda: one_query(mask_info=MaskInfo(q_positions=IDS)),
            r"q_positions must be \[2, 1\], got",
        ),
        (lambda: OperationMetadata(partition_spec=P("x")), "needs the mesh that it names"),
        (lambda: OperationMetadata(partition_spec=P(None, "x")), "shards tokens or features of"),
        (
            lambda: attend(OperationMetadata(mesh=a_mesh(4), partition_spec=P(None, None, "x"))),
            "2 key/value heads cannot be sharded over 4 devices of mesh axis 'x'; repeat them to 4",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(call, message):
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=message):
        call()


def a_mesh(count):
    """Of one device that stands for several: only its shape is read."""
    return SimpleNamespace(shape={"x": count})


# ----------------------------------------------------------------------------------------- sharded

SHARDED = dict(softmax_aux=SINKS, mask_info=MaskInfo(SEEN, IDS, IDS), sliding_window=(5, -1))


def main() -> None:
    """Output and gradients over 2 × 2 devices; in a process of its own, which has four."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    metadata = OperationMetadata(mesh=mesh, partition_spec=P("data", None, "model", None))

    @jax.jit
    def run(q, k, v, d_out):
        def output(q, k, v):
            return BlockSparseAttn(metadata)(q, k, v, **SHARDED).attention_outputs

        out, pull_back = jax.vjp(output, q, k, v)
        return out, *pull_back(d_out)

    ours = run(*(X[name] for name in ("q", "k", "v", "d_out")))
    spec = both(("and", ("array", SEEN), ("and", ("documents", IDS), ("sliding_window", 5, None))))
    allowed, sinks = oracle.allowed(spec, B, N, T, T), np.repeat(SINKS, N // K, axis=0)
    wanted = oracle.attention_grads(
        X["q"], X["k"], X["v"], allowed=allowed, d_out=X["d_out"], sinks=sinks
    )
    theirs = (expected(spec, sinks=sinks), wanted["dq"], wanted["dk"], wanted["dv"])
    errors = [oracle.relative_error(a, b) for a, b in zip(ours, theirs, strict=True)]
    assert max(errors) <= 1e-5, errors
    assert len(ours[0].sharding.device_set) == 4
    explicit = dataclasses.replace(metadata, mesh=jax.make_mesh((2, 2), ("data", "model")))
    out = BlockSparseAttn(explicit)(X["q"], X["k"], X["v"], **SHARDED).attention_outputs
    assert oracle.relative_error(out, theirs[0]) <= 1e-5


def test_an_additive_mask_is_refused_on_a_mesh_too():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    run = BlockSparseAttn(OperationMetadata(mesh=mesh, partition_spec=P("data")))
    additive = np.where(SEEN, 0, -10000).astype(np.int32)
    with pytest.raises(ValueError, match=r"of an additive mask \(0 = attend\) give mask_info"):
        run(X["q"], X["k"], X["v"], mask_info=MaskInfo(additive))


@pytest.mark.second_python
def test_a_mesh_shards_batch_rows_and_heads_and_tokens():
    names = "test_blocksparse, test_easydel, test_levanter"
    code = f"from tests.integrations import {names}; [x.main() for x in ({names})]"
    flags = "--xla_force_host_platform_device_count=4"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"XLA_FLAGS": flags})
