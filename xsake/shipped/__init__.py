"""Bundled data: a small model trained with this package, and text that it was not trained on.

FOLDER/model.safetensors, config.json, tokenizer.json   for `xsake.model.huggingface.load`
       README.md                                        description of the model and the texts
       training.json, events.jsonl                      training configuration, event log
       persuasion.txt.xz                                calibration text
       moby-dick.txt.xz                                 evaluation text
       smollm2-hads.json                                published perplexities of another model
       profile-16.safetensors, profile-64.safetensors   of the model, in blocks of 16 and of 64
RESULTS/*.json, */*.jsonl                               benchmarks/results of the repository
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

FOLDER = Path(str(resources.files(__name__)))
CALIBRATION_TEXT = FOLDER / "persuasion.txt.xz"
HELD_OUT_TEXT = FOLDER / "moby-dick.txt.xz"
PUBLISHED = FOLDER / "smollm2-hads.json"  # written by tools/published.py
PROFILES = (FOLDER / "profile-16.safetensors", FOLDER / "profile-64.safetensors")
# a wheel has them in the package; a clone, which is installed as it is, where they are written
_PACKED = FOLDER / "results"
RESULTS = _PACKED if _PACKED.is_dir() else FOLDER.parent.parent / "benchmarks" / "results"
