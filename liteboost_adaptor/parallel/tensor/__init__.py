"""Tensor parallelism: what of a model is sharded, and the layers that run on a rank's shards.

`layout` (by `attention`, `vocabulary`, `source_checks`) -> `plan` -> `apply` -> `layers`; `shard_spec`:
ranges of a tensor.
"""
