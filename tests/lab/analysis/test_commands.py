"""The commands `trl credit-map` and `trl credit-compat`."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace

import pytest
import torch
from drawn import drawn_map

from credit_trl import cli
from credit_trl.cli import credit_compat, credit_map
from credit_trl.contexts.contrast import text_similarity
from credit_trl.contexts.prompts import user_text, without_question
from credit_trl.evaluation.config import SamplingConfig
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.responses import analysis_config, grade_rollouts, read_rollouts, sample_rollouts
from credit_trl.lab.analysis.tokenmap_parquet import read_parquet, write_parquet
from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.registry import Task, batch_of, load_task


def call(module, *line: str) -> int:
    """Run a command of the command line by its module."""
    return cli.main([module.__name__.rpartition(".")[2].replace("_", "-"), *map(str, line)])


@pytest.fixture
def saved(make_model, tokenizer, tmp_path):
    """Factory that saves a tiny model and its tokenizer."""

    def save(name: str, seed: int = 0, reference_seed: int | None = None):
        directory = tmp_path / name
        make_model(seed=seed).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        if reference_seed is not None:
            from safetensors.torch import save_file

            weights = {n: p.detach().clone() for n, p in make_model(seed=reference_seed).named_parameters()}
            save_file(weights, directory / "teacher.safetensors")
        return directory

    return save


def test_credit_map_scores_a_task_under_two_checkpoints(saved, tmp_path, capsys):
    base, step = saved("base"), saved("run/checkpoint-5", seed=1, reference_seed=2)
    options = ("--max_prompts", 2, "--samples", 2, "--max_completion_length", 8, "--contrastive_count", 2, "--pmi")
    code = call(
        credit_map,
        "--model",
        base,
        "--checkpoint",
        step,
        "--task",
        "quickstart",
        "--output_dir",
        tmp_path / "out",
        *options,
    )
    assert code == 0
    maps = read_parquet(tmp_path / "out" / "maps.parquet")
    assert [m.checkpoint for m in maps] == ["base"] * 4 + ["run/checkpoint-5"] * 4
    assert len({m.response.identifier for m in maps}) == 4
    assert all(m.scores.contrast_logps.shape[0] == 2 for m in maps)
    assert all("Correct option" in m.response.privileged.feedback for m in maps)
    assert {c for m in maps for c in m.classes} <= {"generic", "cue", "topic", "tool", "city"}  # the task's own
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"maps.html", "summary.md", "pmi.md", "map-001.png", "map-004.png"} <= names
    out = capsys.readouterr().out
    assert "run/checkpoint-5" in out
    assert "S_t" in out
    # The saved teacher is loaded.
    checkpoint = Checkpoint.load(str(base), step)
    assert checkpoint.teacher is not checkpoint.student
    assert "a lagged teacher" in checkpoint.describe()


def test_responses_from_json_lines_are_mapped(saved, tmp_path):
    rows = [
        {
            "prompt": "Capital of France?",
            "response": "Paris</script>",
            "feedback": "Right.",
            "contrasts": ["2+2?"],
            "id": "x",
        },
        {"prompt": [{"role": "user", "content": "2+2?"}], "response": "4", "demonstration": "It is 4.", "reward": 1},
        {"prompt": "No teacher?", "response": "none"},
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    line = (
        "--model",
        saved("m"),
        "--responses",
        tmp_path / "own.jsonl",
        "--output_dir",
        tmp_path / "out",
        "--terminal",
        0,
    )
    assert call(credit_map, *line) == 0
    first, second = read_parquet(tmp_path / "out" / "maps.parquet")
    assert (first.response.identifier, first.response.contrasts) == ("x", ("2+2?",))
    assert second.response.reward == 1
    assert len(second.response.contrasts) > 0  # drawn from the other records


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"feedback": "Wrong."}, "have no contrast prompt, which S_t needs. Add `contrasts`"),
        ({}, "no record of .* has feedback or a demonstration"),
    ],
)
def test_records_without_feedback_or_contrasts_are_refused(saved, tmp_path, capsys, record, message):
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "2+2?", "response": "4", **record}))
    line = ("--model", saved("m"), "--responses", tmp_path / "own.jsonl", "--output_dir", tmp_path / "out")
    assert call(credit_map, *line) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "own.jsonl, row 1, field '(whole row)': not JSON"),
        ('{"prompt": "x", "feedback": "z", "contrasts": []}', "field 'response': missing"),
        ('{"response": "x", "prompt": 5}', "field 'prompt': expected str or list, got int"),
        ('{"response": "x", "prompt": [1]}', "field 'prompt': expected text or a list of messages"),
        ('{"response": "x", "prompt": [{"role": "user"}]}', "field 'prompt': expected text or a list of messages"),
        ('{"response": "x", "prompt": "y", "feedback": 5}', "field 'feedback': expected str"),
        ('{"response": "x", "prompt": "y", "contrasts": "2+2?"}', "field 'contrasts': expected list"),
        (
            '{"response": "x", "prompt": "y", "contrasts": [2]}',
            "field 'contrasts': expected text or a list",
        ),
        ('{"response": "x", "prompt": "y", "reward": "<b>"}', "field 'reward': expected int or float"),
        ('{"response": "x", "prompt": "y", "reward": true}', "field 'reward': expected int or float"),
        ('{"a":' * 100_000, "own.jsonl, row 1, field '(whole row)': not JSON"),
    ],
)
def test_malformed_record_is_reported_by_row_and_field(saved, tmp_path, capsys, line, message):
    (tmp_path / "own.jsonl").write_text(line)
    assert call(credit_map, "--model", saved("m"), "--responses", tmp_path / "own.jsonl") == 1
    assert message in capsys.readouterr().err


def test_maps_of_two_files_are_drawn_on_one_page(tmp_path):
    for step in (1, 2):
        write_parquet([drawn_map(["a", "b"], checkpoint=f"step-{step}")], tmp_path / f"{step}.parquet")
    files = (tmp_path / "1.parquet", tmp_path / "2.parquet")
    assert call(credit_map, "--maps", *files, "--output_dir", tmp_path / "out", "--pictures", 0) == 0
    assert '"checkpoints":["step-1","step-2"]' in (tmp_path / "out" / "maps.html").read_text("utf-8")


def test_maps_of_two_runs_at_one_step_get_distinct_names(tmp_path):
    files = [tmp_path / run / "credit_maps" / "step-000050.parquet" for run in ("a", "b")]
    for file, tokens in zip(files, (["x", "y"], ["x", "y", "z"]), strict=True):
        file.parent.mkdir(parents=True)
        write_parquet([drawn_map(tokens, identifier="step 50, rollout 0", checkpoint="step-50")], file)
    assert call(credit_map, "--maps", *files, "--output_dir", tmp_path / "out", "--pictures", 0) == 0
    drawn = read_parquet(tmp_path / "out" / "maps.parquet")
    assert [one.response.identifier for one in drawn] == ["a: step 50, rollout 0", "b: step 50, rollout 0"]


def test_missing_inputs_are_reported(capsys, tmp_path):
    assert call(credit_map, "--model", "x") == 1
    assert "--task or --responses" in capsys.readouterr().err
    assert call(credit_map, "--model", tmp_path / "nowhere", "--task", "quickstart") == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="adapter_config"):
        Checkpoint.load("unused", tmp_path / "empty")


def test_templates_and_coefficients_are_read_from_yaml(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    credit_map.add_arguments(parser)
    (tmp_path / "run.yaml").write_text(
        "contrastive_coef: 0.25\ncontrastive_count: 3\nfeedback_template: 'Z {feedback_raw}'\nlearning_rate: 1.0\n"
        "output_dir: elsewhere\nunknown_option: 1\n"
    )
    args = parser.parse_args(["--config", str(tmp_path / "run.yaml"), "--contrastive_count", "2"])
    config = credit_map.measuring_config(args)
    assert (config.contrastive_coef, config.contrastive_count) == (0.25, 2)
    assert config.feedback_template == "Z {feedback_raw}"
    (tmp_path / "bad.yaml").write_text("!!python/object/apply:os.system ['true']")
    assert call(credit_map, "--model", "m", "--task", "quickstart", "--config", tmp_path / "bad.yaml") == 1
    assert "could not determine a constructor" in capsys.readouterr().err


def test_run_without_other_prompts_is_read_from_yaml(tmp_path):
    (tmp_path / "run.yaml").write_text("contrastive_swap: self\n")
    parser = argparse.ArgumentParser()
    credit_map.add_arguments(parser)
    config = credit_map.measuring_config(parser.parse_args(["--config", str(tmp_path / "run.yaml")]))
    assert (config.contrastive_swap, config.contrastive_count) == ("self", 1)


def test_options_of_the_demonstration_and_the_style_are_read_from_yaml(tmp_path):
    parser = argparse.ArgumentParser()
    credit_map.add_arguments(parser)
    (tmp_path / "run.yaml").write_text("remove_thinking_from_demonstration: false\nreprompt_style: paper\n")
    args = parser.parse_args(["--config", str(tmp_path / "run.yaml")])
    config = credit_map.measuring_config(args)
    assert config.teacher_context == "think+solution"
    assert "Now solve this problem step by step" in config.reprompt_template


def saved_run(saved, name: str, seed: int = 0, **config):
    """A checkpoint in a run directory with `run.json`."""
    checkpoint = saved(f"{name}/checkpoint-5", seed=seed)
    (checkpoint.parent / "run.json").write_text(json.dumps({"config": config, "seed": 1}))
    return checkpoint


SHORT = ("--max_prompts", 2, "--samples", 2, "--max_completion_length", 4, "--pictures", 0, "--pmi")


def test_each_checkpoint_uses_the_formula_of_its_run(saved, tmp_path, capsys):
    paper = saved_run(saved, "paper", 1, contrastive_coef=0.2, contrastive_source="batch")
    guide = saved_run(saved, "guide", 2, contrastive_form="guide", contrastive_coef=2.0, contrastive_gate=1e-5)
    line = ("--model", saved("base"), "--checkpoint", paper, "--checkpoint", guide, "--task", "quickstart")
    assert call(credit_map, *line, "--output_dir", tmp_path / "out", *SHORT) == 0
    scores = {m.checkpoint: m.scores for m in read_parquet(tmp_path / "out" / "maps.parquet")}
    assert [(s.contrastive_coef, s.formula.rule.form, s.formula.rule.gate) for s in scores.values()] == [
        (0.2, "subtract", 0.0),
        (0.2, "subtract", 0.0),
        (2.0, "guide", 1e-5),
    ]
    assert "R_t = ΔV_t + λ S_t, where f and Ĝ differ by a total variation above 1e-05" in capsys.readouterr().out
    assert "R_t = ΔV_t − λ Ĝ, λ = 0.2" in (tmp_path / "out" / "pmi.md").read_text("utf-8")


def test_final_model_of_a_run_uses_its_options(saved, tmp_path):
    final = saved_run(saved, "run", contrastive_coef=0.7).parent
    saved("run")
    line = ("--model", saved("base"), "--checkpoint", final, "--task", "quickstart", "--output_dir", tmp_path / "out")
    assert call(credit_map, *line, *SHORT) == 0
    maps = read_parquet(tmp_path / "out" / "maps.parquet")
    assert {m.scores.contrastive_coef for m in maps} == {0.7}


@pytest.mark.parametrize(
    "option", [{"teacher_model_kind": "trust_region"}, {"teacher_model_kind": "model"}, {"teacher_prompt": "student"}]
)
def test_run_whose_teacher_is_no_checkpoint_is_refused(saved, tmp_path, capsys, option):
    checkpoint = saved_run(saved, "run", **option)
    line = ("--model", saved("base"), "--task", "quickstart", "--output_dir", tmp_path / "out")
    (tmp_path / "run.yaml").write_text(json.dumps(option))
    for source in (("--checkpoint", checkpoint), ("--config", tmp_path / "run.yaml")):
        assert call(credit_map, *line, *source, *SHORT) == 1
        error = capsys.readouterr().err
        assert "{}={!r}".format(*next(iter(option.items()))) in error
        assert "CreditMapCallback" in error


def test_runs_with_other_contexts_are_not_mapped_together(saved, tmp_path, capsys):
    runs = [saved_run(saved, style, seed, reprompt_style=style) for seed, style in enumerate(("sdpo", "paper"))]
    line = ("--model", saved("base"), "--task", "quickstart", "--output_dir", tmp_path / "out")
    both = [word for run in runs for word in ("--checkpoint", run)]
    assert call(credit_map, *line, *both, *SHORT) == 1
    assert "`reprompt_style='sdpo'` and" in (error := capsys.readouterr().err)
    assert "join the results with --maps" in error
    (tmp_path / "all.yaml").write_text("reprompt_style: paper\n")
    assert call(credit_map, *line, *both, *SHORT, "--config", tmp_path / "all.yaml") == 0


@pytest.mark.parametrize(("name", "content"), [("own.jsonl", ""), ("own.jsonl", "\n"), ("own.json", "[]")])
def test_responses_file_without_a_record_is_an_error(saved, tmp_path, capsys, name, content):
    (tmp_path / name).write_text(content)
    line = ("--model", saved("m"), "--responses", tmp_path / name, "--output_dir", tmp_path / "out")
    assert call(credit_map, *line) == 1
    assert f"{tmp_path / name} has no record." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_pmi_of_plain_text_without_its_question(saved, tmp_path, capsys):
    """The prompt has no token without its question."""
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "2 + 2?", "response": "5.", "feedback": "Wrong: 4."}))
    line = ("--model", saved("m"), "--responses", tmp_path / "own.jsonl", "--contrastive_source", "none", "--pmi")
    assert call(credit_map, *line, "--output_dir", tmp_path / "out", "--pictures", 0) == 0
    printed = capsys.readouterr().out
    assert "responses: 1" in printed
    assert "1 map," in printed
    assert "nan" not in (tmp_path / "out" / "pmi.md").read_text("utf-8")


def test_folder_that_cannot_be_made_costs_no_samples(saved, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    sampler = "credit_trl.lab.analysis.responses.sample_rollouts"
    monkeypatch.setattr(sampler, lambda *args, **options: pytest.fail("sampled"))
    line = ("--model", saved("base"), "--task", "quickstart", "--output_dir", tmp_path / "file" / "out")
    assert call(credit_map, *line, *SHORT) == 1
    assert "file/out" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["none", "hard", "batch", "same_task", "dataset"])
def test_contrast_prompts_come_from_the_configured_source(make_model, tokenizer, source):
    checkpoint, task = Checkpoint.of(make_model(), tokenizer), load_task("quickstart")
    data = task.build("test")
    rows, everything = list(data.take(5)), list(data["prompt"])
    count = 1 if source == "none" else 3
    config = analysis_config(contrastive_source=source, contrastive_count=count, max_completion_length=4)
    responses = sample_rollouts(checkpoint, task, rows, config, samples=2, population=everything)
    prompts = [row["prompt"] for row in rows]
    texts = [user_text(prompt) for prompt in prompts]
    for response in responses:
        assert len(response.contrasts) == count
        if source == "none":
            assert response.contrasts == (without_question(response.prompt),)
            continue
        assert response.prompt not in response.contrasts
        if source != "dataset":
            assert all(other in prompts for other in response.contrasts)
        if source == "hard":
            own = text_similarity(texts)[prompts.index(response.prompt)]
            nearest = sorted((own[i] for i, p in enumerate(prompts) if p != response.prompt), reverse=True)[:3]
            assert [own[prompts.index(other)] for other in response.contrasts] == pytest.approx(nearest)


def test_a_map_grades_the_parsed_message_as_training_does(make_model, parsing):
    graded = []
    reward = batch_of(lambda response, answer, **_: graded.append(response) or Verdict(1.0), "spy")
    task = Task("spy", lambda split, path=None: None, lambda response, answer, **_: Verdict(1.0), reward)
    ids = parsing("<think>\nhotels(Oslo)\n</think>\n\nweather(Oslo)<|im_end|>")["input_ids"]
    rows = [{"prompt": [{"role": "user", "content": "Rain in Oslo?"}], "answer": "weather(Oslo)"}]
    grade_rollouts(Checkpoint.of(make_model(), parsing), task, rows, [ids])
    assert graded == ["weather(Oslo)"]


def test_unusable_contrast_source_is_refused(saved, tmp_path, capsys):
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "Say a.", "response": "a", "feedback": "Good."}))
    line = ("--model", saved("m"), "--output_dir", tmp_path / "out", "--pictures", 0)
    own = ("--responses", tmp_path / "own.jsonl", "--contrastive_source", "same_task")
    assert call(credit_map, *line, *own) == 1
    assert "a field `task` of each record" in capsys.readouterr().err
    alone = ("--task", "quickstart", "--max_prompts", 1, "--contrastive_source", "batch")
    assert call(credit_map, *line, *alone, "--max_completion_length", 4) == 1
    assert "Raise --max_prompts" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("contrastive_swap: hint\ncontrastive_source: batch\n")
    assert call(credit_map, *line, "--task", "quickstart", "--config", tmp_path / "run.yaml") == 1
    assert "CreditMapCallback" in capsys.readouterr().err


def test_sampling_is_seeded_and_keeps_the_random_state(make_model, tokenizer, config):
    checkpoint = Checkpoint.of(make_model(), tokenizer)
    contexts = [checkpoint.encode(f"count {n}") for n in range(5)]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, max_completion_length=30, seed=3)
    first = checkpoint.generate(contexts, sampling)
    assert torch.equal(before, torch.get_rng_state())
    assert first == checkpoint.generate(contexts, sampling, batch_size=2)
    assert first != checkpoint.generate(contexts, replace(sampling, seed=4))
    for ids in first:
        assert tokenizer.eos_token_id not in ids[:-1]
    task = load_task("quickstart")
    rows = list(task.build("test").take(2))
    config.max_completion_length = 4
    responses = sample_rollouts(checkpoint, task, rows, config, samples=3)
    assert [r.group for r in responses[:3]] == [responses[0].group] * 3
    assert all(r.contrasts and set(map(str, r.contrasts)).isdisjoint({str(r.prompt)}) for r in responses)


def test_adapters_are_loaded_with_their_teacher(make_model, tokenizer, saved, tmp_path, respond, config):
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    from credit_trl.lab.analysis.tokenmap import map_response

    base = saved("base")
    model = get_peft_model(make_model(seed=0), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    lagged = {}
    for name, weight in model.named_parameters():
        if "lora" in name:
            weight.data = torch.randn_like(weight) * 0.3
            lagged[name.replace(".default", ".teacher")] = torch.randn_like(weight) * 0.3
    model.save_pretrained(tmp_path / "checkpoint-3")
    save_file(lagged, tmp_path / "checkpoint-3" / "teacher.safetensors")
    loaded = Checkpoint.load(str(base), tmp_path / "checkpoint-3")
    own = dict(model.named_parameters())
    for name, weight in loaded.student.student.named_parameters():
        assert torch.equal(weight, own[name])
    for name, weight in loaded.teacher.model.named_parameters():
        assert torch.equal(weight, lagged.get(name.replace(".default", ".teacher"), own[name]))
    token_map = map_response(loaded, respond("Paris"), config)
    assert token_map.scores.delta_v.abs().max() > 0.01


def test_plain_text_prompts_are_read(saved, tmp_path, config):
    records = ({"prompt": f"Say {letter}.", "response": letter, "feedback": "Good."} for letter in "abc")
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, records)))
    checkpoint = Checkpoint.load(str(saved("m")))
    response, *_ = read_rollouts(tmp_path / "own.jsonl", checkpoint, config)
    assert set(response.contrasts) == {"Say b.", "Say c."}
    assert response.token_ids[-1] == checkpoint.tokenizer.eos_token_id


def test_name_that_no_table_can_hold_is_spelled_out(saved, tmp_path, config):
    (tmp_path / "own.jsonl").write_text('{"id": "\\ud800", "prompt": "x", "response": "y", "contrasts": ["z"]}\n')
    [response] = read_rollouts(tmp_path / "own.jsonl", Checkpoint.load(str(saved("m"))), config)
    assert response.identifier == "⟨U+D800⟩"


def test_responses_with_one_name_are_numbered(saved, tmp_path, config):
    names = ("q7", "q7", None, None)
    records = ({"prompt": f"Say {i}.", "response": "a", "feedback": "No.", "id": name} for i, name in enumerate(names))
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = read_rollouts(tmp_path / "own.jsonl", Checkpoint.load(str(saved("m"))), config)
    assert [one.identifier for one in found] == ["q7", "q7#2", "2", "3"]


def test_credit_compat_writes_table_figure_and_records(saved, tmp_path, capsys):
    rows = [
        {"idx": n, "kind": "mcq", "dataset": "sciknoweval", "answer": "ABCD"[n % 4], "system": "Choose.",
         "prompt": f"Question {n}?\n\nA: a\nB: b\nC: c\nD: d\nPlease reason step by step."}
        for n in range(8)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = ("--task", "sciknoweval:physics", "--split", "all", "--path", tmp_path / "rows.jsonl", "--per_letter", 1)
    models = ("--model", saved("one"), "--model", saved("two", seed=1))
    assert call(credit_compat, *models, *line, "--output_dir", tmp_path / "out") == 0
    table = (tmp_path / "out" / "table.md").read_text("utf-8")
    assert "| Metric | one | two |" in table
    assert "| Gold balance (A / B / C / D) | 1 / 1 / 1 / 1 | 1 / 1 / 1 / 1 |" in table
    assert table in capsys.readouterr().out
    records = [json.loads(record) for record in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert [record["model"] for record in records] == ["one"] * 4 + ["two"] * 4
    assert (tmp_path / "out" / "figure.png").stat().st_size > 10_000
    cut = tmp_path / "cut"
    assert call(credit_compat, "--model", saved("one"), "--model", tmp_path / "none", *line, "--output_dir", cut) == 1
    assert (cut / "records.jsonl").read_text() == "".join(
        line for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines(keepends=True) if "one" in line
    )
    assert "| Metric | one |" in (cut / "table.md").read_text("utf-8")
    assert call(credit_compat, "--model", "x", "--task", "quickstart") == 1
    assert "no multiple choice" in capsys.readouterr().err
