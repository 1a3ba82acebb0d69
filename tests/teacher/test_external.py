"""Another model as the teacher: TRL's on-policy distillation, its own dtype, adapter and vocabulary, resuming."""

import json
import math
from pathlib import Path

import pytest
import torch
from trl import DistillationConfig, DistillationTrainer

import rounding
from credit_trl.teacher import external
from test_trainer_parity import assert_close, loss_and_gradients, prepared
from tiny import QUIET, build_tokenizer, save_model


@pytest.fixture
def save_teacher(tmp_path):
    return lambda name="teacher", **options: save_model(tmp_path / name, **{"seed": 5, "hidden_size": 48, **options})


@pytest.fixture
def make_trainer(make_trainer):
    return lambda path, **options: make_trainer(teacher_model_kind="model", teacher_model_name_or_path=path, **options)


PLAIN = {"teacher_prompt": "student", "contrastive_coef": 0.0}


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_plain_distillation_equals_trls(make_trainer, make_model, save_teacher, tokenizer, dataset, tmp_path, alpha):
    path = save_teacher()
    ours = make_trainer(path, distillation_alpha=alpha, temperature=0.8, distillation_topk=None, **PLAIN)
    options = {"beta": alpha, "temperature": 0.8, "teacher_model_init_kwargs": {"dtype": "float32"}}
    config = DistillationConfig(str(tmp_path / "theirs"), **QUIET, **options)
    prompts = dataset.select_columns("prompt")
    theirs = DistillationTrainer(make_model(), path, config, prompts, processing_class=tokenizer)
    theirs.model.train()
    inputs = prepared(ours)
    assert_close(loss_and_gradients(ours, inputs), loss_and_gradients(theirs, inputs), 1e-5, 1e-7)


@pytest.mark.parametrize("plain", [False, True], ids=["messages", "text"])
def test_the_students_prompt_is_read_token_for_token(make_trainer, dataset, save_teacher, plain):
    rows = dataset.map(lambda row: {"prompt": row["prompt"][-1]["content"]}) if plain else dataset
    trainer = make_trainer(
        save_teacher(), reward_funcs=lambda completions, **_: [0.0] * len(completions), rows=rows, **PLAIN
    )
    inputs = prepared(trainer)
    assert inputs["teacher_mask"].all()
    for i, contexts in enumerate(trainer.contexts):
        assert contexts.teacher == inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()


def test_a_teacher_is_frozen_before_it_is_placed(make_trainer, save_teacher, monkeypatch):
    trainable = []

    def place(model, accelerator):
        trainable.extend(parameter.requires_grad for parameter in model.parameters())
        return model

    monkeypatch.setattr(external, "place_frozen", place)
    trainer = make_trainer(save_teacher())
    trainable.extend(parameter.requires_grad for parameter in trainer.teacher.model.parameters())
    assert set(trainable) == {False}


@pytest.mark.slow
@pytest.mark.parametrize("options", [PLAIN, {}, {"distillation_weight": 0.5}])
def test_training_leaves_the_teacher_as_it_was(make_trainer, save_teacher, options):
    trainer = make_trainer(save_teacher(dtype=torch.bfloat16), **options)
    initial = {name: p.clone() for name, p in trainer.teacher.model.named_parameters()}
    trainer.train()
    assert all(torch.equal(p, initial[n]) for n, p in trainer.teacher.model.named_parameters())
    assert {p.dtype for p in trainer.teacher.model.parameters()} == {torch.bfloat16}
    assert not any("credit/teacher_drift" in row for row in trainer.state.log_history)


@pytest.mark.parametrize("stored", [False, True], ids=["of its options", "of its files"])
def test_a_teacher_is_loaded_by_the_quantizer(make_trainer, save_teacher, stored):
    path = save_teacher()
    plain = make_trainer(path, **PLAIN)
    if stored:
        file = Path(path) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | rounding.OPTIONS))
    quantized = make_trainer(path, teacher_model_init_kwargs=None if stored else rounding.OPTIONS, **PLAIN)
    weights = [dict(t.teacher.model.named_parameters()) for t in (plain, quantized)]
    for name, weight in weights[0].items():
        is_linear = "proj" in name or "lm_head" in name
        assert torch.equal(weights[1][name], rounding.rounded(weight) if is_linear else weight), name
    assert torch.isfinite(loss_and_gradients(quantized, prepared(quantized))[0])


