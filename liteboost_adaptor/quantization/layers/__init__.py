"""Modules with quantised weights, and what transformers and PEFT do to them."""
