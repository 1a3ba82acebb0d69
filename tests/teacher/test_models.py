"""The reference: what it starts as, how it moves, what it leaves alone."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import TrainerCallback
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from credit_trl import CreditTrainer
from credit_trl.teacher import models as teacher
from credit_trl.teacher.models import TEACHER_FILE, AdapterTeacher, CopyTeacher, Teacher, make_teacher
from tiny import length_verdicts


class Recorder(TrainerCallback):
    """Keeps the student's weights after every optimizer step."""

    def __init__(self, names):
        self.names, self.history = names, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        weights = dict(model.named_parameters())
        self.history.append({name: weights[name].detach().double().clone() for name in self.names})


def student_names(trainer):
    return [name.replace(".teacher.", ".default.") for name in trainer.teacher.named_weights()]


def adapters(**options):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)


@pytest.mark.parametrize("peft", [None, adapters(), adapters(use_dora=True)], ids=["full", "lora", "dora"])
@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({}, [1, 2, 3, 4]),
        ({"teacher_sync_steps": 2}, [2, 4]),
        # One generation batch feeds two optimizer steps: one update of the average each.
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2}, [2, 4]),
        # Two micro-batches a step, one generation batch a step.
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, [1, 2, 3, 4]),
    ],
    ids=["default", "sync_steps", "two_steps_a_batch", "accumulation"],
)
def test_ema_after_n_steps_is_its_closed_form(make_model, make_config, tokenizer, dataset, peft, options, updates):
    rate = 0.3
    config = make_config(max_steps=4, teacher_update_rate=rate, **options)
    trainer = CreditTrainer(
        make_model(), length_verdicts, config, dataset, processing_class=tokenizer, peft_config=peft
    )
    names = student_names(trainer)
    start = {name: dict(trainer.model.named_parameters())[name].detach().double().clone() for name in names}
    recorder = Recorder(names)
    trainer.add_callback(recorder)
    trainer.train()
    n = len(updates)
    for reference_name, name in zip(trainer.teacher.named_weights(), names, strict=True):
        expected = (1 - rate) ** n * start[name]
        for k, step in enumerate(updates):
            expected = expected + rate * (1 - rate) ** (n - 1 - k) * recorder.history[step - 1][name]
        actual = trainer.teacher.named_weights()[reference_name].double()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
    student = torch.cat([dict(trainer.model.named_parameters())[name].detach().double().flatten() for name in names])
    reference = torch.cat([weight.double().flatten() for weight in trainer.teacher.named_weights().values()])
    apart = (reference - student).norm() / student.norm()
    assert trainer.teacher.drift() == pytest.approx(apart.item(), rel=1e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_base_reference_never_moves_and_a_live_one_is_the_policy(make_model, make_config, tokenizer, dataset, lora):
    def trained(kind):
        trainer = CreditTrainer(
            make_model(),
            length_verdicts,
            make_config(teacher_model_kind=kind),
            dataset,
            processing_class=tokenizer,
            peft_config=adapters() if lora else None,
        )
        weights = {} if kind == "live" else trainer.teacher.named_weights()
        before = {name: weight.clone() for name, weight in weights.items()}
        trainer.train()
        return trainer, before

    base, before = trained("base")
    assert all(torch.equal(weight, before[name]) for name, weight in base.teacher.named_weights().items())
    assert base.teacher.drift() > 0.0
    live, _ = trained("live")
    assert type(live.teacher) is Teacher
    assert live.teacher.drift() == 0.0
    with live.teacher.active() as model:
        assert model is live.teacher.student


def test_a_bf16_policys_average_is_kept_in_fp32_where_small_steps_survive(make_model):
    student = make_model(dtype=torch.bfloat16)
    reference = make_teacher("ema", student, Accelerator(cpu=True))
    before = {name: weight.clone() for name, weight in reference.named_weights().items()}
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.01
    reference.update(0.01)
    moved = [not torch.equal(weight, before[name]) for name, weight in reference.named_weights().items()]
    assert all(moved)
    assert all(weight.dtype is torch.float32 for weight in reference.named_weights().values())


def test_the_copy_shares_nothing_with_the_student_that_trl_patched(make_model, make_config, tokenizer, dataset):
    trainer = CreditTrainer(make_model(), length_verdicts, make_config(), dataset, processing_class=tokenizer)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = trainer.teacher.model(input_ids=ids).logits
        for parameter in trainer.model.parameters():
            parameter += 1.0
        after = trainer.teacher.model(input_ids=ids).logits
    assert isinstance(trainer.teacher, CopyTeacher)
    assert torch.equal(before, after)
    assert not any(p.requires_grad for p in trainer.teacher.model.parameters())


def test_the_adapter_reference_is_frozen_isolated_and_gives_the_student_back(make_model):
    model = get_peft_model(make_model(), adapters())
    ids = torch.tensor([[1, 2, 3]])
    reference = make_teacher("ema", model, Accelerator(cpu=True))
    assert isinstance(reference, AdapterTeacher)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    assert not any(".teacher" in name for name in trainable)
    model.train()
    with torch.no_grad(), reference.active() as scoring:
        start = scoring(input_ids=ids).logits
        assert not scoring.training
        assert not any(".teacher" in n and p.requires_grad for n, p in model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trainable:
                parameter += 0.5
        student = model(input_ids=ids).logits
        with reference.active() as scoring:
            assert torch.equal(scoring(input_ids=ids).logits, start)
    assert model.training
    assert model.active_adapter == "default"
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable
    assert not torch.equal(student, start)


def test_what_trains_of_an_adapter_trains_during_scoring_and_after_it(make_model):
    model = get_peft_model(make_model(), adapters())
    for name, parameter in model.named_parameters():
        if "lora_A" in name:  # as in LoRA-FA
            parameter.requires_grad_(False)
    reference = make_teacher("ema", model, Accelerator(cpu=True))
    trains = {name: "lora_B.default" in name for name, _ in model.named_parameters()}
    assert any(trains.values())
    with reference.active():
        assert {name: p.requires_grad for name, p in model.named_parameters()} == trains
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trains


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_that_rewrites_the_base_rewrites_it_once(make_model, start):
    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=start)).eval()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        reference = make_teacher("ema", model, Accelerator(cpu=True))
        assert torch.equal(model(input_ids=ids).logits, before)
        with reference.active() as scoring:
            assert torch.equal(scoring(input_ids=ids).logits, before)
    assert model.peft_config["default"].init_lora_weights == start