@pytest.mark.slow
def test_a_teacher_of_four_bits_scores_as_its_dequantized_weights(make_trainer, save_teacher):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: `make test-slow` installs it")
    path = save_teacher(hidden_size=64, intermediate_size=64, head_dim=32)  # it quantizes blocks of 64 weights
    options = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "dtype": "float32"}
    trainer = make_trainer(path, teacher_model_init_kwargs=options, **PLAIN)
    stored = trainer.teacher.model.model.layers[0].mlp.up_proj.weight
    assert stored.dtype == torch.uint8
    scores = []
    for teacher in (trainer.teacher.model, trainer.teacher.model.dequantize()):
        trainer.teacher.model = teacher
        torch.manual_seed(0)
        scores.append(prepared(trainer)["teacher_token_logps"])
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-3)
    trainer.train()


@pytest.mark.parametrize("topk", [20, None])
@pytest.mark.parametrize(("padding", "teachers"), [(3, 0), (0, 3)])
def test_padded_vocabulary_beside_an_unpadded_one_trains(
    make_trainer, make_model, save_teacher, tokenizer, padding, teachers, topk
):
    path = save_teacher(vocab_size=len(tokenizer) + teachers)
    trainer = make_trainer(
        path, model=make_model(vocab_size=len(tokenizer) + padding), distillation_topk=topk, **PLAIN
    )
    weight = trainer.teacher.model.get_output_embeddings().weight
    assert len(weight) == len(tokenizer) + max(padding, teachers)
    if padding:  # the logit of an average token
        torch.testing.assert_close(weight[-1], weight[:-padding].mean(dim=0))
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["loss"])


def test_another_vocabulary_is_an_error_with_the_first_differing_id(make_trainer, save_teacher):
    path = Path(save_teacher()) / "tokenizer.json"
    saved = json.loads(path.read_text())
    vocab = saved["model"]["vocab"]
    vocab["B"], vocab["C"] = vocab["C"], vocab["B"]
    path.write_text(json.dumps(saved))
    first_id = min(vocab["B"], vocab["C"])
    with pytest.raises(
        ValueError, match=rf"first differing id is {first_id}, 'B' for the policy and 'C'.*2 of .*GOLD"
    ):
        make_trainer(str(path.parent), **PLAIN)
    larger = build_tokenizer()
    larger.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="None for the policy and '<new>' for the teacher"):
        external.check_same_vocabulary(build_tokenizer(), larger, "larger")


@pytest.mark.slow
def test_resuming_checks_the_name_and_stores_no_weights(make_trainer, save_teacher, tmp_path):
    path = save_teacher()
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, **PLAIN}
    uninterrupted = make_trainer(path, **options)
    uninterrupted.train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert (checkpoint / "teacher.json").is_file()
    assert not (checkpoint / "teacher.safetensors").exists()
    resumed = make_trainer(path, **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert all(
        torch.equal(a, b) for a, b in zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True)
    )
    with_other_teacher = make_trainer(save_teacher("other", seed=6), **options)
    with pytest.raises(ValueError, match=r"other options .*`teacher_model_name_or_path`: .*`resume_changes='allow'`"):
        with_other_teacher.train(resume_from_checkpoint=str(checkpoint))
    with_other_teacher.train(resume_from_checkpoint=str(checkpoint), resume_changes="allow")
    assert with_other_teacher.state.global_step == 2


def test_another_commit_or_revision_of_the_same_teacher_is_refused(make_trainer, save_teacher, tmp_path):
    teacher = make_trainer(save_teacher(), **PLAIN).teacher
    teacher.identity |= {"revision": "main", "commit": "1f0e"}
    teacher.save(tmp_path, True)
    for changes in ({"commit": "2a3b"}, {"commit": None, "revision": "other"}):
        teacher.identity |= changes
        with pytest.raises(
            ValueError, match=r"saved with the (commit '1f0e'|revision 'main') of the teacher .*'revision': '"
        ):
            teacher.load(tmp_path)
    for changes in ({"commit": "1f0e"}, {"name": "another option", "commit": "2a3b"}):
        teacher.identity |= changes
        teacher.load(tmp_path)
    teacher.load(tmp_path / "run")  # of a run with another kind of teacher
