"""Levanter's attention: what its own reference returned for named axes, masks, sinks, soft caps."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.integrations import levanter_cases
from tests.integrations.test_blocksparse import some_on_both
from tests.oracle import relative_error
from xsake import masks
from xsake.integrations.levanter import dot_product_attention, dot_product_attention_with_sink

CLOSE = 2e-6
EXPECTED = np.load(Path(__file__).parent / "fixtures" / "levanter.npz")


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class Named:
    """What the adapter reads of a Haliax NamedArray."""

    array: object
    axes: tuple

    def __post_init__(self):
        assert tuple(axis.size for axis in self.axes) == np.shape(self.array)


def named(array, *names):
    return Named(jnp.asarray(array), tuple(map(Axis, names, np.shape(array))))


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """The fields of Levanter's."""

    is_causal: bool = False
    causal_offset: object = None
    explicit_mask: object = None
    segment_ids: object = None
    sliding_window: int | None = None


@dataclasses.dataclass(frozen=True)
class LaterMask(AttentionMask):
    """With a field of newer versions, and one that nobody knows."""

    bidirectional_window: int | None = None
    stride: int | None = None


CASES = levanter_cases.cases(named)
NAMES = (levanter_cases.QUERY, levanter_cases.KEY, levanter_cases.KEY)


def turned(x, names, order):
    """The same named array with its axes in another order."""
    return named(np.transpose(x, [names.index(name) for name in order]), *order)


def mesh(count):
    """Of one device that stands for several: only its shape is read."""
    return SimpleNamespace(shape={"x": count})


def sharded(**mapping):
    return {"mesh": mesh(4), "axis_mapping": mapping}


def too_short(field, count):
    """An AttentionMask with five queries, or with `count` arrays of segment ids."""
    ids = named(np.zeros(5, np.int32), "position")
    return AttentionMask(is_causal=True, **{field: (ids,) * count if count else ids})


def call(case="causal", orders=NAMES, **more):
    if isinstance(case, tuple):
        mask = too_short(*case)
        return dot_product_attention("position", "key_position", "head_size", *given(NAMES), mask)
    fields, others = CASES[case]
    mask = None if fields is None else AttentionMask(**fields)
    more = {"use_flash": False} | others | more
    arrays = given(orders)
    return dot_product_attention("position", "key_position", "head_size", *arrays, mask, **more)


def given(orders):
    """Query, key and value with their axes in these orders."""
    each = zip(levanter_cases.arrays(), NAMES, orders, strict=True)
    return [turned(x, *names) for x, *names in each]


@pytest.mark.parametrize("case", some_on_both(CASES, "segments", "sinks"))
def test_results_are_those_of_levanter(case):
    out = call(case)
    assert [axis.name for axis in out.axes] == list(levanter_cases.QUERY)
    assert relative_error(out.array, EXPECTED[case]) <= CLOSE


ORDERS = (
    ("position", "q_heads_per_group", "batch", "head_size", "kv_head"),
    ("head_size", "key_position", "kv_head", "batch"),
    ("batch", "key_position", "kv_head", "head_size"),
)


@pytest.mark.second_python
def test_axes_may_come_in_any_order_and_blocks_in_any_size():
    out = call("segments", ORDERS, use_flash=None, flash_block_size=4)
    assert [axis.name for axis in out.axes] == list(ORDERS[0])
    back = [ORDERS[0].index(name) for name in levanter_cases.QUERY]
    assert relative_error(np.transpose(out.array, back), EXPECTED["segments"]) <= CLOSE


@pytest.mark.second_python
def test_axes_without_batch_or_heads():
    """One batch row of one head, without these axes; values have features of their own."""
    q, k, v = levanter_cases.arrays()
    out = dot_product_attention(
        Axis("position", 9), "key_position", Axis("head_size", 4),
        named(q[0, 0, 0], "position", "head_size"), named(k[0, 0], "key_position", "head_size"),
        named(v[0, 0, :, :3], "key_position", "features"), AttentionMask(is_causal=True),
        use_flash=False,
    )  # fmt: skip
    assert [axis.name for axis in out.axes] == ["position", "features"]
    assert relative_error(out.array, EXPECTED["causal"][0, 0, 0, :, :3]) <= CLOSE


