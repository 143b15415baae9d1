"""Idioms, a file a theme."""
