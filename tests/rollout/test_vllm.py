"""Weights, options and seeds of a vLLM engine, and the importance ratio in the loss."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from credit_trl import CreditTrainer
from credit_trl.rollout.vllm import PolicyGeneration, merged_weights, seeded
from credit_trl.teacher.models import make_teacher
from tiny import length_verdicts

ADAPTERS = {
    "lora": {"target_modules": "all-linear"},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "saved_head": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
    "rank_stabilised": {"target_modules": ["o_proj"], "use_rslora": True},
}


def adapted(make_model, kind, dtype):
    """A policy with a trained adapter and a teacher adapter with other weights."""
    torch.manual_seed(1)
    model = get_peft_model(make_model(dtype=dtype), LoraConfig(r=4, lora_alpha=8, **ADAPTERS[kind]))
    teacher = make_teacher("ema", model, Accelerator(cpu=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
        for weight in teacher.named_weights().values():
            weight += 1.0
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_engine_gets_merged_adapter_and_model_is_unchanged(make_model, kind, dtype):
    model = adapted(make_model, kind, dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sent = {name: weight.clone() for name, weight in merged_weights(model)}
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())

    plain = copy.deepcopy(model)
    plain.delete_adapter("teacher")
    expected = dict(plain.merge_and_unload().named_parameters())
    assert sent.keys() == expected.keys() == dict(make_model().named_parameters()).keys()
    assert any(not torch.equal(sent[n], p) for n, p in make_model(dtype=dtype).named_parameters())
    for name, weight in expected.items():
        torch.testing.assert_close(sent[name], weight.detach(), rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_each_adapted_parameter_of_a_module_is_sent_merged():
    """PEFT adapts fused experts with nested wrappers, one per parameter."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, **sizes
    )
    plain = transformers.AutoModelForCausalLM.from_config(config)
    adapted = {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    model = get_peft_model(copy.deepcopy(plain), LoraConfig(r=2, init_lora_weights=False, **adapted))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sent = {name: weight.clone() for name, weight in merged_weights(model)}
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())
    expected, own = dict(model.merge_and_unload().named_parameters()), dict(plain.named_parameters())
    assert sent.keys() == own.keys()
    for name, weight in sent.items():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=0, atol=1e-7)
        assert torch.equal(weight, own[name]) == (not any(part in name for part in ("q_proj", "experts")))


def test_control_in_place_merging_changes_weights(make_model):
    model = adapted(make_model, "lora", torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for _ in range(3):
        model.merge_adapter()
        model.unmerge_adapter()
    after = model.state_dict()
    assert any(not torch.equal(after[name], weight) for name, weight in before.items())


class RecordedLLM:
    """Stand-in for `vllm.LLM` that records its options."""

    def __init__(self, **options) -> None:
        self.options = options
        self.slept: list[int] = []
        torch.manual_seed(options["seed"])  # vLLM's worker does

    def sleep(self, level: int) -> None:
        self.slept.append(level)


@pytest.fixture
def fake_vllm(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # TRL sets them; monkeypatch restores them
        monkeypatch.delenv(name)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", RecordedLLM, raising=False)


def test_vllm_options_reach_the_engine(make_model, make_config, tokenizer, dataset, fake_vllm):
    options = {
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": 0.55,
        "vllm_max_model_length": 777,
        "vllm_model_impl": "transformers",
    }
    config = make_config(use_vllm=True, vllm_mode="colocate", seed=11, **options)
    trainer = CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)
    engine = trainer.vllm_generation.llm
    assert isinstance(trainer.vllm_generation, PolicyGeneration)
    wanted = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.55, "max_model_len": 777}
    assert wanted.items() <= engine.options.items()
    assert engine.options["model_impl"] == "transformers"
    assert engine.options["tensor_parallel_size"] == 1
    assert engine.options["logprobs_mode"] == "processed_logprobs"
    assert engine.slept == [2]
    assert torch.initial_seed() == 11


