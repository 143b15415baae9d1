"""Drift: what another transformers has where the rules expect targets, against catalogue and record."""
