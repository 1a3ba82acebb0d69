"""Weights of the teacher: initial values, updates, checkpoints and isolation from the student."""

import weakref

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import TrainerCallback
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from credit_trl.teacher import models
from credit_trl.teacher.models import TEACHER_FILE, AdapterTeacher, Teacher, make_teacher
from tables import tables_of

TABLES = tables_of(__file__)


class Recorder(TrainerCallback):
    """Records the student's weights after each optimizer step."""

    def __init__(self, names):
        self.names, self.history = names, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        weights = dict(model.named_parameters())
        self.history.append({name: weights[name].detach().double().clone() for name in self.names})


def student_names(trainer):
    return [name.replace(".teacher.", ".default.") for name in trainer.teacher.named_weights()]


def adapters(**options):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)


@pytest.mark.parametrize(
    "peft", [None, adapters(), adapters(use_dora=True, modules_to_save=["norm"])], ids=["full", "lora", "dora"]
)
@pytest.mark.parametrize(("options", "updates"), TABLES["updates"].values(), ids=TABLES["updates"])
def test_ema_equals_closed_form(make_trainer, peft, options, updates):
    rate = 0.3
    trainer = make_trainer(peft_config=peft, max_steps=4, teacher_update_rate=rate, **options)
    names = student_names(trainer)
    start = {name: dict(trainer.model.named_parameters())[name].detach().double().clone() for name in names}
    recorder = Recorder(names)
    trainer.add_callback(recorder)
    trainer.train()
    n = len(updates)
    for teacher_name, name in zip(trainer.teacher.named_weights(), names, strict=True):
        expected = (1 - rate) ** n * start[name]
        for k, step in enumerate(updates):
            expected = expected + rate * (1 - rate) ** (n - 1 - k) * recorder.history[step - 1][name]
        actual = trainer.teacher.named_weights()[teacher_name].double()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
    student = torch.cat([dict(trainer.model.named_parameters())[name].detach().double().flatten() for name in names])
    teacher = torch.cat([weight.double().flatten() for weight in trainer.teacher.named_weights().values()])
    drift = (teacher - student).norm() / student.norm()
    assert trainer.teacher.drift() == pytest.approx(drift.item(), rel=1e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_base_teacher_is_constant_and_live_is_policy(make_trainer, lora):
    def trained(kind):
        trainer = make_trainer(peft_config=adapters() if lora else None, teacher_model_kind=kind)
        weights = {} if kind == "live" else trainer.teacher.named_weights()
        initial = {name: weight.clone() for name, weight in weights.items()}
        trainer.train()
        return trainer, initial

    base, initial = trained("base")
    assert all(torch.equal(weight, initial[name]) for name, weight in base.teacher.named_weights().items())
    assert base.teacher.drift() > 0.0
    live, _ = trained("live")
    assert type(live.teacher) is Teacher
    assert live.teacher.drift() == 0.0
    with live.teacher.active() as model:
        assert model is live.teacher.student


@pytest.mark.parametrize("kind", ["base", "ema"])
def test_frozen_tied_embeddings_are_shared_by_both_names(make_model, kind):
    student = make_model(tie_word_embeddings=True)
    student.get_input_embeddings().requires_grad_(False)
    teacher = make_teacher(kind, student, Accelerator(cpu=True))
    assert teacher.model.get_output_embeddings().weight is student.get_input_embeddings().weight
    teacher.update(0.1)
    assert teacher.drift() == 0.0


def test_ema_of_bf16_policy_is_fp32_and_keeps_small_steps(make_model):
    student = make_model(dtype=torch.bfloat16)
    teacher = make_teacher("ema", student, Accelerator(cpu=True))
    initial = {name: weight.clone() for name, weight in teacher.named_weights().items()}
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.01
    teacher.update(0.01)
    moved = [not torch.equal(weight, initial[name]) for name, weight in teacher.named_weights().items()]
    assert all(moved)
    assert all(weight.dtype is torch.float32 for weight in teacher.named_weights().values())


def test_adapter_teacher_is_frozen_and_restores_student(make_model):
    model = get_peft_model(make_model(), adapters())
    ids = torch.tensor([[1, 2, 3]])
    teacher = make_teacher("ema", model, Accelerator(cpu=True))
    assert isinstance(teacher, AdapterTeacher)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    assert not any(".teacher" in name for name in trainable)
    model.train()
    with torch.no_grad(), teacher.active() as scoring:
        start = scoring(input_ids=ids).logits
        assert not scoring.training
        assert not any(".teacher" in n and p.requires_grad for n, p in model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trainable:
                parameter += 0.5
        student = model(input_ids=ids).logits
        with teacher.active() as scoring:
            assert torch.equal(scoring(input_ids=ids).logits, start)
    assert model.training
    assert model.active_adapter == "default"
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable
    assert not torch.equal(student, start)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_adapter_init_changes_base_once(make_model, start):
    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=start)).eval()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        initial = model(input_ids=ids).logits
        teacher = make_teacher("ema", model, Accelerator(cpu=True))
        assert torch.equal(model(input_ids=ids).logits, initial)
        with teacher.active() as scoring:
            assert torch.equal(scoring(input_ids=ids).logits, initial)
    assert model.peft_config["default"].init_lora_weights == start