def test_sinks_in_the_order_of_an_earlier_levanter():
    arrays = [named(x, *ns) for x, ns in zip(levanter_cases.arrays(), NAMES, strict=True)]
    fields, more = CASES["sinks"]
    out = dot_product_attention_with_sink(
        "position", "key_position", "head_size", *arrays, more["attn_sink"],
        AttentionMask(**fields), use_flash=False,
    )  # fmt: skip
    assert relative_error(out.array, EXPECTED["sinks"]) <= CLOSE


@pytest.mark.second_python
def test_a_narrower_attention_dtype_casts_and_the_output_keeps_the_querys():
    out = call("causal", attention_dtype=jnp.bfloat16).array
    assert out.dtype == jnp.float32
    assert 1e-4 < relative_error(out, EXPECTED["causal"]) < 2e-2
    assert relative_error(call(attention_dtype=jnp.float32).array, EXPECTED["causal"]) <= CLOSE


def test_backends_of_levanter_that_mean_something_here():
    vanilla = SimpleNamespace(value="vanilla")
    out = call("causal", use_flash=None, attn_backend=vanilla)
    assert relative_error(out.array, EXPECTED["causal"]) <= CLOSE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1, "inference": False}, "dropout=0.1 would drop attention weights"),
        ({"bias": named(np.zeros(9, np.float32), "position"), "logits_soft_cap": 2.0}, "before"),
        ({"precision": "BF16_BF16_F32"}, "selects an algorithm for products"),
        ({"attn_backend": "nvte"}, "attn_backend 'nvte' has no meaning here; leave it out"),
        ({"attn_backend": "vanilla", "use_flash": True}, "use_flash=True contradicts attn_backend"),
        ({"attn_backend": "default", "use_flash": False}, "use_flash=False contradicts attn_backe"),
        ({"case": ("segment_ids", 3)}, "segment_ids must be one named array, or two, .* got 3"),
        ({"case": ("segment_ids", 0)}, "segment_ids has 5 along 'position', but query, key and"),
        ({"case": ("explicit_mask", 0)}, "explicit_mask has 5 along 'position', but query, key"),
        ({"mesh": mesh(2)}, "mesh and axis_mapping are given together"),
        (sharded(batch="y"), r"names the mesh axis 'y', but the mesh has \['x'\]"),
        (sharded(position="x"), "axis_mapping shards 'position', but only batch rows and kv heads"),
        (sharded(kv_head="x"), "2 along 'kv_head' cannot be sharded over 4 devices of mesh axis"),
        (sharded(batch="x", kv_head="x"), r"'kv_head'\] over the mesh axis 'x', which can"),
        (sharded(batch=1), r"axis_mapping\['batch'\] must be the name of a mesh axis .* got 1"),
        ({"flash_block_size": 0}, "flash_block_size must be an integer from 1"),
        ({"scaling_factor": float("inf")}, "scaling_factor must be a finite number"),
        (
            {"attn_sink": named(np.zeros(2, np.float32), "kv_head")},
            r"attn_sink must have axes \['kv_head', 'q_heads_per_group'\], got \['kv_head'\]",
        ),
        (
            {"bias": named(np.zeros(3, np.float32), "other")},
            "bias has axis 'other', but may have",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(arguments, message):
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=message):
        call(**arguments)


# ----------------------------------------------------------------------------------------- sharded


def main() -> None:
    """Batch rows and kv heads over 2 × 2 devices; test_easydel.py has a process for it."""
    devices = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    mapping = {"batch": "data", "kv_head": "model", "mlp": "model"}
    run = jax.jit(
        lambda case: call(case, use_flash=None, mesh=devices, axis_mapping=mapping).array,
        static_argnums=0,
    )
    for case in ("segments", "sinks", "bias", "explicit"):
        assert relative_error(run(case), EXPECTED[case]) <= CLOSE, case
    assert len(run("segments").sharding.device_set) == 4
    devices = jax.make_mesh((2, 2), ("data", "model"))  # with Explicit axes
    out = call("sinks", use_flash=None, mesh=devices, axis_mapping=mapping).array
    assert relative_error(out, EXPECTED["sinks"]) <= CLOSE


