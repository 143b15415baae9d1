"""Cases of every op, one module a family."""
