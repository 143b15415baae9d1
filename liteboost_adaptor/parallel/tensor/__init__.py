"""Tensor parallelism: what of a model is sharded, and the layers that run on a rank's shards."""
