"""Pretraining of the embedded task's base models from random weights.

`architecture` builds the tokenizer and the model, `curriculum` draws the training examples of a world, `pretrain`
trains and writes a base. `make_base.py` in the folder above is the command line.
"""
