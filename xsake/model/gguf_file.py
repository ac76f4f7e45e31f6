"""A GGUF file → Config, tensors and tokenizer, through the `gguf` package.

llama.cpp's `llama` files store q and k in the interleaved RoPE layout; `weights` permutes them to
the half-split one. Quantised tensors are read as float32.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from xsake.model import rope, weights
from xsake.model.config import Config
from xsake.model.rope import Rope

TYPES = tuple("F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K".split())


ARRAY = int(gguf.GGUFValueType.ARRAY)


class Reader(gguf.GGUFReader):
    """GGUFReader over a plain view of the mapped file.

    It makes an array for every string of the vocabulary, and slices of np.memmap cost three times
    as much as those of a plain array: 1.5 s instead of 4 for 49,152 tokens.
    """

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        """The file's bytes."""
        return self._bytes

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._bytes = np.asarray(mapped)

    def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
        """The same, after an array's length was compared with the bytes that are left for it."""
        if raw_type == ARRAY:
            kind = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0])
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            left = len(self.data) - orig_offs - 12
            scalar = self.gguf_scalar_to_np.get(kind)
            # a string has a length of 8 bytes at least, an array its type and length
            least = 8 if scalar is None else np.dtype(scalar).itemsize
            if count * least > left:
                raise ValueError(f"an array of {count} values is longer than the file")
        return super()._get_field_parts(orig_offs, raw_type)


class File:
    """An opened GGUF: `metadata` by key, `source` of tensors, `config`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            reader = Reader(self.path)
            self.metadata: dict[str, Any] = {
                key: field.contents() for key, field in reader.fields.items()
            }
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read as GGUF: it is truncated, damaged or of another format "
                f"({error})"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.metadata.get("general.architecture")
        if not isinstance(self.architecture, str) or self.architecture not in weights.GGUF:
            raise ValueError(
                f"{path}: architecture {self.architecture!r:.60} is not one of {list(weights.GGUF)}"
            )
        parts = self.metadata.get("split.count", 1)
        if not isinstance(parts, int):
            raise ValueError(f"{path}: split.count must be a whole number, got {parts!r:.60}")
        if parts > 1:
            raise ValueError(f"{path} is one part of a split GGUF; merge the parts first")
        self.names = weights.GGUF[self.architecture]
        self.source = weights.Source(
            shapes={
                name: tuple(int(n) for n in reversed(tensor.shape))
                for name, tensor in self._tensors.items()
            },
            types={name: tensor.tensor_type.name for name, tensor in self._tensors.items()},
            readable=TYPES,
            read=self.read,
            location=lambda name: str(path),
        )
        try:
            self.config = self._config()
        except KeyError as missing:
            raise ValueError(f"{path} lacks the key {missing.args[0]!r}") from None
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32."""
        tensor = self._tensors[name]
        return gguf.dequantize(tensor.data, tensor.tensor_type)

    def _config(self) -> Config:
        has, shapes = self._tensors.keys(), self.source.shapes
        heads, width = self._count("attention.head_count"), self._count("embedding_length")
        if (layers := self._count("block_count")) > len(has):
            raise ValueError(f"block_count = {layers}, but the file holds {len(has)} tensors only")
        head_size = self._get("attention.key_length", width // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (value := self._get(key, head_size)) != head_size:
                raise ValueError(f"{key} = {value} must be the head size, {head_size}")
        if experts := self._get("expert_count", 0):
            raise ValueError(f"expert_count = {experts}: mixtures of experts are not supported")
        if len(shapes.get("token_embd.weight", ())) != 2:
            raise ValueError("the tensor 'token_embd.weight' is missing or has not two axes")
        common: dict[str, Any] = dict(
            vocab_size=shapes["token_embd.weight"][0],
            context=self._need("context_length"),
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=self._get("attention.head_count_kv", heads),
            head_size=head_size,
            mlp_width=self._need("feed_forward_length"),
            tied="output.weight" not in has,
            bos=self.metadata.get("tokenizer.ggml.bos_token_id"),
            eos=ends(self.metadata),
        )
        if self.architecture == "gpt2":
            return Config(
                **common,
                activation="gelu_tanh",
                gated=False,
                norm="layer",
                norm_epsilon=self._need("attention.layer_norm_epsilon"),
                positions="learned",
                qkv_bias=True,
                out_bias=True,
                mlp_bias=True,
            )
        return Config(
            **common,
            norm_epsilon=self._need("attention.layer_norm_rms_epsilon"),
            rope=self._rope(head_size),
            qkv_bias="blk.0.attn_q.bias" in has,
            out_bias="blk.0.attn_output.bias" in has,
            mlp_bias="blk.0.ffn_up.bias" in has,
            qk_norm="blk.0.attn_q_norm.weight" in has,
            window=self._get("attention.sliding_window") or None,
        )

    def _get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _need(self, key: str) -> Any:
        return self.metadata[f"{self.architecture}.{key}"]

    def _count(self, key: str) -> int:
        value = self._need(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key} must be a whole number of at least 1, got {value!r:.40}")
        return value

    def _rope(self, head_size: int) -> Rope:
        base = self._get("rope.freq_base", 10_000.0)
        if "rope_freqs.weight" in self._tensors:
            return _llama3(base, head_size, self.read("rope_freqs.weight"))
        kind = self._get("rope.scaling.type", "none")
        if kind == "none":
            return Rope(base=base)
        if kind not in ("linear", "yarn"):
            raise ValueError(f"rope scaling {kind!r} is not one of ['none', 'linear', 'yarn']")
        if (attention := self._get("rope.scaling.attn_factor", 1.0)) != 1:
            raise ValueError(f"rope.scaling.attn_factor = {attention} is not supported, only 1")
        return Rope(
            base=base,
            scaling=kind,
            factor=self._get("rope.scaling.factor", 1.0),
            original_context=self._get(
                "rope.scaling.original_context_length", self._need("context_length")
            ),
        )


def ends(metadata: dict[str, Any]) -> tuple[int, ...]:
    """EOS token ids: end of text and, if the file has it, end of turn."""
    ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _llama3(base: float, head_size: int, divisors: np.ndarray) -> Rope:
    """The Llama 3 scaling that has these frequency divisors; raises if none has.

    The file holds the divisor of each frequency. They follow from the scaling factor, which is the
    largest divisor, and from three numbers that every published Llama 3 shares.
    """
    found = Rope(base=base, scaling="llama3", factor=float(divisors.max()), original_context=8192)
    plain, _ = rope.frequencies(Rope(base=base), head_size)
    scaled, _ = rope.frequencies(found, head_size)
    if divisors.shape != plain.shape or not np.allclose(plain / divisors, scaled, rtol=1e-4):
        raise ValueError("the tensor 'rope_freqs.weight' is not a scaling of Llama 3's form")
    return found
