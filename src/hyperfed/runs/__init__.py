"""A run from its settings to its records: train, evaluate, checkpoint, serve, report."""
