import pytest

from credit_trl import CreditTrainer
from tiny import length_verdicts


@pytest.fixture
def make_trainer(make_model, make_config, tokenizer, dataset):
    """A function that builds a trainer on the twelve questions; other arguments are options of the configuration."""

    def make(reward_funcs=length_verdicts, rows=None, eval_rows=None, model=None, rollout_func=None, **options):
        return CreditTrainer(
            model or make_model(),
            reward_funcs,
            make_config(**options),
            rows or dataset,
            eval_rows,
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )

    return make
