"""Prompts with images: `CreditTrainer` against plain forward passes over single sequences, in fp64."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor, nn
from torch.testing import assert_close
from trl import GRPOConfig, GRPOTrainer

from credit_trl import CreditConfig, CreditTrainer
from credit_trl.contexts.images import PromptImages
from credit_trl.contexts.prompts import row_prompt
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts
from credit_trl.rollout.batch import content_key, prompt_key
from dense import buckets, divergence, gradients, move
from tiny import QUIET
from vlm import FAMILIES, build_vlm, image_verdicts, picture, rows

LORA = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
# Families and options of a generation batch with 0, 1 and 2 images a prompt.
CASES = [
    *((family, {"distillation_topk": topk}) for family in FAMILIES for topk in (5, None)),
    *(("Qwen2_5_VL", {"contrastive_count": 2, "distillation_alpha": alpha}) for alpha in (0.0, 0.5)),
    *(("Gemma3", {"contrastive_count": 2, "teacher_model_kind": kind}) for kind in ("base", "live")),
    *((family, {"contrastive_count": 2, "peft_config": LORA}) for family in ("Qwen3VL", "Idefics3")),
    ("Qwen2_5_VL", {"contrastive_source": "other_images"}),
    ("LlavaNext", {"contrastive_source": "without_images"}),
]


@dataclass
class Batch:
    """A generation batch of a trainer, before it is shuffled and split."""

    trainer: CreditTrainer
    inputs: dict[str, Any]
    prompts: list[Any]  # of the rows, in the order of the samples
    contexts: list[TokenContexts]


@pytest.fixture
def make_batch(make_config):
    """A function that runs one rollout; other options are those of `make_config`."""

    def make(family="Qwen2_5_VL", given=None, peft_config=None, **options) -> Batch:
        given = rows() if given is None else given
        model, processor = build_vlm(family)
        common = {"num_generations": 2, "per_device_train_batch_size": 2 * len(given), "loss_type": "grpo"}
        common |= {"contrastive_coef": 0.3, "distillation_topk": 5, "max_reprompt_len": 512}
        config = make_config(**common | options)
        dataset = Dataset.from_list(given)
        trainer = CreditTrainer(
            model, image_verdicts, config, dataset, processing_class=processor, peft_config=peft_config
        )
        if config.teacher_model_kind != "live":
            move(trainer.teacher.named_weights().values())
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        seen = []
        build = trainer._build_contexts
        trainer._build_contexts = lambda batch: seen.append(build(batch)) or seen[-1]
        inputs = trainer._generate_and_score_completions([row for row in dataset for _ in range(2)])
        return Batch(trainer, inputs, [row for row in given for _ in range(2)], seen[0])

    return make


def plain_logps(model: nn.Module, processor: Any, ids: list[int], images: list[Any], completion: list[int]) -> Tensor:
    """(t, V) log-probabilities of a completion, by the processor's own tensors and a pass over one sequence."""
    read = torch.tensor([ids + completion])
    inputs = {"input_ids": read, "attention_mask": torch.ones_like(read)}
    if images:
        own = processor(images=[images], text=[processor.image_token * len(images)], return_tensors="pt")
        inputs |= {name: own[name] for name in own.keys() - inputs.keys()}
        for name in inputs.keys() & {"mm_token_type_ids", "token_type_ids"}:
            inputs[name] = (read == model.config.image_token_id).long()
    return model(**inputs).logits[0, len(ids) - 1 : -1].log_softmax(-1)


def shown(batch: Batch, ids: list[int], k: int) -> list[Any]:
    """Images of the k-th prompt of a sample, or of the student's where k is 0, by the question in its ids."""
    text = batch.trainer._tokenizer.decode(ids)
    [row] = [i for i in range(4) if f"What is {i}?" in text]
    source = batch.trainer.args.contrastive_source if k else "batch"
    if source == "without_images":
        return []
    return rows()[{0: 3, 3: 0}[row] if source == "other_images" else row]["images"]


def plain_loss(batch: Batch, read=shown) -> Tensor:
    """Lines 2 to 7 of Algorithm 1; `read` gives the images of a prompt, see `shown`."""
    config, processor = batch.trainer.args, batch.trainer.processing_class
    policy = batch.trainer.model
    losses = []
    for i, own in enumerate(batch.contexts):
        length = int(batch.inputs["completion_mask"][i].sum())
        completion = batch.inputs["completion_ids"][i, :length].tolist()
        student = batch.inputs["prompt_ids"][i][batch.inputs["prompt_mask"][i].bool()].tolist()
        p = plain_logps(policy, processor, student, read(batch, student, 0), completion)
        with torch.no_grad(), batch.trainer.teacher.active() as teacher:
            f, *g = (
                plain_logps(teacher, processor, ids, read(batch, ids, k), completion)
                for k, (ids, _) in enumerate(own.sequences())
            )
        support = f.topk(config.distillation_topk or f.shape[-1]).indices
        target = buckets(f, support, "bucket")
        if g:
            target = target - config.contrastive_coef * sum(buckets(x, support, "bucket") for x in g) / len(g)
        losses.append(divergence(buckets(p, support, "bucket"), target, config.distillation_alpha).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("family", "options"), CASES)
def test_loss_and_gradients_with_images_are_those_of_algorithm_1(make_batch, family, options):
    batch = make_batch(family, **options)
    assert [len(own.contrasts) for own in batch.contexts]
    model = batch.trainer.model
    ours, theirs = batch.trainer.compute_loss(model, batch.inputs), plain_loss(batch)
    assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)
    found, expected = gradients(ours, model), gradients(theirs, model)
    assert found.keys() == expected.keys()
    assert any("vis" in name for name in expected) or "peft_config" in options
    difference = torch.cat([(found[name] - gradient).flatten() for name, gradient in expected.items()]).norm()
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert difference <= size * 1e-9


