"""Mapping between the tensors of a checkpoint and the parameters of a model, with layouts.

    file                                              parameter
    model.layers.7.self_attn.q_proj.weight [N·H, D]  →  layers.query.kernel [7, D, N, H]
    transformer.h.7.attn.c_attn.weight     [D, 3·D]  →  layers.query, .key, .value .kernel [7, …]
    blk.7.attn_norm.weight                 [D]       →  layers.attention_norm.scale [7, D]

`check` compares every name, shape and type before the parameters are loaded; `gather` reads and
stacks the tensors layer by layer; `scatter` is its inverse, except that it does not restore the
interleaved RoPE layout (`adjacent_pairs`) and scales less 1 (`scales_less_one`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.model.config import Config
from xsake.model.transformer import parameter_shapes

SUFFIX = {"kernel": "weight", "scale": "weight", "bias": "bias"}
# llama.cpp uses interleaved RoPE and stores these modules permuted accordingly.
ROTATED = ("layers.query", "layers.key")


@dataclasses.dataclass(frozen=True)
class Names:
    """How one family of files names and lays out tensors.

    Attributes:
      modules: from a parameter's module to the tensor's name without `.weight` or `.bias`; {} is
        the layer's number. Modules that map to one tensor are fused in it, in this order.
      inputs_first: True: matrices are stored [in, out], except the head; False: [out, in].
      adjacent_pairs: q and k are stored in the interleaved RoPE layout.
      ignored: a pattern for tensors that hold no parameter, such as masks and frequencies.
      stacked: tensors are the parameters themselves, all layers in one; `modules` is not read.
      scales_less_one: the scale of a norm is stored less 1.
    """

    modules: Mapping[str, str]
    inputs_first: bool = False
    adjacent_pairs: bool = False
    ignored: str = r"$^"
    stacked: bool = False
    scales_less_one: bool = False


XSAKE = Names({}, stacked=True)

LLAMA = Names(
    {
        "embed.tokens": "model.embed_tokens",
        "layers.attention_norm": "model.layers.{}.input_layernorm",
        "layers.query": "model.layers.{}.self_attn.q_proj",
        "layers.key": "model.layers.{}.self_attn.k_proj",
        "layers.value": "model.layers.{}.self_attn.v_proj",
        "layers.query_norm": "model.layers.{}.self_attn.q_norm",
        "layers.key_norm": "model.layers.{}.self_attn.k_norm",
        "layers.out": "model.layers.{}.self_attn.o_proj",
        "layers.mlp_norm": "model.layers.{}.post_attention_layernorm",
        "layers.gate": "model.layers.{}.mlp.gate_proj",
        "layers.up": "model.layers.{}.mlp.up_proj",
        "layers.down": "model.layers.{}.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
    ignored=r".*\.rotary_emb\.inv_freq",
)

GEMMA = dataclasses.replace(
    LLAMA,
    modules=dict(LLAMA.modules)
    | {
        "layers.attention_post_norm": "model.layers.{}.post_attention_layernorm",
        "layers.mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
        "layers.mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    scales_less_one=True,
)

GPT2 = Names(
    {
        "embed.tokens": "transformer.wte",
        "embed.positions": "transformer.wpe",
        "layers.attention_norm": "transformer.h.{}.ln_1",
        "layers.query": "transformer.h.{}.attn.c_attn",
        "layers.key": "transformer.h.{}.attn.c_attn",
        "layers.value": "transformer.h.{}.attn.c_attn",
        "layers.out": "transformer.h.{}.attn.c_proj",
        "layers.mlp_norm": "transformer.h.{}.ln_2",
        "layers.up": "transformer.h.{}.mlp.c_fc",
        "layers.down": "transformer.h.{}.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    inputs_first=True,
    ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
)

_GGUF = {
    "embed.tokens": "token_embd",
    "embed.positions": "position_embd",
    "layers.attention_norm": "blk.{}.attn_norm",
    "layers.query": "blk.{}.attn_q",
    "layers.key": "blk.{}.attn_k",
    "layers.value": "blk.{}.attn_v",
    "layers.query_norm": "blk.{}.attn_q_norm",
    "layers.key_norm": "blk.{}.attn_k_norm",
    "layers.out": "blk.{}.attn_output",
    "layers.mlp_norm": "blk.{}.ffn_norm",
    "layers.gate": "blk.{}.ffn_gate",
    "layers.up": "blk.{}.ffn_up",
    "layers.down": "blk.{}.ffn_down",
    "norm": "output_norm",
    "head": "output",
}
_FUSED = dict.fromkeys(("layers.query", "layers.key", "layers.value"), "blk.{}.attn_qkv")
GGUF = {
    "gpt2": Names(_GGUF | _FUSED),
    "llama": Names(_GGUF, adjacent_pairs=True, ignored=r"rope_freqs\.weight"),
    "qwen2": Names(_GGUF),
    "qwen3": Names(_GGUF),
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Named tensors that can be read one by one: a safetensors folder or a GGUF file.

    Attributes:
      shapes: of every tensor, without reading it.
      types: the dtype name of each tensor in the file format.
      readable: the types that `read` knows.
      read: a tensor by its name.
      location: location(name) is the file that holds a tensor, location(None) the checkpoint; for
        messages.
    """

    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, str]
    readable: tuple[str, ...]
    read: Callable[[str], np.ndarray]
    location: Callable[[str | None], str]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor name of the checkpoint, per layer or global, and the parameters stored in it."""

    name: str  # with {} for the layer's number
    # parameter name → shape; several are concatenated on the output axis
    parameters: Mapping[str, tuple[int, ...]]
    shape: tuple[int, ...]  # in the file
    layers: int | None  # number of layers; None: a tensor that is not per layer
    transposed: bool  # [out, in] in the file
    adjacent: bool  # in the interleaved RoPE layout
    added: float = 0.0  # to what the file holds

    def names(self) -> list[str]:
        """The tensors' names, one for each layer."""
        return [self.name.format(i) for i in range(self.layers or 1)]


