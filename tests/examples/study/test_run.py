"""Bases of the study: pretrained once, shared between launchers, retried; token classes of its responses."""

from __future__ import annotations

from filelock import FileLock


def test_missing_bases_are_made_and_locked_ones_come_last(study, tmp_path, monkeypatch):
    run = study("run")
    made = []
    monkeypatch.setattr(run, "pretrain", lambda base, world, seed: (made.append((world, seed)), base.mkdir()))
    (tmp_path / "plain-seed2").mkdir()
    run.make_bases(tmp_path, [("plain", 1), ("plain", 2), ("plain", 3), ("shortcut", 1)])
    assert made == [("plain", 1), ("plain", 3), ("shortcut", 1)]
    other = FileLock(tmp_path / "plain-seed4.lock")
    other.acquire()
    seen = []
    monkeypatch.setattr(run, "pretrain", lambda base, world, seed: (seen.append(seed), base.mkdir(), other.release()))
    run.make_bases(tmp_path, [("plain", seed) for seed in range(1, 6)])
    assert seen == [5, 4]


def test_failed_pretraining_is_retried_with_another_seed(study, tmp_path, monkeypatch, capsys):
    run = study("run")
    tried = []

    def make_base(seed, directory, progress):
        tried.append(seed)
        if len(tried) < 3:
            raise RuntimeError("Letter look-up is 0.40")
        directory.mkdir()

    monkeypatch.setattr(run, "base_maker", lambda world: make_base)
    run.pretrain(tmp_path / "plain-seed7", "plain", 7)
    assert tried == [7, 107, 207]
    assert (tmp_path / "plain-seed7").is_dir()
    assert "attempt 1: Letter look-up" in capsys.readouterr().err


def test_tokens_are_measured_on_the_reported_bases(study, tmp_path):
    for name in ("plain-seed1", "plain-seed2", "plain-seed6", "shortcut-seed1", "style-seed1", "programs-seed1"):
        (tmp_path / name).mkdir()
    (tmp_path / "plain-seed1.lock").touch()
    found = study("tokens").bases_of_the_study(tmp_path)
    assert [base.name for base in found] == ["plain-seed1", "plain-seed2", "shortcut-seed1"]


def test_planted_tokens_have_their_own_class(study):
    from transformers import AutoTokenizer

    from credit_trl.tasks.quickstart import SHORTCUT_THOUGHT, Question
    from credit_trl.tasks.quickstart_model import SHIPPED

    tokens = study("tokens")
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    question = Question("airport", "Oslo", ("travel", "food", "music", "books"), "travel")
    for thought, expected in ((None, "cue"), (SHORTCUT_THOUGHT, "shortcut")):
        ids = tokenizer(question.response(thought), add_special_tokens=False)["input_ids"]
        labels = tokens.classes_of(ids, tokenizer, thought)
        assert labels[len(tokens.prefix_ids(tokenizer))] == expected
        planted = tokenizer.decode([i for i, label in zip(ids, labels, strict=True) if label == "shortcut"])
        assert planted.strip() == (thought or "")
