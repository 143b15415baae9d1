"""Sequence and context parallelism: ranks share the tokens of a prompt and the KV cache."""
