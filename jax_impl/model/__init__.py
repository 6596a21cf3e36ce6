"""A hybrid language model around the cache: Qwen3.5 and Qwen3-Next from checkpoint files, decoded speculatively.

config → weights → {mixers, attention} → hybrid → decode → cli. Everything a request owns lives in slots; a step
verifies a block of tokens in all layers, accepts a prefix of it, or a path of a tree, and commits once.
"""
