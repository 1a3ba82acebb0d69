"""Research tools for runs and checkpoints: analysis, comparison, sweeps and planning."""
