"""The quality of sparse attention, on a model's activations and on its predictions."""
