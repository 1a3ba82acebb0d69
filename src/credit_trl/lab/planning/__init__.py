"""Plans a run without loading weights: memory by phase, tokens, time, and changes of settings that make it fit.

shape (size of the model) + setup (configuration and hardware) → memory, work → fit → report
"""