def test_axes_that_do_not_fit_are_refused():
    q, k, v = (named(x, *ns) for x, ns in zip(levanter_cases.arrays(), NAMES, strict=True))
    attend = functools.partial(dot_product_attention, Key="head_size", value=v)
    with pytest.raises(ValueError, match="QPos and KPos must have different names, got 'position'"):
        attend(QPos="position", KPos="position", query=q, key=k)
    with pytest.raises(ValueError, match=r"without \['key_position'\]"):
        attend(QPos="position", KPos="key_position", query=q, key=q)
    attend = functools.partial(attend, "position", "key_position")
    with pytest.raises(
        TypeError, match="mask must be an AttentionMask, a named array or a rule of"
    ):
        attend(query=q, key=k, mask=3)
    additive = named(np.full((9, 9), -1e9, np.float32), "position", "key_position")
    for mask in (additive, AttentionMask(explicit_mask=additive)):
        with pytest.raises(ValueError, match=r"mask is float32 with values other .*mask == 0"):
            attend(query=q, key=k, mask=mask)
    with pytest.raises(TypeError, match=r"query must be a named array, .* got ndarray; for arrays"):
        attend(query=levanter_cases.arrays()[0], key=k)
    with pytest.raises(ValueError, match="key has 7 along 'key_position', but value has 9"):
        attend(query=q, key=cut(k, "key_position", 7))
    with pytest.raises(ValueError, match="query has 9 along 'position', but axis 'position' has 8"):
        dot_product_attention(Axis("position", 8), "key_position", "head_size", q, k, v)
    with pytest.raises(TypeError, match="KPos must be an axis or its name, got tuple"):
        dot_product_attention("position", (), "head_size", q, k, v)


def cut(x, name, size):
    """The first elements along an axis."""
    at = tuple(slice(size) if axis.name == name else slice(None) for axis in x.axes)
    return named(np.asarray(x.array)[at], *(axis.name for axis in x.axes))


def test_a_rule_may_be_the_mask_and_dropout_may_be_none():
    arrays = [named(x, *ns) for x, ns in zip(levanter_cases.arrays(), NAMES, strict=True)]
    out = dot_product_attention(
        "position", "key_position", "head_size", *arrays, masks.causal(), use_flash=False,
        dropout=None,
    )  # fmt: skip
    assert relative_error(out.array, EXPECTED["causal"]) <= CLOSE


def test_fields_of_later_versions_are_read_or_refused():
    arrays = [named(x, *ns) for x, ns in zip(levanter_cases.arrays(), NAMES, strict=True)]

    def out(mask):
        found = dot_product_attention("position", "key_position", "head_size", *arrays, mask)
        return found.array

    both = out(LaterMask(bidirectional_window=2))
    np.testing.assert_allclose(both, out(masks.sliding_window(2, 2)), atol=CLOSE)
    assert np.abs(both - out(None)).max() > 1e-2
    with pytest.raises(NotImplementedError, match="the mask has stride = 3, which is not known"):
        out(LaterMask(stride=3))


@pytest.mark.second_python
def test_sinks_tell_the_heads_of_a_key_without_kv_heads():
    """One kv head without an axis: the shared batch axis is not taken for it."""
    q, k, v = levanter_cases.arrays()
    fields, more = CASES["sinks"]
    sinks = np.asarray(more["attn_sink"].array)[0]
    out = dot_product_attention(
        "position", "key_position", "head_size",
        named(q[:, 0], "batch", "heads", "position", "head_size"),
        named(k[:, 0], "batch", "key_position", "head_size"),
        named(v[:, 0], "batch", "key_position", "head_size"),
        AttentionMask(**fields), use_flash=False, attn_sink=named(sinks, "heads"),
    )  # fmt: skip
    assert relative_error(out.array, EXPECTED["sinks"][:, 0]) <= CLOSE
