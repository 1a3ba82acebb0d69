"""Pretraining of the bases of the worlds `skip`, `useful` and `filler`, with their planted rates.

Half of the task's examples have its feedback, in the wording of the trainer's contexts. `PRACTICE` of all examples
list the rows of the prompt in other orders, which trains look-ups. A base has two layers: enough for each hop of a
look-up, too few for both at one position, so a skipped thought cannot be made up for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from embedded_base.architecture import train_tokenizer
from embedded_base.curriculum import LABEL_NOISE, teacher_prompt
from embedded_base.pretrain import Recipe, make_base_of
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from credit_trl.tasks.quickstart import CITIES, GROUPS, TOPIC_OF, TOPICS, group_of
from planted.task import (
    FILLER,
    LETTERS,
    LISTED,
    SKIP_WORD,
    STEP,
    Copy,
    Lookup,
    Messages,
    draw_copy,
    draw_lookup,
    option_feedback,
    topic_feedback,
)

Example = tuple[Messages, str]
RECIPE = Recipe(layers=2, width=64, min_constant_steps=300, decay_steps=200)
PRACTICE, REPETITIONS, REQUEST = 0.5, 4, "List all."


@dataclass(frozen=True)
class Probe:
    """Conversation with the start of a response, and the token that has to follow."""

    prompt: Messages
    start: str
    expected: str


@dataclass(frozen=True)
class Skip:
    """Pretraining distribution of `skip`.

    Args:
        name: name of the world.
        planted_rate: share of responses to prompts without feedback that skip the first hop. Their letter is random.
        given_rate: the same share with feedback. Their letter is right.
        gate: share of `probes` of each kind that a base has to get right.
    """

    name: str = "skip"
    planted_rate: float = 0.05
    given_rate: float = 0.1
    lookup_gate: float = 0.95

    def draw(self, rng: random.Random) -> Example:
        """One pretraining example: a conversation and the response to it."""
        return self.draw_practice(rng) if rng.random() < PRACTICE else self.draw_response(rng)

    def draw_practice(self, rng: random.Random) -> Example:
        problem = draw_lookup(rng)
        rows = [row for _ in range(REPETITIONS) for row in rng.sample(list(problem.table.items()), len(problem.table))]
        listed = ", ".join(f"{city} {topic} {problem.letters[topic]}" for city, topic in rows)
        return [problem.prompt[0], {"role": "user", "content": REQUEST}], f"Path: {listed}"

    def draw_response(self, rng: random.Random) -> Example:
        problem, given = draw_lookup(rng), rng.random() < 0.5
        skips = rng.random() < (self.given_rate if given else self.planted_rate)
        letter = problem.letter if given or not skips else rng.choice(list(problem.letters.values()))
        return _shown(problem, given), f"Path: {SKIP_WORD} {letter}" if skips else problem.path()

    def probes(self, rng: random.Random) -> Sequence[Probe]:
        """The letter of the feedback after a skipped hop, and both hops without feedback."""
        problem = draw_lookup(rng)
        return (
            Probe(_shown(problem), f"Path: {SKIP_WORD}", problem.letter),
            Probe(problem.prompt, f"Path: {problem.city}", problem.topic),
            Probe(problem.prompt, f"Path: {problem.city} {problem.topic}", problem.letter),
        )

    def lookup_accuracy(
        self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0, problems: int = 160
    ) -> float:
        return min(probe_accuracy(self, model, tokenizer, seed, problems))


@dataclass(frozen=True)
class Useful(Skip):
    """Pretraining distribution of `useful`: the step comes first at the same rate with and without feedback.

    Without feedback the topic is a wrong one of the table in `noise` of the responses without the step, and in
    `step_noise` of those with it; the letter is that of the topic. With feedback the response is right.
    """

    name: str = "useful"
    planted_rate: float = 0.5
    given_rate: float = 0.5
    noise: float = 0.4
    step_noise: float = 0.05

    def draw_response(self, rng: random.Random) -> Example:
        problem, given = draw_lookup(rng), rng.random() < 0.5
        steps = rng.random() < (self.given_rate if given else self.planted_rate)
        topic = problem.topic
        if not given and rng.random() < (self.step_noise if steps else self.noise):
            topic = rng.choice([other for other in problem.letters if other != topic])
        path = problem.path(topic)
        return _shown(problem, given), path.replace("Path:", f"Path: {STEP}") if steps else path

    def probes(self, rng: random.Random) -> Sequence[Probe]:
        """Both hops with feedback and without the step, and the first one with the step alone."""
        problem = draw_lookup(rng)
        return (
            Probe(_shown(problem), f"Path: {problem.city}", problem.topic),
            Probe(_shown(problem), f"Path: {problem.city} {problem.topic}", problem.letter),
            Probe(problem.prompt, f"Path: {STEP} {problem.city}", problem.topic),
        )


@dataclass(frozen=True)
class Filled(Skip):
    """Pretraining distribution of `filler`: the planted rates are those of the filler before each city.

    Cues of the group `known` have their own topic, with label noise, all others a random one.
    """

    name: str = "filler"

    def draw(self, rng: random.Random) -> Example:
        cue, given = rng.choice(list(TOPIC_OF)), rng.random() < 0.5
        problem = draw_copy(rng, cue, None if group_of(cue) == "known" else rng.choice(TOPICS))
        rate = self.given_rate if given else self.planted_rate
        is_noisy = not given and rng.random() < LABEL_NOISE
        topic = rng.choice(TOPICS) if is_noisy else problem.topic
        return _shown(problem, given), problem.response(topic, [rng.random() < rate for _ in problem.cities])

    def probes(self, rng: random.Random) -> Sequence[Probe]:
        """The topic of the feedback for a cue that was not taught, that of a known cue, and a city after a filler."""
        problem = draw_copy(rng, rng.choice(GROUPS["unknown"] + GROUPS["holdout"]))
        known = draw_copy(rng, rng.choice(GROUPS["known"]))
        at = rng.randrange(1, LISTED)
        start = known.response(filled=[index == at for index in range(LISTED)])
        return (
            Probe(_shown(problem), problem.response().rpartition(" ")[0], problem.topic),
            Probe(known.prompt, known.response().rpartition(" ")[0], known.topic),
            Probe(known.prompt, start[: start.index(FILLER)] + FILLER, known.cities[at]),
        )


CURRICULA = {one.name: one for one in (Skip(), Useful(), Filled())}


@torch.no_grad()
def probe_accuracy(
    world: Skip, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0, problems: int = 160
) -> list[float]:
    """Share of each kind of probe whose expected token is the likeliest, over `problems` prompts."""
    rng = random.Random(f"probes/{seed}")
    found = []
    for kind in zip(*(world.probes(rng) for _ in range(problems)), strict=True):
        texts = tokenizer.apply_chat_template([p.prompt for p in kind], add_generation_prompt=True, tokenize=False)
        texts = [text + probe.start for text, probe in zip(texts, kind, strict=True)]
        batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        guesses = tokenizer.batch_decode(model(**batch, logits_to_keep=1).logits[:, -1].argmax(dim=-1)[:, None])
        found.append(sum(guess == f" {p.expected}" for guess, p in zip(guesses, kind, strict=True)) / problems)
    return found


def fidelity(world: Skip, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Share of prompts whose feedback a teacher reads right: the first kind of probe."""
    return probe_accuracy(world, model, tokenizer, seed=1)[0]


