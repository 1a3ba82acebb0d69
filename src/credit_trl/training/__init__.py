"""What a run needs around the stages: checkpoints, checks, metrics, timing, the run directory."""
