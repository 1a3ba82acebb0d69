"""Stage 2: the token ids that the teacher reads for each sample."""
