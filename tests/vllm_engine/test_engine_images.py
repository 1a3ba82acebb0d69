"""A real engine with a tiny vision-language model reads the images that the policy reads."""

import importlib.util
import os

import pytest
import torch
from datasets import Dataset

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torchvision") is None:
    pytest.skip("no vLLM engine with torchvision in this environment: run `make test-vllm`", allow_module_level=True)

import cpu_engine
from transformers import Qwen2VLVideoProcessor

from credit_trl import CreditTrainer
from credit_trl.contexts.images import joined_images
from credit_trl.evaluation import evaluate
from credit_trl.tasks.registry import Task
from faults.launching import free_port
from vlm import FAMILIES, build_vlm, image_verdicts, rows


@torch.no_grad()
def whole_vocabulary_logps(trainer: CreditTrainer, output: dict) -> torch.Tensor:
    """The policy's log-probabilities of the completions over all tokens, to which the engine's are moved."""
    ids, mask = (
        torch.cat([output[f"prompt_{kind}"], output[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")
    )
    images = [prompt_images for prompt_images in output["prompt_images"] if prompt_images is not None]
    logits = trainer.model(input_ids=ids, attention_mask=mask, **joined_images(images, ids)).logits
    logps = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return logps[:, -output["completion_ids"].shape[1] :]


def test_engine_reads_the_images_that_the_policy_reads(make_config, monkeypatch, tmp_path):
    """Log-probabilities after updates are the policy's, for prompts with 0, 1 and 2 images; then avg@k."""
    cpu_engine.in_process()
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    videos = Qwen2VLVideoProcessor(**FAMILIES["Qwen2_5_VL"]["pixels"])
    for part in build_vlm("Qwen2_5_VL", torch.float32, video_processor=videos):
        part.save_pretrained(tmp_path / "model")
    options = {"num_generations": 2, "max_completion_length": 8, "learning_rate": 1e-2, "max_steps": 3}
    options |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512}
    config = make_config(**options, distillation_weight=0.5, num_iterations=2, steps_per_generation=1)
    trainer = CreditTrainer(str(tmp_path / "model"), image_verdicts, config, Dataset.from_list(rows()))
    score = trainer._generate_and_score_completions
    differences = []

    def compare(inputs):
        output = score(inputs)
        difference = output["sampling_per_token_logps"] - whole_vocabulary_logps(trainer, output)
        differences.append(difference[output["completion_mask"].bool()].abs().max())
        return output

    trainer._generate_and_score_completions = compare
    trainer.train()
    assert len(differences) >= 2
    # Measured 6e-6; .8 to 3.5 after an update with the features of images by earlier weights.
    assert max(differences) < 1e-3
    task = Task("pictures", lambda split, path=None: rows(), image_verdicts, image_verdicts)
    assert len(evaluate(trainer, task, k=2, max_completion_length=6, progress=False).prompts) == 4