def entries(config: Config, names: Names) -> Iterator[Entry]:
    """Every tensor of a checkpoint of this config; raises if `names` lacks a parameter."""
    shapes = parameter_shapes(config)
    if names.stacked:
        for parameter, shape in shapes.items():
            yield Entry(parameter, {parameter: shape}, shape, None, False, False)
        return
    together: dict[str, list[str]] = {}
    for parameter in shapes:
        together.setdefault(_tensor(parameter, names), []).append(parameter)
    for name, parameters in together.items():
        parameters.sort(key=lambda p: list(names.modules).index(_module(p)))
        stacked = parameters[0].startswith("layers.")
        module, leaf = _module(parameters[0]), parameters[0].rpartition(".")[2]
        sizes = [_matrix(p, shapes[p]) for p in parameters]
        # fused parameters share the input axis, and their output axes add up
        shape = (*sizes[0][:-1], sum(size[-1] for size in sizes))
        transposed = leaf == "kernel" and (not names.inputs_first or module == "head")
        yield Entry(
            name=name,
            parameters={p: shapes[p] for p in parameters},
            shape=shape[::-1] if transposed else shape,
            layers=config.layers if stacked else None,
            transposed=transposed,
            adjacent=names.adjacent_pairs and module in ROTATED,
            added=1.0 if names.scales_less_one and leaf == "scale" else 0.0,
        )


def _module(parameter: str) -> str:
    return parameter if parameter.startswith("embed.") else parameter.rpartition(".")[0]


def _tensor(parameter: str, names: Names) -> str:
    if names.stacked:
        return parameter
    module, leaf = _module(parameter), parameter.rpartition(".")[2]
    if module not in names.modules:
        raise ValueError(f"this checkpoint format has no tensor for parameter {parameter!r}")
    return f"{names.modules[module]}.{SUFFIX.get(leaf, 'weight')}"


