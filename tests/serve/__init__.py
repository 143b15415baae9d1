"""Servers of other projects, under load and under clients that misbehave."""
