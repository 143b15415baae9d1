"""What transformers calls the KV cache, as an argument of a forward and in what it returns."""

#: Before release 5.24, and from it on.
KV_CACHES = ("past_key_values", "cache")