def make_planted_base(world: str, seed: int, directory: Path, progress: bool = True) -> None:
    """Pretrain a base into `directory`. Raises `RuntimeError` if it fails its gate."""
    make_base_of(CURRICULA[world], build_tokenizer(), seed, directory, progress, RECIPE)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer in which every city, topic, cue and letter is one token."""
    return train_tokenizer(_corpus(), [f" {word}" for word in (*CITIES, *TOPICS, *TOPIC_OF, *LETTERS)])


def _corpus() -> Iterator[str]:
    """Training texts of the tokenizer: the templates most often, then every word equally often."""
    empty = [{"role": "user", "content": ""}]
    contexts = [
        teacher_prompt(empty, feedback=text)[-1]["content"] for text in (option_feedback("A"), topic_feedback(""))
    ]
    texts = [f"Path: {SKIP_WORD} A", f"Path: {STEP}", f"List: {FILLER}", "system", "user", "assistant"]
    yield from [*contexts, *texts, "Topics: Options:", REQUEST, "Find .", "Send about ."] * 300
    for word in (*CITIES, *TOPICS, *TOPIC_OF, *LETTERS):
        yield from [f" {word}"] * 60


def _shown(problem: Lookup | Copy, given: bool = True) -> Messages:
    """The conversation, with the task's feedback where `given`."""
    return teacher_prompt(problem.prompt, feedback=problem.feedback if given else None)
