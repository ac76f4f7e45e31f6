"""One decoder for GPT-2 and the Llama family that takes a mask by layer, loads and generates."""

from xsake.model.config import PRESETS, Config
from xsake.model.rope import Rope
from xsake.model.transformer import Observation, Transformer, parameter_shapes

__all__ = ["PRESETS", "Config", "Observation", "Rope", "Transformer", "parameter_shapes"]
