"""The worlds `tables`, `skip`, `useful` and `filler`: one decision of the policy each, whose outcome theory predicts.

`planted.task` has the prompts and the verifiers, `planted.base` pretrains the bases.
"""
