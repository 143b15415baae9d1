"""Several processes, one model."""
