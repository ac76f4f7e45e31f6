"""Which checkpoint the user means: a path, `shipped`, or the folder of a training run.

SmolLM2.gguf, checkpoints/mine   as they are
runs/mine                        runs/mine/model, which a finished run exports
shipped                          the model that comes with the package
"""

from __future__ import annotations

from pathlib import Path

from xsake import shipped

SHIPPED = "shipped"


def checkpoint(path: Path) -> Path:
    """The checkpoint's folder or file; a folder named `shipped` wins over the shipped model."""
    if str(path) == SHIPPED and not path.exists():
        return shipped.FOLDER
    if (path / "model" / "config.json").is_file():
        return path / "model"
    if (path / "events.jsonl").is_file() and not any(path.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{path} is a training run without the folder {path / 'model'}: a finished run writes "
            "it, unless checkpoint.export is off"
        )
    if not path.exists():
        raise FileNotFoundError(
            f"there is no checkpoint {path}; name a folder, a .gguf file, the folder of a training "
            f"run, or {SHIPPED} for the model that comes with the package"
        )
    return path
