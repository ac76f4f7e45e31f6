"""What comes with the package: a small model that it trained, and text that the model never saw.

FOLDER/model.safetensors, config.json, tokenizer.json   for `xsake.model.huggingface.load`
       README.md                                        what the model is, and where texts are from
       training.json, events.jsonl                      its run's settings, and what happened
       persuasion.txt.xz                                to calibrate on
       moby-dick.txt.xz                                 to measure on
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

FOLDER = Path(str(resources.files(__name__)))
CALIBRATION_TEXT = FOLDER / "persuasion.txt.xz"
HELD_OUT_TEXT = FOLDER / "moby-dick.txt.xz"
