"""`evaluate`: scores against direct computation, and resumed evaluations."""

import json
import math
import multiprocessing
import os
import re
import signal
from contextlib import nullcontext

import pytest
from datasets import Dataset
from torch import nn

from credit_trl import Verdict
from credit_trl.evaluation import EvaluationConfig, evaluate
from credit_trl.evaluation.generation import Response
from credit_trl.evaluation.protocol import EvaluationMismatchError, distinct_names, sample_seed, task_rows
from credit_trl.evaluation.verdicts import task_verdicts
from credit_trl.run_directory import RunLockedError
from credit_trl.tasks.registry import Task, batch_of
from tables import rows_of

LETTERS = "ABCD"


def graded(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    right = f"<answer>{answer}</answer>" in response
    return Verdict(float(right), f"Correct answer: {answer}", {"has_tag": float("<answer>" in response)})


def letters(split: str = "test", path=None) -> Dataset:
    prompts = [[{"role": "user", "content": f"Question {i}"}] for i in range(6)]
    answers = {"answer": list("ABCDAB"), "task": ["even", "odd"] * 3, "id": [f"q{i}" for i in range(6)]}
    return Dataset.from_dict({"prompt": prompts, **answers})


TASK = Task("letters", letters, graded, batch_of(graded, "letters"))


class FakeEngine:
    """Responses depend on the seed only. Records the seeds; `on_generate` runs after each batch."""

    name, is_main = "fake", True

    def __init__(self, batch_size=4, weights="w", on_generate=None):
        self.batch_size, self.weights, self.on_generate = batch_size, weights, on_generate
        self.seeds: list[int] = []

    def identity(self):
        return self.weights

    def session(self, sampling):
        return nullcontext()

    def share(self, value):
        return value

    def generate(self, prompts, seeds, sampling):
        self.seeds += seeds
        responses = []
        for seed in seeds:
            text = f"<answer>{LETTERS[seed % 4]}</answer>" if seed % 7 else "no answer"
            responses.append(Response(text, 3 + seed % 5, seed % 11 == 0))
        if self.on_generate is not None:
            self.on_generate(len(self.seeds))
        return responses


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def run(folder, k=5, **options):
    engine = FakeEngine(**options)
    return evaluate(engine, TASK, k, output_dir=folder, progress=False), engine


def test_a_folder_is_evaluated_by_one_process_at_a_time(tmp_path):
    def evaluate_again(samples):
        with pytest.raises(RunLockedError, match="is used by another"):
            evaluate(FakeEngine(), TASK, k=1, output_dir=tmp_path, progress=False)

    result = evaluate(FakeEngine(on_generate=evaluate_again), TASK, k=1, output_dir=tmp_path, progress=False)
    assert evaluate(FakeEngine(), TASK, k=1, output_dir=tmp_path, progress=False) == result


def test_scores_follow_from_the_samples(tmp_path):
    result, _ = run(tmp_path)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(s["prompt"], s["sample"]) for s in samples] == [(f"q{i}", j) for i in range(6) for j in range(5)]
    golds = {row["id"]: row["answer"] for row in letters()}
    rewards = [float(f"<answer>{golds[s['prompt']]}</answer>" in s["text"]) for s in samples]
    assert [s["reward"] for s in samples] == rewards
    by_prompt = [rewards[i : i + 5] for i in range(0, 30, 5)]
    assert [prompt.score for prompt in result.prompts] == pytest.approx([sum(r) / 5 for r in by_prompt])
    assert result.score == pytest.approx(sum(rewards) / 30)
    assert result.pass_at[5] == pytest.approx(sum(any(r) for r in by_prompt) / 6)
    assert result.pass_at[1] == pytest.approx(result.score)
    assert set(result.pass_at) == {1, 2, 4, 5}
    assert result.mean_length == pytest.approx(sum(s["length"] for s in samples) / 30)
    assert result.truncated == pytest.approx(sum(s["truncated"] for s in samples) / 30)
    assert result.metrics["has_tag"] == pytest.approx(sum("<answer>" in s["text"] for s in samples) / 30)
    assert result.low <= result.score <= result.high
    assert {name: interval.mean for name, interval in result.groups.items()} == pytest.approx(
        {"even": sum(map(sum, by_prompt[::2])) / 15, "odd": sum(map(sum, by_prompt[1::2])) / 15}
    )
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(result.to_dict()))


def test_a_single_prompt_has_no_interval(tmp_path):
    result = evaluate(FakeEngine(), TASK, 2, max_prompts=1, output_dir=tmp_path, progress=False)
    assert "%  95 % CI needs at least two prompts\n" in str(result)
    assert "nan" not in str(result)
    assert not [name for name in result.log_metrics() if name.endswith(("low", "high"))]
    assert json.loads((tmp_path / "result.json").read_text())["low"] is None