def test_the_model_that_is_saved_has_no_reference_in_it(make_model, tmp_path):
    model = get_peft_model(make_model(), adapters())
    make_teacher("ema", model, Accelerator(cpu=True))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "teacher").exists()


def test_lora_holds_no_second_copy_of_the_base(make_model):
    model = get_peft_model(make_model(), adapters())
    before = sum(p.numel() for p in model.parameters())
    adapter = sum(p.numel() for n, p in model.named_parameters() if ".default" in n)
    make_teacher("ema", model, Accelerator(cpu=True))
    assert sum(p.numel() for p in model.parameters()) == before + adapter


def test_saved_and_loaded_references_are_equal_and_foreign_ones_are_named(make_model, tmp_path):
    accelerator = Accelerator(cpu=True)
    first = make_teacher("ema", make_model(seed=1), accelerator)
    second = make_teacher("ema", make_model(seed=2), accelerator)
    first.save(tmp_path)
    second.load(tmp_path)
    for name, weight in second.named_weights().items():
        assert torch.equal(weight, first.named_weights()[name])
    foreign = make_teacher("ema", get_peft_model(make_model(), adapters()), accelerator)
    with pytest.raises(ValueError, match="full fine-tuning or LoRA"):
        foreign.load(tmp_path)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_activation_checkpointing_that_is_put_in_later_changes_no_names(make_model, tmp_path, lora):
    """As accelerate does under FSDP2: layers are wrapped when the model is prepared, after the reference was made."""
    model = get_peft_model(make_model(), adapters()) if lora else make_model()
    reference = make_teacher("ema", model, Accelerator(cpu=True))
    names = reference.named_weights().keys()
    before = {name: weight.clone() for name, weight in reference.named_weights().items()}
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Qwen3DecoderLayer))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 1.0
    reference.update(0.5)
    assert reference.named_weights().keys() == names
    for name, weight in reference.named_weights().items():
        torch.testing.assert_close(weight, before[name] + 0.5)
    reference.save(tmp_path)
    assert load_file(tmp_path / TEACHER_FILE).keys() == names


