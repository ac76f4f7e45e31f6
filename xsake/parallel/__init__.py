"""Parallelism over devices: the mesh, and which arrays are sharded or replicated on it."""
