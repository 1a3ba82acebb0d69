"""Tools for researchers that work on runs and checkpoints: analysis, comparison, sweeps, planning."""
