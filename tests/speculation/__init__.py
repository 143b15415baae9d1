"""Speculation: texts with it are texts without it."""
