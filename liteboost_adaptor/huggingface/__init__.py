"""Where we meet transformers: loading, the first forward, the attention registry."""
