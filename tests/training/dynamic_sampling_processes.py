"""Prints the prompts of one generation batch after dynamic sampling; run by `test_dynamic_sampling.py`."""

from __future__ import annotations

import sys

from accelerate import PartialState
from test_dynamic_sampling import ROWS, feedback_on_some

from credit_trl import CreditConfig, CreditTrainer
from tiny import build_model, build_tokenizer

state = PartialState(cpu=True)
tokenizer = build_tokenizer()
config = CreditConfig(
    sys.argv[1],
    use_cpu=True,
    bf16=False,
    per_device_train_batch_size=8 // state.num_processes,
    num_generations=2,
    max_completion_length=4,
    dynamic_sampling_rounds=2,
    shuffle_dataset=False,
    report_to="none",
    gradient_checkpointing=False,
)
trainer = CreditTrainer(build_model(tokenizer), feedback_on_some, config, ROWS, processing_class=tokenizer)
trainer.current_gradient_accumulation_steps = 1
trainer.model.train()
first = ROWS.select([0, 7, 1, 2])  # one group with a signal, in the first process
rows = [row for row in first for _ in range(2)]
size = len(rows) // state.num_processes
inputs = trainer._generate_and_score_completions(rows[state.process_index * size : (state.process_index + 1) * size])
batch = trainer._generation_batch
for i in range(0, size, 2):
    print(f"group {(batch.first + i) // 2}: {batch.rows[i]['answer']} {batch.prompts[i][0]['content']}", flush=True)
