"""Config: the configuration of a decoder, and presets of published models.

One transformer covers GPT-2 (learned positions, LayerNorm, GELU, biases) and the Llama family
(rotary positions, RMSNorm, gated SiLU, grouped heads; Qwen's biases and q/k norm, Mistral's
window; Gemma's soft caps, norms after attention and MLP, a RoPE of its own for windows; gpt-oss's
sinks): they differ in the fields below and in nothing else. `attention` gives any of them attention
that selects its own blocks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from xsake import _files
from xsake.model.rope import Rope
from xsake.model.sparse import options
from xsake.model.sparse.options import Sparse
from xsake.nsa.settings import Score, Settings

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
NORMS = ("layer", "rms")
POSITIONS = ("learned", "rope")
LARGEST = 2**31 - 1  # of a size: positions and ids are int32


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a decoder. Hashable, so that it can be static under jit."""

    vocab_size: int
    context: int  # maximum length; longer prompts raise an error
    layers: int
    width: int  # of the residual stream
    heads: int  # query heads, N
    kv_heads: int  # key/value heads, K, which divides N
    head_size: int  # H; need not be width / heads
    mlp_width: int
    activation: str = "silu"  # gelu | gelu_tanh | relu | silu
    gated: bool = True  # activation(gate x) · (up x), instead of activation(up x)
    norm: str = "rms"  # rms | layer (which has a bias)
    norm_epsilon: float = 1e-5
    positions: str = "rope"  # rope | learned
    rope: Rope = dataclasses.field(default_factory=Rope)  # read when positions = "rope"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over the head size of q and k, before they are rotated
    tied: bool = False  # the output head is the token embedding, transposed
    window: int | None = None  # a query sees itself and window - 1 keys to the left
    window_layers: tuple[int, ...] | None = None  # which layers have it; None: all
    window_rope: Rope | None = None  # RoPE of these layers; None: the same
    scale: float | None = None  # of attention's logits; None: 1/sqrt(head_size)
    soft_cap: float | None = None  # attention's logits become cap · tanh(logits / cap)
    sinks: bool = False  # a learned logit for each head that joins the softmax's denominator
    post_norms: bool = False  # norms of what attention and the MLP add to the residual stream
    scaled_embedding: bool = False  # token embeddings are multiplied by sqrt(width)
    final_soft_cap: float | None = None  # of the logits of the next token
    attention: str = "dense"  # dense | nsa | moba | msa
    sparse: Sparse = dataclasses.field(default_factory=Sparse)  # read unless attention = "dense"
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = "vocab_size context layers width heads kv_heads head_size mlp_width".split()
        for name in sizes:
            _check_count(name, getattr(self, name))
        for name, choices in (
            ("activation", ACTIVATIONS),
            ("norm", NORMS),
            ("positions", POSITIONS),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} {value!r} is not one of {list(choices)}")
        _files.check_fields(Config, vars(self), "Config")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        if self.positions == "rope" and self.head_size % 2:
            raise ValueError(
                f"RoPE rotates pairs of dimensions, so head_size must be even, got {self.head_size}"
            )
        if not 0 < self.norm_epsilon < 1:
            raise ValueError(f"norm_epsilon must be between 0 and 1, got {self.norm_epsilon}")
        if self.window is not None:
            _check_count("window", self.window)
        _check_window_layers(self)
        for name in ("scale", "soft_cap", "final_soft_cap"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {value}")
        options.check(
            self.attention,
            self.sparse,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            rope=self.positions == "rope",
        )
        if self.is_sparse and (self.soft_cap is not None or self.sinks):
            raise ValueError(
                f"soft_cap and sinks are for attention = 'dense', but it is {self.attention!r}; "
                "leave them out"
            )
        if self.is_sparse and self.window is not None:
            raise ValueError(
                f"window = {self.window} is for attention = 'dense', but it is {self.attention!r}, "
                "whose window branch has sparse.window_size; leave window out"
            )
        for name, ids in (("bos", [] if self.bos is None else [self.bos]), ("eos", self.eos)):
            if any(not 0 <= i < self.vocab_size for i in ids):
                raise ValueError(
                    f"{name} {list(ids)} must be from 0 to vocab_size - 1 = {self.vocab_size - 1}"
                )

    def windowed(self, layer: int) -> bool:
        """Whether this layer sees a window only."""
        among = self.window_layers is None or layer in self.window_layers
        return self.window is not None and among

    @property
    def is_sparse(self) -> bool:
        """Whether attention selects its own blocks."""
        return self.attention != "dense"

    @property
    def settings(self) -> Settings:
        """The numbers of sparse attention, as `xsake.nsa` takes them."""
        return self.sparse.settings(self._score)

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches of sparse attention, by the names of their gates."""
        return self.sparse.branches(self._score)

    @property
    def index_size(self) -> int:
        """Head size of the indexer of msa."""
        return self.sparse.index_size or self.head_size

    @property
    def _score(self) -> Score:
        if not self.is_sparse:
            raise ValueError("attention is 'dense': it has no settings of sparse attention")
        return self.attention  # type: ignore[return-value]  # checked by options.check

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """A Config of plain values; an unknown or missing key raises an error that names it.

        >>> Config.from_dict({**PRESETS["tiny"].to_dict(), "layer": 3})
        Traceback (most recent call last):
        ValueError: Config has no 'layer'; did you mean 'layers'?
        """
        values = dict(values)
        _check_keys(cls, values)
        for name in ("window_layers", "eos"):
            if not isinstance(values.get(name), list | tuple | None):
                raise ValueError(f"Config: {name!r} must be a list, got {values[name]!r:.40}")
        nested: tuple[tuple[str, Any], ...] = (
            ("rope", Rope),
            ("window_rope", Rope),
            ("sparse", Sparse),
        )
        for name, kind in nested:
            if name == "window_rope" and values.get(name) is None:
                continue
            if not isinstance(values.get(name, kind()), Mapping | kind):
                raise ValueError(f"Config: {name!r} must be an object, got {values[name]!r:.40}")
            if isinstance(values.get(name), Mapping):
                _check_keys(kind, values[name])
                values[name] = kind(**values[name])
        for name in ("window_layers", "eos"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return cls(**values)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if value > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, got {value}")


def _check_window_layers(config: Config) -> None:
    if config.window_rope is not None and config.window is None:
        raise ValueError("window_rope needs window, the number of keys that its layers see")
    if config.window_layers is None:
        return
    if config.window is None:
        raise ValueError("window_layers needs window, the number of keys that they see")
    if any(not 0 <= layer < config.layers for layer in config.window_layers):
        raise ValueError(
            f"window_layers {list(config.window_layers)} must be from 0 to {config.layers - 1}"
        )


def _check_keys(cls: Any, values: Mapping[str, Any]) -> None:
    import difflib

    fields = dataclasses.fields(cls)
    names = [field.name for field in fields]
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
            raise ValueError(f"{cls.__name__} has no {key!r}; {hint}")
    for field in fields:
        if field.name not in values and field.default is field.default_factory:  # both MISSING
            raise ValueError(f"{cls.__name__} needs {field.name!r}, which is missing")


def _gpt2(layers: int, width: int, heads: int) -> Config:
    return Config(
        vocab_size=50_257,
        context=1024,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=64,
        mlp_width=4 * width,
        activation="gelu_tanh",
        gated=False,
        norm="layer",
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
        bos=50_256,
        eos=(50_256,),
    )


# As the published config.json files have them; "tiny" is for tests and first steps.
PRESETS: dict[str, Config] = {
    "tiny": Config(
        vocab_size=256,
        context=256,
        layers=2,
        width=64,
        heads=4,
        kv_heads=2,
        head_size=16,
        mlp_width=128,
        tied=True,
        eos=(0,),
    ),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "smollm2-135m": Config(
        vocab_size=49_152,
        context=8192,
        layers=30,
        width=576,
        heads=9,
        kv_heads=3,
        head_size=64,
        mlp_width=1536,
        rope=Rope(base=100_000.0),
        tied=True,
        bos=0,
        eos=(0,),
    ),
    "llama-3.2-1b": Config(
        vocab_size=128_256,
        context=131_072,
        layers=16,
        width=2048,
        heads=32,
        kv_heads=8,
        head_size=64,
        mlp_width=8192,
        rope=Rope(base=500_000.0, scaling="llama3", factor=32.0, original_context=8192),
        tied=True,
        bos=128_000,
        eos=(128_001,),
    ),
    "qwen3-0.6b": Config(
        vocab_size=151_936,
        context=40_960,
        layers=28,
        width=1024,
        heads=16,
        kv_heads=8,
        head_size=128,
        mlp_width=3072,
        norm_epsilon=1e-6,
        rope=Rope(base=1_000_000.0),
        qk_norm=True,
        tied=True,
        bos=151_643,
        eos=(151_645,),
    ),
}
