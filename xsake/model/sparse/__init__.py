"""Models whose attention selects its own blocks: attention = "nsa" | "moba" | "msa" in the config.

    options.py   Sparse: the settings, and the branches that they give
    module.py    SparseAttention: gates, learned pooling and the indexer, with their parameters
    attend.py    how a layer attends: to a whole text, a prompt, or a cache
    cache.py     SparseCache: what generation remembers

`xsake.nsa` computes; it takes arrays and callables. What has parameters is here.
"""
