"""Log-probabilities of truncated and biased sampling: one distribution on both sides of every ratio."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.testing import assert_close
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from credit_trl.loss.head import LMHead
from credit_trl.loss.sampling import SamplingDistribution, engine_options, sampling_logps
from credit_trl.training.checks import check_server
from dense import logps
from tables import tables_of

TABLES = tables_of(__file__)
OPTIONS = TABLES["options"]
SAME = 2e-3  # of a mean ratio; 1e-6 measured


def engine_logps(logits: Tensor, config) -> Tensor:
    """Log-probabilities that an engine samples from, by transformers' processors in the order of vLLM."""
    options = engine_options(config)
    for token, bias in (options["logit_bias"] or {}).items():
        logits = logits.index_add(-1, torch.tensor([token]), torch.full((len(logits), 1), bias, dtype=logits.dtype))
    processors = LogitsProcessorList()
    if options["min_p"]:
        processors.append(MinPLogitsWarper(options["min_p"]))
    if options["top_k"] > 0:
        processors.append(TopKLogitsWarper(options["top_k"]))
    if options["top_p"] < 1.0:
        processors.append(TopPLogitsWarper(options["top_p"]))
    return processors(None, logits / config.temperature).log_softmax(-1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_replayed_options_are_those_of_transformers_processors(make_config, monkeypatch, options, rows):
    config = make_config(**options)
    monkeypatch.setattr(LMHead, "chunk_size", lambda *_: 4 * rows)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 16, generator=generator, dtype=torch.float64) for size in (40, 260))
    head = LMHead(weight / 2, temperature=config.temperature)
    expected = engine_logps(hidden @ head.weight.T, config)
    tokens = expected.exp().multinomial(1, generator=generator)
    sampling = SamplingDistribution.from_config(config)
    policy, sampled = sampling_logps(head, hidden, tokens, sampling)
    whole = (hidden @ head.weight.T / config.temperature).log_softmax(-1)
    assert not sampling.is_policy
    assert_close(policy, whole.gather(-1, tokens)[:, 0], rtol=1e-12, atol=1e-12)
    assert_close(sampled, expected.gather(-1, tokens)[:, 0], rtol=1e-12, atol=1e-12)


def test_a_token_below_the_threshold_by_rounding_is_kept():
    """The engine rounds: what it sampled it has kept, with all tokens above."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    sampled = SamplingDistribution(top_k=2).token_logps(logits.clone(), torch.tensor([[2]]))
    assert_close(sampled, logits[:, :3].log_softmax(-1)[:, 2])


def test_tokens_of_equal_logits_are_kept_as_vllm_does():
    """`top_k` keeps all that equal the last one, `top_p` as many as reach it."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -1.0]])
    token = torch.tensor([[0]])
    of_k = SamplingDistribution(top_k=2).token_logps(logits.clone(), token)
    assert_close(of_k, logits[:, :4].log_softmax(-1)[:, 0])
    of_p = SamplingDistribution(top_p=float(logits.softmax(-1)[0, :3].sum()) - 1e-3).token_logps(logits.clone(), token)
    assert_close(of_p, logits[:, :3].log_softmax(-1)[:, 0])


def sampled_rollouts(prompts, trainer):
    """Completions that are sampled as the options of the run say, with the log-probabilities of an engine."""
    was_training = trainer.model.training
    model = trainer.model.eval()
    generator = torch.Generator().manual_seed(0)
    prompt_ids = [trainer.processing_class(prompt[-1]["content"])["input_ids"] for prompt in prompts]
    completions = []
    reported = []
    for ids in prompt_ids:
        completion = []
        of_sample = []
        for _ in range(4):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids + completion])).logits[:, -1].float()
            distribution = engine_logps(logits, trainer.args)[0]
            token = int(distribution.exp().multinomial(1, generator=generator))
            completion.append(token)
            of_sample.append(distribution[token].item())
        completions.append(completion)
        reported.append(of_sample)
    trainer.model.train(was_training)
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": reported}


