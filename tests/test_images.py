"""Prompts with images: `CreditTrainer` against plain forward passes over single sequences, in fp64."""

import base64
import json
import pickle
import re
import shutil
from dataclasses import dataclass
from functools import partial, wraps
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from itertools import pairwise, product
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset, IterableDataset, List
from datasets import Image as ImageFeature
from peft import LoraConfig
from PIL import Image
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import BatchFeature
from trl import GRPOConfig, GRPOTrainer

from credit_trl import CreditConfig, CreditTrainer
from credit_trl.cli.data import drop_long_prompts
from credit_trl.contexts import gather
from credit_trl.contexts.images import with_local_images
from credit_trl.contexts.prompts import images_of, remote_image, row_prompt, user_text
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts
from credit_trl.evaluation import SamplingConfig, evaluate
from credit_trl.evaluation.engines import TransformersEngine
from credit_trl.lab.analysis.callback import CreditMapCallback
from credit_trl.lab.analysis.responses import data_url
from credit_trl.lab.analysis.tokenmap import read_maps
from credit_trl.lab.report.callback import ReportCallback
from credit_trl.rollout.batch import content_key, prompt_key
from credit_trl.tasks.registry import Task
from credit_trl.teacher import passes
from credit_trl.teacher.models import make_teacher
from credit_trl.training import checks
from dense import buckets, divergence, gradients, move
from tables import tables_of
from tiny import QUIET, build_model
from vlm import FAMILIES, SIZES, SPECIAL, build_vlm, image_verdicts, picture, rows

TABLES = tables_of(__file__)
LORA = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
FULL = product(FAMILIES, (5, None), (1, 2), ("ema", "base"))
# Families and options of a generation batch with 0, 1 and 2 images a prompt.
CASES = [
    *((f, {"distillation_topk": k, "contrastive_count": c, "teacher_model_kind": kind}) for f, k, c, kind in FULL),
    *(("Qwen2_5_VL", {"contrastive_count": 2, "distillation_alpha": alpha}) for alpha in (0.0, 0.5)),
    ("Gemma3", {"contrastive_count": 2, "teacher_model_kind": "live"}),
    *((family, {"contrastive_count": 2, "peft_config": LORA}) for family in ("Qwen3VL", "Idefics3")),
    ("Qwen2_5_VL", {"contrastive_source": "other_images"}),
    ("LlavaNext", {"contrastive_source": "without_images"}),
    ("Qwen3VL", {"contrastive_source": "dataset", "contrastive_count": 2}),
]


@dataclass
class Batch:
    """A generation batch of a trainer, before it is shuffled and split."""

    trainer: CreditTrainer
    inputs: dict[str, Any]
    prompts: list[Any]  # of the rows, in the order of the samples
    contexts: list[TokenContexts]


@pytest.fixture
def make_batch(make_config, tmp_path):
    """A function that runs one rollout; other options are those of `make_config`."""

    def make(family="Qwen2_5_VL", image_rows=None, peft_config=None, environment_factory=None, **options):
        image_rows = rows() if image_rows is None else image_rows
        model, processor = build_vlm(family)
        common = {"num_generations": 2, "per_device_train_batch_size": 2 * len(image_rows), "loss_type": "grpo"}
        common |= {"contrastive_coef": 0.3, "distillation_topk": 5, "max_reprompt_len": 512}
        config = make_config(**common | options)
        if config.beta:  # TRL loads the reference model
            model.save_pretrained(tmp_path / "model")
            model.config._name_or_path = str(tmp_path / "model")
        dataset = Dataset.from_list(image_rows)
        remaining = {"peft_config": peft_config, "environment_factory": environment_factory}
        trainer = CreditTrainer(model, image_verdicts, config, dataset, processing_class=processor, **remaining)
        if config.teacher_model_kind != "live":
            move(trainer.teacher.named_weights().values())
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        seen = []
        build = trainer._build_contexts
        trainer._build_contexts = lambda batch: seen.append(build(batch)) or seen[-1]
        inputs = trainer._generate_and_score_completions([row for row in dataset for _ in range(2)])
        return Batch(trainer, inputs, [row for row in image_rows for _ in range(2)], seen[0])

    return make


