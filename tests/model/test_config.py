"""What a Config accepts, what it refuses, and the published shapes."""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from xsake.model import PRESETS, Config, Rope, parameter_shapes
from xsake.model.rope import angles, frequencies, rotate

TINY = PRESETS["tiny"]

# As the models' own pages and files count them; a tied head counts once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    counted = sum(math.prod(shape) for shape in parameter_shapes(PRESETS[name]).values())
    assert counted == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name):
    read = Config.from_dict(json.loads(json.dumps(PRESETS[name].to_dict())))
    assert read == PRESETS[name]
    assert hash(read) == hash(PRESETS[name])


YARN = {"scaling": "yarn", "factor": 2.0, "original_context": 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "Config has no 'colour'; it has vocab_size, context"),
        ({"kv_head": 2}, "Config has no 'kv_head'; did you mean 'kv_heads'"),
        ({"rope": {"theta": 1.0}}, "Rope has no 'theta'"),
        ({"rope": {"scaling": "dynamic"}}, "rope scaling 'dynamic' is not one of"),
        ({"rope": {"scaling": "yarn", "factor": 2.0}}, "'yarn' needs original_context"),
        ({"rope": {"base": 0.5}}, "rope base must be above 1, got 0.5"),
        ({"rope": {"scaling": "linear", "factor": 0.5}}, "factor must be at least 1, got 0.5"),
        ({"rope": {"base": math.nan}}, "rope base must be above 1, got nan"),
        ({"rope": {"base": math.inf}}, "rope base must be above 1, got inf"),
        ({"rope": {"scaling": "linear", "factor": math.nan}}, "factor must be at least 1, got nan"),
        ({"rope": YARN | {"beta_fast": 0.0}}, "0 < beta_slow < beta_fast, got 1.0 and 0.0"),
        ({"rope": YARN | {"beta_slow": math.nan}}, "0 < beta_slow < beta_fast, got nan and 32.0"),
        ({"rope": YARN | {"attention_factor": math.nan}}, "attention_factor must be above 0, got"),
        ({"rope": [1]}, r"Config: 'rope' must be an object, got \[1\]"),
        ({"eos": 3}, "Config: 'eos' must be a list, got 3"),
        ({"layers": 2**31}, "layers must be at most 2147483647, got 2147483648"),
        ({"activation": "swish"}, "activation 'swish' is not one of"),
        ({"norm": "batch"}, "norm 'batch' is not one of"),
        ({"positions": "alibi"}, "positions 'alibi' is not one of"),
        ({"kv_heads": 3}, "kv_heads = 3 does not divide heads = 4"),
        ({"head_size": 15}, "head_size must be even, got 15"),
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"layers": True}, "layers must be a whole number of at least 1, got True"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be between 0 and 1, got 0.0"),
        ({"window": 0}, "window must be a whole number of at least 1, got 0"),
        ({"window_layers": [1]}, "window_layers needs window"),
        ({"window": 4, "window_layers": [2]}, r"window_layers \[2\] must be from 0 to 1"),
        ({"eos": [256]}, r"eos \[256\] must be from 0 to vocab_size - 1 = 255"),
    ],
)
def test_invalid_values_raise_a_one_line_error(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        Config.from_dict({**TINY.to_dict(), **change})
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named():
    values = TINY.to_dict()
    del values["mlp_width"]
    with pytest.raises(ValueError, match="Config needs 'mlp_width', which is missing"):
        Config.from_dict(values)


def test_windows_are_by_layer():
    config = dataclasses.replace(TINY, window=8, window_layers=(1,))
    assert [config.windowed(layer) for layer in range(2)] == [False, True]
    assert dataclasses.replace(TINY, window=8).windowed(0)
    assert not TINY.windowed(0)


# --------------------------------------------------------------------------------------------- rope


def llama3_frequency(plain, rope):
    """One frequency, by the three cases in which Llama 3's rule is published."""
    wavelength = 2 * math.pi / plain
    if wavelength < rope.original_context / rope.high_frequency:
        return plain
    if wavelength > rope.original_context / rope.low_frequency:
        return plain / rope.factor
    smooth = (rope.original_context / wavelength - rope.low_frequency) / (
        rope.high_frequency - rope.low_frequency
    )
    return (1 - smooth) * plain / rope.factor + smooth * plain


def test_llama3_scaling_is_the_published_rule():
    rope = PRESETS["llama-3.2-1b"].rope
    plain = [rope.base ** (-2 * i / 64) for i in range(32)]
    wanted = [llama3_frequency(x, rope) for x in plain]
    found, magnitude = frequencies(rope, 64)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert magnitude == 1
    kinds = np.isclose(found, plain), np.isclose(found, np.array(plain) / rope.factor)
    assert kinds[0].any()
    assert kinds[1].any()
    assert not (kinds[0] | kinds[1]).all()


def test_linear_scaling_divides_every_frequency():
    plain, _ = frequencies(Rope(base=1e4), 16)
    slow, _ = frequencies(Rope(base=1e4, scaling="linear", factor=4.0), 16)
    np.testing.assert_allclose(slow, plain / 4, rtol=1e-6)


def test_yarn_keeps_the_fast_pairs_and_stretches_the_slow_ones():
    """The ramp runs between the pairs that make beta_fast and beta_slow turns, as published."""
    rope = Rope(base=1e6, scaling="yarn", factor=4.0, original_context=32_768)
    plain, _ = frequencies(Rope(base=1e6), 128)
    found, magnitude = frequencies(rope, 128)
    turns = 32_768 * plain / (2 * np.pi)
    first, last = int((turns > 32).sum()) - 1, int((turns >= 1).sum())
    np.testing.assert_allclose(found[: first + 1], plain[: first + 1], rtol=1e-6)
    np.testing.assert_allclose(found[last:], plain[last:] / 4, rtol=1e-6)
    ramp = (found / plain - 1 / 4) / (3 / 4)
    np.testing.assert_allclose(np.diff(ramp[first : last + 1]), -1 / (last - first), rtol=1e-4)
    assert magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_rope_logits_depend_only_on_the_relative_position():
    """q·k at positions p and p' equals q·k at p - p' and 0."""
    rng = np.random.default_rng(0)
    q, k = jnp.asarray(rng.standard_normal((2, 1, 1, 1, 16)), jnp.float32)

    def meet(p, p_key):
        turned = [
            rotate(x, *angles(Rope(), 16, np.array([[at]]))) for x, at in ((q, p), (k, p_key))
        ]
        return float((turned[0] * turned[1]).sum())

    assert meet(7, 3) == pytest.approx(meet(104, 100), rel=1e-5)
    assert meet(7, 3) != pytest.approx(meet(7, 4), rel=1e-2)
