"""Finds targets in a model and swaps them for replacements; knows no model and no op."""