def plain_logps(model: nn.Module, processor: Any, ids: list[int], images: list[Any], completion: list[int]) -> Tensor:
    """(t, V) log-probabilities of a completion, by the processor's own tensors and a pass over one sequence."""
    input_ids = torch.tensor([ids + completion])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if images:
        image_inputs = processor(images=[images], text=[processor.image_token * len(images)], return_tensors="pt")
        inputs |= {name: image_inputs[name] for name in image_inputs.keys() - inputs.keys()}
        for name in inputs.keys() & {"mm_token_type_ids", "token_type_ids"}:
            inputs[name] = (input_ids == model.config.image_token_id).long()
    return model(**inputs).logits[0, len(ids) - 1 : -1].log_softmax(-1)


def shown(batch: Batch, ids: list[int], k: int) -> list[Any]:
    """Images of the k-th prompt of a sample, or of the student's where k is 0, by the question in its ids."""
    text = batch.trainer._tokenizer.decode(ids)
    [row] = [i for i in range(4) if f"What is {i}?" in text]
    source = batch.trainer.args.contrastive_source if k else "batch"
    if source == "without_images":
        return []
    return rows()[{0: 3, 3: 0}[row] if source == "other_images" else row]["images"]


def plain_loss(batch: Batch, images_read=shown) -> Tensor:
    """Lines 2 to 7 of Algorithm 1; `read` gives the images of a prompt, see `shown`."""
    config, processor = batch.trainer.args, batch.trainer.processing_class
    policy = batch.trainer.model
    losses = []
    for i, sample_contexts in enumerate(batch.contexts):
        length = int(batch.inputs["completion_mask"][i].sum())
        completion = batch.inputs["completion_ids"][i, :length].tolist()
        student = batch.inputs["prompt_ids"][i][batch.inputs["prompt_mask"][i].bool()].tolist()
        p = plain_logps(policy, processor, student, images_read(batch, student, 0), completion)
        with torch.no_grad(), batch.trainer.teacher.active() as teacher:
            f, *g = (
                plain_logps(teacher, processor, ids, images_read(batch, ids, k), completion)
                for k, (ids, _) in enumerate(sample_contexts.sequences())
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
    assert [len(sample_contexts.contrasts) for sample_contexts in batch.contexts]
    model = batch.trainer.model
    ours, theirs = batch.trainer.compute_loss(model, batch.inputs), plain_loss(batch)
    assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)
    actual, expected = gradients(ours, model), gradients(theirs, model)
    assert actual.keys() == expected.keys()
    assert any("vis" in name for name in expected) or "peft_config" in options
    difference = torch.cat([(actual[name] - gradient).flatten() for name, gradient in expected.items()]).norm()
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert difference <= size * 1e-9


class Pictures:
    """An environment whose observation is a picture."""

    def reset(self, answer, **row):
        return [{"type": "image", "image": picture(int(answer))}]


