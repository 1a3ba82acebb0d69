"""Analysis of the credit, and the report of runs."""
