"""config.json of Hugging Face ↔ Config, for the kinds of model that Config covers.

model_type   positions  norm   mlp          bias                        else
gpt2         learned    layer  GELU         everywhere
llama        rope       rms    gated SiLU   attention_bias, mlp_bias
mistral      rope       rms    gated SiLU   none                        sliding_window, all layers
qwen2        rope       rms    gated SiLU   q, k, v                     a window in some layers
qwen3        rope       rms    gated SiLU   attention_bias              q/k norm, as qwen2
gemma2       rope       rms    gated GELU   attention_bias              soft caps, norms, windows
gemma3_text  rope       rms    gated GELU   attention_bias              q/k norm, norms, windows
                                                                        with their own RoPE

Gemma is read, and written in our own layout only. gpt_oss is refused for its experts: its attention
is a Config with sinks, biases, windows and yarn.
model_type "xsake" is our own: its `config` is Config's fields, for models that no kind above has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xsake.model.config import Config
from xsake.model.rope import SCALINGS, Rope

Values = Mapping[str, Any]

# model_type → the entry of `architectures` for its causal language model.
KINDS = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
GEMMA = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}  # read only
OWN = "xsake"  # model_type of our own layout
# Hugging Face name → our name; if several map to one, `write` uses the last.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "swish": "silu",
    "silu": "silu",
}
# Settings that affect the model's output, with the only supported value of each.
FIXED = {
    "add_cross_attention": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "use_bidirectional_attention": False,
}
# RoPE scaling: Hugging Face name → field of Rope.
SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "low_freq_factor": "low_frequency",
    "high_freq_factor": "high_frequency",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}
SCALING_FIXED = {
    "partial_rotary_factor": 1.0,
    "mscale": None,
    "mscale_all_dim": None,
    "finetuned": True,
}


def read(values: Values, generation: Values, path: str, most_layers: int | None = None) -> Config:
    """The Config of config.json's and generation_config.json's values; `path` is for messages.

    `most_layers` is the number of tensors that the checkpoint has: a layer has at least one.
    """
    kind = values.get("model_type")
    if kind == OWN:
        return _own(values, path)
    if kind == "gpt_oss":
        raise ValueError(f"{path}: model_type 'gpt_oss' has experts, which are not supported")
    known = KINDS | GEMMA
    if kind not in list(known):
        raise ValueError(f"{path}: model_type {kind!r} is not one of {[*known, OWN]}")
    if (named := values.get("architectures")) not in (None, [], [known[kind]]):
        raise ValueError(f"{path}: architectures {named} is not {[known[kind]]}")
    _check_fixed(values, FIXED, path)
    key = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    layers = values.get(key)
    if most_layers is not None and isinstance(layers, int) and layers > most_layers:
        raise ValueError(f"{path}: {key} = {layers}, but the files hold {most_layers} tensors only")
    try:
        shape = (
            _gpt2(values)
            if kind == "gpt2"
            else _gemma(values, kind)
            if kind in GEMMA
            else _llama(values, kind)
        )
        return Config(**shape, **_ends(values, generation))
    except KeyError as missing:
        raise ValueError(f"{path} lacks {missing.args[0]!r}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _own(values: Values, path: str) -> Config:
    if not isinstance(values.get("config"), Mapping):
        raise ValueError(f"{path} lacks 'config', the fields of the model")
    try:
        return Config.from_dict(values["config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _check_fixed(values: Values, fixed: Values, path: str) -> None:
    for key, only in fixed.items():
        if (value := values.get(key, only)) not in (only, None):
            raise ValueError(f"{path}: {key} = {value!r} is not supported, only {only!r}")


def _gpt2(values: Values) -> dict[str, Any]:
    width, heads = values["n_embd"], values["n_head"]
    if width % heads:
        raise ValueError(f"n_head = {heads} does not divide n_embd = {width}")
    return dict(
        vocab_size=values["vocab_size"],
        context=values["n_positions"],
        layers=values["n_layer"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=width // heads,
        mlp_width=values.get("n_inner") or 4 * width,
        activation=_activation(values.get("activation_function", "gelu_new")),
        gated=False,
        norm="layer",
        norm_epsilon=float(values.get("layer_norm_epsilon", 1e-5)),
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=values.get("tie_word_embeddings", True),
    )


def _llama(values: Values, kind: str) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    bias = kind in ("llama", "qwen3") and values.get("attention_bias", False)
    window, window_layers = _window(values, kind)
    return dict(
        vocab_size=values["vocab_size"],
        context=values["max_position_embeddings"],
        layers=values["num_hidden_layers"],
        width=values["hidden_size"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_size=values.get("head_dim") or values["hidden_size"] // heads,
        mlp_width=values["intermediate_size"],
        activation=_activation(values.get("hidden_act", "silu")),
        norm_epsilon=float(values.get("rms_norm_eps", 1e-6)),
        rope=_rope(values),
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias,
        mlp_bias=kind == "llama" and values.get("mlp_bias", False),
        qk_norm=kind == "qwen3",
        tied=values.get("tie_word_embeddings", False),
        window=window,
        window_layers=window_layers,
    )


def _gemma(values: Values, kind: str) -> dict[str, Any]:
    """Gemma 2 and 3: the fields of Llama, and what they add."""
    layers, bias = values["num_hidden_layers"], values.get("attention_bias", False)
    kinds = values.get("layer_types")
    if kinds is None:  # every second layer of Gemma 2 sees all, and every sixth of Gemma 3
        every = 2 if kind == "gemma2" else values.get("sliding_window_pattern", 6)
        slides = tuple(i for i in range(layers) if (i + 1) % every)
    else:
        slides = _sliding(kinds)
    rope, local = _rope(values), None
    if kind == "gemma3_text":
        rope, local = _gemma3_ropes(values)
    return _llama(values, kind) | dict(
        tied=values.get("tie_word_embeddings", True),
        activation=_activation(values.get("hidden_activation") or "gelu_pytorch_tanh"),
        head_size=values.get("head_dim") or 256,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=kind == "gemma3_text",
        rope=rope,
        window=values["sliding_window"] if slides else None,
        window_layers=slides or None,
        window_rope=local if slides else None,
        scale=float(values["query_pre_attn_scalar"]) ** -0.5,
        soft_cap=values.get("attn_logit_softcapping"),
        final_soft_cap=values.get("final_logit_softcapping"),
        post_norms=True,
        scaled_embedding=True,
    )


def _gemma3_ropes(values: Values) -> tuple[Rope, Rope]:
    """(of layers that see all, of those with a window), in the old and the new form of the file."""
    given = values.get("rope_parameters") or {}
    if "full_attention" in given:
        full, sliding = (given[name] for name in ("full_attention", "sliding_attention"))
        return _rope({**values, "rope_parameters": full}), _rope({"rope_parameters": sliding})
    local = {"rope_theta": values.get("rope_local_base_freq", 10_000.0)}
    return _rope({"rope_theta": 1_000_000.0} | dict(values)), _rope(local)


def _sliding(kinds: Any) -> tuple[int, ...]:
    """The layers that layer_types marks as sliding."""
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer type {kind!r} is neither full nor sliding attention")
    return tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {list(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _window(values: Values, kind: str) -> tuple[int | None, tuple[int, ...] | None]:
    """(window, its layers): all layers in Mistral.

    In Qwen, if use_sliding_window is set: the layers that layer_types marks as sliding, or without
    layer_types those from max_window_layers on.
    """
    if kind == "mistral":
        return values.get("sliding_window"), None
    if kind not in ("qwen2", "qwen3") or not values.get("use_sliding_window"):
        return None, None
    layers = values["num_hidden_layers"]
    kinds = values.get("layer_types")
    if kinds is None:
        first = values.get("max_window_layers", layers)
        slides = tuple(range(first, layers))
    else:
        slides = _sliding(kinds)
    return (values["sliding_window"], slides) if slides else (None, None)


def _rope(values: Values) -> Rope:
    """Old files have rope_theta and rope_scaling, new ones both in rope_parameters."""
    given = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    base = given.pop("rope_theta", None)
    base = values.get("rope_theta", 10_000.0) if base is None else base
    kinds = {given.pop("rope_type", None), given.pop("type", None)} - {None}
    if len(kinds) > 1:
        raise ValueError(f"rope_type and type of rope scaling differ: {sorted(kinds)}")
    kind = kinds.pop() if kinds else "default"
    if kind == "default":
        return Rope(base=float(base))
    if kind not in SCALINGS:
        raise ValueError(f"rope scaling {kind!r} is not one of {['default', *SCALINGS[1:]]}")
    _check_fixed(given, SCALING_FIXED, "rope scaling")
    fields = {"original_context": values["max_position_embeddings"]} if kind == "yarn" else {}
    for key, x in given.items():
        if key in SCALING and x is not None:
            whole: dict[str, Any] = {"original_context": int, "truncate": bool}
            fields[SCALING[key]] = whole.get(SCALING[key], float)(x)
        elif key not in SCALING_FIXED and x is not None:
            raise ValueError(f"{key!r} of rope scaling is not supported")
    return Rope(base=float(base), scaling=kind, **fields)


def _ends(values: Values, generation: Values) -> dict[str, Any]:
    """bos and eos; generation_config.json takes precedence, as in transformers' generate."""

    def token(name: str) -> Any:
        found = generation.get(name)
        return values.get(name) if found is None else found

    bos, eos = token("bos_token_id"), token("eos_token_id")
    return dict(bos=bos, eos=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))


