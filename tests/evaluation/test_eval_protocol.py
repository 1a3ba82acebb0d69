"""`evaluate`: figures against closed forms, and interruptions that leave no trace."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import signal
import time
from contextlib import nullcontext

import pytest
from datasets import Dataset

from credit_trl import Verdict
from credit_trl.evaluation import Evaluation, evaluate
from credit_trl.evaluation.engines import Response
from credit_trl.evaluation.protocol import EvaluationMismatchError, sample_seed, task_rows
from credit_trl.evaluation.verdicts import VerifierFailed
from credit_trl.rollout.verdict import VerifierPolicy, VerifierTimeout
from credit_trl.tasks.registry import Task, batch_of

LETTERS = "ABCD"


def graded(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    right = f"<answer>{answer}</answer>" in response
    return Verdict(float(right), f"Correct answer: {answer}", {"has_tag": float("<answer>" in response)})


def letters(split: str = "test", path=None) -> Dataset:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Question {i}"}],
            "answer": LETTERS[i % 4],
            "task": "even" if i % 2 == 0 else "odd",
            "id": f"q{i}",
        }
        for i in range(6)
    ]
    return Dataset.from_list(rows)


TASK = Task("letters", letters, graded, batch_of(graded, "letters"))


class FakeEngine:
    """Answers from the seed alone. It remembers what it was asked, and fails when it is told to."""

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

    def generate(self, requests, sampling):
        responses = []
        for request in requests:
            self.seeds.append(request.seed)
            letter = LETTERS[request.seed % 4]
            text = f"<answer>{letter}</answer>" if request.seed % 7 else "no answer"
            responses.append(Response(text, 3 + request.seed % 5, request.seed % 11 == 0))
        if self.on_generate is not None:
            self.on_generate(len(self.seeds))
        return responses


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def run(folder, k=5, **options):
    engine = FakeEngine(**options)
    return evaluate(engine, TASK, k, output_dir=folder, progress=False), engine


def test_figures_follow_from_the_samples(tmp_path):
    result, _ = run(tmp_path)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(s["prompt"], s["sample"]) for s in samples] == [(f"q{i}", j) for i in range(6) for j in range(5)]
    golds = {row["id"]: row["answer"] for row in letters()}
    rewards = [float(f"<answer>{golds[s['prompt']]}</answer>" in s["text"]) for s in samples]
    assert [s["reward"] for s in samples] == rewards
    by_prompt = [rewards[i : i + 5] for i in range(0, 30, 5)]
    assert result.per_prompt_scores == pytest.approx([sum(r) / 5 for r in by_prompt])
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
    assert 0.0 <= result.majority <= 1.0
    assert Evaluation.from_dict(json.loads((tmp_path / "result.json").read_text())) == result


def test_majority_is_left_out_where_answers_are_no_letters():
    rows = letters().map(lambda row: {"answer": f"{row['answer']}!"})
    task = Task("texts", lambda *a: rows, graded, batch_of(graded, "texts"))
    assert evaluate(FakeEngine(), task, 3, progress=False).majority is None
    counted = evaluate(FakeEngine(), task, 3, answer_of=lambda text: text[8:9] + "!", progress=False)
    assert counted.majority is not None


def test_a_finished_evaluation_generates_nothing_again(tmp_path):
    first, engine = run(tmp_path)
    before = files(tmp_path)
    assert len(set(engine.seeds)) == len(engine.seeds) == 30
    again, engine = run(tmp_path)
    assert engine.seeds == []
    assert again == first
    assert files(tmp_path) == before


def test_samples_do_not_depend_on_the_batch_size(tmp_path):
    run(tmp_path / "a", batch_size=1)
    run(tmp_path / "b", batch_size=64)
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.77, 0.999])
def test_a_file_torn_at_any_byte_is_completed_without_a_sample_twice(tmp_path, share):
    run(tmp_path / "whole")
    expected = files(tmp_path / "whole")
    torn = tmp_path / "torn"
    torn.mkdir()
    content = expected["samples.jsonl"][: int(share * len(expected["samples.jsonl"]))]
    (torn / "samples.jsonl").write_bytes(content)
    (torn / "settings.json").write_bytes(expected["settings.json"])
    _, engine = run(torn)
    assert files(torn) == expected
    assert len(engine.seeds) == 30 - content.count(b"\n")


def killed_after(folder, samples):
    """An evaluation in a process of its own that receives SIGKILL once so many samples were generated."""

    def die(generated):
        if generated >= samples:
            os.kill(os.getpid(), signal.SIGKILL)

    run(folder, on_generate=die)


def test_kill_and_restart_gives_the_files_of_an_undisturbed_run(tmp_path):
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
def test_another_evaluation_in_the_directory_is_refused_by_what_differs(tmp_path, change):
    run(tmp_path)
    with pytest.raises(EvaluationMismatchError, match=next(iter(change))):
        run(tmp_path, **change)


def test_every_sample_has_a_seed_of_its_own():
    seeds = [sample_seed(s, f"q{i}", j) for s in range(3) for i in range(40) for j in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_rows_without_ids_get_stable_ones_and_duplicates_stay_apart():
    rows = [{"prompt": "a", "answer": "A"}, {"prompt": "b", "answer": "B"}, {"prompt": "a", "answer": "A"}]
    named = task_rows(TASK, dataset=rows)
    assert named[0]["id"] != named[1]["id"]
    assert named[2]["id"] == f"{named[0]['id']}#2"
    assert task_rows(TASK, dataset=rows[1:])[0]["id"] == named[1]["id"]
    assert len(task_rows(TASK, max_prompts=2)) == 2


def test_a_verifier_that_does_not_apply_is_refused_by_prompt():
    def silent(response, answer, *, truncated=False):
        return Verdict(None)

    task = Task("silent", letters, silent, batch_of(silent, "silent"))
    with pytest.raises(ValueError, match="'q0'"):
        evaluate(FakeEngine(), task, 2, progress=False)


def rewarded(reward) -> Task:
    return Task("letters", letters, graded, reward)


def test_a_verifier_that_is_a_coroutine_is_waited_for():
    async def slow(completions, answer, **columns):
        await asyncio.sleep(0)
        return TASK.reward(completions, answer, **columns)

    plain, waited = (evaluate(FakeEngine(), task, 3, progress=False) for task in (TASK, rewarded(slow)))
    assert waited == plain


@pytest.mark.parametrize("tries", [1, 2, 3])
def test_what_a_verifier_leaves_undecided_is_asked_once_more_alone_and_then_counts_as_zero(tmp_path, tries, caplog):
    """Only answers to q2 are ever undecided, `tries` times each."""
    asked = []

    def hesitant(completions, answer, id, **columns):
        asked.append(list(id))
        verdicts = TASK.reward(completions, answer, **columns)
        hesitates = sum("q2" in ids for ids in asked) < tries
        return [
            Verdict(None, "too slow", {"undecided": 1.0}) if name == "q2" and hesitates else verdict
            for name, verdict in zip(id, verdicts, strict=True)
        ]

    result = evaluate(FakeEngine(batch_size=30), rewarded(hesitant), 5, output_dir=tmp_path, progress=False)
    plain = evaluate(FakeEngine(batch_size=30), TASK, 5, progress=False)
    assert asked[1:] == ([] if tries == 1 else [["q2"] * 5])
    scores, expected = ({p.id: p.score for p in one.prompts} for one in (result, plain))
    assert scores == expected | ({"q2": 0.0} if tries == 3 else {})
    assert result.metrics.get("undecided") == (1.0 if tries == 3 else None)
    assert ("count as 0" in caplog.text) == (tries == 3)


def test_numbers_and_characters_that_no_file_takes_do_not_end_an_evaluation_that_was_interrupted(tmp_path):
    def odd(completions, answer, id, **columns):
        return [Verdict(1.0, "half \ud800 a pair", {"ratio": math.nan, "n": 2.0}) for _ in id]

    def interrupted(count):
        if count > 8:
            raise KeyboardInterrupt

    whole = evaluate(FakeEngine(), rewarded(odd), 3, output_dir=tmp_path / "whole", progress=False)
    engine = FakeEngine(on_generate=interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(engine, rewarded(odd), 3, output_dir=tmp_path / "part", progress=False)
    assert evaluate(FakeEngine(), rewarded(odd), 3, output_dir=tmp_path / "part", progress=False) == whole
    assert files(tmp_path / "part") == files(tmp_path / "whole")
    assert whole.metrics == {"n": 2.0}


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_finite_number_is_refused_by_prompt(reward):
    with pytest.raises(ValueError, match="'q0'"):
        evaluate(FakeEngine(), rewarded(lambda completions, **columns: [reward] * len(completions)), 2, progress=False)


def test_a_verifier_that_hangs_ends_the_evaluation_as_the_policy_says():
    def hanging(completions, **columns):
        time.sleep(3.0)

    for on_error, error in (("raise", VerifierTimeout), ("skip", VerifierFailed)):
        with pytest.raises(error):
            evaluate(FakeEngine(), rewarded(hanging), 1, policy=VerifierPolicy(on_error, 0.1), progress=False)


def test_a_tiny_model_is_evaluated_end_to_end_and_continues(tmp_path, make_model, tokenizer):
    options = {"k": 2, "max_completion_length": 4, "tokenizer": tokenizer, "progress": False, "batch_size": 3}
    whole = evaluate(make_model(), TASK, output_dir=tmp_path / "whole", **options)
    expected = files(tmp_path / "whole")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "settings.json").write_bytes(expected["settings.json"])
    (tmp_path / "part" / "samples.jsonl").write_bytes(b"".join(expected["samples.jsonl"].splitlines(True)[:5]))
    part = evaluate(make_model(), TASK, output_dir=tmp_path / "part", **options)
    assert part == whole
    assert files(tmp_path / "part") == expected
    assert whole.mean_length <= 4.0
