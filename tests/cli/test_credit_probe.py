"""`trl credit-probe`: of a configuration, a run folder, or names; two processes; the same command continues."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from credit_trl.cli import main
from credit_trl.cli.credit_probe import read_arm
from credit_trl.lab.analysis.targets import Arm
from credit_trl.tasks.quickstart import TEMPLATES
from faults.launching import free_port
from tiny import QUIET

OPTIONS = {"task": "quickstart", "model_name_or_path": "quickstart", "max_completion_length": 32, "num_generations": 4}
OPTIONS |= {"per_device_train_batch_size": 16, "max_steps": 1} | TEMPLATES
SMALL = ["--prompts", "4", "--arms", "0", "guide:0.2"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quiet = {name: value for name, value in QUIET.items() if name != "output_dir"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(quiet | OPTIONS))
    return "run.yaml"


def document(folder):
    return json.loads((folder / "probe.json").read_text())


def test_configuration_is_probed_and_the_rule_printed(config, tmp_path, capsys):
    line = ["credit-probe", "--config", config, *SMALL]
    assert main(line) == 0
    printed = capsys.readouterr().out
    probed = document(tmp_path / "credit_probe")
    assert (
        printed.index("training steps") < printed.index(probed["advice"]["sentence"]) < printed.index(probed["rule"])
    )
    assert [arm["name"] for arm in probed["arms"]] == ["SDPO", "guide 0.2"]
    assert (tmp_path / "credit_probe" / "probe.html").is_file()
    stored = (tmp_path / "credit_probe" / "probe.jsonl").read_bytes()
    assert main(line) == 0  # continues, with nothing left to do
    assert (tmp_path / "credit_probe" / "probe.jsonl").read_bytes() == stored


@pytest.mark.slow
def test_run_folder_is_probed_as_before_its_training(config, tmp_path):
    assert main(["credit-probe", "--config", config, *SMALL]) == 0
    folder = tmp_path / "run"
    options = [f"--{name}={value}" for name, value in {"output_dir": folder, "learning_rate": 0.01}.items()]
    subprocess.run([sys.executable, "-m", "credit_trl.cli.training", "--config", config, *options], check=True)
    assert main(["credit-probe", str(folder), *SMALL]) == 0
    probed = document(folder / "probe")
    assert probed["facts"] == document(tmp_path / "credit_probe")["facts"]


def test_names_alone_are_probed_with_the_default_options(config, tmp_path, capsys):
    line = ["credit-probe", "--task", "quickstart", "--model", "quickstart", "--output_dir", "named", *SMALL]
    assert main(line) == 0
    assert document(tmp_path / "named")["prompts"] == 4
    assert main(["credit-probe", "--task", "quickstart"]) != 0
    assert "give a run directory, --config FILE, or --model and --task." in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_share_the_work_with_the_result_of_one(config, tmp_path):
    line = ["credit-probe", "--config", config, *SMALL]
    assert main([*line, "--output_dir", "one"]) == 0
    launched = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launched += ["--main_process_port", str(free_port()), "-m", "credit_trl"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, *launched, *line, "--output_dir", "two"], check=True, env=env, cwd=tmp_path)
    one, two = document(tmp_path / "one"), document(tmp_path / "two")
    assert (two["facts"], two["arms"], two["examples"]) == (one["facts"], one["arms"], one["examples"])


def test_arms_of_the_command_line():
    arms = [read_arm(text) for text in ("0", "0.1", "guide:1.5")]
    assert arms == [Arm("SDPO", 0.0), Arm("λ = 0.1", 0.1), Arm("guide 1.5", 1.5, "guide")]
    for text in ("", "guide", "-1", "subtle:0.2", "nan"):
        with pytest.raises(ValueError, match="expected λ such as"):
            read_arm(text)