# ------------------------------------------------------------------------------------------ writing


def kind_of(config: Config) -> str:
    """The model_type that can represent this config; raises if there is none.

    >>> from xsake.model import PRESETS
    >>> [kind_of(PRESETS[name]) for name in ("gpt2", "smollm2-135m", "qwen3-0.6b")]
    ['gpt2', 'llama', 'qwen3']
    """
    if config.is_sparse:
        raise ValueError(
            f"no model_type of {list(KINDS)} has attention = {config.attention!r}; "
            "save with layout='xsake'"
        )
    for kind in KINDS:
        try:
            same = read(_values(config, kind), {}, "config") == _plain(config)
        except ValueError:
            continue
        if same:
            return kind
    raise ValueError(
        f"no model_type of {list(KINDS)} has the norm, biases, activation and windows of {config}; "
        "save with layout='xsake'"
    )


def _plain(config: Config) -> Config:
    """The config in the form that `read` returns: the same windows and RoPE."""
    slides = tuple(i for i in range(config.layers) if config.windowed(i))
    everywhere = len(slides) == config.layers and not (config.qkv_bias or config.qk_norm)
    return dataclasses.replace(
        config,
        window=config.window if slides else None,
        window_layers=None if everywhere or not slides else slides,
        rope=config.rope if config.positions == "rope" else Rope(),
    )


