"""Token rules: which keys a query may see, as small objects that combine with & | ~.

A rule is evaluated for token pairs, `rule(b, n, q, k)` -> bool, and classifies whole blocks. Most
rules do that without evaluating the token pairs; a rule made from a function evaluates them all.

                 kv blocks
               ┌──────┬──────┐          live  some token pair of the block may be allowed
    row blocks │ full │ part │          full  every token pair of it is
    (causal)   ├──────┼──────┤
               │ full │ full │          empty = not live, partial = live but not full

`live` may be too generous and `full` too strict, never the other way round: that keeps & | ~ sound.
and: (l & l', f & f'), or: (l | l', f | f'), not: (~f, ~l).

q and k are *positions*, which causal and window rules compare; b and n are the global batch row and
head. Arrays that a rule carries are read by local *index*. Positions and indices differ only inside
`at_positions`. Global and local batch rows and heads differ only inside `numbered`.
"""

from xsake.masks.carrying import (
    array,
    at_positions,
    documents,
    lengths,
    numbered,
    prefix,
    rule,
)
from xsake.masks.positional import (
    bigbird,
    causal,
    chunked,
    dilated,
    everything,
    first,
    global_tokens,
    longformer,
    random,
    sliding_window,
    strided,
)
from xsake.masks.rule import Rule

__all__ = [
    "Rule",
    "array",
    "at_positions",
    "bigbird",
    "causal",
    "chunked",
    "dilated",
    "documents",
    "everything",
    "first",
    "global_tokens",
    "lengths",
    "longformer",
    "numbered",
    "prefix",
    "random",
    "rule",
    "sliding_window",
    "strided",
]
