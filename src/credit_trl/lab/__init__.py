"""Tools for runs and checkpoints: analysis of the credit, and the report of a run."""
