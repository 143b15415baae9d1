"""Programs composed of idioms of ordinary user code, run with recorded steps, without, and without us."""
