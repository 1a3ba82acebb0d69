"""Step 7 of 8: the trained model as a folder for transformers, vLLM or llama.cpp, and its answers beside the base's.

python examples/07_export.py     # runs/exported, in bfloat16
"""

from importlib import import_module

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from credit_trl.tasks import model_path

prompts = import_module("03_evaluate").TASK.build("test")["prompt"][:3]

if __name__ == "__main__":
    # An adapter: `model = peft.AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload()`.
    model = AutoModelForCausalLM.from_pretrained("runs/arms/credit", dtype=torch.bfloat16)
    model.save_pretrained("runs/exported")
    AutoTokenizer.from_pretrained("runs/arms/credit").save_pretrained("runs/exported")
    folders = {"before": model_path("quickstart"), "after": "runs/exported"}
    chats = {name: pipeline("text-generation", folder) for name, folder in folders.items()}
    for prompt in prompts:
        print(prompt[-1]["content"])
        for name, chat in chats.items():
            conversation = chat(prompt, max_new_tokens=32, do_sample=False)[0]["generated_text"]
            print(f"  {name:7}{conversation[-1]['content']!r}")
