"""What `import credit_trl` loads, and what a run of a script prints."""

import os
import subprocess
import sys


def test_importing_package_loads_neither_trl_nor_torch():
    heavy = ("torch", "trl", "transformers", "datasets", "matplotlib", "scipy")
    code = f"import sys, credit_trl; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


RUN = """
from datasets import Dataset
from credit_trl import CreditConfig, CreditTrainer, Verdict

def verifier(completions, **columns):
    return [Verdict(float(number % 2), "no") for number, _ in enumerate(completions)]

rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(4)])
config = CreditConfig("run", max_steps=1, max_completion_length=4, per_device_train_batch_size=8, num_generations=4,
                      max_reprompt_len=64, save_strategy="steps", save_steps=1, report_to="none")
CreditTrainer("quickstart", verifier, config, rows).train()
"""


def test_run_in_python_prints_no_warning_of_dependencies(tmp_path):
    """With the alias of the shipped model, as on the command line."""
    (tmp_path / "train.py").write_text(RUN)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "step 1/1  reward" in ran.stdout + ran.stderr
    assert "FutureWarning" not in ran.stderr