def write(config: Config) -> dict[str, Any]:
    """config.json's values, which `read` and transformers turn back into the same model."""
    kind = kind_of(config)
    return {"architectures": [KINDS[kind]], "model_type": kind, **_values(config, kind)}


def write_own(config: Config) -> dict[str, Any]:
    """config.json's values in our own layout."""
    return {"model_type": OWN, "config": config.to_dict()}


def _values(config: Config, kind: str) -> dict[str, Any]:
    """config.json's values for this model_type; `kind_of` checks that `read` returns the config."""
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    eos = list(config.eos) if len(config.eos) > 1 else next(iter(config.eos), None)
    values: dict[str, Any] = dict(
        model_type=kind,
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.tied,
        bos_token_id=config.bos,
        eos_token_id=eos,
    )
    if kind == "gpt2":
        return values | dict(
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            n_inner=config.mlp_width,
            activation_function=names[config.activation],
            layer_norm_epsilon=config.norm_epsilon,
        )
    values |= dict(
        max_position_embeddings=config.context,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        intermediate_size=config.mlp_width,
        hidden_act=names[config.activation],
        rms_norm_eps=config.norm_epsilon,
        # the older spelling, which old and new versions of transformers both read
        rope_theta=config.rope.base,
        rope_scaling=_scaling(config.rope),
    )
    if kind in ("llama", "qwen3"):
        values["attention_bias"] = config.out_bias
    if kind == "llama":
        values["mlp_bias"] = config.mlp_bias
    if kind == "mistral":
        values["sliding_window"] = config.window
    if kind in ("qwen2", "qwen3"):
        slides = [config.windowed(i) for i in range(config.layers)]
        values |= dict(
            use_sliding_window=any(slides),
            sliding_window=config.window,
            max_window_layers=slides.index(True) if any(slides) else config.layers,
            layer_types=[("full", "sliding")[slide] + "_attention" for slide in slides],
        )
    return values


def _scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    names = {
        "linear": ("factor",),
        "llama3": ("factor", "original_context", "low_frequency", "high_frequency"),
        "yarn": (
            "factor",
            "original_context",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "truncate",
        ),
    }[rope.scaling]
    fields = {theirs: getattr(rope, ours) for theirs, ours in SCALING.items() if ours in names}
    return {"rope_type": rope.scaling} | {k: x for k, x in fields.items() if x is not None}
