"""Ops compared with their references on the device at hand: at first use on an NPU, and by ``selftest``."""
