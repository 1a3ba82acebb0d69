"""Planned bytes against the tensors of tiny runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig
from transformers import TrainerCallback
from trl import ModelConfig

from credit_trl import CreditTrainer
from credit_trl.lab.planning import memory
from credit_trl.lab.planning.fit import CHANGES, changes_that_fit, fits
from credit_trl.lab.planning.setup import GIB, GPUS, Vllm, make_setup
from credit_trl.lab.planning.shape import Lora, load_shape
from credit_trl.lab.planning.work import Lengths, work_of
from credit_trl.loss.scores import SupportConfig
from tiny import length_verdicts


def size(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def shape_of(model, folder):
    model.config.save_pretrained(folder)
    return load_shape("tiny", folder / "config.json")


class Held(TrainerCallback):
    """Bytes of gradients and optimizer state at the step."""

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.gradients = size(p.grad for p in model.parameters() if p.grad is not None)
        moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq") if name in s]
        self.optimizer = size(moments)


LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="full"),
        pytest.param({"dtype": "bfloat16"}, id="full-bf16"),
        pytest.param(LORA, id="lora"),
        pytest.param({**LORA, "dtype": "bfloat16", "use_dora": True, "lora_target_modules": "all-linear"}, id="dora"),
    ],
)
@pytest.mark.parametrize("kind", ["ema", "base", "live"])
def test_bytes_of_training_state_and_scores_are_exact(
    make_model, make_config, tokenizer, dataset, tmp_path, options, kind
):
    described = ModelConfig(**options)
    model = make_model(dtype=getattr(torch, described.dtype))
    shape = shape_of(model, tmp_path)
    config = make_config(max_steps=1, teacher_model_kind=kind, distillation_topk=7, max_completion_length=5)
    setup = make_setup(config, described, {}, GPUS["h100"], mixed=False)
    adapter = None
    if described.use_peft:
        targets = described.lora_target_modules
        adapter = LoraConfig(r=4, target_modules=targets, use_dora=described.use_dora, task_type="CAUSAL_LM")
    held, stored = Held(), {}
    trainer = CreditTrainer(
        model, length_verdicts, config, dataset, processing_class=tokenizer, peft_config=adapter, callbacks=[held]
    )
    original = trainer._score

    def record(output, contexts):
        scores = original(output, contexts)
        stored.update({name: t for name, t in scores.items() if t.shape[:2] == output["completion_ids"].shape})
        return scores

    trainer._score = record
    trainer.train()

    stored_teacher = 0 if kind == "live" else size(trainer.teacher.named_weights().values())
    assert memory.teacher_bytes(shape, setup) == stored_teacher
    policy = size(p for name, p in trainer.model.named_parameters() if ".teacher" not in name)
    assert memory.policy_bytes(shape, setup) == policy
    assert memory.gradient_bytes(shape, setup) == held.gradients
    assert memory.optimizer_state_bytes(shape, setup) == held.optimizer
    assert stored["support_ids"].shape[1] == setup.completion  # the longest completion reaches the maximum length
    assert memory.score_bytes(setup) == size(stored.values())


def test_bytes_of_scores_are_those_of_the_performance_page(make_config):
    page = (Path(__file__).parents[3] / "docs" / "performance.md").read_text("utf-8")
    per_token, fixed = map(int, re.search(r"N \((\d+) K \+ (\d+)\): ids, f and Ĝ", page).groups())
    setup = setup_of(make_config, completion=1, generation_batch=1, support=SupportConfig(topk=50))
    assert memory.score_bytes(setup) == per_token * 50 + fixed


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_within_a_quarter(make_model, tmp_path, checkpointing):
    model = make_model(hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4)
    shape = shape_of(model, tmp_path)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved, kept = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no address is reused
        return tensor

    tokens = (2, 384)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=torch.randint(0, 200, tokens), use_cache=False)
    elements = shape.hidden if checkpointing else shape.layer_elements
    predicted = 4 * tokens[0] * tokens[1] * shape.layers * elements
    constant = 4 * tokens[0] * tokens[1] * 2 * 16 * shape.layers  # rotary tables, which layers share
    assert predicted == pytest.approx(sum(saved.values()) - (constant if checkpointing else 0), rel=0.25)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen3-8B", 8.19e9),
        ("Qwen/Qwen3-4B", 4.02e9),
        ("Qwen/Qwen3-0.6B", 0.60e9),
        ("Olmo-3-7B-Instruct", 7.30e9),
        ("smollm2", 1.345e8),
    ],
)
def test_packaged_sizes_give_the_published_parameter_counts(name, parameters):
    assert load_shape(name).parameters == pytest.approx(parameters, rel=0.01)


def test_adapter_parameters_equal_those_of_peft(make_model, tmp_path):
    from peft import get_peft_model

    shape = shape_of(make_model(), tmp_path)
    for targets in (["q_proj"], ["gate_proj", "o_proj"], "all-linear"):
        for dora in (False, True):
            config = LoraConfig(r=3, target_modules=targets, use_dora=dora, task_type="CAUSAL_LM")
            trained = get_peft_model(make_model(), config).get_nb_trainable_parameters()[0]
            names = [targets] if isinstance(targets, str) else targets
            assert shape.adapter_parameters(Lora(3, names, dora)) == trained


def setup_of(make_config, options=None, **changes):
    setup = make_setup(make_config(**(options or {})), ModelConfig(), {}, GPUS["h100"], mixed=True)
    return replace(setup, **{"generation_batch": 64, "per_device": 8, "completion": 4096, **changes})


def test_sharding_divides_what_each_strategy_shards(make_config):
    shape = load_shape("Qwen/Qwen3-0.6B")
    whole = memory.memory_of(shape, setup_of(make_config))
    for strategy, divided in {"fsdp2": ("weights", "teacher"), "zero3": ("teacher",)}.items():
        sharded = memory.memory_of(shape, setup_of(make_config, strategy=strategy, processes=8)).steady
        for name in divided:
            assert sharded[name] == -(-whole.steady[name] // 8), (strategy, name)
    ddp = memory.memory_of(shape, setup_of(make_config, strategy="ddp", processes=8))
    assert ddp.steady["weights"] == whole.steady["weights"]
    zero2 = setup_of(make_config, strategy="zero2", processes=8)
    # fp32 weights and two moments per parameter, over eight processes
    assert memory.optimizer_state_bytes(shape, zero2) == -(-12 * shape.parameters // 8)
    assert memory.policy_bytes(shape, zero2) == 2 * shape.parameters


def test_every_change_lowers_the_peak_where_it_applies(make_config):
    shape = load_shape("Qwen/Qwen3-0.6B")
    base = setup_of(
        make_config,
        checkpointing=False,
        vllm=Vllm("colocate", 0.9, sleeps=False),
        flash=False,
        per_device=8,
        scoring_tokens=2**17,
    )
    setups = [base, replace(base, vllm=None, completion=16384), replace(base, strategy="ddp", processes=2)]
    setups += [replace(setup, vllm=None, lora=Lora(8), weight_bytes=4) for setup in setups]
    for change in CHANGES:
        lowered = []
        for setup in setups:
            changed = change.apply(setup)
            if changed is not None:
                before, after = memory.memory_of(shape, setup), memory.memory_of(shape, changed)
                lowered.append(any(after.total(phase) < before.total(phase) for phase in before.phases))
        assert any(lowered), change.setting


def test_an_offloaded_teacher_is_on_the_gpu_while_it_scores(make_config):
    shape = load_shape("Qwen/Qwen3-8B")
    held = setup_of(make_config)
    offloaded = replace(held, teacher_offload=True)
    there, away = memory.memory_of(shape, held), memory.memory_of(shape, offloaded)
    saved = {phase: there.total(phase) - away.total(phase) for phase in there.phases}
    whole = memory.teacher_bytes(shape, held)
    assert whole == 4 * shape.parameters
    assert saved == {"rollout": whole, "scores": 0, "update": whole}


def test_rehearsal_stores_the_base_beside_the_average(make_config):
    setup, shape = setup_of(make_config), load_shape("Qwen/Qwen3-8B")
    rehearsing = replace(setup, rehearsal=0.1)
    base, average = (memory.teacher_bytes(shape, replace(setup, teacher=kind)) for kind in ("base", "ema"))
    assert memory.teacher_bytes(shape, rehearsing) == base + average
    both = replace(setup, teacher="trust_region")
    assert memory.teacher_bytes(shape, replace(both, rehearsal=0.1)) == memory.teacher_bytes(shape, both)
    before, after = (memory.memory_of(shape, s).phases["update"]["activations"] for s in (setup, rehearsing))
    assert after > before  # the student reads the teacher's prompts


def test_two_losses_are_planned_with_two_passes(make_model, make_config, tokenizer, dataset):
    shape = load_shape("Qwen/Qwen3-8B")
    weights = ({"distillation_weight": weight} for weight in (1.0, 0.5))
    one, two = (setup_of(make_config, options, checkpointing=True) for options in weights)
    before, after = (memory.memory_of(shape, s).phases["update"]["activations"] for s in (one, two))
    assert 1.5 * before < after < 2 * before  # recomputation holds one layer at a time
    model, passes = make_model(), []
    model.model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    config = make_config(max_steps=1, distillation_weight=0.5)
    CreditTrainer(model, length_verdicts, config, dataset, processing_class=tokenizer).train()
    assert sum(passes) == two.losses * config.gradient_accumulation_steps


def test_parts_of_a_micro_batch_bound_the_activations(make_config):
    shape = load_shape("Qwen/Qwen3-8B")
    plain = setup_of(make_config, per_device=8, flash=True)
    length = plain.prompt + plain.completion

    def activations(tokens):
        options = {} if tokens is None else {"update_batch_tokens": tokens}
        setup = setup_of(make_config, options, per_device=8, flash=True)
        return memory.memory_of(shape, setup).phases["update"]["activations"]

    assert activations(1) == activations(2 * length - 1) == activations(None) / 8
    assert activations(2 * length) == activations(None) / 4
    assert activations(100 * length) == activations(None)


def test_a_kl_model_is_stored_beside_the_policy(make_config):
    shape = load_shape("Qwen/Qwen3-8B")
    plain, kl = (setup_of(make_config, {"distillation_weight": 0.5, "beta": beta}) for beta in (0.0, 0.04))
    assert memory.memory_of(shape, kl).steady["KL model"] == memory.policy_bytes(shape, plain)
    assert "KL model" not in memory.memory_of(shape, replace(kl, lora=Lora(4))).steady
    lengths = Lengths(10, 100, 50)
    read = [work_of(shape, setup, lengths).tokens["old_logps"] for setup in (plain, kl)]
    assert read[1] - read[0] >= plain.generation_batch * 110


@pytest.mark.parametrize(
    ("options", "bits", "dtype"),
    [
        (None, 0, torch.bfloat16),
        ({"dtype": "float32"}, 0, torch.float32),
        ({"quantization_config": {"load_in_4bit": True}}, 4, torch.bfloat16),
        ({"quantization_config": {"quant_method": "quanto", "weights": "int8"}}, 8, torch.bfloat16),
    ],
)
def test_another_model_is_stored_as_it_is_loaded(make_model, make_config, tmp_path, options, bits, dtype):
    model = make_model(hidden_size=48, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = make_config(
        teacher_model_kind="model", teacher_model_name_or_path=str(tmp_path), teacher_model_init_kwargs=options
    )
    policy = shape_of(make_model(), tmp_path / "policy")
    sizes = {"mixed": False, "teacher": load_shape(str(tmp_path))}
    setup = make_setup(config, ModelConfig(), {}, GPUS["h100"], **sizes)
    linear = [m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    expected = size(model.to(dtype).parameters())
    if bits:
        expected += -size(linear) + int(size(linear) / 2 * bits / 8 * 1.016)
    assert memory.teacher_bytes(policy, setup) == expected
    eight = replace(setup, strategy="fsdp2", processes=8)
    assert memory.teacher_bytes(policy, eight) == -(-expected // 8)


def test_a_trust_region_stores_the_average_and_the_base(make_config):
    setup, shape = setup_of(make_config), load_shape("Qwen/Qwen3-8B")
    base, average, both = (
        memory.teacher_bytes(shape, replace(setup, teacher=kind)) for kind in ("base", "ema", "trust_region")
    )
    assert both == base + average > average > 0


def test_more_processes_keep_the_rollouts_of_a_step(make_config):
    """The change names all settings that keep the rollouts of an optimizer step."""
    shape = load_shape("Qwen/Qwen3-8B")
    one = setup_of(make_config, per_device=2, accumulation=32, generation_batch=64, checkpointing=True, flash=True)
    (words,) = changes_that_fit(shape, one)
    assert words == (
        "num_processes: 8, accelerate_config: fsdp2, per_device_train_batch_size: 2, gradient_accumulation_steps: 4"
    )
    more = next(change for change in CHANGES if change.setting.startswith("num_processes"))
    halved = more.apply(replace(one, accumulation=4))
    assert (halved.processes, halved.per_device, halved.accumulation) == (8, 1, 1)
    assert more.apply(replace(one, accumulation=6)) is None  # 12 rollouts do not split over 8 processes
    far = more.apply(replace(one, processes=8, strategy="fsdp2", accumulation=4))
    assert (far.processes, far.machines, far.accumulation, far.strategy) == (16, 2, 2, "fsdp2")


def test_the_named_changes_make_the_run_fit(make_config):
    shape = load_shape("Qwen/Qwen3-8B")
    tight = setup_of(make_config, strategy="fsdp2", processes=8, checkpointing=False, flash=True)
    assert not fits(shape, tight)
    words = changes_that_fit(shape, tight)
    assert words
    applied = tight
    for change in CHANGES:
        if any(word.startswith(change.setting.split(":")[0]) for word in words):
            applied = change.apply(applied)
    assert fits(shape, applied)
    small = replace(tight, gpu=replace(tight.gpu, memory=GIB))
    assert changes_that_fit(shape, small) is None


def test_unknown_models_and_broken_files_are_errors(tmp_path):
    with pytest.raises(ValueError, match="--model_config"):
        load_shape("someone/unknown-1b")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a model configuration"):
        load_shape("x", tmp_path / "config.json")


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this transformers has no Gemma 4")
def test_layers_of_different_sizes_count_with_their_own(tmp_path):
    """Full attention of Gemma 4 has larger heads than its sliding attention."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 100, "vocab_size_per_layer_input": 100}
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(
        **heads,
        **sizes,
        num_hidden_layers=2,
        layer_types=layers,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
    )
    config.save_pretrained(tmp_path)
    shape = load_shape("x", tmp_path / "config.json")
    assert shape.key_value_elements == 2 * 2 * (16 + 32)
    assert shape.layer_elements == 6 * 64 + 4 * (4 * 32) + 3 * (2 * 2 * 32) + 4 * 96


def test_models_without_attention_are_errors(tmp_path):
    transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=100).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="only models with attention"):
        load_shape("x", tmp_path / "config.json")


def test_code_beside_a_configuration_does_not_run(tmp_path):
    (tmp_path / "own.py").write_text("raise SystemExit('the code ran')")
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    with pytest.raises(ValueError, match="is not a model configuration"):
        load_shape("x", tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "auto_map": auto_map}))
    assert load_shape("x", tmp_path / "config.json").hidden == 64


def test_configurations_with_infinity_are_read(tmp_path):
    """transformers writes the time steps of Bamba in a form of its own."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.BambaConfig(**sizes, num_hidden_layers=1, vocab_size=100).save_pretrained(tmp_path)
    assert load_shape("x", tmp_path / "config.json").key_value_elements == 2 * 2 * 16
