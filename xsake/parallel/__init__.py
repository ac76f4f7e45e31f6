"""Several devices: the mesh and what lies where."""
