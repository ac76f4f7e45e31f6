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
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from xsake import _files
from xsake.data.tokenizer import Tokenizer, build_tokenizer, read_tokenizer
from xsake.model import hf_config, weights
from xsake.model.config import Config
from xsake.model.transformer import Transformer, parameter_axes
from xsake.parallel import sharding

TYPES = ("F64", "F32", "F16", "BF16")  # safetensors dtypes that are supported
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
INDEX = "model.safetensors.index.json"
# What `save` writes and `load` reads, config.json apart: an earlier save's are cleared.
WRITTEN = ("model*.safetensors", INDEX, "generation_config.json", "tokenizer*.json")
PART = ".xsake-part"  # where a save is written before it is moved
LAYOUTS = {"huggingface": hf_config.write, "xsake": hf_config.write_own}
PADDING = 512  # a vocabulary may have so many ids without a token before `load` warns of it


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
      **options: of `Transformer`: scan, remat, implementation, mesh. On a mesh, every device reads
        whole parameters from the file and keeps its part.
    """
    opened = examine(path)
    config = opened.config
    words: Tokenizer | None = None
    if not isinstance(tokenizer, bool):
        words = read_tokenizer(tokenizer, config.bos, config.eos)
    elif tokenizer:
        words = opened.tokenizer()
    if words is not None:
        _check_vocabulary(words, config, path)
    parameters = weights.gather(config, opened.entries, opened.source, param_dtype)
    if (mesh := options.get("mesh")) is not None:
        shapes = {name: x.shape for name, x in parameters.items()}
        where = sharding.of_parameters(mesh, parameter_axes(config), shapes)
        parameters = sharding.put(dict(parameters), where)
    return Loaded(Transformer.of(config, parameters, dtype=dtype, **options), config, words)


def _check_vocabulary(words: Tokenizer, config: Config, path: str | os.PathLike[str]) -> None:
    count = len(words)
    if not count or count > config.vocab_size:
        more = "no entries" if not count else f"{count} entries, more than"
        raise ValueError(
            f"the tokenizer of {path} has {more}{'; for' if not count else ''} the model's "
            f"vocab_size = {config.vocab_size}; name its own tokenizer.json with tokenizer="
        )
    if config.vocab_size - count > PADDING:
        warnings.warn(
            f"the tokenizer of {path} has {count} entries, the model's vocab_size is "
            f"{config.vocab_size}: the ids from {count} on have no text",
            stacklevel=3,
        )


def examine(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint and checks it: configuration, and every tensor's name, shape and type."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}; name a folder or a .gguf file")
    metadata = None
    if path.is_dir():
        values = _config_values(path)
        names = _names(values)
        source = folder_source(path, names)
        config = _config(path, values, len(source.shapes))
    elif path.suffix == ".gguf":
        from xsake.model import gguf_file  # only GGUF files need the gguf package

        file = gguf_file.File(path)
        config, names, source, metadata = file.config, file.names, file.source, file.metadata
    else:
        raise ValueError(f"{path} is neither a folder nor a .gguf file")
    return Checkpoint(path, config, source, weights.check(config, names, source), metadata)


# ------------------------------------------------------------------------------------------- folder


def _config_values(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json, so it is no checkpoint")
    return _files.read_object(folder / "config.json")


def _config(folder: Path, values: dict[str, Any], tensors: int) -> Config:
    """The Config of config.json and, where there is one, generation_config.json."""
    generation = folder / "generation_config.json"
    return hf_config.read(
        values,
        _files.read_object(generation) if generation.is_file() else {},
        str(folder / "config.json"),
        tensors,
    )


def _names(values: dict[str, Any]) -> weights.Names:
    """How the folder of a config.json names its tensors."""
    own = {"gpt2": weights.GPT2, hf_config.OWN: weights.XSAKE}
    own |= dict.fromkeys(hf_config.GEMMA, weights.GEMMA)
    return own.get(str(values.get("model_type")), weights.LLAMA)


def folder_source(folder: Path, names: weights.Names) -> weights.Source:
    """The tensors of a folder's safetensors; only headers are read here."""
    shards, placed = _shards(folder)
    files = {file.name: _open(file) for file in shards}
    keys = {key: name for name, file in files.items() for key in list(file.keys())}
    if placed is not None:
        _check_index(folder / INDEX, placed, files)
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


