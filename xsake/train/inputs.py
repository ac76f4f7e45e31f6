"""The text that a run reads: datasets opened, checked against the model, and made into streams.

Every process opens all datasets, which are memory-mapped, and reads the batch rows of its devices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from xsake.data.stream import Batch, Stream
from xsake.data.tokens import TokenDataset
from xsake.parallel import mesh as meshes
from xsake.parallel import processes
from xsake.train.config import Config
from xsake.train.step import batch_on

# settings that may differ between processes: where files are, and who a process is
OWN = ("data.train", "evaluation.files", "run.folder", "processes")


def opened(config: Config) -> tuple[Stream, dict[str, Stream]]:
    """(the training text, the evaluation datasets by name), before a run's folder is touched.

    Raises in all processes if one has other settings or data, or if the mesh does not fit.
    """
    stream, others = training_stream(config), held_out(config)
    hashes = {"the hash of data.train": stream.hash}
    hashes["the hashes of evaluation.files"] = ", ".join(x.hash for x in others.values())
    processes.check_same(shared_settings(config) | hashes)
    processes.agreed(lambda: str(mesh_sizes(config, jax.device_count(), processes.count())))
    return stream, others


def shared_settings(config: Config) -> dict[str, Any]:
    """The settings that all processes must have, by their names: "data.rows"."""

    def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if prefix + key in OWN:
                continue
            if isinstance(value, Mapping):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    return dict(flat(config.to_dict())) | {"init": config.init is not None}


def training_stream(config: Config) -> Stream:
    """The training text, shuffled by the seed."""
    return _stream(config, _files_of(config), config.seed)


def _files_of(config: Config) -> list[TokenDataset]:
    if not config.data.train:
        raise ValueError(
            "data.train names no tokenized dataset; `xsake tokenize` writes one, "
            "--data.train FOLDER names it"
        )
    return [_checked(config, path) for path in config.data.train]


def held_out(config: Config) -> dict[str, Stream]:
    """The evaluation datasets by name."""
    found: dict[str, Stream] = {}
    for path in config.evaluation.files:
        name = Path(path).name
        if name in found:
            raise ValueError(
                f"evaluation.files has two datasets of the name {name!r}, by which results are "
                "logged; rename a folder"
            )
        found[name] = _stream(config, [_checked(config, path)])
    return found


def mesh_sizes(config: Config, devices: int, process_count: int = 1) -> meshes.MeshSizes:
    """The sizes of the config's mesh; raises if they do not divide the batch or the model."""
    model = config.model
    sizes = meshes.resolved(
        config.mesh,
        devices,
        config.data.rows,
        config.optimizer.accumulate,
        all_devices=process_count > 1,
    )
    meshes.check_divides(
        sizes,
        {
            "fsdp": ("model.width", model.width),
            "tensor": ("model.kv_heads", model.kv_heads),
            "tensor 2": ("model.mlp_width", model.mlp_width),
            "context": ("data.length", config.data.length),
        },
    )
    return sizes


def training_batch(config: Config, stream: Stream, step: int, mesh: Mesh | None) -> Batch:
    """The batch of `step` on the mesh."""
    rows = config.data.rows

    def read(chosen: Sequence[int]) -> Batch:
        return stream.batch_rows(step, rows, chosen)

    return batch_on(config, read, (rows, stream.length), mesh)


def evaluation_batches(config: Config, stream: Stream, mesh: Mesh | None) -> Iterator[Batch]:
    """The evaluation windows of a file, on the mesh.

    Batches are padded with sequences of weight 0 to a multiple of the devices that share them.
    """
    settings, sizes = config.evaluation, meshes.sizes_of(mesh)
    shares = sizes.data * sizes.fsdp
    rows = -(-settings.rows // shares) * shares
    count = min(settings.windows or stream.windows, stream.windows)

    def read(first: int, chosen: Sequence[int]) -> Batch:
        return stream.windows_in_order([first + number for number in chosen], count)

    for first in range(0, count, rows):
        part = functools.partial(read, first)
        yield batch_on(config, part, (rows, stream.length), mesh)


def vocabulary_note(config: Config, stream: Stream) -> str:
    """What is said of a vocabulary that is larger than the text's."""
    size = max(file.header.vocab_size for file in stream.files)
    if config.model.vocab_size <= size:
        return ""
    return (
        f"model.vocab_size is {config.model.vocab_size:,}, the tokenizer's {size:,}: the other "
        f"rows of the embedding are never trained; --model.vocab-size {size} leaves them out"
    )


def _stream(config: Config, files: list[TokenDataset], seed: int = 0) -> Stream:
    data = config.data
    return Stream(files, data.length, seed, data.separate, config.model.bos if data.bos else None)


def _checked(config: Config, path: str) -> TokenDataset:
    file = TokenDataset.open(path, verify=config.data.verify)
    if file.header.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"{path} has a vocabulary of {file.header.vocab_size:,}, the model one of "
            f"{config.model.vocab_size:,}; set model.vocab_size"
        )
    return file
