"""Parallelism over devices: the mesh, what is sharded on it, and attention over split sequences."""

from xsake.parallel.context import (
    ContextExplanation,
    context_attention,
    context_mask,
    explain_context,
    token_order,
)

__all__ = [
    "ContextExplanation",
    "context_attention",
    "context_mask",
    "explain_context",
    "token_order",
]