@pytest.mark.parametrize("name", ["completions", "prompts", "truncated"])
def test_columns_named_as_arguments_raise_before_sampling(name):
    rows = [*letters(), {**letters()[0], name: "<answer>A</answer>"}]
    engine = FakeEngine()
    with pytest.raises(ValueError, match=rf"column `{name}`.*rename_column\('{name}'"):
        evaluate(engine, TASK, 2, dataset=rows, progress=False)
    assert engine.seeds == []
    with pytest.raises(ValueError, match=f"column `{name}`"):
        task_verdicts(TASK, rows[-1:], [Response("<answer>B</answer>", 3, False)])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.77, 0.999, 1.0])
def test_samples_that_are_missing_in_the_file_are_generated(tmp_path, share):
    complete, engine = run(tmp_path / "whole")
    assert len(set(engine.seeds)) == len(engine.seeds) == 30
    expected = files(tmp_path / "whole")
    torn = tmp_path / "torn"
    torn.mkdir()
    content = expected["samples.jsonl"][: int(share * len(expected["samples.jsonl"]))]
    (torn / "samples.jsonl").write_bytes(content)
    (torn / "settings.json").write_bytes(expected["settings.json"])
    again, engine = run(torn)
    assert again == complete
    assert files(torn) == expected
    assert len(engine.seeds) == 30 - content.count(b"\n")


def killed_after(folder, samples):
    """Evaluate, and kill the process after so many samples."""

    def die(generated):
        if generated >= samples:
            os.kill(os.getpid(), signal.SIGKILL)

    run(folder, on_generate=die)


def test_killed_evaluation_resumes_to_the_same_files(tmp_path):
    run(tmp_path / "whole")
    folder = tmp_path / "killed"
    on_disk = 0
    for samples in (2, 9, 5, 13):  # each time counted from the restart
        child = multiprocessing.get_context("fork").Process(target=killed_after, args=(folder, samples))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        lines = (folder / "samples.jsonl").read_bytes().count(b"\n") if (folder / "samples.jsonl").exists() else 0
        assert lines >= on_disk
        on_disk = lines
    assert on_disk > 0
    _, engine = run(folder)
    assert len(engine.seeds) == 30 - on_disk
    assert files(folder) == files(tmp_path / "whole")


@pytest.mark.parametrize("change", [{"k": 6}, {"weights": "other"}])
def test_other_evaluation_in_output_dir_raises(tmp_path, change):
    run(tmp_path)
    with pytest.raises(EvaluationMismatchError, match=next(iter(change))):
        run(tmp_path, **change)


def test_samples_of_another_verifier_column_or_program_are_not_taken(tmp_path):
    def other(completions, **columns):
        return [0.0] * len(completions)

    evaluate(FakeEngine(), TASK, 1, output_dir=tmp_path, progress=False)
    rows = [row | {"tests": "other"} for row in letters()]
    for task, data, name in ((TASK, rows, "data"), (Task.from_dataset({}, other), letters(), "verifier")):
        with pytest.raises(EvaluationMismatchError, match=f"{name}: "):
            evaluate(FakeEngine(), task, 1, dataset=data, output_dir=tmp_path, progress=False)
    (tmp_path / "samples.jsonl").unlink()
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(FileExistsError, match="was not written by an evaluation"):
        evaluate(FakeEngine(), TASK, 1, output_dir=tmp_path, progress=False)


def test_verifier_gets_the_arguments_of_training():
    seen = {}

    def check(completions, completion_ids, log_extra, log_metric, **columns):
        seen["ids"] = completion_ids
        log_extra("length", list(map(len, completions)))
        log_metric("share", 0.5)
        return [1.0] * len(completions)

    responses = [Response("<answer>B</answer>", 2, False, ids=(3, 4))]
    assert task_verdicts(Task.from_dataset({}, check), [letters()[0]], responses) == [Verdict(1.0)]
    assert seen == {"ids": [(3, 4)]}
    task = Task.from_dataset({}, lambda completions, prompts, answer, truncated, task, id: [0.0])
    assert task_verdicts(task, [letters()[0]], responses) == [Verdict(0.0)]


