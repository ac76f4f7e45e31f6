"""Checkpoints: a folder of safetensors or a GGUF file → a model and its tokenizer, and back.

    config.json ─────────── hf_config ─┐
    *.safetensors (+ index) ───────────┼─ weights.gather ─ Transformer ─┐
    tokenizer.json ─────────── tokenizer ───────────────────────────────┴─ Loaded
    *.gguf ──────────────── gguf_file ─┘

All names, shapes and types are checked before a weight is read, so that nothing is half-loaded.
Pickled weights (*.bin, *.pt) are never opened.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from xsake.data.tokenizer import Tokenizer, build_tokenizer, read_tokenizer
from xsake.model import hf_config, weights
from xsake.model.config import Config
from xsake.model.transformer import Transformer

TYPES = ("F64", "F32", "F16", "BF16")  # safetensors dtypes that are supported
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The model, its config, and its tokenizer (None if loaded with tokenizer=False)."""

    model: Transformer
    config: Config
    tokenizer: Tokenizer | None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, completely checked by its headers.

    Two checks also read tensors. If the embeddings are tied but the file stores a head too, the two
    tensors are compared. The rope_freqs.weight of a GGUF is compared with the known values.

    Attributes:
      path: the folder or the file.
      config: the model's shape.
      source: every tensor's shape, type and file.
      entries: which tensor becomes which parameters.
      metadata: of a GGUF, by key; None for a folder.
    """

    path: Path
    config: Config
    source: weights.Source
    entries: list[weights.Entry]
    metadata: dict[str, Any] | None

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's own tokenizer; raises if it has none."""
        if self.metadata is not None:
            return build_tokenizer(self.metadata, str(self.path))
        return read_tokenizer(self.path / "tokenizer.json", self.config.bos, self.config.eos)


def load(
    path: str | os.PathLike[str],
    *,
    dtype: Any = jnp.float32,
    param_dtype: Any = jnp.float32,
    tokenizer: str | os.PathLike[str] | bool = True,
    **options: Any,
) -> Loaded:
    """The model of a folder with config.json and *.safetensors, or of a .gguf file.

    Args:
      path: the folder or the file.
      dtype: what activations are computed in.
      param_dtype: what parameters are kept in.
      tokenizer: True: the checkpoint's own, which must be there; False: none; or the path of a
        tokenizer.json.
      **options: of `Transformer`: scan, remat, implementation.
    """
    opened = examine(path)
    config = opened.config
    words: Tokenizer | None = None
    if not isinstance(tokenizer, bool):
        words = read_tokenizer(tokenizer, config.bos, config.eos)
    elif tokenizer:
        words = opened.tokenizer()
    if words is not None and len(words) > config.vocab_size:
        raise ValueError(
            f"the tokenizer of {path} has {len(words)} entries, more than the model's "
            f"vocab_size = {config.vocab_size}"
        )
    parameters = weights.gather(config, opened.entries, opened.source, param_dtype)
    return Loaded(Transformer.of(config, parameters, dtype=dtype, **options), config, words)


def examine(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint and checks it: configuration, and every tensor's name, shape and type."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}; name a folder or a .gguf file")
    metadata = None
    if path.is_dir():
        config = read_config(path)
        names = weights.GPT2 if config.positions == "learned" else weights.LLAMA
        source = folder_source(path, names)
    elif path.suffix == ".gguf":
        from xsake.model import gguf_file  # only GGUF files need the gguf package

        file = gguf_file.File(path)
        config, names, source, metadata = file.config, file.names, file.source, file.metadata
    else:
        raise ValueError(f"{path} is neither a folder nor a .gguf file")
    return Checkpoint(path, config, source, weights.check(config, names, source), metadata)


# ------------------------------------------------------------------------------------------- folder


def read_config(folder: Path) -> Config:
    """The Config of a folder's config.json and, where there is one, generation_config.json."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json, so it is no checkpoint")
    generation = folder / "generation_config.json"
    return hf_config.read(
        _json(folder / "config.json"),
        _json(generation) if generation.is_file() else {},
        str(folder / "config.json"),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def folder_source(folder: Path, names: weights.Names) -> weights.Source:
    """The tensors of a folder's safetensors; only headers are read here."""
    files = {file.name: _open(file) for file in _shards(folder)}
    keys = {key: name for name, file in files.items() for key in list(file.keys())}
    # some GPT-2 checkpoints lack the prefix `transformer.`
    bare = names is weights.GPT2 and not any(key.startswith("transformer.") for key in keys)
    prefix = "transformer." if bare else ""
    held = {prefix + key: name for key, name in keys.items()}

    def header(name: str) -> Any:
        return files[held[name]].get_slice(name.removeprefix(prefix))

    return weights.Source(
        shapes={name: tuple(header(name).get_shape()) for name in held},
        types={name: header(name).get_dtype() for name in held},
        readable=TYPES,
        read=lambda name: files[held[name]].get_tensor(name.removeprefix(prefix)),
        location=lambda name: str(folder / held[name] if name in held else folder),
    )


def _shards(folder: Path) -> list[Path]:
    """model.safetensors, or the files that its index names, each of which must be there."""
    if (single := folder / "model.safetensors").is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if pickles := sorted(file.name for kind in PICKLES for file in folder.glob(kind)):
            raise ValueError(
                f"{folder} holds pickled weights only ({pickles[0]}), which can run code and are "
                "never opened; convert them to safetensors"
            )
        raise FileNotFoundError(f"{folder} has neither model.safetensors nor {index.name}")
    placed = _json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{index} has no weight_map")
    shards = sorted(set(placed.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise ValueError(f"{index} names {shard!r}, which is not a file of this folder")
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"{index} names the shard {shard!r}, which is not there")
    return [folder / shard for shard in shards]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is truncated or not safetensors ({error})") from error


# ------------------------------------------------------------------------------------------- saving


def save(
    path: str | os.PathLike[str],
    model: Transformer,
    tokenizer: Tokenizer | None = None,
    *,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that `load` and transformers read: config.json, safetensors, tokenizer.

    Parameters are written as they are, bit for bit. config.json comes last, so that a folder
    whose writing was interrupted is no checkpoint.
    """
    folder = Path(path)
    if (folder / "config.json").exists():
        raise FileExistsError(f"{folder} already holds a checkpoint; name another folder")
    values = hf_config.write(model.config)
    names = weights.GPT2 if values["model_type"] == "gpt2" else weights.LLAMA
    parameters = model.parameters()
    values["dtype"] = values["torch_dtype"] = parameters["embed.tokens"].dtype.name
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, list(weights.scatter(model.config, names, parameters)), shard_bytes)
    if tokenizer is not None:
        tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _write_weights(folder: Path, tensors: list[tuple[str, np.ndarray]], shard_bytes: int) -> None:
    shards = list(_split_into_shards(tensors, shard_bytes))
    if len(shards) == 1:
        return save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        placed |= dict.fromkeys(shard, name)
    total = sum(x.nbytes for _, x in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return None


def _split_into_shards(
    tensors: list[tuple[str, np.ndarray]], most_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Groups tensors into shards of at most `most_bytes`; a larger tensor gets its own shard."""
    part: dict[str, np.ndarray] = {}
    for name, x in tensors:
        if part and sum(y.nbytes for y in part.values()) + x.nbytes > most_bytes:
            yield part
            part = {}
        part[name] = x
    yield part
