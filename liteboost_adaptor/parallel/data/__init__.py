"""Data parallelism: replicas share the rows of a batch, or each process has an unsharded model."""
