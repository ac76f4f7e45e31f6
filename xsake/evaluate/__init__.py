"""How good is sparse attention? Measured on real activations and on the model's own predictions."""