def _shards(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """(the files of weights, the index's weight_map); model.safetensors alone has no index."""
    single, index = folder / "model.safetensors", folder / INDEX
    if not index.is_file():
        if single.is_file():
            return [single], None
        if pickles := sorted(file.name for kind in PICKLES for file in folder.glob(kind)):
            raise ValueError(
                f"{folder} holds pickled weights only ({pickles[0]}), which can run code and are "
                "never opened; convert them to safetensors"
            )
        raise FileNotFoundError(f"{folder} has neither model.safetensors nor {INDEX}")
    placed = _files.read_object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{index} has no weight_map")
    for shard in placed.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index} names {shard!r:.60}, which is not a file of this folder")
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"{index} names the shard {shard!r}, which is not there")
    shards = [folder / shard for shard in sorted(set(placed.values()))]
    if single.is_file() and single not in shards:
        raise ValueError(
            f"{folder} holds both model.safetensors and {INDEX}, which names other files; "
            "remove the one that is not of this model"
        )
    return shards, placed


def _check_index(index: Path, placed: dict[str, str], files: dict[str, Any]) -> None:
    """Every tensor is in the file that the index names for it, and in no other."""
    held = {name: set(file.keys()) for name, file in files.items()}
    for key, shard in placed.items():
        if key not in held[shard]:
            raise ValueError(f"{index} places the tensor {key!r} in {shard!r}, which lacks it")
    for shard, keys in held.items():
        for key in sorted(keys):
            if placed.get(key) != shard:
                where = f"places it in {placed[key]!r}" if key in placed else "does not name it"
                raise ValueError(f"{shard!r} holds the tensor {key!r}, but {index} {where}")


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
    replace: bool = False,
    layout: str = "huggingface",
) -> None:
    """Writes a folder that `load` and transformers read: config.json, safetensors, tokenizer.

    Parameters are written as they are, bit for bit. Everything is written to a folder inside first
    and then moved; what an earlier or interrupted save left is cleared, and config.json is moved
    last, so that a folder whose writing was interrupted is no checkpoint.

    Args:
      path: the folder.
      model: the model.
      tokenizer: saved beside the weights.
      shard_bytes: the largest size of a file of weights.
      replace: replace the checkpoint in the folder; by default that raises.
      layout: "huggingface", or "xsake", which has every config, sparse attention too, and which
        `load` reads but transformers does not.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not one of {list(LAYOUTS)}")
    folder = Path(path)
    if (folder / "config.json").exists() and not replace:
        raise FileExistsError(f"{folder} already holds a checkpoint; name another folder")
    values = LAYOUTS[layout](model.config)
    names = _names(values)
    parameters = model.parameters()
    values["dtype"] = values["torch_dtype"] = parameters["embed.tokens"].dtype.name
    part = folder / PART
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        _write_weights(part, list(weights.scatter(model.config, names, parameters)), shard_bytes)
        if tokenizer is not None:
            tokenizer.save(part)
        (part / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        _move_up(part)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _move_up(part: Path) -> None:
    """Moves a written checkpoint into the folder above, in place of the one that is there."""
    folder = part.parent
    (folder / "config.json").unlink(missing_ok=True)  # no checkpoint from here to the last move
    for old in sorted(file for kind in WRITTEN for file in folder.glob(kind)):
        old.unlink(missing_ok=True)
    for new in sorted(part.iterdir(), key=lambda file: file.name == "config.json"):
        new.replace(folder / new.name)


def _write_weights(folder: Path, tensors: list[tuple[str, np.ndarray]], shard_bytes: int) -> None:
    def write(shard: dict[str, np.ndarray], name: str) -> None:
        with _files.replaced(folder / name) as part:
            save_file(shard, part, {"format": "pt"})

    shards = list(_split_into_shards(tensors, shard_bytes))
    if len(shards) == 1:
        return write(shards[0], "model.safetensors")
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write(shard, name)
        placed |= dict.fromkeys(shard, name)
    total = sum(x.nbytes for _, x in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
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