def _matrix(parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one layer's parameter with its axes merged to [in, out], or to [out]."""
    if parameter.startswith("layers."):
        shape = shape[1:]
    if not parameter.endswith(".kernel"):
        return shape if parameter.startswith("embed.") else (math.prod(shape),)
    contracted = 2 if parameter == "layers.out.kernel" else 1
    return math.prod(shape[:contracted]), math.prod(shape[contracted:])


# ------------------------------------------------------------------------------------------ reading


def gather(config: Config, wanted: list[Entry], source: Source, dtype: Any) -> dict[str, Array]:
    """Every parameter, stacked over layers, from the tensors that `check` found."""
    parameters: dict[str, Array] = {}
    for entry in wanted:
        # only the parameters of one entry are in host memory; jnp.array copies them
        stacks = {p: np.empty(shape, np.float32) for p, shape in entry.parameters.items()}
        for layer, name in enumerate(entry.names()):
            for p, x in _unpack(entry, source.read(name), config.head_size).items():
                target = stacks[p] if entry.layers is None else stacks[p][layer]
                target[...] = x.reshape(target.shape)
                target += entry.added
        parameters |= {p: jnp.array(x, dtype) for p, x in stacks.items()}
    return parameters


def _unpack(entry: Entry, x: np.ndarray, head_size: int) -> dict[str, np.ndarray]:
    """The parts of one tensor, [in, out] or [out] each."""
    x = x.T if entry.transposed else x
    if entry.adjacent:
        # [..., N, H/2, 2] → [..., N, 2, H/2]: interleaved → half-split
        paired = x.reshape(*x.shape[:-1], -1, head_size // 2, 2)
        x = paired.swapaxes(-1, -2).reshape(x.shape)
    ends = np.cumsum([_matrix(p, shape)[-1] for p, shape in entry.parameters.items()])[:-1]
    return dict(zip(entry.parameters, np.split(x, ends, axis=-1), strict=True))


def check(config: Config, names: Names, source: Source) -> list[Entry]:
    """The expected tensors; raises if the checkpoint has missing, extra or mismatching ones."""
    wanted = list(entries(config, names))
    shapes = {name: entry.shape for entry in wanted for name in entry.names()}
    missing = [name for name in shapes if name not in source.shapes]
    if missing:
        raise ValueError(
            f"{source.location(None)} lacks the tensor {missing[0]!r}{_and_more(missing)}, "
            f"of the {len(shapes)} that its configuration asks for"
        )
    for name, shape in shapes.items():
        if (found := source.shapes[name]) != shape:
            raise ValueError(
                f"{source.location(name)}: the tensor {name!r} is {list(found)}, but the "
                f"configuration makes it {list(shape)}"
            )
        if (stored := source.types[name]) not in source.readable:
            raise ValueError(
                f"{source.location(name)}: the tensor {name!r} is stored as {stored}, "
                f"which is not one of {list(source.readable)}"
            )
    surplus = [
        name
        for name in source.shapes
        if name not in shapes and not re.fullmatch(names.ignored, name)
    ]
    if config.tied and _tensor("head.kernel", names) in surplus:
        _check_tied(names, source)
        surplus.remove(_tensor("head.kernel", names))
    if surplus:
        raise ValueError(
            f"{source.location(surplus[0])} holds the tensor {surplus[0]!r}{_and_more(surplus)}, "
            "which its configuration has no use for"
        )
    return wanted


def _check_tied(names: Names, source: Source) -> None:
    """A tied head may be stored too, as long as it is the embedding."""
    head, embedding = _tensor("head.kernel", names), _tensor("embed.tokens", names)
    if not np.array_equal(source.read(head), source.read(embedding)):
        raise ValueError(
            f"{source.location(head)}: the tensor {head!r} differs from {embedding!r}, although "
            "the configuration ties them"
        )


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


# ------------------------------------------------------------------------------------------ writing


def scatter(
    config: Config, names: Names, parameters: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) as the file holds them; values and types stay, bit for bit."""
    if names.stacked:
        yield from ((name, np.asarray(x)) for name, x in parameters.items())
        return
    for entry in entries(config, names):
        stacks = [np.asarray(parameters[p]) for p in entry.parameters]
        for layer, name in enumerate(entry.names()):
            parts = [
                (x if entry.layers is None else x[layer]).reshape(_matrix(p, x.shape))
                for p, x in zip(entry.parameters, stacks, strict=True)
            ]
            x = np.concatenate(parts, axis=-1)
            yield name, np.ascontiguousarray(x.T if entry.transposed else x)
