"""``transformers serve`` under a closed loop of clients, without us and by `run`."""
