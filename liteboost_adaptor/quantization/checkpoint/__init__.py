"""Quantized checkpoints: checksums, parameter names, and whether a model was loaded with all of one."""
