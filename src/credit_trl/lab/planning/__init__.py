"""What a run will need, before any weight is loaded: memory by phase, tokens, time, and what to change.

shape (how large the model is) + setup (what runs where) → memory, work → fit → report
"""
