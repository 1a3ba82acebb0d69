"""Analysis of the credit, and the report of runs."""

MAPS_FOLDER = "credit_maps"  # token maps of a run directory