@pytest.mark.parametrize(
    "break_images",
    [
        lambda own: replace(own, images=[own.images[0]] * len(own.images)),
        lambda own: replace(own, images=[one and _reversed(one) for one in own.images]),
        lambda own: replace(own, images=[one and replace(one, modalities={}) for one in own.images]),
    ],
    ids=["x's images under x'", "images in reverse order", "all tokens are text"],
)
def test_wrong_images_change_the_loss(make_batch, break_images):
    given = rows((2, 2), sizes=((24, 24),))
    batch = make_batch(given=given)
    trainer = batch.trainer
    loss = trainer.compute_loss(trainer.model, batch.inputs)
    broken = [break_images(own) for own in batch.contexts]
    scores = trainer.credit_step.prepare(trainer._generation_batch, batch.inputs, broken)
    assert (loss - trainer.compute_loss(trainer.model, batch.inputs | scores)).abs() > 1e-4


def _reversed(one: PromptImages) -> PromptImages:
    parts = one.tensors["pixel_values"].chunk(2)
    return replace(one, tensors=one.tensors | {"pixel_values": torch.cat(parts[::-1])})


def test_pictures_of_equal_size_and_text_are_told_apart(make_batch):
    batch = make_batch(given=rows((1, 1), sizes=((24, 24),), same_text=True))
    first, second = batch.contexts[0], batch.contexts[2]
    assert first.teacher == first.contrasts[0]  # by their ids
    pixels = [[one.tensors["pixel_values"] for one in own.images] for own in (first, second)]
    assert torch.equal(pixels[0][0], pixels[1][1])
    assert torch.equal(pixels[0][1], pixels[1][0])
    assert not torch.equal(pixels[0][0], pixels[0][1])
    keys = {prompt_key([{"role": "user", "content": [{"type": "image", "image": picture(i)}]}]) for i in range(9)}
    assert len(keys) == 9  # objects at one address, one after the other
    assert content_key(picture(1)) == content_key(picture(1).copy())
    palettes = [picture(1).convert("P"), picture(1).convert("P")]
    palettes[1].putpalette(range(256))
    assert len(set(map(content_key, [*palettes, *(torch.full((900, 900), x) for x in (0, 1))]))) == 4


def test_placeholders_in_the_privileged_context_stay_text(make_batch):
    """Its feedback has the placeholders of all families; a demonstration has more."""
    batch = make_batch("Qwen3VL")
    builder = batch.trainer.context_builder
    soft = batch.trainer.model.config.image_token_id
    for row in rows():
        prompt = row_prompt(row)
        student = builder.encode(prompt, PrivilegedContext())
        for text in ("<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<image>\x04\x02"):
            z = PrivilegedContext(text, text)
            ids = builder.build(prompt, z).teacher
            assert ids.count(soft) == student.count(soft)
            assert builder.tokenizer.decode(ids).count(text) == 2 + (
                student.count(soft) if text == "<|image_pad|>" else 0
            )
    (alone,) = batch.trainer._tokenize_prompts([row_prompt(rows()[2])])[0]
    assert builder.encode(row_prompt(rows()[2]), PrivilegedContext()) == alone
    with pytest.raises(ValueError, match="placeholders"):
        builder.student_text(row_prompt(rows((1,))[0] | {"prompt": [{"role": "user", "content": "<|image_pad|>"}]}))


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Gemma3"])
def test_contexts_are_what_the_processor_forms_of_the_whole_text(make_batch, family):
    """With a feedback that it may read: images keep their places, and the template surrounds the text parts."""
    batch = make_batch(family)
    builder, processor = batch.trainer.context_builder, batch.trainer.processing_class
    parts = [
        {"type": "text", "text": "Before"},
        {"type": "image", "image": picture(1)},
        {"type": "text", "text": "after?"},
    ]
    prompt = [
        {"role": "user", "content": "Earlier"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": parts},
    ]
    z = PrivilegedContext(feedback="It is red.")
    shown = batch.trainer.args.feedback_template.format(feedback_raw=z.feedback)
    end = batch.trainer.args.reprompt_template.format(prompt="", solution="", feedback=shown)
    whole = [*prompt[:2], {"role": "user", "content": [*parts, {"type": "text", "text": end}]}]
    text = processor.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    expected = processor(images=[[picture(1)]], text=[text])["input_ids"][0]
    assert builder.build(prompt, z).teacher == list(expected)


def test_weight_0_is_grpo(make_config):
    ends = []
    for trainer_class, config_class, verdicts in (
        (GRPOTrainer, GRPOConfig, lambda **columns: [v.reward for v in image_verdicts(**columns)]),
        (CreditTrainer, CreditConfig, image_verdicts),
    ):
        model, processor = build_vlm("Qwen2_5_VL", torch.float32)
        options = {name: getattr(make_config(max_steps=3), name) for name in QUIET | {"max_steps": 1, "seed": 1}}
        options |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}
        weight = {"distillation_weight": 0.0} if config_class is CreditConfig else {}
        config = config_class(str(make_config().output_dir), learning_rate=1e-2, **options, **weight)
        dataset = Dataset.from_list(rows((1, 1, 1, 1)))
        trainer = trainer_class(model, verdicts, config, dataset, processing_class=processor)
        trainer.train()
        ends.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