def test_tensor_parallel_size_reaches_each_engine(make_model, make_config, tokenizer, dataset, fake_vllm, monkeypatch):
    class AsIfFour(vllm_generation.VLLMGeneration):
        """The generation layer of the third of four processes."""

        def __init__(self, accelerator, **options) -> None:
            state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
            two_groups = {"num_processes": 4, "process_index": 2, "local_process_index": 2, "is_main_process": False}
            others = SimpleNamespace(state=state, wait_for_everyone=lambda: None, **two_groups)
            super().__init__(accelerator=others, **options)

    groups = []
    monkeypatch.setattr(
        torch.distributed, "new_subgroups_by_enumeration", lambda ranks: (groups.extend(ranks) or "group", None)
    )
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", AsIfFour)
    config = make_config(use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=2, seed=11)
    trainer = CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)
    options = trainer.vllm_generation.llm.options
    assert options["tensor_parallel_size"] == 2
    assert options["distributed_executor_backend"] == "external_launcher"
    assert groups == [[0, 1], [2, 3]]
    assert options["seed"] == 1
    assert torch.initial_seed() == 12  # the seed of the second engine, on both of its processes


def test_indivisible_tensor_parallel_size_is_refused(make_model, make_config, tokenizer, dataset, fake_vllm):
    config = make_config(use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"tensor_parallel_size \(2\) must divide world size"):
        CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)


def test_seeded_engine_sets_one_seed_per_request():
    class Parameters(SimpleNamespace):
        def clone(self):
            return Parameters(**vars(self))

    class Engine:
        page_size = 16

        def generate(self, prompts, sampling_params, use_tqdm):
            return [(prompt, p.seed, p.temperature) for prompt, p in zip(prompts, sampling_params, strict=True)]

    generation = SimpleNamespace(llm=(engine := Engine()))
    shared = Parameters(seed=None, temperature=0.5)
    with seeded(generation, [7, 8]):
        assert generation.llm.page_size == 16
        answers = generation.llm.generate(["a", "b"], sampling_params=shared, use_tqdm=False)
    assert answers == [("a", 7, 0.5), ("b", 8, 0.5)]
    assert shared.seed is None
    assert generation.llm is engine


@pytest.mark.parametrize("shape", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_importance_ratio_scales_distillation_per_token(make_model, make_config, tokenizer, dataset, shape, loss_type):
    """KL(π ‖ teacher) of each token, from plain forward passes over single samples."""
    config = make_config(distillation_topk=None, contrastive_coef=0.0, loss_type=loss_type)
    trainer = CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    with torch.no_grad():
        for parameter in trainer.teacher.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    built = []
    build = trainer.credit_step.build_contexts
    trainer.credit_step.build_contexts = lambda batch: built.extend(build(batch)) or built
    inputs = trainer._generate_and_score_completions([dataset[i // 4] for i in range(8)])
    mask = inputs["completion_mask"].float()
    size = mask.shape if shape == "token" else (len(mask), 1)
    ratio = torch.rand(size, generator=torch.Generator().manual_seed(0)) * 2
    loss = trainer._compute_loss(trainer.model, {**inputs, "importance_sampling_ratio": ratio})

    divisors = {
        "grpo": mask.sum(-1, keepdim=True) * len(mask),
        "dapo": mask.sum(),
        "dr_grpo": len(mask) * config.max_completion_length,
    }
    weights = ratio * mask / divisors[loss_type]
    expected = 0.0
    for i, contexts in enumerate(built):
        completion = inputs["completion_ids"][i][mask[i].bool()].tolist()
        prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
        policy, teacher = (
            model(torch.tensor([before + completion])).logits[0, len(before) - 1 : -1].log_softmax(-1)
            for model, before in ((trainer.model, prompt), (trainer.teacher.model, contexts.teacher))
        )
        kl = (policy.exp() * (policy - teacher.detach())).sum(-1)
        expected += (weights[i, : len(kl)] * kl).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
