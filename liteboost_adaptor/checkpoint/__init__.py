"""Checkpoints on the disk: safetensors files read and written by tensor, and the folders they are in."""
