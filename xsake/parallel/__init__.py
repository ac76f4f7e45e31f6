"""Parallelism over devices: the mesh, what is sharded on it, and attention over split sequences."""

from xsake.parallel.context import context_attention, token_order

__all__ = ["context_attention", "token_order"]