def test_teacher_round_trips_and_mismatch_is_refused(make_model, tmp_path):
    accelerator = Accelerator(cpu=True)
    saved = make_teacher("ema", make_model(seed=1), accelerator)
    second = make_teacher("ema", make_model(seed=2), accelerator)
    saved.save(tmp_path, True)
    second.load(tmp_path)
    for name, weight in second.named_weights().items():
        assert torch.equal(weight, saved.named_weights()[name])
    foreign = make_teacher("ema", get_peft_model(make_model(), adapters()), accelerator)
    with pytest.raises(ValueError, match=r"different parameters .*same fine-tuning method"):
        foreign.load(tmp_path)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_later_activation_checkpointing_keeps_names(make_model, tmp_path, lora):
    """Under FSDP2, accelerate wraps the layers when it prepares the model, after the teacher is built."""
    model = get_peft_model(make_model(), adapters()) if lora else make_model()
    teacher = make_teacher("ema", model, Accelerator(cpu=True))
    names = teacher.named_weights().keys()
    initial = {name: weight.clone() for name, weight in teacher.named_weights().items()}
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Qwen3DecoderLayer))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 1.0
    teacher.update(0.5)
    assert teacher.named_weights().keys() == names
    for name, weight in teacher.named_weights().items():
        torch.testing.assert_close(weight, initial[name] + 0.5)
    teacher.save(tmp_path, True)
    assert load_file(tmp_path / TEACHER_FILE).keys() == names


def test_saving_and_loading_gather_one_tensor_at_a_time(make_model, tmp_path, monkeypatch):
    teacher = make_teacher("ema", make_model(), Accelerator(cpu=True))
    teacher.save(tmp_path, True)
    tensors, alive = [], []

    def track(tensor):
        alive.append(sum(reference() is not None for reference in tensors))
        tensors.append(weakref.ref(tensor))
        return tensor

    copy = models.copy_full
    monkeypatch.setattr(models, "copy_full", lambda target, value: copy(target, track(value)))
    teacher.load(tmp_path)
    assert len(alive) == len(teacher.named_weights()) > 2
    assert max(alive) <= 1

    tensors.clear(), alive.clear()
    monkeypatch.setattr(models, "full_tensor", lambda tensor: track(tensor.clone()))
    teacher.save(tmp_path / "nowhere", False)
    assert len(alive) == len(teacher.named_weights())
    assert max(alive) <= 1


@pytest.mark.parametrize("kind", ["ema", "base"])
@pytest.mark.parametrize(("options", "unfrozen", "message"), TABLES["unfrozen"].values(), ids=TABLES["unfrozen"])
def test_trainable_base_parameters_are_refused(make_model, kind, options, unfrozen, message):
    model = get_peft_model(make_model(), adapters(**options))
    if unfrozen:
        model.get_base_model().model.norm.requires_grad_(True)
    with pytest.raises(ValueError, match=message):
        make_teacher(kind, model, Accelerator(cpu=True))
    make_teacher("live", model, Accelerator(cpu=True))


def test_policy_that_another_trainer_has_trained_is_refused(make_model):
    model = get_peft_model(make_model(), adapters())
    make_teacher("ema", model, Accelerator(cpu=True))
    with pytest.raises(ValueError, match=r"adapter 'teacher'.*`model\.delete_adapter\('teacher'\)`"):
        make_teacher("ema", model, Accelerator(cpu=True))
    model.delete_adapter("teacher")
    make_teacher("ema", model, Accelerator(cpu=True))


def autocast_dtype(teacher) -> torch.dtype | None:
    with teacher.autocast():
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


@pytest.mark.filterwarnings("ignore:The trained weights are bfloat16")
def test_teacher_autocast_ignores_fp32_head(make_model, make_trainer):
    model = make_model(dtype=torch.bfloat16, tie_word_embeddings=True)
    trainer = make_trainer(model=model, cast_lm_head_to_fp32=True)
    assert model.get_input_embeddings().weight.dtype is torch.float32
    assert autocast_dtype(trainer.teacher) is torch.bfloat16


def test_teacher_autocast_ignores_adapters_and_int8_weights(make_model):
    model = get_peft_model(make_model(dtype=torch.bfloat16, tie_word_embeddings=True), adapters())
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.base_layer.weight = torch.nn.Parameter(module.base_layer.weight.to(torch.int8), requires_grad=False)
    teacher = make_teacher("ema", model, Accelerator(cpu=True))
    assert all(weight.dtype is torch.float32 for weight in teacher.named_weights().values())
    assert autocast_dtype(teacher) is torch.bfloat16


def test_teacher_autocast_follows_weights_cast_by_deepspeed(make_model, monkeypatch):
    """Under DeepSpeed, accelerate's autocast does nothing and the average is in fp32."""
    accelerator, model = Accelerator(cpu=True), make_model()
    monkeypatch.setattr(accelerator.state, "_mixed_precision", "bf16")
    monkeypatch.setattr(accelerator, "native_amp", False)
    teacher = make_teacher("ema", model, accelerator)
    model.to(torch.bfloat16)  # as DeepSpeed's engine does, after the copy is built
    assert teacher.named_weights()["lm_head.weight"].dtype is torch.float32
    assert autocast_dtype(teacher) is torch.bfloat16


@pytest.mark.parametrize("kind", ["ema", "live", "base"])
def test_prompt_learning_is_refused(make_model, kind):
    model = get_peft_model(make_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="LoRA"):
        make_teacher(kind, model, Accelerator(cpu=True))
