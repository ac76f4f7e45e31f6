"""Training that can be killed at any step and goes on bit for bit, dense or by a plan.

text ─ tokens.tokenize ─ TokenFile ─ data.Stream ─ batch(step) ─┐
config.Config ─ optimizer.make ─────────────────────────────────┼─ loop.train ─ runs/NAME/
hads: calibrate every n steps ─ Plan ───────────────────────────┘
"""
