"""The fourth world of the study: small programs, a failing unit test as feedback, and a habit instead of a phrase.

`programs.task` has the prompts and the verifier, `programs.base` the pretraining of its base.
"""
