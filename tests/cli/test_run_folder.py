"""A person's own rows and verifier through training, evaluation, maps and report by the run's folder alone."""

import io
import json
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import Mock

import pytest

from credit_trl import CreditTrainer, Verdict, cli
from credit_trl.cli import training
from credit_trl.cli.data import CreditScriptArguments, describe
from credit_trl.cli.run_folder import model_of_run, read_run, task_of_run
from credit_trl.lab.analysis import responses, tokenmap
from credit_trl.lab.report import run_callbacks
from credit_trl.run_directory import describe_data, describe_function, describe_rows
from credit_trl.tasks.registry import task_of_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of `trl credit-init`, trained for two steps by its own configuration."""
    folder = tmp_path_factory.mktemp("own") / "first"
    with pytest.MonkeyPatch.context() as patch:
        assert cli.main(["credit-init", str(folder)]) == 0
        patch.setattr("credit_trl.trainer.run_callbacks", run_callbacks)
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        output = io.StringIO()
        with redirect_stdout(output):
            assert training.run(["--config", "run.yaml", "--max_steps", "2"]) == 0
        (folder / "printed.txt").write_text(output.getvalue(), encoding="utf-8")
        yield folder
    sys.modules.pop("my_verifier", None)


def test_starter_trains_evaluates_and_writes_its_report(folder):
    run = folder / "runs" / "first"
    assert [path.stem for path in sorted(run.glob("credit_maps/*.json"))] == ["step-000001", "step-000002"]
    assert len(list(run.glob("completions/*.parquet"))) == 2
    page = (run / "report.html").read_text("utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["maps"]["checkpoints"] == ["step-1", "step-2"]
    assert {rollout["step"] for rollout in data["rollouts"]} == {1, 2}
    assert model_of_run(run) == run
    history = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in history] == [0, 2]
    assert read_run(run)["data"]["reward_funcs"][0]["name"] == "my_verifier:check"


def test_training_prints_the_link_of_its_report_once(folder):
    assert (folder / "printed.txt").read_text("utf-8").count("Report: ") == 1


@pytest.mark.parametrize("command", ["credit-eval", "credit-map", "credit-report"])
def test_commands_need_the_run_alone(folder, command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)  # from any directory
    options = {"credit-eval": ["--k", "2"], "credit-map": ["--max_prompts", "1"], "credit-report": []}
    run = folder / "runs" / "first"
    assert cli.main([command, str(run), *options[command]]) == 0
    written = {"credit-eval": "credit_eval/result.json", "credit-map": "credit_maps/maps.json"}
    assert (run / written.get(command, "report.html")).is_file()
    if command == "credit-eval":
        assert "5 prompts × 2 samples" in capsys.readouterr().out


def test_maps_build_the_contexts_of_a_response_once_for_each_checkpoint(folder, monkeypatch, tmp_path):
    build = Mock(side_effect=responses.rollout_contexts)
    for module in (responses, tokenmap):
        monkeypatch.setattr(module, "rollout_contexts", build)
    command = ["credit-map", str(folder / "runs" / "first"), "--max_prompts", "2", "--output_dir", str(tmp_path)]
    assert cli.main(command) == 0
    maps = tokenmap.read_maps(tmp_path / "maps.json")
    assert build.call_count == len(maps) > 0


def test_run_is_found_again_in_a_copy_of_its_project(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    run = copy / "runs" / "first"
    assert len(task_of_run(run).build("test")) == 5
    assert task_of_run(run, reward_funcs=[f"{__name__}.half"]).verify("abc").reward == 0.5
    (copy / "questions.jsonl").unlink()
    with pytest.raises(ValueError, match=rf"{copy}/questions\.jsonl of the run does not exist. .* `--path`"):
        task_of_run(run).build("test")


def test_starter_and_recipes_are_not_overwritten(folder, tmp_path, capsys):
    assert cli.main(["credit-init", str(folder)]) == 1
    assert "run.yaml exists and is not overwritten" in capsys.readouterr().err
    assert cli.main(["credit-init", str(tmp_path), "--recipe", "sciknoweval_qwen3_8b"]) == 0
    assert "task: sciknoweval" in (tmp_path / "sciknoweval_qwen3_8b.yaml").read_text()


def half(completions, **columns):
    return [Verdict(0.5, "Half.") for _ in completions]


def length(completions, **columns):
    return [float(len(completion)) if isinstance(completion, str) else None for completion in completions]


def test_several_reward_functions_are_one_verifier():
    task = task_of_data(describe_data([half, length], [2.0, 1.0]))
    verdicts = task.reward(completions=["abc", [{"role": "assistant", "content": "x"}]], prompts=["?", "?"])
    assert [(verdict.reward, verdict.feedback) for verdict in verdicts] == [(4.0, "Half."), (1.0, "Half.")]
    assert task.verify("abc", None).reward == 4.0


def test_run_from_python_describes_its_functions(make_trainer):
    task = task_of_data(make_trainer(half, reward_weights=[2.0]).run_log.facts["data"])
    assert task.verify("abc").reward == 1.0
    with pytest.raises(ValueError, match=r"were a `Dataset` object.*`--path questions.jsonl`"):
        task.build("test")


def test_run_from_python_needs_its_folder_alone(make_config, dataset, tmp_path, monkeypatch, capsys):
    """Rows that were a `Dataset` object, as after `load_dataset`, a filter or a map, also after the folder moved."""
    config = make_config(output_dir=str(tmp_path / "run"), max_steps=1)
    held_out = dataset.select(range(3))
    trainer = CreditTrainer("quickstart", half, config, dataset, held_out)
    trainer.train()
    trainer.save_model()
    run = (tmp_path / "run").rename(tmp_path / "moved")
    task = task_of_run(run)
    assert list(task.build("train")) == list(dataset)
    assert list(task.build("test")) == list(held_out)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    for command, options in {"credit-eval": ["--k", "2"], "credit-map": [], "credit-report": []}.items():
        assert cli.main([command, str(run), *options]) == 0
    assert "3 prompts × 2 samples" in capsys.readouterr().out


def test_folder_in_the_hubs_form_is_found_from_any_directory(tmp_path, monkeypatch):
    for split in ("train", "test"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.jsonl").write_text(json.dumps({"prompt": split, "answer": "1"}) + "\n")
    monkeypatch.chdir(tmp_path)
    data = describe(CreditScriptArguments(dataset_name="./data", reward_funcs=["math.sqrt"]))
    monkeypatch.chdir("/")
    task = task_of_data(data)
    assert [task.build(split)[0]["prompt"] for split in ("train", "test")] == ["train", "test"]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (lambda completions, **columns: [], r"`.*<lambda>` of this run has no import name. Define it with `def`"),
        ([half, type("Callable", (), {"__call__": half})()], "`Callable` of this run has no import name"),
    ],
)
def test_functions_without_an_import_name_say_what_to_write(functions, message):
    with pytest.raises(ValueError, match=message):
        task_of_data(describe_data(functions))


def test_changed_or_missing_data_is_refused(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    task = task_of_data(describe_data(half, train=describe_rows(path)))
    assert next(iter(task.build("test")))["answer"] == "2"
    path.write_text('{"prompt": "1+1=", "answer": "3"}\n')
    with pytest.raises(ValueError, match=r"q\.jsonl has changed since the run. Name the file to use with `--path`"):
        task.build("test")
    assert next(iter(task.build("test", path)))["answer"] == "3"
    moved = {**describe_function(half), "name": "no_such_module:half"}
    with pytest.raises(ValueError, match=r"no_such_module:half of this run is not found .* Run from the folder"):
        task_of_data({**describe_data(half), "reward_funcs": [moved]})
