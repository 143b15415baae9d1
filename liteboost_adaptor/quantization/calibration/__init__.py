"""Scales and rounding chosen by the activations of a sample text: SmoothQuant, AWQ and GPTQ."""
