"""Training with dense or HADS-sparse attention; a killed run resumes bit-identically.

text ─ tokens.tokenize ─ TokenDataset ─ stream.Stream ─ batch(step) ─┐
config.Config ─ optimizer.make ───────────────────────────────────┼─ loop.train ─ runs/NAME/
hads: a new plan every n steps ─ Plan ────────────────────────────┘
"""