@pytest.fixture
def trained(make_trainer, no_engine):
    """A function that trains, and returns the trainer and the first generation batch."""

    def train(**options):
        sizes = {"max_steps": 1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
        sizes |= {"use_vllm": True, "learning_rate": 0.0, "num_generations": 2, "rollout_func": sampled_rollouts}
        if "beta" in options:  # a reference without a second model
            sizes["peft_config"] = LoraConfig(r=2, target_modules="all-linear")
        trainer = make_trainer(**sizes | options)
        if trainer.use_vllm:
            trainer.vllm_generation.sync_weights = lambda: None
        batches = []
        score = trainer._generate_and_score_completions

        def keep(inputs):
            batches.append(score(inputs))
            return batches[-1]

        trainer._generate_and_score_completions = keep
        trainer.train()
        return trainer, batches[0]

    return train


def whole_logps(trainer, batch) -> list[Tensor]:
    """Log-probabilities of each completion over the whole vocabulary, from plain passes."""
    rows = []
    for sample, mask in enumerate(batch["prompt_mask"].bool()):
        prompt = batch["prompt_ids"][sample][mask].tolist()
        ids = batch["completion_ids"][sample][batch["completion_mask"][sample].bool()].tolist()
        with torch.no_grad():
            rows.append(logps(trainer.model.eval(), prompt, ids, trainer.args.temperature)[range(len(ids)), ids])
    return rows


def log_of_first_step(trainer):
    return next(row for row in trainer.state.log_history if "loss" in row)


@pytest.mark.parametrize("use", TABLES["uses"])
@pytest.mark.parametrize("options", ["top_p .95", "all at 0.7", "bias and top_p"])
def test_the_ratio_to_an_exact_engine_is_1(trained, use, options):
    trainer, batch = trained(**OPTIONS[options], **TABLES["uses"][use])
    row = log_of_first_step(trainer)
    assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=SAME)
    assert row["sampling/importance_sampling_ratio/median"] == pytest.approx(1.0, abs=SAME)
    assert row["sampling/sampling_logp_difference/mean"] < SAME
    if trainer.credit_step.engine_role == "correction":
        return  # the loss moves what the engine reported
    for sample, expected in enumerate(whole_logps(trainer, batch)):
        for name in {"sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps"} & batch.keys():
            assert_close(batch[name][sample][: len(expected)], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use", ["correction in the loss", "two updates", "two updates without correction"])
def test_control_comparing_whole_with_truncated_is_seen(trained, monkeypatch, use):
    monkeypatch.setattr(SamplingDistribution, "is_policy", True)
    trainer, _ = trained(top_p=0.8, **TABLES["uses"][use])
    assert log_of_first_step(trainer)["sampling/importance_sampling_ratio/mean"] < 0.9


def test_loss_and_gradient_of_truncated_samples_have_no_factor(trained):
    """The same batch with an engine whose log-probabilities are over the whole vocabulary."""
    trainer, _ = trained(top_p=0.8)
    reported = log_of_first_step(trainer)

    def whole(prompts, trainer):
        generated = sampled_rollouts(prompts, trainer)
        was_training = trainer.model.training
        read = partial(logps, trainer.model.eval())
        rows = zip(generated["prompt_ids"], generated["completion_ids"], strict=True)
        with torch.no_grad():
            generated["logprobs"] = [read(ids, own)[range(len(own)), own].tolist() for ids, own in rows]
        trainer.args.top_p = 1.0
        trainer.model.train(was_training)
        return generated

    def sampled_at_80(prompts, trainer):
        trainer.args.top_p = 0.8
        return whole(prompts, trainer)

    plain, _ = trained(rollout_func=sampled_at_80)
    for name in ("loss", "grad_norm"):
        assert log_of_first_step(plain)[name] == pytest.approx(reported[name], rel=1e-4)


@pytest.mark.parametrize("use", TABLES["passes"])
def test_options_of_generate_change_no_log_probability(trained, use):
    """All ratios are between passes of models over the whole vocabulary."""
    two_updates = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "max_completion_length": 6}
    options = TABLES["generate"] | two_updates | TABLES["passes"][use]
    trainer, batch = trained(use_vllm=False, rollout_func=None, **options)
    names = {"old_per_token_logps", "ref_per_token_logps"} & batch.keys()
    assert names
    assert "sampling_per_token_logps" not in batch
    for sample, expected in enumerate(whole_logps(trainer, batch)):
        for name in names:
            assert_close(batch[name][sample][: len(expected)], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("options", "named"), TABLES["refused"], ids=str)
def test_options_that_cannot_be_replayed_are_refused_by_name(make_trainer, no_engine, options, named):
    with pytest.raises(ValueError, match=named):
        make_trainer(use_vllm=True, **options)


@pytest.mark.parametrize("options", TABLES["accepted"], ids=str)
def test_options_that_compare_or_are_not_read_are_accepted(make_trainer, no_engine, options):
    assert make_trainer(use_vllm=True, **options).use_vllm


@pytest.mark.parametrize(("mode", "options", "is_refused"), TABLES["servers"], ids=str)
def test_a_server_that_reports_another_distribution_is_refused(make_config, mode, options, is_refused):
    client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": mode}})
    trainer = SimpleNamespace(
        args=make_config(**{"use_vllm": True} | options),
        accelerator=SimpleNamespace(is_main_process=True),
        vllm_generation=SimpleNamespace(mode="server", vllm_client=client),
    )
    with pytest.raises(ValueError, match=f"logprobs-mode {mode}") if is_refused else nullcontext():
        check_server(trainer)
