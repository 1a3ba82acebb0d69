"""Services around the stages: checkpoints, checks, TRL compatibility, metrics, timing and the run directory."""
