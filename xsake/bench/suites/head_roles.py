"""Previous-token, sink and induction heads of the shipped model.

    python -m xsake.bench.suites.head_roles --out benchmarks/results/head-roles.json

previous   weight on the previous token, mean over queries, on text
sink       weight on the first token, mean over queries from the 64th on, on text
induction  weight on the token that followed the previous occurrence of the current token, on a
           sequence of random tokens and its copy

All inputs start with the tokenizer's bos, the random ones too.
"""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import shipped
from xsake.bench import programs
from xsake.bench.timing import provenance
from xsake.data.documents import load_documents
from xsake.model import Transformer, huggingface

PERIOD = 256  # tokens until the random text repeats


def weights_at(model: Transformer, tokens: np.ndarray, back: int, first: int) -> Array:
    """Mean attention weight from queries ≥ `first` to the key `back` tokens earlier.

    With back = 0, to key 0. float32 [layers, N].
    """
    T = len(tokens)
    queries = np.arange(first, T)
    keys = queries - back if back else np.zeros_like(queries)

    def fold(layer: Any, seen: Any, carry: Any) -> Any:
        q, k = seen.q[0], jnp.repeat(seen.k[0], seen.q.shape[2] // seen.k.shape[2], axis=1)
        logits = jnp.einsum("tnh,snh->nts", q, k) / math.sqrt(q.shape[-1])
        p = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool), logits, -jnp.inf))
        return carry.at[layer].set(p[:, queries, keys].mean(-1))

    empty = jnp.zeros((model.config.layers, model.config.heads))
    return jax.jit(lambda tokens: model.observe(tokens[None], fold, empty))(jnp.asarray(tokens))


def main(arguments: list[str] | None = None) -> None:
    """Measures and writes one record per role."""
    parser = programs.parser("xsake.bench.suites.head_roles", __doc__)
    programs.add_out(parser)
    given = parser.parse_args(arguments)
    loaded = huggingface.load(shipped.FOLDER)
    model = loaded.model
    assert loaded.tokenizer is not None
    texts = load_documents([shipped.HELD_OUT_TEXT], loaded.tokenizer.encode, 2 * PERIOD, 4)
    random = np.random.default_rng(0).integers(1, model.config.vocab_size, (4, PERIOD))
    bos = loaded.tokenizer.encode("")
    repeated = [np.asarray([*bos, *line, *line]) for line in random]
    roles = {
        "previous": (texts, 1, 1),
        "sink": (texts, 0, 64),
        "induction": (repeated, PERIOD - 1, PERIOD + len(bos)),
    }
    records = []
    for role, (lines, back, first) in roles.items():
        found = np.mean([weights_at(model, line, back, first) for line in lines], axis=0)
        records.append({"role": role, "weight_by_layer_and_head": found.round(4).tolist()})
        print(role, f"{found.max():.3f}", np.argwhere(found > 0.1).tolist(), flush=True)
    given.out.write_text(json.dumps({**provenance(), "results": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
