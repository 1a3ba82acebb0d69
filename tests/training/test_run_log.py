"""`run.json` and `log.jsonl` of a run without evaluations."""

from __future__ import annotations

import json

from credit_trl import CreditTrainer
from credit_trl.training.run_directory import read_lines
from tiny import length_verdicts


def test_every_run_writes_its_settings_and_log(make_model, make_config, tokenizer, dataset, tmp_path):
    config = make_config(output_dir=str(tmp_path), contrastive_coef=0.2)
    trainer = CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)
    trainer.run_log.facts["arm"] = "mine"
    trainer.train()
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["arm"], run["seed"], run["config"]["contrastive_coef"]) == ("mine", 1, 0.2)
    log = read_lines(tmp_path / "log.jsonl")
    assert [row["step"] for row in log if "loss" in row] == [1, 2]
    assert {name: log[0][name] for name in ("reward", "credit/s_mean")} == {
        name: trainer.state.log_history[0][name] for name in ("reward", "credit/s_mean")
    }
