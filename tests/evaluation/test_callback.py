"""`EvaluationCallback` and the run log: unchanged training, best model, resumed runs."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from credit_trl import Verdict
from credit_trl.evaluation import EvaluationCallback, engines, evaluate
from credit_trl.evaluation.engines import weight_fingerprint
from credit_trl.run_directory import keep_up_to, read_lines
from credit_trl.tasks.registry import Task, batch_of


def odd_length(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    return Verdict(float(len(response) % 2), f"The answer is {answer}.")


def questions(split: str = "test", path=None) -> Dataset:
    prompts = [[{"role": "user", "content": f"{i}+1="}] for i in range(4)]
    return Dataset.from_dict({"prompt": prompts, "answer": list("1234"), "id": ["q0", "q1", "q2", "q3"]})


TASK = Task("odd", questions, odd_length, batch_of(odd_length, "odd"))


@pytest.fixture
def train(make_trainer):
    def run(folder, evaluated=True, resume=None, scores=None, **options):
        options = {"output_dir": str(folder), "max_steps": 4, "learning_rate": 1e-2, **options}
        trainer = make_trainer(TASK.reward, **options)
        if evaluated:
            trainer.run_log.facts["task"] = TASK.name
            callback = EvaluationCallback(trainer, TASK, k=3, eval_steps=2, temperature=1.0, top_p=1.0)
            if scores is not None:
                script_scores(callback, scores)
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def script_scores(callback, scores):
    """Replace the scores of the evaluations, by step."""
    measure = callback._measure

    def scripted(folder):
        result = measure(folder)
        object.__setattr__(result, "score", scores[int(folder.name.rpartition("-")[2])])
        return result

    callback._measure = scripted


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_evaluation_leaves_training_bitwise_unchanged(train, tmp_path):
    plain = weights(train(tmp_path / "plain", evaluated=False))
    evaluated = weights(train(tmp_path / "evaluated"))
    assert all(torch.equal(evaluated[name], value) for name, value in plain.items())


def test_run_directory_holds_evaluations_log_and_settings(train, tmp_path):
    trainer = train(tmp_path)
    history = read_lines(tmp_path / "evaluations.jsonl")
    assert [row["step"] for row in history] == [0, 2, 4]
    for row in history:
        folder = tmp_path / "evaluations" / f"step-{row['step']:06d}"
        assert len(read_lines(folder / "samples.jsonl")) == 4 * 3
        assert json.loads((folder / "result.json").read_text())["score"] == row["score"]
    log = read_lines(tmp_path / "log.jsonl")
    trained, logged = ([row for row in rows if "loss" in row] for rows in (log, trainer.state.log_history))
    assert [entry["step"] for entry in trained] == [1, 2, 3, 4]
    for name in ("reward", "credit/s_mean"):
        assert [entry[name] for entry in trained] == [entry[name] for entry in logged]
    assert [entry["eval_avg@3"] for entry in log if "eval_avg@3" in entry] == [row["score"] for row in history]
    evaluations = [entry for entry in trainer.state.log_history if "eval_avg@3" in entry]
    assert [entry["step"] for entry in evaluations] == [0, 2, 4]
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["task"], run["seed"], run["config"]["contrastive_coef"]) == ("odd", 1, 0.1)


def test_best_model_is_kept(train, tmp_path):
    (tmp_path / "best-step-2-copy").mkdir()
    trainer = train(tmp_path, scores={0: 0.25, 2: 0.75, 4: 0.5})
    assert {path.name for path in tmp_path.glob("best-step-*")} == {"best-step-2", "best-step-2-copy"}
    best_model = type(trainer.model).from_pretrained(tmp_path / "best-step-2")
    evaluated = json.loads((tmp_path / "evaluations" / "step-000002" / "settings.json").read_text())["weights"]
    assert evaluated != weight_fingerprint(trainer.model)
    assert weight_fingerprint(best_model) != weight_fingerprint(trainer.model)


def results(folder):
    """The files of a run, without times and without warnings, which a resumed run repeats."""
    rows = [row for row in read_lines(folder / "log.jsonl") if not {"train_loss", "warning"} & row.keys()]
    log = [{k: v for k, v in row.items() if "second" not in k and "time" not in k} for row in rows]
    samples = {p.parent.name: p.read_bytes() for p in sorted(folder.glob("evaluations/*/samples.jsonl"))}
    return log, (folder / "evaluations.jsonl").read_bytes(), samples


@pytest.mark.parametrize("lost", ["everything_after", "half_an_evaluation"])
def test_resumed_run_ends_with_the_same_files(train, tmp_path, lost):
    """The run is killed after step 4, or during its evaluation; its last checkpoint is of step 3."""
    train(tmp_path / "whole", max_steps=6, save_strategy="steps", save_steps=3)
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole", killed)
    shutil.rmtree(killed / "checkpoint-6")
    shutil.rmtree(killed / "evaluations" / "step-000006")
    keep_up_to(killed / "evaluations.jsonl", 4)
    keep_up_to(killed / "log.jsonl", 4)
    if lost == "half_an_evaluation":
        keep_up_to(killed / "evaluations.jsonl", 2)
        samples = killed / "evaluations" / "step-000004" / "samples.jsonl"
        samples.write_bytes(samples.read_bytes()[:200])
        (samples.parent / "result.json").unlink()
    train(killed, resume=str(killed / "checkpoint-3"), max_steps=6, save_strategy="steps", save_steps=3)
    assert results(killed) == results(tmp_path / "whole")


def test_evaluations_count_generation_batches(train, tmp_path):
    """A generation batch is two optimizer steps here."""
    train(tmp_path, max_steps=8, per_device_train_batch_size=4, steps_per_generation=2)
    assert [row["step"] for row in read_lines(tmp_path / "evaluations.jsonl")] == [0, 4, 8]


def test_last_evaluation_is_logged_before_dashboards_close(make_trainer):
    logged = []

    class Dashboard(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logged.extend(name for name in logs if name.startswith("eval_avg"))

        def on_train_end(self, args, state, control, **kwargs):
            logged.append("closed")

    trainer = make_trainer(TASK.reward, callbacks=[Dashboard()], max_steps=1)
    evaluation = EvaluationCallback(trainer, TASK, 2, temperature=0.0, max_prompts=1)
    trainer.add_callback(evaluation)
    trainer.train()
    assert logged == ["eval_avg@2", "eval_avg@2", "closed"]
    # one prompt has no interval, and greedy decoding is said beside avg@k
    lines = str(evaluation).splitlines()
    assert [line[:18] for line in lines] == ["step    0  avg@2  ", "step    1  avg@2  "]
    assert all(line.endswith("%  greedy  95 % CI needs at least two prompts") for line in lines)
    assert "nan" not in str(trainer.state.log_history)


@pytest.mark.parametrize("failing", [2, 4])  # a middle step and the last
def test_failing_verifier_skips_the_evaluation_only(make_trainer, tmp_path, failing, caplog):
    trainer = make_trainer(TASK.reward, output_dir=str(tmp_path), max_steps=4, on_verifier_error="skip")

    def broken_once(**columns):
        if trainer.state.global_step == failing:
            raise OSError("service unavailable")
        return TASK.reward(**columns)

    trainer.add_callback(EvaluationCallback(trainer, Task("odd", questions, odd_length, broken_once), 2, eval_steps=2))
    trainer.train()
    assert trainer.state.global_step == 4
    steps = [row["step"] for row in read_lines(tmp_path / "evaluations.jsonl")]
    assert steps == [step for step in (0, 2, 4) if step != failing]
    assert f"Step {failing} was not evaluated" in caplog.text


def test_evaluation_of_other_weights_is_replaced(train, tmp_path):
    train(tmp_path)
    samples_before = (tmp_path / "evaluations" / "step-000004" / "samples.jsonl").read_bytes()
    train(tmp_path, learning_rate=5e-2)
    again = tmp_path / "evaluations" / "step-000004"
    assert (again / "samples.jsonl").read_bytes() != samples_before
    assert [row["step"] for row in read_lines(tmp_path / "evaluations.jsonl")] == [0, 2, 4]
    assert len([row for row in read_lines(tmp_path / "log.jsonl") if "loss" in row]) == 4


@pytest.mark.parametrize("use_vllm", [False, True])
@pytest.mark.filterwarnings("ignore:No sample of this generation batch")
def test_training_and_evaluation_grade_the_same_messages(make_trainer, parsing, monkeypatch, use_vllm):
    """Of a tokenizer that parses responses, as one saved after a run with tools does."""
    ids = parsing("<think>\nhotels(Oslo)\n</think>\n\nweather(Oslo)<|im_end|>")["input_ids"]
    seen = []

    def spy(completions, **columns):
        seen.extend(completions)
        return [float(len(seen) % 2)] * len(completions)

    trainer = make_trainer(spy, processing_class=parsing, max_steps=1)
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda prompt_ids, *a, **k: ([ids] * len(prompt_ids), None))
    trainer.train()
    trained, seen[:] = list(seen), []
    monkeypatch.setattr(engines, "generate_ids", lambda model, prompts, *a, **k: [ids] * len(prompts))
    rollout = {"temperature": 2.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5}
    rollout |= {"max_completion_length": 99, "generation_kwargs": {"stop": "x"}}
    settings_of_calls = []

    def generate(prompts, **options):
        settings_of_calls.append({name: getattr(generation, name) for name in rollout})
        return None, [ids] * len(prompts)

    generation = SimpleNamespace(mode="server", sync_weights=lambda: None, generate=generate, **rollout)
    if use_vllm:
        trainer.vllm_generation, trainer.use_vllm, trainer._last_loaded_step = generation, True, -1
    sampling = {"temperature": 0.7, "top_p": 0.8, "max_completion_length": 5}
    result = evaluate(trainer, Task("spy", questions, odd_length, spy), 2, **sampling, progress=False)
    settings = {**sampling, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": {}}
    assert all(call_settings == settings for call_settings in settings_of_calls)
    assert bool(settings_of_calls) == use_vllm
    assert {name: getattr(generation, name) for name in rollout} == rollout  # restored
    assert seen == trained
    assert seen[0][0]["content"] == "weather(Oslo)"
    assert (result.mean_length, result.truncated) == (len(ids), 0.0)


@pytest.mark.parametrize("arguments", [("task", "trainer"), ("odd", "trainer"), (None, "task"), ("model", "task")])
def test_arguments_in_another_order_are_named(make_trainer, arguments):
    trainer = make_trainer(TASK.reward)
    objects = {"task": TASK, "trainer": trainer, "model": trainer.model}
    with pytest.raises(TypeError, match=r"^`trainer` must be a trainer, got \w+\. The order .* is trainer, task\.$"):
        EvaluationCallback(*(objects.get(name, name) for name in arguments))
