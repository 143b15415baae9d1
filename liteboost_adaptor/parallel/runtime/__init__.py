"""Ranks: how they find each other, are arranged and grouped, communicate, and notice who is gone."""
