"""Token rules: which keys a query may see, as small objects that combine with & | ~.

A rule is evaluated for token pairs, `rule(b, n, q, k)` -> bool, and classifies whole blocks without
evaluating their tokens:

            k block                     live  some token pair of the block may be allowed
    q  ┌──────┬──────┐                  full  every token pair of it is
    b  │ full │ part │  causal()
    l  ├──────┼──────┤                  empty = not live, partial = live but not full
    k  │ full │ full │

`live` may be too generous and `full` too strict, never the other way round: that keeps & | ~ sound.
and: (l & l', f & f'), or: (l | l', f | f'), not: (~f, ~l).

q and k are *positions*, which causal and window rules compare; b and n are the global batch row and
head. Arrays that a rule carries are read by local *index*. Positions and indices differ only under
`at_positions`, global and local b and n only under `numbered`.
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
