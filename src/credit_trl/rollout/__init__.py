"""Stage 1: completions of the policy and what the environment returned for them."""
