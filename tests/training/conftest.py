import pytest

from credit_trl import CreditTrainer
from tiny import length_verdicts


@pytest.fixture
def make_trainer(make_model, make_config, tokenizer, dataset):
    """A function that builds a trainer on the twelve questions; other arguments are options of the configuration."""

    def make(
        reward_funcs=length_verdicts,
        rows=None,
        eval_rows=None,
        model=None,
        rollout_func=None,
        peft_config=None,
        **options,
    ):
        config = make_config(**options)
        given = {"processing_class": tokenizer, "rollout_func": rollout_func, "peft_config": peft_config}
        return CreditTrainer(model or make_model(), reward_funcs, config, rows or dataset, eval_rows, **given)

    return make
