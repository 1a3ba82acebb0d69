"""`CreditMapCallback` in training runs."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from credit_trl import CreditTrainer
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.lab.analysis.callback import CreditMapCallback
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.tokenmap import TokenMap, read_maps
from credit_trl.lab.analysis.vocabulary_logps import next_token_logps
from credit_trl.teacher.models import Teacher
from tables import tables_of
from tiny import save_model


@pytest.fixture
def train(make_model, make_trainer, dataset):
    """Factory that trains a tiny model in fp64 and returns the trainer."""
    rows = dataset.add_column("task", ["sums"] * len(dataset))

    def run(options, resume=None, **overrides):
        """With `options` of `CreditMapCallback`, or without it."""
        defaults = {
            "max_steps": 3,
            "distillation_support": "sampled",
            "teacher_update_rate": 0.5,
            "learning_rate": 0.01,
        }
        model = make_model(dtype=torch.float64)
        trainer = make_trainer(rows=rows, eval_rows=rows.select(range(4)), model=model, **defaults | overrides)
        if options is not None:
            trainer.add_callback(CreditMapCallback(trainer, **options))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def pages(trainer: CreditTrainer) -> dict[str, list[TokenMap]]:
    directory = Path(trainer.args.output_dir) / "credit_maps"
    return {path.stem: read_maps(path) for path in sorted(directory.glob("*.json"))}


def of_this_step(maps: list[TokenMap]) -> list[TokenMap]:
    return [m for m in maps if m.response.identifier.startswith(m.checkpoint.replace("-", " ") + ",")]


@pytest.mark.parametrize("options", tables_of(__file__)["options"], ids=str)
def test_maps_show_the_credit_of_the_loss(train, options):
    support = {"distillation_support": "teacher_topk"} if options else {}
    trainer = train({"every": 2, "rollouts": 8}, **support | options)
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "credit/advantage_mean" in entry}
    written = pages(trainer)
    assert list(written) == ["step-000001", "step-000002", "step-000003"]  # the last of three, too
    metrics = {"advantage": "advantage", "s": "specific", "delta_v": "delta_v", "generic": "generic"}
    for name, maps in written.items():
        current = of_this_step(maps)
        assert len(current) == 8
        # With a support the other metrics are means over it, not over the sampled tokens.
        for metric in metrics if not options else ("advantage",):
            values = torch.cat([m.values(metrics[metric]) for m in current])
            expected = logged[int(name[-6:])][f"credit/{metric}_mean"]
            assert values.mean().item() == pytest.approx(expected, abs=2e-6), metric


def test_maps_keep_training_equal(train):
    mapped, alone = train({"every": 2, "rollouts": 8}), train(None)
    for parameter, counterpart in zip(mapped.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(parameter, counterpart)


def test_pinned_rollouts_are_scored_under_later_weights(train):
    trainer = train({"every": 3, "rollouts": 2})
    written = pages(trainer)
    first_maps = {m.response.identifier: m for m in written["step-000001"]}
    again = [m for m in written["step-000003"] if m.response.identifier in first_maps]
    assert len(again) == 2
    for token_map in again:
        first_map = first_maps[token_map.response.identifier]
        assert token_map.response == first_map.response
        assert token_map.checkpoint == "step-3"
        assert not torch.equal(token_map.scores.advantage, first_map.scores.advantage)


def test_resumed_run_keeps_its_pinned_rollouts(train):
    trainer = train({"every": 2, "rollouts": 1}, save_strategy="steps", save_steps=2, max_steps=2)
    pinned_before = [m.response for m in pages(trainer)["step-000001"]]
    checkpoint = str(Path(trainer.args.output_dir) / "checkpoint-2")
    resumed = train({"every": 2, "rollouts": 1}, resume=checkpoint, max_steps=4)
    current, pinned = (m.response for m in pages(resumed)["step-000004"])
    assert current.identifier.startswith("step 4,")
    assert [pinned] == pinned_before


def test_run_resumes_inside_a_generation_batch_without_its_map(train, caplog):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "steps_per_generation": 2}
    trainer = train({}, per_device_train_batch_size=4, **options)
    resumed = train({}, resume=f"{trainer.args.output_dir}/checkpoint-1", per_device_train_batch_size=4, **options)
    assert resumed.state.global_step == 2
    assert "CreditMapCallback: the last step has no token map" in caplog.text


def test_failing_event_of_an_optional_callback_is_one_warning(train, caplog, monkeypatch):
    monkeypatch.setattr(CreditMapCallback, "_write", lambda self, step: [][step])
    assert train({"every": 1}).state.global_step == 3
    assert caplog.text.count("CreditMapCallback: IndexError: list index out of range. Training continues.") == 1


@pytest.mark.filterwarnings("ignore:No sample with a teacher")
def test_evaluation_rollouts_are_not_mapped(train):
    # A generation batch is used for two updates, with an evaluation between them.
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    batches = {"max_steps": 4, "steps_per_generation": 2, "per_device_train_batch_size": 4}
    trainer = train({"every": 2, "rollouts": 8}, **batches, **evaluation)
    written = pages(trainer)
    assert list(written) == ["step-000001", "step-000003"]  # step 2 has no new generation batch
    assert len(of_this_step(written["step-000003"])) == 8


@pytest.mark.parametrize("lora", [False, True])
def test_loaded_checkpoint_has_the_runs_policy_and_teacher(make_trainer, tokenizer, tmp_path, caplog, lora):
    path = save_model(tmp_path / "model", max_position_embeddings=2048)
    options = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.05, "teacher_update_rate": 0.5}
    peft = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None
    trainer = make_trainer(model=path, peft_config=peft, **options)
    trainer.train()
    saved = Path(trainer.args.output_dir) / "checkpoint-2"
    loaded = Checkpoint.load(path, saved, device="cpu")
    prompt, y = tokenizer("Add 1.")["input_ids"], list(range(3))
    for mine, theirs in ((loaded.student, Teacher(trainer.model)), (loaded.teacher, trainer.teacher)):
        scores = [next_token_logps(model, TokenContexts(prompt), y) for model in (mine, theirs)]
        torch.testing.assert_close(*scores)
    policy, lagged = (
        next_token_logps(scored_model, TokenContexts(prompt), y) for scored_model in (loaded.student, loaded.teacher)
    )
    assert not torch.equal(policy, lagged)
    (saved / "teacher.safetensors").unlink()  # as in a final model
    initial = Checkpoint.load(path, device="cpu").student
    final = Checkpoint.load(path, saved, device="cpu", teacher="base").teacher
    assert torch.equal(
        *(next_token_logps(scored_model, TokenContexts(prompt), y) for scored_model in (initial, final))
    )
    assert Checkpoint.load(path, saved, device="cpu", teacher="ema").name in caplog.text
