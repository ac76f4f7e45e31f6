"""Gemma 2 and 3, and gpt-oss's attention: logits as transformers has them, whole and decoded."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.model import checkpoints
from tests.model.checkpoints import FIXTURES
from xsake.evaluate import methods
from xsake.evaluate.table import measure_methods
from xsake.hads import make
from xsake.hads.chunks import attention_weights
from xsake.model import Config, Rope, Transformer, generate, parameter_shapes
from xsake.model.huggingface import load, save
from xsake.model.observer import Observer

GEMMAS = ("gemma2", "gemma3_text")
CLOSE = 1e-4


def far(actual, expected):
    return np.abs(np.asarray(actual, np.float64) - expected).max()


def gemma(kind):
    return load(FIXTURES / kind, tokenizer=False).model


def gpt_oss() -> Transformer:
    """Its attention; the experts add nothing, and so does an MLP of zeros."""
    config = Config(
        vocab_size=96, context=64, layers=2, width=24, heads=4, kv_heads=2, head_size=8,
        mlp_width=4, qkv_bias=True, out_bias=True, sinks=True, window=6, window_layers=(0,),
        rope=Rope(1000.0, "yarn", 4.0, original_context=64, truncate=False),
    )  # fmt: skip
    stored = load_file(FIXTURES / "gpt_oss_attention" / "model.safetensors")

    def layers(name, *shape):
        every = [stored[f"model.layers.{i}.{name}"] for i in range(config.layers)]
        every = [x.T.reshape(shape or x.T.shape) for x in every]
        return np.stack(every)

    N, K, H, D = config.heads, config.kv_heads, config.head_size, config.width
    parameters = {
        "embed.tokens": stored["model.embed_tokens.weight"],
        "head.kernel": stored["lm_head.weight"].T,
        "norm.scale": stored["model.norm.weight"],
        "layers.attention_norm.scale": layers("input_layernorm.weight"),
        "layers.mlp_norm.scale": layers("post_attention_layernorm.weight"),
        "layers.sinks": layers("self_attn.sinks"),
        "layers.out.kernel": layers("self_attn.o_proj.weight", N, H, D),
        "layers.out.bias": layers("self_attn.o_proj.bias"),
    }
    for ours, theirs, heads in (("query", "q", N), ("key", "k", K), ("value", "v", K)):
        parameters[f"layers.{ours}.kernel"] = layers(f"self_attn.{theirs}_proj.weight", D, heads, H)
        parameters[f"layers.{ours}.bias"] = layers(f"self_attn.{theirs}_proj.bias", heads, H)
    for name, shape in parameter_shapes(config).items():
        parameters.setdefault(name, np.zeros(shape, np.float32))  # the MLP
    return Transformer.of(config, {name: jnp.asarray(x) for name, x in parameters.items()})


MODELS = {"gemma2": lambda: gemma("gemma2"), "gemma3_text": lambda: gemma("gemma3_text")}
MODELS["gpt_oss_attention"] = gpt_oss


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_those_of_transformers(kind):
    tokens, logits = checkpoints.expected(kind)
    assert far(MODELS[kind]()(tokens), logits) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gemma2", {"soft_cap": None}),
        ("gemma2", {"scale": None}),
        ("gemma3_text", {"window_rope": None}),
        ("gpt_oss_attention", {"rope": Rope(1000.0, "yarn", 4.0, original_context=64)}),
    ],
)
def test_the_expected_logits_are_sensitive_to_every_setting(kind, change):
    tokens, logits = checkpoints.expected(kind)
    model = MODELS[kind]()
    changed = Transformer.of(dataclasses.replace(model.config, **change), model.parameters())
    assert far(changed(tokens), logits) > 10 * CLOSE


@pytest.mark.second_python
def test_sinks_change_the_logits():
    tokens, logits = checkpoints.expected("gpt_oss_attention")
    model = gpt_oss()
    without = model.parameters() | {"layers.sinks": jnp.full((2, 4), -50.0)}
    assert far(Transformer.of(model.config, without)(tokens), logits) > 10 * CLOSE


@pytest.mark.second_python
@pytest.mark.parametrize(
    ("kind", "budget", "chunk"),
    [
        pytest.param("gemma2", None, 8, marks=pytest.mark.slow),
        pytest.param("gpt_oss_attention", 1.0, 8, marks=pytest.mark.slow),
        ("gpt_oss_attention", None, 64),
    ],
)
def test_decoding_from_the_cache_is_the_whole_forward(kind, budget, chunk):
    """The prompt in chunks or at once, then a token at a time, with caps, sinks and windows."""
    model = MODELS[kind]()
    tokens, _ = checkpoints.expected(kind)
    prompt = [int(x) for x in tokens[0]]
    made = generate(model, [prompt], max_tokens=4, chunk=chunk, budget=budget, stop=(), burst=4)
    text = list(prompt)
    for _ in range(4):
        text.append(int(jnp.argmax(model(np.array([text]))[0, -1])))
    assert made[0].tokens == text[len(prompt) :]


@pytest.mark.second_python
def test_a_model_that_huggingface_layout_lacks_is_saved_in_our_own(tmp_path):
    model = gemma("gemma2")
    with pytest.raises(ValueError, match="save with layout='xsake'"):
        save(tmp_path / "theirs", model)
    save(tmp_path / "ours", model, layout="xsake")
    tokens, logits = checkpoints.expected("gemma2")
    again = load(tmp_path / "ours", tokenizer=False)
    assert again.config == model.config
    assert far(again.model(tokens), logits) < CLOSE


def test_experts_are_refused(tmp_path):
    config, tensors = checkpoints.read(FIXTURES / "gemma2")
    folder = checkpoints.write(tmp_path / "oss", config | {"model_type": "gpt_oss"}, tensors)
    with pytest.raises(
        ValueError, match="model_type 'gpt_oss' has experts, which are not supported"
    ):
        load(folder, tokenizer=False)


def observed_attention(layer, seen, distance):
    """The largest distance of p · v, as HADS computes p, to what the layer computed, relative."""
    p, _, _ = attention_weights(seen.q[0], seen.k[0], 0, seen.q.shape[1], seen.softmax)
    v = jnp.repeat(seen.v[0], seen.q.shape[2] // seen.v.shape[2], axis=1)
    far = jnp.abs(jnp.einsum("nts,snh->tnh", p, v) - seen.out[0]).max()
    return distance.at[layer].set(far / jnp.abs(seen.out).max())


@pytest.mark.parametrize(
    "kind",
    [
        "gpt_oss_attention",
        *(pytest.param(x, marks=pytest.mark.second_python) for x in ("gemma2", "gemma3_text")),
    ],
)
def test_hads_measures_the_attention_that_each_layer_has(kind):
    """Caps, sinks, and the window of some layers."""
    model = MODELS[kind]()
    tokens, _ = checkpoints.expected(kind)
    distance = jnp.zeros(model.config.layers)
    found = jax.jit(lambda model: model.observe(tokens[:1], observed_attention, distance))(model)
    assert found.max() < 2e-6  # float32 sums in another order


@pytest.mark.second_python
@pytest.mark.parametrize(
    "kind",
    [
        "gpt_oss_attention",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma2", "gemma3_text")),
    ],
)
def test_plans_are_calibrated_made_and_measured(kind):
    """At equal density the plan is better than sink and window; at density 1 it is the model."""
    model = MODELS[kind]()
    subject = Observer(model)
    documents = np.random.default_rng(0).integers(0, model.config.vocab_size, (3, 32))
    profile = subject.profile(documents[:2], block=4, curves=("static",))
    plans = [make(profile, density, "kl", "static") for density in (1.0, 0.7)]
    whole, sparse = (methods.of_plan(plan, 32) for plan in plans)
    fixed = methods.at_density(profile, 0.7, 32, names=["sink_window"])
    found = measure_methods(subject, [whole, sparse, *fixed], [documents[2]], 4)
    densities = [row["realised_density_ratio"] for row in found]
    assert densities == pytest.approx([1, 0.7, 0.7], abs=0.01)
    assert found[0]["kl"] < 1e-6
    assert abs(found[0]["perplexity_gap"]) < 1e-5
    assert found[1]["kl"] < found[2]["kl"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"soft_cap": 0.0}, "soft_cap must be a finite number above 0, got 0.0"),
        ({"scale": -1.0}, "scale must be a finite number above 0"),
        (
            {"window": None, "window_layers": None, "window_rope": Rope()},
            "window_rope needs window",
        ),
        (
            {"attention": "moba", "window": None, "window_layers": None},
            "soft_cap and sinks are for attention = 'dense', but it is 'moba'",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(gemma("gemma2").config, **change)
