"""The layers: each has `declare(cfg)` (its parameters) and a pure function. None of them names a mesh axis.

Legend of einsum letters: B batch, S sequence of queries, T sequence of keys, D embed, N query heads, K key/value heads,
G query heads per key/value head, H head dim, F feed-forward width, V vocabulary.
"""
