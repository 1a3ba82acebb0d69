"""Credit for what a picture shows: a tiny vision-language model learns to name the colour of a square.

    python examples/images.py --seed 0        # one to four minutes on a CPU

The model is made here. It names a random colour in most cases, and the right one where it is told to look again.
`CreditTrainer` distils what it sees with this feedback into the model without. The script prints the accuracy on new
pictures before and after, and the mean S_t of the words of the last rollouts. For a model of your own, pass it with
its processor, and rows whose column `images` has PIL images.
"""

import argparse
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch
import transformers
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from credit_trl import CreditConfig, CreditTrainer, Verdict
from credit_trl.contexts.prompts import with_images

COLOURS = {
    "red": 0xE02020,
    "green": 0x20A020,
    "blue": 0x2040E0,
    "yellow": 0xE0E020,
    "white": 0xF8F8F8,
    "black": 0x101010,
}
NAMES = list(COLOURS)
QUESTION, LOOK = "what colour is the square ?", "look again ."
SPECIAL = ["<pad>", "<end>", "<user>", "<bot>", "<image>"]
WORDS = [*SPECIAL, *"x the square is what colour ? look again .".split(), *NAMES]
TEMPLATE = (
    "{% for m in messages %}<user> {% for c in m['content'] %}{% if c['type'] == 'image' %}<image> {% else %}"
    "{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}<bot> "
)
SEEN = 0.25  # share of answers without feedback that are not random
COMMON = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
OPTIONS = {
    **{
        "max_steps": 40,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 64,
        "num_generations": 4,
        "logging_steps": 10,
        "teacher_model_kind": "ema",
    },
    **{"max_completion_length": 8, "distillation_topk": None, "use_successful_as_teacher": False},  # feedback only
    **{"reprompt_template": "{prompt}{solution}{feedback}", "feedback_template": " {feedback_raw}"},
    **{"report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False, "gradient_checkpointing": False},
}


def build_model():
    """A random LLaVA with a vocabulary of words, and its processor."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="x"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"pad_token": "<pad>", "eos_token": "<end>", "extra_special_tokens": SPECIAL[2:], "padding_side": "left"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    patches = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = transformers.LlavaProcessor(pixels, tokenizer, chat_template=TEMPLATE, **patches)
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    vision = transformers.CLIPVisionConfig(**COMMON, image_size=16, patch_size=8)
    text = transformers.Qwen3Config(**COMMON, **ends, head_dim=16, num_key_value_heads=4, vocab_size=len(tokenizer))
    parts = {"vision_config": vision, "text_config": text, "image_token_id": 4, "vision_feature_layer": -1}
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**parts))
    model.generation_config = transformers.GenerationConfig(**ends)
    return model, processor


def make_rows(rng, count: int) -> list[dict]:
    """Questions about squares somewhere in noise."""
    rows = []
    for colour in map(str, rng.choice(NAMES, count)):
        pixels = rng.integers(90, 160, (16, 16, 3), dtype=np.uint8)
        top, column = rng.integers(0, 7, 2)
        pixels[top : top + 9, column : column + 9] = [*COLOURS[colour].to_bytes(3, "big")]
        prompt = [{"role": "user", "content": QUESTION}]
        rows.append({"prompt": prompt, "images": [Image.fromarray(pixels)], "colour": colour})
    return rows


def pretrain(model, processor, rng, count: int = 3000, steps: int = 400) -> None:
    """Supervised training on answers that are right with `LOOK`, and mostly random without."""
    rows = make_rows(rng, count)
    said = [row["colour"] if i % 2 or rng.random() < SEEN else rng.choice(NAMES) for i, row in enumerate(rows)]
    asked = [f"<user> <image> {QUESTION} {LOOK * (i % 2)} <bot>" for i in range(count)]
    texts = [f"{question} the square is {colour} . <end>" for question, colour in zip(asked, said, strict=True)]
    data = processor(images=[row["images"] for row in rows], text=texts, padding=True, return_tensors="pt")
    is_answer = (data["input_ids"] == WORDS.index("<bot>")).cumsum(dim=1).bool()
    data["labels"] = data["input_ids"].masked_fill(~is_answer, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        chosen = torch.from_numpy(rng.choice(count, 64))
        model(**{name: values[chosen] for name, values in data.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def verifier(completions, colour, **columns) -> list[Verdict]:
    said = [completion[-1]["content"].split() for completion in completions]
    return [Verdict(float(right in words), LOOK) for words, right in zip(said, colour, strict=True)]


def is_right(model, processor, rows: list[dict]) -> np.ndarray:
    """Whether the model's answer to each row, sampled once, has the colour."""
    texts = [f"<user> <image> {QUESTION} <bot>"] * len(rows)
    inputs = processor(images=[row["images"] for row in rows], text=texts, return_tensors="pt")
    said = processor.batch_decode(model.eval().generate(**inputs, do_sample=True, max_new_tokens=8))
    return np.array([row["colour"] in answer.partition("<bot>")[2] for row, answer in zip(rows, said, strict=True)])


def mean_credit(step, batch, tensors, contexts) -> dict[str, float]:
    """Mean S_t of the right colours of some rollouts, of wrong ones, and of the words around them."""
    scores = step.prepare(batch, tensors, contexts)
    values_of = defaultdict(list)
    for i, ids in enumerate(batch.completion_ids):
        kinds = dict.fromkeys(NAMES, "wrong colour") | {batch.rows[i]["colour"]: "right colour"}
        specific = scores["teacher_token_logps"][i] - scores["generic_token_logps"][i]
        for token, value in zip(ids, specific.tolist(), strict=False):
            values_of[kinds.get(WORDS[token], "frame")].append(value)
    return {kind: round(float(np.mean(values)), 2) for kind, values in sorted(values_of.items())}


def main(seed: int, output_dir: str, **options) -> None:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model, processor = build_model()
    pretrain(model, processor, rng)
    train, test = Dataset.from_list(make_rows(rng, 512)), make_rows(rng, 300)
    accuracy_at_start = is_right(model, processor, test)
    config = CreditConfig(output_dir, seed=seed, **OPTIONS | options)
    trainer = CreditTrainer(model, verifier, config, train, processing_class=processor)
    step, scored = trainer.credit_step, []
    prepare = step.prepare
    step.prepare = lambda *arguments: scored.append(arguments) or prepare(*arguments)
    trainer.train()
    step.prepare = prepare
    gain = 100.0 * (is_right(model, processor, test).astype(float) - accuracy_at_start)
    margin = 1.96 * gain.std() / len(gain) ** 0.5
    print(f"accuracy {100 * accuracy_at_start.mean():.0f} %, after training {gain.mean():+.1f} ± {margin:.1f} points")
    batch, tensors, contexts = scored[-1]
    print("S_t with the picture:", mean_credit(step, batch, tensors, contexts))
    blind = step.build_contexts(replace(batch, prompts=[with_images(prompt, []) for prompt in batch.prompts]))
    pairs = zip(contexts, blind, strict=True)
    unseen = [
        replace(context, teacher=unrelated.teacher, images=[None, *context.images[1:]]) for context, unrelated in pairs
    ]
    print("S_t where the teacher does not see it:", mean_credit(step, batch, tensors, unseen))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", default="runs/images")
    main(**vars(parser.parse_args()))