def test_images_of_an_environment_are_read_by_teacher_and_contrast(make_batch, monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.supports_tool_calling", lambda processor: True)  # it has no tools
    batch = make_batch(image_rows=rows((0, 0, 0, 0)), environment_factory=Pictures)

    def observed(batch, ids, k):
        text = batch.trainer._tokenizer.decode(ids)
        return [picture(i) for i in range(4) if f"What is {i}?" in text]

    loss = batch.trainer.compute_loss(batch.trainer.model, batch.inputs)
    assert_close(loss.detach(), plain_loss(batch, observed).detach(), rtol=1e-12, atol=1e-12)


def test_pictures_of_equal_size_and_text_are_told_apart(make_batch):
    batch = make_batch(image_rows=rows((1, 1), sizes=((24, 24),), same_text=True))
    first_contexts, second = batch.contexts[0], batch.contexts[2]
    assert first_contexts.teacher == first_contexts.contrasts[0]  # by their ids
    pixels = [
        [prompt_images.tensors["pixel_values"] for prompt_images in sample_contexts.images]
        for sample_contexts in (first_contexts, second)
    ]
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


@pytest.mark.parametrize(("family", "bos"), [("Qwen2_5_VL", None), ("Gemma3", None), ("Gemma3", SPECIAL[-1])])
def test_contexts_are_what_the_processor_forms_of_the_whole_text(make_batch, family, bos):
    """With a feedback that it may read: images keep their places, and the template surrounds the text parts."""
    batch = make_batch(family)
    builder, processor = batch.trainer.context_builder, batch.trainer.processing_class
    if bos is not None:  # which the processor adds, also to text alone
        number = processor.tokenizer.convert_tokens_to_ids(bos)
        added = TemplateProcessing(f"{bos} $A", None, [(bos, number)])
        processor.tokenizer.bos_token = bos
        processor.tokenizer.backend_tokenizer.post_processor = added
        text = [{"role": "user", "content": "No picture"}]
        assert batch.trainer._tokenize_prompts([text])[0] == [ids := builder.encode(text, PrivilegedContext())]
        assert (ids[0], ids.count(number)) == (number, 1)
    parts = [{"type": "text", "text": "In"}, {"type": "image", "image": picture(1)}, {"type": "text", "text": "what?"}]
    prompt = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": parts},
    ]
    z = PrivilegedContext(feedback="It is red.")
    feedback_text = batch.trainer.args.feedback_template.format(feedback_raw=z.feedback)
    end = batch.trainer.args.reprompt_template.format(prompt="", solution="", feedback=feedback_text)
    messages = [*prompt[:2], {"role": "user", "content": [*parts, {"type": "text", "text": end}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
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


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_marks_of_a_processors_template_are_those_of_the_run(make_config, weight):
    model, processor = build_vlm("Qwen2_5_VL")
    processor.chat_template += "{# <mm:think> and </mm:think> #}"
    config = make_config(distillation_weight=weight, num_generations=2)
    trainer = CreditTrainer(model, image_verdicts, config, Dataset.from_list(rows()), processing_class=processor)
    [response] = TransformersEngine(model, processor).generate([rows()[0]["prompt"]], [0], SamplingConfig(2))
    assert trainer.context_builder.marks == response.marks == (("<mm:think>", "</mm:think>"),)


@pytest.fixture
def train(make_config, tmp_path):
    """A function that trains on images in fp64, in a folder, and returns the trainer."""

    def run(name, resume=None, shows=False, **options):
        model, processor = build_vlm(options.pop("family", "Qwen2_5_VL"))
        common = {"output_dir": str(tmp_path / name), "num_generations": 2, "per_device_train_batch_size": 4}
        common |= {"gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 1e-2, "max_grad_norm": 0.0}
        config = make_config(**common | {"max_steps": 1, "teacher_update_rate": 0.2} | options)
        dataset = Dataset.from_list(rows())
        evaluated = dataset if config.eval_strategy != "no" else None
        trainer = CreditTrainer(model, image_verdicts, config, dataset, evaluated, processing_class=processor)
        if shows:
            trainer.add_callback(CreditMapCallback(trainer, every=1, rollouts=8))
            trainer.add_callback(ReportCallback(trainer))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def assert_same_weights(trainer, expected_trainer, tolerance):
    for (name, ours), theirs in zip(
        trainer.model.named_parameters(), expected_trainer.model.parameters(), strict=True
    ):
        assert_close(ours, theirs, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def test_micro_batches_give_the_same_weights(train):
    """However TRL's shuffled generation batch is split; a sample's images stay with it."""
    unsplit = train("whole", per_device_train_batch_size=8, gradient_accumulation_steps=1)
    start, _ = build_vlm("Qwen2_5_VL")
    pairs = zip(unsplit.model.parameters(), start.parameters(), strict=True)
    assert any((trained - untrained).abs().max() > 1e-5 for trained, untrained in pairs)
    assert_same_weights(unsplit, train("split"), 1e-10)


def test_run_resumed_inside_a_generation_batch_is_equal_bitwise(train, tmp_path):
    options = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4, "distillation_weight": 0.5}
    options |= {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1}
    options |= {"family": "Gemma3", "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    uninterrupted = train("whole", **options)
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in uninterrupted.state.log_history if "loss" in row)
    assert any("eval_loss" in row for row in uninterrupted.state.log_history)
    shutil.copytree(tmp_path / "whole" / "checkpoint-1", tmp_path / "resumed" / "checkpoint-1")
    resumed = train("resumed", resume=True, **options)
    assert resumed.state.global_step == 4
    assert_same_weights(uninterrupted, resumed, 0.0)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "LlavaNext", "Idefics3"])
def test_stored_log_probabilities_are_those_of_plain_passes(make_batch, family):
    """Of the policy, for the ratio, and of the reference model of GRPO's KL penalty; both losses read the images."""
    batch = make_batch(family, distillation_weight=0.5, beta=0.1, num_iterations=2, per_device_train_batch_size=4)
    trainer, inputs = batch.trainer, batch.inputs
    for i, ids in enumerate(inputs["prompt_ids"]):
        length = int(inputs["completion_mask"][i].sum())
        completion = inputs["completion_ids"][i, :length]
        prompt = ids[inputs["prompt_mask"][i].bool()].tolist()
        images = batch.prompts[i]["images"]
        with torch.no_grad():
            plain = plain_logps(trainer.model, trainer.processing_class, prompt, images, completion.tolist())
        expected = plain.gather(1, completion[:, None]).squeeze(1)
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            assert_close(inputs[name][i, :length].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(trainer.compute_loss(trainer.model, inputs))


@pytest.mark.parametrize("family", ["Qwen3VL", "Idefics3"])
def test_the_tower_encodes_each_prompts_images_once_in_scoring(make_batch, family, monkeypatch):
    """Four prompts with four images, two rollouts and two contrasts each: 36 images are read, in three lists."""
    batch = make_batch(family, contrastive_count=2, scoring_batch_tokens=128)
    trainer = batch.trainer
    calls, sent = [], []
    reads = Mock(wraps=passes.model_inputs)
    monkeypatch.setattr(passes, "model_inputs", reads)
    monkeypatch.setattr(gather, "gather_object", lambda local: sent.append(pickle.dumps(local)) or local)
    trainer.credit_step.build_contexts(trainer._generation_batch)
    images = {image.tobytes() for row in rows() for image in row["images"] or ()}
    assert [sent[0].count(image) for image in images] == [1] * len(images)  # of two rollouts
    with trainer.teacher.active() as teacher:
        tower = teacher.model
        encode = tower.get_image_features

        @wraps(encode)
        def counted(*arguments, **options):
            calls.append(1)
            return encode(*arguments, **options)

        monkeypatch.setattr(tower, "get_image_features", counted)
        scores = trainer.credit_step.prepare(trainer._generation_batch, batch.inputs, batch.contexts)
    assert len(calls) == 3
    for _, ids, *_ in (call.args for call in reads.call_args_list):  # with the tokens of images
        assert len(ids) * max(map(len, ids)) <= 128 or len(ids) == 1
    for name, values in scores.items():
        assert_close(values, batch.inputs[name], rtol=1e-9, atol=1e-9)  # of larger passes


def test_frozen_tower_is_shared_with_the_teacher_and_not_stored():
    model, _ = build_vlm("Gemma3")
    model.model.vision_tower.requires_grad_(False)
    teacher = make_teacher("ema", model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    teacher_parameters = dict(teacher.model.named_parameters())
    assert frozen
    assert all((teacher_parameters[name] is p) == (name in frozen) for name, p in model.named_parameters())
    assert teacher.named_weights().keys() == teacher_parameters.keys() - frozen
    move(p for p in model.parameters() if p.requires_grad)
    teacher.update(0.5)
    assert all(p.requires_grad for name, p in model.named_parameters() if name not in frozen)


def test_another_vlm_is_a_teacher_and_a_text_model_is_refused(make_batch, tmp_path):
    model, processor = build_vlm("Qwen3VL", seed=3)
    model.save_pretrained(tmp_path / "vlm")
    processor.tokenizer.save_pretrained(tmp_path / "vlm")
    options = {"teacher_model_kind": "model", "teacher_model_name_or_path": str(tmp_path / "vlm")}
    batch = make_batch("Qwen3VL", teacher_model_init_kwargs={"dtype": "float64"}, **options)
    loss = batch.trainer.compute_loss(batch.trainer.model, batch.inputs)
    assert_close(loss.detach(), plain_loss(batch).detach(), rtol=1e-6, atol=1e-6)
    build_model(processor.tokenizer).save_pretrained(tmp_path / "text")
    processor.tokenizer.save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="`Qwen3ForCausalLM` has no vision tower"):
        make_batch("Qwen3VL", **options | {"teacher_model_name_or_path": str(tmp_path / "text")})


@pytest.mark.parametrize(("options", "message"), TABLES["refusals"], ids=str)
@pytest.mark.parametrize("streams", [False, True])
def test_what_cannot_train_is_refused_before_the_loss(make_config, monkeypatch, options, message, streams):
    """Datasets at construction, streams at the first batch."""
    options = dict(options)
    model, processor = build_vlm("Qwen2_5_VL")
    image_rows = rows(options.pop("counts", (1, 1)))
    if parts := options.pop("parts", None):
        options["prompt"] = [{"role": "user", "content": [{"type": kind} for kind in parts]}]
    if prompt := options.pop("prompt", None):
        image_rows = [row | {"prompt": prompt} for row in image_rows]
    if template := options.pop("template", None):
        processor.chat_template = processor.tokenizer.chat_template = template
    if name := options.pop("output", None):
        call = type(processor).__call__

        def with_another(self, *arguments, **call_options):
            return BatchFeature({**call(self, *arguments, **call_options), name: torch.zeros(1)})

        monkeypatch.setattr(type(processor), "__call__", with_another)
    arguments = processor.tokenizer if options.pop("tokenizer", False) else processor
    if options.pop("sharded", False):
        monkeypatch.setattr(checks, "is_zero3", lambda accelerator: True)
    dataset = Dataset.from_list(image_rows)
    at_batch = streams or "contrastive_source" in options
    if streams:
        dataset = IterableDataset.from_generator(lambda: iter(image_rows))
    monkeypatch.setattr(CreditTrainer, "_distillation_loss", lambda *arguments: pytest.fail("the loss was computed"))
    config = make_config(num_generations=2, per_device_train_batch_size=4, **options)
    if not at_batch:
        monkeypatch.setattr(GRPOTrainer, "_generate", lambda *arguments: pytest.fail("a completion was generated"))
    with pytest.raises(ValueError, match=message):
        CreditTrainer(model, image_verdicts, config, dataset, processing_class=arguments).train()


class Web(ThreadingHTTPServer):
    """A server on loopback that has no page, and the paths that were asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.send_error(404)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def web():
    with Web() as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def with_address(form: str, web: Web) -> Dataset:
    """Two rows, of which the second has the address of an image."""
    row = json.loads(json.dumps(TABLES["addresses"][form]).replace("{port}", str(web.server_port)))
    typed = row.pop("typed", None)
    local = json.loads(json.dumps(row).replace(row_address(row), "picture.png"))
    plain = {"prompt": rows((1,))[0]["prompt"], "answer": "0"}
    dataset = Dataset.from_list([plain | local, plain | row])
    if typed is None:
        return dataset
    return dataset.cast_column(typed, ImageFeature() if typed == "image" else List(ImageFeature()))


def row_address(row: dict[str, Any]) -> str:
    return remote_image(row.get("prompt", []), [row.get("image"), row.get("images")])


@pytest.mark.parametrize("form", TABLES["addresses"])
@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_addresses_of_images_are_refused_and_not_fetched(make_config, web, form, weight):
    model, processor = build_vlm("Qwen2_5_VL")
    config = make_config(num_generations=2, per_device_train_batch_size=4, distillation_weight=weight)
    dataset = with_address(form, web)
    streams = [dataset.to_iterable_dataset()]
    if "typed" not in form:
        streams.append(IterableDataset.from_generator(lambda: iter(dataset)))
    for source in (dataset, *streams):
        with pytest.raises(ValueError, match=r"(?i)the address 'http://127.*Download it first"):
            CreditTrainer(model, image_verdicts, config, source, processing_class=processor).train()
    task = Task("pictures", lambda split, path=None: dataset, image_verdicts, image_verdicts)
    for read in (
        lambda: evaluate(model, task, k=1, tokenizer=processor),
        lambda: drop_long_prompts("training", dataset, processor, 99, {}),
    ):
        with pytest.raises(ValueError, match=r"(?i)the address 'http://127.*Download it first"):
            read()
    with_local_images(dataset.select([0]))  # without the row
    assert web.paths == []


@pytest.mark.parametrize(("source", "is_address"), TABLES["sources"])
def test_paths_and_encoded_pictures_are_no_addresses(source, is_address):
    assert remote_image([], [source]) == (source if is_address else None)


def test_paths_are_read_as_the_pictures(make_batch, tmp_path):
    pictures = rows()
    paths = [dict(row) for row in pictures]
    for row in paths:
        row["images"] = [str(tmp_path / f"{row['answer']}_{place}.png") for place in range(len(row["images"]))]
    for row, path_row in zip(pictures, paths, strict=True):
        for image, path in zip(row["images"], path_row["images"], strict=True):
            image.save(path)
    batches = [make_batch(image_rows=image_rows) for image_rows in (pictures, paths)]
    first, second = (batch.trainer.compute_loss(batch.trainer.model, batch.inputs) for batch in batches)
    assert torch.equal(first, second)


def test_maps_and_report_show_the_pictures_of_prompt_and_contrast(train, tmp_path):
    """Maps score with the pictures; a data URL of each is stored, and the page shows nothing else."""
    train("run", shows=True, max_steps=2, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    page = (tmp_path / "run" / "report.html").read_text()
    document = json.loads(re.search(r"id=.data.>(.*?)</script>", page)[1])
    stored_maps = read_maps(tmp_path / "run" / "credit_maps" / "step-000001.json")
    assert len(stored_maps) == 8
    for token_map in stored_maps:
        texts = (user_text(token_map.response.prompt), *token_map.response.contrasts)
        for text, urls in zip(texts, token_map.response.images, strict=True):
            [row] = [row for i, row in enumerate(rows()) if f"What is {i}?" in text]
            assert list(urls) == list(map(data_url, row["images"]))
    image = picture(1)
    stored = Image.open(BytesIO(base64.b64decode(data_url(image).partition(",")[2])))
    assert stored.tobytes() == image.tobytes()
    assert {len(response["images"]) for response in document["maps"]["responses"]} == {2}
    assert sorted(len(token_map["images"]) for token_map in document["rollouts"][:8]) == [0, 0, 1, 1, 1, 1, 2, 2]
    assert data_url("http://picture.png") == ""


def test_table_of_completions_has_thumbnails_and_the_console_sizes(make_batch, monkeypatch, capsys):
    """In the table of TRL's dashboards, with this package's columns; `log_multimodal=False` keeps them out."""
    tables = []
    backend = SimpleNamespace(run=True, Image=lambda image: image.size, Table=lambda dataframe: dataframe)
    backend.log = lambda logs: tables.append(logs["completions"])
    monkeypatch.setattr("trl.trainer.grpo_trainer.wandb", backend, raising=False)
    for logs_images in (True, False):
        batch = make_batch(
            image_rows=rows(sizes=((24, 16), (512, 256))), log_completions=True, log_multimodal=logs_images
        )
        batch.trainer.args.report_to = ["wandb"]
        batch.trainer.log({})
    assert list(tables[0]["image"])[::2] == [[(24, 16)], [], [(256, 128), (24, 16)], [(256, 128)]]
    assert {"feedback", "teacher_prompt", "s_mean"} <= {*tables[0]}
    assert "image" not in tables[1]
    assert "user: [image 24×16] What is 0?" in capsys.readouterr().out


class FakeEngine:
    """A colocated engine and a server's client of TRL, which check the images of each prompt that they get.

    As vLLM does, the engine expands one placeholder for each image, and the server reads expanded prompts.
    """

    def __init__(self) -> None:
        self.processor = build_vlm("Qwen2_5_VL")[1]
        self.tokenizer = self.processor.tokenizer
        self.soft = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.read = 0
        self.llm_engine = self
        self.features_are_dropped = False
        self.reset_encoder_cache = partial(setattr, self, "features_are_dropped", True)

    def check(self, ids: list[int], images: list[Any], options: dict[str, Any]) -> None:
        [row] = [row for i, row in enumerate(rows()) if f"What is {i}?" in self.tokenizer.decode(ids)]
        assert [image.tobytes() for image in images] == [image.tobytes() for image in row["images"]]
        runs = [a != self.soft == b for a, b in pairwise(ids)]
        assert sum(runs) == len(images)
        assert options["logit_bias"][self.soft] == -100.0
        self.read += len(images)

    def expanded(self, ids: list[int], images: list[Any]) -> list[int]:
        assert ids.count(self.soft) == len(images)
        text = self.tokenizer.decode(ids)
        return self.processor(images=[images], text=[text])["input_ids"][0] if images else ids

    def completion(self, i: int) -> list[int]:
        return self.tokenizer(f"A{i % 3}")["input_ids"] + [self.tokenizer.eos_token_id]

    def generate(self, prompts, sampling_params=None, features=None, **options) -> Any:
        outputs = []
        assert self.features_are_dropped  # by earlier weights
        if sampling_params is not None:  # colocated, with one prompt for each rollout
            for i, prompt in enumerate(prompts):
                images = prompt.get("multi_modal_data", {}).get("image", [])
                images = images if isinstance(images, list) else [images]
                self.check(prompt["prompt_token_ids"], images, vars(sampling_params))
                expanded_ids = self.expanded(prompt["prompt_token_ids"], images)
                logprobs = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in self.completion(i)]
                output = SimpleNamespace(token_ids=self.completion(i), logprobs=logprobs)
                outputs.append(SimpleNamespace(prompt_token_ids=expanded_ids, outputs=[output]))
            return outputs
        for ids, feature in zip(prompts, features, strict=True):
            self.check(ids, feature["images"] if feature else [], options["generation_kwargs"])
        completions = [self.completion(i) for i in range(len(prompts) * options["n"])]
        logprobs = [[[-1.0] for _ in completion] for completion in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}

    def image_features(self, all_images: list[list[Any] | None]) -> list[dict[str, Any] | None]:
        return [
            prompt_images and {"images": prompt_images, "mm_placeholders": {"image": [None] * len(prompt_images)}}
            for prompt_images in all_images
        ]

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_an_engine_gets_the_images_of_each_prompt(make_batch, monkeypatch, mode):
    engine = FakeEngine()
    fakes = {
        "LLM": lambda **options: engine,
        "VLLMClient": lambda *arguments, **options: engine,
        "SamplingParams": SimpleNamespace,
    }
    fakes["VLLMGeneration.sync_weights"] = lambda self: None
    for name, fake in fakes.items():
        monkeypatch.setattr(f"trl.generation.vllm_generation.{name}", fake, raising=False)
    monkeypatch.setattr("credit_trl.rollout.vllm.WatchedClient.adopt", lambda client, patience: client)
    batch = make_batch(use_vllm=True, vllm_mode=mode)
    assert engine.read == (8 if mode == "colocate" else 4)
    loss = batch.trainer.compute_loss(batch.trainer.model, batch.inputs)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Gemma3", "Idefics3"])
def test_avg_at_k_samples_what_the_model_says_of_the_images(family, tmp_path):
    """Greedy answers to prompts with 0, 1 and 2 images are those of the processor's own tensors, one at a time."""
    model, processor = build_vlm(family)
    seen = []

    def verdicts(completions, images, prompts, **columns):
        seen.extend(zip([completion[-1]["content"] for completion in completions], images, prompts, strict=True))
        return [1.0] * len(completions)

    task = Task("pictures", lambda split, path=None: rows(), verdicts, verdicts)
    options = {"temperature": 0.0, "max_completion_length": 5, "batch_size": 3, "progress": False}
    result = evaluate(model, task, k=2, tokenizer=processor, output_dir=tmp_path, **options)
    assert (result.score, len(seen)) == (1.0, 8)
    for row, (text, images, prompt) in zip(rows(), seen[::2], strict=True):
        assert images_of(prompt) == images == row["images"]
        rendered = processor.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        ids = list(processor(images=[images] if images else None, text=[rendered])["input_ids"][0])
        said: list[int] = []
        while len(said) < 5 and processor.tokenizer.eos_token_id not in said:
            said.append(int(plain_logps(model, processor, ids, images, [*said, 0])[-1].argmax()))
        assert text == processor.tokenizer.decode(said, skip_special_tokens=True)
    swapped_task = Task("pictures", lambda split, path=None: rows(sizes=SIZES[::-1]), verdicts, verdicts)
    with pytest.raises(ValueError, match=r"holds another evaluation \(data: "):
        evaluate(model, swapped_task, k=2, tokenizer=processor, output_dir=tmp_path, **options)
    with pytest.raises(ValueError, match="Pass the processor of the model"):
        evaluate(model, task, k=1, tokenizer=processor.tokenizer, **options)
