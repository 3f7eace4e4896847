"""Attention over a paged KV pool, usable without conflux_jax.

The pool is `[layers, 2, pages, page_rows, head_dim]`: keys then values. A page holds `page_rows`
rows as `[heads, tokens, head_dim]`; how many heads it has is the reader's to say, so one pool holds
pages of many heads and few tokens (decode) beside pages of few heads and many tokens (prefill).
"""