def test_sample_seeds_are_unique():
    seeds = [sample_seed(s, f"q{i}", j) for s in range(3) for i in range(40) for j in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_task_rows_get_stable_unique_ids():
    rows = [{"prompt": "a", "answer": "A"}, {"prompt": "b", "answer": "B"}, {"prompt": "a", "answer": "A"}]
    rows_with_ids = task_rows(TASK, EvaluationConfig(dataset=rows))
    assert rows_with_ids[0]["id"] != rows_with_ids[1]["id"]
    assert rows_with_ids[2]["id"] == f"{rows_with_ids[0]['id']}#2"
    assert task_rows(TASK, EvaluationConfig(dataset=rows[1:]))[0]["id"] == rows_with_ids[1]["id"]
    assert len(task_rows(TASK, EvaluationConfig(max_prompts=2))) == 2
    assert distinct_names(["a", "a", "a#2", "a"]) == ["a", "a#3", "a#2", "a#4"]


def rewarded(reward) -> Task:
    return Task("letters", letters, graded, reward)


def test_a_sample_with_a_reward_is_decided():
    task = rewarded(lambda completions, **columns: [Verdict(1.0, None, {"undecided": 1.0})] * len(completions))
    assert evaluate(FakeEngine(), task, 1, progress=False).score == 1.0


def test_a_verifier_that_does_not_apply_to_a_row_raises():
    unfit = rewarded(lambda completions, **columns: [None] * len(completions))
    with pytest.raises(ValueError, match="no finite reward for prompt 'q0'"):
        evaluate(FakeEngine(), unfit, 1, progress=False)


@pytest.mark.parametrize("tries", [1, 2, 3])
def test_undecided_samples_are_graded_twice_then_count_as_zero(tmp_path, tries, caplog):
    """Only samples of q2 are undecided, in the first `tries` − 1 calls."""
    graded_ids = []

    def slow(completions, answer, id, **columns):
        graded_ids.append(list(id))
        verdicts = TASK.reward(completions, answer, **columns)
        is_undecided = sum("q2" in ids for ids in graded_ids) < tries
        return [
            Verdict(None, "too slow", {"undecided": 1.0}) if name == "q2" and is_undecided else verdict
            for name, verdict in zip(id, verdicts, strict=True)
        ]

    result = evaluate(FakeEngine(batch_size=30), rewarded(slow), 5, output_dir=tmp_path, progress=False)
    plain = evaluate(FakeEngine(batch_size=30), TASK, 5, progress=False)
    assert graded_ids[1:] == ([] if tries == 1 else [["q2"] * 5])
    scores, expected = ({p.id: p.score for p in outcome.prompts} for outcome in (result, plain))
    assert scores == expected | ({"q2": 0.0} if tries == 3 else {})
    assert result.metrics.get("undecided") == (1.0 if tries == 3 else None)
    assert ("count as 0" in caplog.text) == (tries == 3)


def test_evaluation_with_nan_metrics_and_surrogates_resumes(tmp_path):
    def odd(completions, answer, id, **columns):
        return [Verdict(1.0, "half \ud800 a pair", {"ratio": math.nan, "n": 2.0}) for _ in id]

    def interrupted(count):
        if count > 8:
            raise KeyboardInterrupt

    uninterrupted = evaluate(FakeEngine(), rewarded(odd), 3, output_dir=tmp_path / "whole", progress=False)
    engine = FakeEngine(on_generate=interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(engine, rewarded(odd), 3, output_dir=tmp_path / "part", progress=False)
    assert evaluate(FakeEngine(), rewarded(odd), 3, output_dir=tmp_path / "part", progress=False) == uninterrupted
    assert files(tmp_path / "part") == files(tmp_path / "whole")
    assert uninterrupted.metrics == {"n": 2.0}


@pytest.mark.parametrize(("arguments", "options", "message"), rows_of(__file__, "wrong_arguments"))
def test_wrong_arguments_are_named_with_the_remedy(arguments, options, message):
    objects = {"engine": FakeEngine(), "task": TASK, "rows": list(letters()), "data": letters()}
    objects["weights"] = nn.Linear(1, 1)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as refused:
        evaluate(*(objects.get(name, name) for name in arguments), **options)
    assert "\n" not in str(refused.value)


def test_length_of_an_evaluated_trainer_is_that_of_its_run(make_trainer):
    trainer = make_trainer(max_completion_length=3)
    for options, length in (({}, 3), ({"max_completion_length": 2}, 2)):
        result = evaluate(trainer, TASK, 1, progress=False, **options)
        assert result.settings["max_completion_length"] == length


def test_edits_of_a_verifier_do_not_reach_the_rows():
    def edits(completions, prompts, answer, **columns):
        prompts.clear()
        answer[:] = ["?"] * len(answer)
        os.chdir("/")
        return [Verdict(1.0) for _ in completions]

    task, rows, place = Task("edits", letters, graded, edits), list(letters()), os.getcwd()
    task_verdicts(task, rows, FakeEngine().generate(rows, list(range(6)), None))
    assert rows == list(letters())
    assert os.getcwd() == place