def test_saving_and_loading_hold_one_tensor_at_a_time(make_model, tmp_path, monkeypatch):
    reference = make_teacher("ema", make_model(), Accelerator(cpu=True))
    reference.save(tmp_path)
    whole, most = [], []

    def noted(tensor):
        most.append(sum(held() is not None for held in whole))
        whole.append(weakref.ref(tensor))
        return tensor

    copy = teacher.copy_full
    monkeypatch.setattr(teacher, "copy_full", lambda target, value: copy(target, noted(value)))
    reference.load(tmp_path)
    assert len(most) == len(reference.named_weights()) > 2
    assert max(most) <= 1

    whole.clear(), most.clear()
    monkeypatch.setattr(teacher, "full_tensor", lambda tensor: noted(tensor.clone()))
    monkeypatch.setattr(reference, "accelerator", SimpleNamespace(is_main_process=False, unwrap_model=lambda m: m))
    reference.save(tmp_path / "nowhere")
    assert len(most) == len(reference.named_weights())
    assert max(most) <= 1


@pytest.mark.parametrize("kind", ["ema", "base"])
@pytest.mark.parametrize(
    ("options", "thawed", "message"),
    [
        ({"bias": "lora_only"}, None, r"`bias='lora_only'`.*Set `bias=\"none\"`.*'live'"),
        ({}, "norm", r"`.*norm\.weight` of the base is trainable.*`modules_to_save`.*'live'"),
    ],
    ids=["bias", "thawed"],
)
def test_parameters_of_the_base_that_train_are_refused(make_model, kind, options, thawed, message):
    model = get_peft_model(make_model(), adapters(**options))
    if thawed:
        model.get_base_model().model.norm.requires_grad_(True)
    with pytest.raises(ValueError, match=message):
        make_teacher(kind, model, Accelerator(cpu=True))
    make_teacher("live", model, Accelerator(cpu=True))


def test_a_module_that_peft_copies_lags_with_the_adapter(make_model):
    model = get_peft_model(make_model(), adapters(modules_to_save=["norm"]))
    reference = make_teacher("ema", model, Accelerator(cpu=True))
    assert any("norm.modules_to_save.teacher" in name for name in reference.named_weights())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 1.0
    reference.update(0.5)
    for average, student in reference.pairs():
        torch.testing.assert_close(student - average, torch.full_like(student, 0.5))


def autocast_dtype(reference) -> torch.dtype | None:
    with reference.autocast():
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def test_a_reference_computes_in_bf16_as_its_student_where_trl_casts_a_tied_head_to_fp32(
    make_model, make_config, tokenizer, dataset
):
    model, config = make_model(dtype=torch.bfloat16, tie_word_embeddings=True), make_config(cast_lm_head_to_fp32=True)
    trainer = CreditTrainer(model, length_verdicts, config, dataset, processing_class=tokenizer)
    assert model.get_input_embeddings().weight.dtype is torch.float32
    assert autocast_dtype(trainer.teacher) is torch.bfloat16


def test_a_reference_computes_in_its_bases_precision_whatever_that_of_adapters_and_quantised_weights(make_model):
    model = get_peft_model(make_model(dtype=torch.bfloat16, tie_word_embeddings=True), adapters())
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.base_layer.weight = torch.nn.Parameter(module.base_layer.weight.to(torch.int8), requires_grad=False)
    reference = make_teacher("ema", model, Accelerator(cpu=True))
    assert all(weight.dtype is torch.float32 for weight in reference.named_weights().values())
    assert autocast_dtype(reference) is torch.bfloat16


def test_where_no_autocast_makes_mixed_precision_a_reference_computes_in_what_the_students_weights_were_cast_to(
    make_model, monkeypatch
):
    """DeepSpeed's way: accelerate's own autocast does nothing there, and the average is in fp32."""
    accelerator, model = Accelerator(cpu=True), make_model()
    monkeypatch.setattr(accelerator.state, "_mixed_precision", "bf16")
    monkeypatch.setattr(accelerator, "native_amp", False)
    reference = make_teacher("ema", model, accelerator)
    model.to(torch.bfloat16)  # as the engine does, after the copy was made
    assert reference.named_weights()["lm_head.weight"].dtype is torch.float32
    assert autocast_dtype(reference) is torch.bfloat16


def test_prompt_learning_is_refused_with_what_to_use_instead(make_model):
    model = get_peft_model(make_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="LoRA"):
        make_teacher("ema", model, Accelerator(cpu=True))
