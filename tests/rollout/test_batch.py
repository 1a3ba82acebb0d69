"""Which rewards count as successful."""

import math

import pytest

from credit_trl.rollout.batch import is_successful
from credit_trl.training.metrics import CreditWarning
from tables import tables_of

TABLES = tables_of(__file__)


@pytest.mark.parametrize(("rewards", "successful"), TABLES["without_threshold"])
def test_a_graded_reward_is_no_success_without_a_threshold(rewards, successful):
    rewards = [math.nan if reward is None else reward for reward in rewards]
    assert [number for number, is_one in enumerate(is_successful(rewards, None)) if is_one] == successful


def graded(completions, **columns):
    """The reward of TRL's quick start."""
    return [float(len(set(completion[-1]["content"]))) for completion in completions]


def percents(completions, answer, **columns):
    return [100.0 * (len(completion[-1]["content"]) % 2) for completion in completions]


@pytest.mark.parametrize("reward", [graded, percents])
def test_graded_rewards_are_named_and_demonstrate_nothing(make_trainer, dataset, reward):
    rows = dataset.add_column("privileged_context", ["Add."] * len(dataset))
    trainer = make_trainer(reward, rows, max_steps=1)
    message = f"rewards of {reward.__name__} are not 0 and 1.*`success_reward_threshold`"
    with pytest.warns(CreditWarning, match=message):
        trainer.train()
    with_threshold = make_trainer(reward, rows, max_steps=1, success_reward_threshold=1.0)
    with_threshold.train()
    shares = [run.state.log_history[0]["credit/frac_with_demonstration"] for run in (trainer, with_threshold)]
    assert shares[0] == 0.0 < shares[1]
