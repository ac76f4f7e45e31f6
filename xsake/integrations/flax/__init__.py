"""XSAKE in models made with Flax, NNX and Linen.

    attention(mask)       an attention_fn for Flax's attention modules                attend.py
    observed(model, …)    HADS on such a model: calibrate, plan, run under the plan   observed.py
    linen.SelfAttention   a Linen module that attends over blocks                     linen.py

Flax is imported by what needs it, when it is used.
"""

from xsake.integrations.flax.attend import Attend, attention
from xsake.integrations.flax.observed import Observed, observed

__all__ = ["Attend", "Observed", "attention", "observed"]
