"""The KV cache: buffers that tokens are appended to, the layers that keep them, int8 keys and values."""
