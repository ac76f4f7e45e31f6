"""Python that does again what the page Play shows: it runs as it is copied."""

from __future__ import annotations

from pathlib import Path

from xsake import shipped
from xsake.server.reader import HADS, ORACLE, Text

HEAD = """\
import jax
import jax.numpy as jnp
import numpy as np
{imports}
from xsake.model import huggingface

text = {text!r}
loaded = huggingface.load({model})
tokens = np.array(loaded.tokenizer.encode(text)[:{length}])
layers, heads, T = loaded.config.layers, loaded.config.heads, len(tokens)
"""
TAIL = """\
p = jax.nn.softmax(loaded.model(tokens[None], mask=mask)[0, -1])
for i in jnp.argsort(-p)[:5].tolist():
    print(f"{float(p[i]):.4f} {loaded.tokenizer.decode([i])!r}")
"""
PLANNED = """\
profile = hads.Profile.load({profile})
mask = hads.make(profile, {density}, length=T)  # a plan: a budget for every head
"""
BY_ORACLE = """\
profile = hads.Profile.load({profile})
counts = jnp.asarray(oracle_counts(profile, {density}, "kl", T))


def mask(layer, q, k):
    scores = baselines.oracle(q[0], k[0], {block}, loaded.model.softmax(layer))
    kept = selection.keep_top(scores, counts[layer], band=profile.facts.band)
    return selection.to_mask(kept, T, {block})


"""
FIXED = """\
kept = jnp.asarray(baselines.fixed({method!r}, {density}, layers, heads, -(-T // {block})))


def mask(layer, q, k):
    return selection.to_mask(kept[layer], T, {block})


"""


def play(text: Text, method: str, density: float, model: Path, profile: str) -> str:
    """A script that prints the next-token distribution of a method at a density."""
    is_shipped = model == shipped.FOLDER
    own = ", shipped" if is_shipped or "shipped." in profile else ""
    if method == HADS:
        imports, body = f"from xsake import hads{own}", PLANNED
    elif method == ORACLE:
        imports = (
            f"from xsake import hads, selection{own}\n"
            "from xsake.evaluate.methods import oracle_counts\n"
            "from xsake.hads import baselines"
        )
        body = BY_ORACLE
    else:
        shipped_import = ", shipped" if is_shipped else ""
        imports = f"from xsake import selection{shipped_import}\nfrom xsake.hads import baselines"
        body = FIXED
    values = {
        "imports": imports,
        "text": text.text,
        "model": "shipped.FOLDER" if is_shipped else repr(str(model)),
        "length": text.length,
        "profile": profile,
        "density": density,
        "block": text.block,
        "method": method,
    }
    return HEAD.format(**values) + body.format(**values) + TAIL
