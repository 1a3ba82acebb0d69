"""Stage 3: the teacher π_ref and its scoring passes."""
