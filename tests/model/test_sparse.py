"""Models with sparse attention: what they compute, how they generate, and what they refuse."""

from __future__ import annotations

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.draws import FAST_COMPILATION
from tests.model.families import LLAMA, random_model, random_tokens
from xsake import masks, nsa
from xsake.cli import checkpoints
from xsake.evaluate.decoding import compare_decoding
from xsake.model import (
    Config,
    GenerateOptions,
    KVCache,
    Sparse,
    SparseCache,
    Transformer,
    generate,
    huggingface,
    parameter_shapes,
)
from xsake.model.observer import Observer
from xsake.model.sparse.attend import chosen_blocks
from xsake.train.flops import per_token

# By name, because xsake.model.generate is also the name of a function.
module = importlib.import_module("xsake.model.generate")

T = 40
ROUNDING = 1e-4  # of float32 logits of size about 10, by another order of operations
SIZES = {"block_size": 8, "num_selected": 3}
POOLED = {"compression_block": 8, "compression_stride": 4}
KINDS = {
    # the first block and the current one are forced, the third is free
    "nsa": Sparse(**SIZES, **POOLED, local_blocks=1, window_size=6, compression="weights"),
    "moba": Sparse(**SIZES),
    "msa": Sparse(**SIZES, index_size=4),
}
ALL_PARTS = Sparse(
    **SIZES, **POOLED, compressed=True, compression="mlp", window_size=6, index_heads=2
)
# msa has another cache than nsa; moba has no parts of its own in the model
SOME = ["nsa", "msa", *(pytest.param(x, marks=pytest.mark.slow) for x in ("moba", "all parts"))]
EVERYTHING = {"block_size": 8, "num_selected": T // 8}  # all blocks of T tokens

jit = functools.partial(jax.jit, compiler_options=FAST_COMPILATION)


def configured(attention, sparse=None, **changes):
    if attention == "all parts":
        attention, sparse = "msa", ALL_PARTS
    sparse = KINDS[attention] if sparse is None else sparse
    return dataclasses.replace(LLAMA, attention=attention, sparse=sparse, eos=(), **changes)


@functools.cache
def model(attention):
    return random_model(configured(attention), implementation="reference")  # compiles fastest


@jit
def logits(model, tokens, segment_ids=None):
    return model(tokens, segment_ids=segment_ids)


@functools.cache
def tokens():
    return random_tokens(LLAMA, (2, T))


@functools.cache
def expected(attention):
    return np.asarray(logits(model(attention), tokens()))


# -------------------------------------------------------------------------------------- full pass


@pytest.mark.parametrize(
    ("attention", "sparse"),
    [
        pytest.param("moba", Sparse(**EVERYTHING), marks=pytest.mark.slow),
        ("msa", Sparse(**EVERYTHING)),
        # gates of 0.5, and a window of all tokens: half of it, and half of all blocks
        ("nsa", Sparse(**EVERYTHING, **POOLED, window_size=T, compressed=False)),
    ],
)
def test_all_blocks_are_dense_attention(attention, sparse):
    """A model that selects everything has the logits of the dense model of the same weights."""
    dense = random_model(LLAMA, implementation="reference")
    config = configured(attention, sparse)
    more = {
        name: jnp.zeros(shape)
        for name, shape in parameter_shapes(config).items()
        if ".sparse." in name
    }
    same = Transformer.of(config, dense.parameters() | more, implementation="reference")
    found = logits(same, tokens())
    np.testing.assert_allclose(found, logits(dense, tokens()), atol=ROUNDING)


@pytest.mark.parametrize("attention", SOME)
def test_what_is_selected_matters(attention):
    dense = random_model(LLAMA, implementation="reference")
    shared = {
        name: x for name, x in model(attention).parameters().items() if ".sparse." not in name
    }
    assert shared.keys() == dense.parameters().keys()
    same = Transformer.of(LLAMA, shared, implementation="reference")
    assert np.abs(expected(attention) - logits(same, tokens())).max() > 0.1


def test_packed_documents_equal_each_alone():
    ids = np.repeat([[3, 5]], [23, 17], axis=1).repeat(2, axis=0).astype(np.int32)
    packed = np.asarray(logits(model("moba"), tokens(), ids))
    alone = np.asarray(logits(model("moba"), np.roll(tokens(), -23, axis=1)))
    np.testing.assert_allclose(packed[:, :23], expected("moba")[:, :23], atol=ROUNDING)
    np.testing.assert_allclose(packed[:, 23:], alone[:, :17], atol=ROUNDING)


def test_the_indexer_learns_from_its_own_loss_only_and_the_model_from_its_own():
    """Blocks have no gradient: what reaches the indexer is KL, and KL reaches nothing else."""

    own = model("msa")

    @jit
    def gradient(parameters, of_model, of_index):
        def loss(parameters):
            same = Transformer.of(own.config, parameters, implementation="reference")
            hidden, index = same.hidden_and_index_loss(tokens())
            return of_model * (hidden**2).mean() + of_index * index

        return jax.grad(loss)(parameters)

    from_model = gradient(own.parameters(), 1.0, 0.0)
    from_index = gradient(own.parameters(), 0.0, 1.0)
    for name in from_model:
        of_indexer = ".sparse.index_" in name
        assert (np.abs(from_model[name]).max() == 0) == (of_indexer or name == "head.kernel"), name
        assert (np.abs(from_index[name]).max() == 0) == (not of_indexer), name


def test_observe_gives_what_the_choice_needs():
    """`chosen_blocks` of a layer's observation: 3 blocks of the past, the current one always."""
    config = configured("moba")

    def fold(layer, seen, carry):
        return carry.at[layer].set(chosen_blocks(config, seen.q, seen.k, seen.inputs))

    shape = (config.layers, 2, T, config.kv_heads, 3)
    found = np.asarray(
        jit(lambda model: model.observe(tokens(), fold, jnp.zeros(shape, jnp.int32)))(model("moba"))
    )
    current = np.arange(T)[None, None, :, None] // 8
    assert (found.max(-1) == current).all()
    assert ((found >= 0).sum(-1) == np.minimum(current + 1, 3)).all()
    assert (found[0] != found[1]).any()


# -------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("attention", SOME)
def test_decoding_equals_the_full_pass(attention):
    """Prompts of 21 and 9 tokens, then the texts' own tokens one by one, through the cache."""
    lengths, more = [21, 9], 12
    own = model(attention)
    cache = SparseCache.empty(own.config, 2, 21 + more)
    prompts = [tokens()[row, :length].tolist() for row, length in enumerate(lengths)]
    prefill = jit(module._prefill_whole.__wrapped__)
    padded = module.padded(prompts, 32)
    cache, first = prefill(own, cache, padded, jnp.asarray(lengths), None)
    at = np.array(lengths)[:, None] + np.arange(more)[None]
    new = jnp.asarray(tokens()[np.arange(2)[:, None], at])
    reader = GenerateOptions().reader(own.config)

    @jit
    def decode(own, cache, new):
        def step(cache, token):
            one = jnp.ones(2, jnp.int32)
            hidden, (cache, _) = module.decode_step(
                own, reader, (cache, None), token, one, reselect=False
            )
            return cache, own.logits(hidden)

        return jax.lax.scan(step, cache, new.T)

    cache, found = decode(own, cache, new)
    assert cache.length.tolist() == [21 + more, 9 + more]
    wanted = expected(attention)[np.arange(2)[:, None], at]
    np.testing.assert_allclose(np.moveaxis(np.asarray(found), 0, 1), wanted, atol=ROUNDING)
    before = expected(attention)[np.arange(2), np.array(lengths) - 1]
    np.testing.assert_allclose(own.logits(first), before, atol=ROUNDING)


@pytest.mark.slow
def test_generated_tokens_are_those_of_the_full_pass():
    """Greedy, over several bursts and past the length of the prompts' padding."""
    own, prompts = model("moba"), tokens()[:, :13].tolist()
    rows = generate(own.unstacked(), prompts, max_tokens=T - 13, stop=(), burst=16)
    whole = [prompt + row.tokens for prompt, row in zip(prompts, rows, strict=True)]
    predicted = np.asarray(logits(own, np.asarray(whole, np.int32)))[:, 12:-1].argmax(-1)
    assert [row.tokens for row in rows] == predicted.tolist()


# ------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("attention", [*KINDS, "all parts", "dense"])
def test_a_saved_folder_is_the_same_model(attention, tmp_path):
    config = LLAMA if attention == "dense" else configured(attention)
    own = random_model(config)
    huggingface.save(tmp_path, own, layout="xsake", shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = huggingface.load(tmp_path, tokenizer=False)
    assert again.config == config
    assert again.model.parameters().keys() == own.parameters().keys()
    for name, x in own.parameters().items():
        np.testing.assert_array_equal(again.model.parameters()[name], x)


def test_inspect_counts_what_the_cache_holds(tmp_path, capsys):
    """2 layers of k and v, 2 heads of 8, and the mean keys of every 8 tokens: 64 + 4 numbers."""
    huggingface.save(tmp_path, model("moba"), layout="xsake")
    checkpoints.inspect(tmp_path)
    said = capsys.readouterr().out
    assert "moba" in said
    assert "272 in float32, 136 in bfloat16" in said


def test_hugging_face_has_no_layout_for_sparse_attention(tmp_path):
    with pytest.raises(ValueError, match=r"has attention = 'nsa'; save with layout='xsake'"):
        huggingface.save(tmp_path / "model", model("nsa"))
    assert not (tmp_path / "model").exists()
    with pytest.raises(ValueError, match="layout 'hf' is not one of"):
        huggingface.save(tmp_path / "model", model("nsa"), layout="hf")


def test_a_damaged_configuration_is_named(tmp_path):
    huggingface.save(tmp_path, model("moba"), layout="xsake")
    path = tmp_path / "config.json"
    text = path.read_text()
    for old, new, message in (
        ('"config"', '"settings"', "lacks 'config', the fields of the model"),
        ('"moba"', '"mobas"', "attention 'mobas' is not one of"),
        ('"num_selected"', '"selected"', "Sparse has no 'selected'"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            huggingface.load(tmp_path, tokenizer=False)


# ---------------------------------------------------------------------------------------- refusals


def test_what_is_for_dense_attention_is_refused():
    own, config = model("nsa"), configured("nsa")
    with pytest.raises(ValueError, match=r"mask restricts dense attention, .* leave mask out"):
        own(tokens(), mask=masks.causal())
    with pytest.raises(ValueError, match="mask restricts dense attention"):
        generate(own, [[1, 2]], mask=masks.causal())
    with pytest.raises(ValueError, match=r"budget is for dense attention, .* leave budget out"):
        generate(own, [[1, 2]], budget=0.5)
    with pytest.raises(ValueError, match="budget is for dense attention"):
        compare_decoding(own, tokens()[0], 3, 0.5)
    with pytest.raises(ValueError, match="KVCache is for dense attention"):
        KVCache.empty(config, 1, 8)
    with pytest.raises(ValueError, match="HADS plans dense attention, but this model has"):
        Observer(own)
    with pytest.raises(ValueError, match="hidden_and_index_loss needs attention = 'msa'"):
        own.hidden_and_index_loss(tokens())
    with pytest.raises(ValueError, match="attention is 'dense': it has no settings"):
        _ = LLAMA.settings


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("sparse", {}, r"attention 'sparse' is not one of \['dense', 'nsa', 'moba', 'msa'\]"),
        ("dense", {"num_selected": 3}, "num_selected = 3 is not read with attention = 'dense'"),
        ("nsa", {"num_selected": 2}, "sparse.num_selected = 2 is below the 3 blocks"),
        ("nsa", {"block_size": 0}, "sparse.block_size must be"),
        ("nsa", {"block_size": 40}, "sparse.block_size must be a multiple of compression"),
        ("nsa", {"compression_block": 24}, "sparse.compression_block must be a multiple of"),
        ("nsa", {"window_size": -1}, r"window_size must be at least 0 \(no window\), got -1"),
        ("nsa", {"compression": "max"}, "compression 'max' is not one of"),
        ("nsa", {"compression_width": 3}, "compression_width = 3 is not read with attention"),
        ("nsa", {"index_size": 8}, "index_size = 8 is not read with attention = 'nsa'"),
        ("moba", {"compression": "mlp"}, "compression = 'mlp' is not read with attention = 'moba'"),
        ("moba", {"compressed": True}, "a branch that attention = 'moba' does not have"),
        ("msa", {"index_heads": 3}, "index_heads must be 1 or kv_heads = 2, got 3"),
        ("msa", {"index_size": 5}, "index_size must be even, got 5"),
        ("msa", {"index_size": 0}, "index_size must be at least 1, got 0"),
    ],
)
def test_a_wrong_setting_is_named(attention, options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LLAMA, attention=attention, sparse=Sparse(**options))


def test_a_window_of_the_dense_model_is_refused():
    with pytest.raises(ValueError, match="window = 9 is for attention = 'dense'"):
        configured("nsa", window=9)


def test_settings_have_the_defaults_of_each_attention():
    found = {name: configured(name, Sparse()).settings for name in KINDS}
    assert {name: (x.block_size, x.window_size) for name, x in found.items()} == {
        "nsa": (64, 512),
        "moba": (64, None),
        "msa": (128, None),
    }
    assert found["nsa"] == nsa.Settings(window_size=512)
    assert configured("nsa", Sparse(window_size=0)).branches == ("g_cmp", "g_slc")


def test_a_config_survives_its_dictionary():
    for name in KINDS:
        assert Config.from_dict(configured(name).to_dict()) == configured(name)
    with pytest.raises(ValueError, match="'sparse' must be an object, got 3"):
        Config.from_dict(LLAMA.to_dict() | {"sparse": 3})


def test_operations_count_every_branch():
    """2 layers, 4 heads of 8: 12 · 64 operations for every key that a query sees on average."""
    dense = per_token(dataclasses.replace(LLAMA, tied=True), 64)
    plain = dataclasses.replace(LLAMA, tied=True, attention="moba", sparse=Sparse(**SIZES))
    assert per_token(plain, 64, 0.5) == dense - 12 * 64 * 16
    window = dataclasses.replace(plain, sparse=Sparse(**SIZES, window_size=6))
    gates = 6 * 2 * 32 * 2 * 4
    assert per_token(window, 64, 0.5) == per_token(plain, 64, 0.5) + gates + 12 * 64 * 6
