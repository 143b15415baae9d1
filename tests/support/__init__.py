"""What several tests need: tiny models, call counts, oracles, planted modeling code, fresh processes."""
