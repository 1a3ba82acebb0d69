"""`vllm_mode="colocate"` with a real engine: weights of sampling and of scoring."""

import copy
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="no vLLM engine in this environment: run `make test-vllm`")

import cpu_engine
from engine_observer import as_in_engine, engine_weights, record, same_weights, token_logps
from vllm import SamplingParams

from credit_trl.evaluation import SamplingConfig
from credit_trl.evaluation.engines import TrainerEngine
from credit_trl.lab.analysis.probing import ProbeSettings, probe
from credit_trl.lab.analysis.targets import Arm
from credit_trl.loss.sampling import _DEFAULTS, _NEUTRAL
from credit_trl.tasks import Task
from tables import tables_of
from tiny import length_verdicts

SAME = 1e-3  # nats; measured 1e-6
STALE = 1e-2

TABLES = tables_of(__file__)
ADAPTERS = TABLES["adapters"]


@pytest.fixture(autouse=True)
def _on_cpu():
    cpu_engine.in_process()


def adapter(kind: str) -> LoraConfig | None:
    options = ADAPTERS[kind]
    if options is None:
        return None
    return LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", **options)


def merged(model):
    """Return a copy of the policy, merged by PEFT."""
    model = copy.deepcopy(model)
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def initial(trainer):
    return AutoModelForCausalLM.from_pretrained(trainer.vllm_generation.llm.llm_engine.model_config.model)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_engine_samples_with_policy_weights_after_each_update(make_trainer, kind):
    trainer = make_trainer(adapter(kind))
    recording = record(trainer)
    trainer.train()
    assert len(recording.differences) == 3
    assert max(recording.differences) < SAME
    trainer.vllm_generation.sync_weights()
    policy = as_in_engine(merged(trainer.model))
    assert not same_weights(as_in_engine(initial(trainer)), policy)
    for name, weight in engine_weights(trainer).items():
        torch.testing.assert_close(weight[: len(policy[name])], policy[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_control_without_weight_sync_engine_is_stale(make_trainer, kind):
    trainer = make_trainer(adapter(kind))
    trainer.vllm_generation.sync_weights = lambda: None
    recording = record(trainer)
    trainer.train()
    assert recording.differences[0] < SAME
    assert min(recording.differences[1:]) > STALE


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("teacher", ["ema", "base"])
def test_phases_keep_engine_policy_and_teacher_weights_apart(make_trainer, kind, teacher):
    trainer = make_trainer(adapter(kind), teacher_model_kind=teacher, teacher_update_rate=0.3, max_steps=4)
    phases = []

    def snapshot():
        return {
            "engine": engine_weights(trainer),
            "policy": {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad},
            "base": {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad},
            "teacher": {n: p.detach().clone() for n, p in trainer.teacher.named_weights().items()},
        }

    def equal(a, b):
        return all(torch.equal(a[name], b[name]) for name in a)

    stage = trainer.clock.stage

    @contextmanager
    def watched(name):
        snapshot_before = snapshot()
        with stage(name):
            yield
        phases.append((name, snapshot_before, snapshot(), as_in_engine(merged(trainer.model))))

    trainer.clock.stage = watched
    start_snapshot = snapshot()
    trainer.train()
    assert [name for name, *_ in phases].count("scores") == 4
    drifts = []
    for name, snapshot_before, snapshot_after, policy in phases:
        # Only optimizer steps change policy and teacher.
        for part in ("policy", "teacher") if kind == "full" else ("policy", "base", "teacher"):
            assert equal(snapshot_before[part], snapshot_after[part]), (name, part)
        # Only rollouts change the engine's weights, to those of the policy.
        assert name == "rollout" or equal(snapshot_before["engine"], snapshot_after["engine"]), name
        for weight_name, weight in policy.items():
            engine_weight = snapshot_after["engine"][weight_name][: len(weight)]
            torch.testing.assert_close(engine_weight, weight, rtol=0, atol=0 if kind == "full" else 1e-6)
        pairs = list(trainer.teacher.pairs()) if name == "scores" else []
        drifts.extend((teacher - student).abs().max().item() for teacher, student in pairs)
    assert max(drifts) > 1e-3  # control: teacher and policy differ
    assert equal(start_snapshot["teacher"], phases[-1][2]["teacher"]) == (teacher == "base")


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_ratio_of_a_stale_engine_is_that_of_the_mode(make_trainer, mode):
    options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.2}
    # With two optimizer steps per generation batch, TRL computes the ratio; with one, the loss does.
    trainer = make_trainer(loss_type="grpo", max_steps=1, steps_per_generation=2, **options)
    generate, sampled = trainer.vllm_generation.generate, []

    def keeping(*args, **kwargs):
        sampled.append(generate(*args, **kwargs))
        return sampled[-1]

    trainer.vllm_generation.generate = keeping
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    trainer._last_loaded_step = 0  # the engine keeps what it was started with
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [row for row in trainer.train_dataset.select(range(2)) for _ in range(4)]
    inputs = trainer._generate_and_score_completions(rows)
    with pytest.warns(UserWarning, match="under vLLM and under the model"):
        trainer.log({})

    prompts, completions, logps, _ = sampled[0]
    expected = torch.zeros_like(inputs["completion_ids"], dtype=torch.float32)
    for i, (prompt, completion, theirs) in enumerate(zip(prompts, completions, logps, strict=True)):
        policy_logps = token_logps(trainer.model.eval(), list(prompt), list(completion))
        log_ratio = policy_logps - torch.tensor([position[0] for position in theirs])
        ratio = (log_ratio.sum().expand_as(policy_logps) if mode.startswith("sequence") else log_ratio).exp()
        expected[i, : len(policy_logps)] = (
            ratio.clamp(max=1.2) if mode.endswith("truncate") else ratio * (ratio <= 1.2)
        )
    trainer.model.train()
    mask = inputs["completion_mask"].bool()
    ratio = inputs["importance_sampling_ratio"].expand_as(expected)
    torch.testing.assert_close(ratio[mask], expected[mask], rtol=1e-3, atol=1e-5)
    assert (expected[mask] - 1).abs().max() > 0.1


@pytest.mark.parametrize("updates", [1, 2])
def test_ten_steps_have_a_median_ratio_near_1_in_the_log(make_trainer, run_callbacks, capfd, updates):
    """With the default correction; and with two updates a batch, whose ratio is that to the engine."""
    options = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    several = {} if updates == 1 else {"vllm_importance_sampling_correction": False, **options}
    trainer = make_trainer(max_steps=10, learning_rate=1e-4, **several)
    trainer.train()
    if updates == 1:
        assert trainer.args.vllm_importance_sampling_mode == "token_truncate"
        assert trainer.args.vllm_importance_sampling_clip_max == 2.0
    rows = [row for row in trainer.state.log_history if "loss" in row]
    medians = [row["sampling/importance_sampling_ratio/median"] for row in rows]
    assert len(medians) == 10
    assert 0.95 < min(medians) <= max(medians) < 1.05
    assert "  ratio " in capfd.readouterr().out
    differences = [row["sampling/sampling_logp_difference/mean"] for row in rows]
    assert max(differences[::updates]) < SAME  # the first update of each generation batch
    assert not any("credit/seconds_old_logps" in row for row in rows)


def test_siblings_share_the_prefix_cache_which_no_update_of_the_weights_survives(make_trainer, dataset):
    """vLLM's default, which the recipes use: cached keys and values of earlier weights would change log π."""
    long = {"role": "system", "content": "Add the numbers. " * 20}
    trainer = make_trainer(rows=dataset.map(lambda row: {"prompt": [long, row["prompt"][-1]]}), learning_rate=0.1)
    recording = record(trainer)
    engine, cached = trainer.vllm_generation.llm, []
    generate = engine.generate

    def counting(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        cached.append([output.num_cached_tokens for output in outputs])
        return outputs

    engine.generate = counting
    trainer.train()
    assert len(cached) == 3
    for of_batch in cached:
        assert of_batch[0] == 0  # the first reads its prompt with the present weights
        assert sum(count > 0 for count in of_batch) >= len(of_batch) // 2
    assert max(recording.differences) < SAME


def test_tokens_behind_a_cached_prefix_have_the_policys_distribution(make_trainer):
    """As whatever speeds up sampling must: the rare tokens count as one."""
    trainer = make_trainer(max_completion_length=1)
    prompt = trainer.processing_class("Add the numbers. " * 20)["input_ids"]
    torch.manual_seed(0)
    answers = trainer.vllm_generation.generate(prompts=[prompt] * 1000, images=None, num_generations=1)[1]
    with torch.no_grad():
        expected = 1000 * trainer.model.eval()(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor(answers)[:, 0], minlength=len(expected))
    is_common = expected >= 5
    counts, expected = (torch.cat([x[is_common], x[~is_common].sum()[None]]) for x in (counts, expected))
    assert chisquare(counts, expected.double() * (1000 / expected.double().sum())).pvalue > 0.001


def test_evaluation_uses_engine_with_current_weights(make_trainer):
    trainer = make_trainer()
    trainer.train()
    engine = TrainerEngine(trainer, batch_size=16)
    recording = record(trainer)
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, max_completion_length=8)
    prompts = [[{"role": "user", "content": f"{i}+1="}] for i in range(6)]
    with engine.session(sampling):
        answers = engine.generate(prompts, range(6), sampling)
        again = engine.generate(prompts[3:], range(3, 6), sampling)
        unsynced = engine.generate(prompts, range(100, 106), sampling)
    assert max(recording.differences) < SAME
    assert answers[3:] == again  # a sample depends on its seed, not on its batch
    assert answers != unsynced
    assert all(answer.length <= 8 for answer in answers)
    assert trainer.vllm_generation.max_completion_length == 12


def test_evaluation_does_not_change_training(make_trainer):
    def trained(evaluated):
        trainer = make_trainer()
        engine, sampling = TrainerEngine(trainer), SamplingConfig(max_completion_length=4)
        step = trainer.training_step

        def evaluating(*args, **kwargs):
            if evaluated:
                with engine.session(sampling):
                    engine.generate(["1+1="] * 5, [3] * 5, sampling)
            return step(*args, **kwargs)

        trainer.training_step = evaluating
        recording = record(trainer)
        trainer.train()
        return [batch["completion_ids"].tolist() for batch in recording.batches]

    assert trained(False) == trained(True)


def test_run_seed_determines_samples_of_colocated_engine(make_trainer):
    def sampled(seed):
        trainer = make_trainer(max_steps=1, seed=seed, shuffle_dataset=False)
        recording = record(trainer)
        trainer.train()
        return recording.batches[0]["completion_ids"].tolist()

    samples = sampled(1)
    assert samples == sampled(1)
    assert samples != sampled(2)


@pytest.mark.parametrize("options", TABLES["sampling"].values(), ids=TABLES["sampling"])
@pytest.mark.parametrize("updates", [1, 2])
def test_the_ratio_of_truncated_samples_to_the_engine_is_1(make_trainer, options, updates):
    """In the loss, or from TRL's correction before it; and what the loss reads is over the whole vocabulary."""
    several = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    trainer = make_trainer(max_steps=1, **(several if updates == 2 else {}), **options)
    recording = record(trainer)
    trainer.train()
    row = next(row for row in trainer.state.log_history if "loss" in row)
    assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=2e-3)
    assert row["sampling/importance_sampling_ratio/median"] == pytest.approx(1.0, abs=2e-3)
    assert row["sampling/sampling_logp_difference/mean"] < SAME
    assert recording.differences[0] > 0.03  # control: the engine's log-probabilities are of the kept tokens


def test_options_of_the_engine_are_replayed_refused_or_neutral():
    """A new option of vLLM is refused until it is known; a renamed one would be seen here."""
    options = set(SamplingParams.__struct_fields__)
    assert {"top_p", "top_k", "min_p", "logit_bias", *_NEUTRAL, *_DEFAULTS, "temperature"} <= options


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_probe_samples_its_rollouts_with_the_engine(make_trainer, dataset, kind):
    trainer = make_trainer(adapter(kind))
    generate, sampled = trainer.vllm_generation.generate, []

    def counting(*args, **kwargs):
        sampled.append(len(kwargs["prompts"]))
        return generate(*args, **kwargs)

    trainer.vllm_generation.generate = counting
    task = Task.from_dataset(dataset, length_verdicts, "lengths")
    document = probe(trainer, task, ProbeSettings(prompts=4, arms=(Arm("SDPO", 0.0),)))
    assert sum(sampled) == 4 * trainer.num_generations
    assert document["arms"][0]["ceiling"]["mean"] >= 0.0
