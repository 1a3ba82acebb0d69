"""The world `programs`: small programs with a unit test as feedback, and a position bias as the shortcut.

`programs.task` has the prompts and the verifier, `programs.base` pretrains the base.
"""
