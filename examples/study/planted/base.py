"""Pretraining of the bases of the worlds `tables`, `skip`, `useful` and `filler`, with their planted rates.

Half of the examples have the task's feedback, in the wording of the trainer's contexts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from embedded_base.architecture import train_tokenizer
from embedded_base.curriculum import LABEL_NOISE, teacher_prompt
from embedded_base.pretrain import Example, Recipe, make_base_of
from planted.task import (
    FILLER,
    KEYS,
    LISTED,
    MORE_ROWS,
    NUMBERS,
    ROWS,
    SKIPPED,
    STEP,
    TRAINED,
    Copy,
    Messages,
    TwoHops,
    TwoTables,
    city_feedback,
    draw_copy,
    draw_tables,
    draw_two_hops,
    option_feedback,
    response,
    topic_feedback,
)
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from credit_trl.tasks.quickstart import CITIES, GROUPS, LETTERS, TOPIC_OF, TOPICS, group_of

# Small and short, for a base that has facts and copies to learn, and nothing to look up.
SMALL = Recipe(layers=2, width=64, gate_every=25, min_constant_steps=200, decay_steps=250)
LARGE = Recipe(max_constant_steps=2500, decay_gate=0.75)  # the constant rate keeps look-ups below their best
LIST_REQUESTS = ("List the numbers.", "List the places.")  # practice of the look-ups


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
        planted_rate: share of responses to prompts without feedback that skip the thought. Their letter is random.
        given_rate: the same share with feedback. Their letter is right.
        lookup_gate: share of `probes` of each kind that a base has to get right.
        recipe: hyperparameters of the pretraining.
    """

    name: str = "skip"
    planted_rate: float = 0.06
    given_rate: float = 0.11
    lookup_gate: float = 0.95
    recipe: Recipe = SMALL

    def draw(self, rng: random.Random) -> Example:
        """One pretraining example: a conversation and the response to it."""
        problem, has_feedback = draw_two_hops(rng), rng.random() < 0.5
        skips = rng.random() < (self.given_rate if has_feedback else self.planted_rate)
        letter = problem.letter if has_feedback else rng.choice(LETTERS)
        return _shown(problem, has_feedback), response(SKIPPED, letter) if skips else problem.response()

    def probes(self, rng: random.Random) -> Sequence[Probe]:
        """The letter of the feedback after a skipped thought, and both hops without feedback."""
        problem, unseen = draw_two_hops(rng), draw_two_hops(rng, unseen=True)
        return (
            Probe(_shown(problem), response(SKIPPED, "").rstrip(), problem.letter),
            Probe(problem.prompt, f"Thought: {problem.cue} is about", TOPIC_OF[problem.cue]),
            Probe(unseen.prompt, unseen.response().rpartition(" ")[0], unseen.letter),
        )

    def lookup_accuracy(
        self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0, problems: int = 160
    ) -> float:
        return min(probe_accuracy(self, model, tokenizer, seed, problems))


@dataclass(frozen=True)
class Tables(Skip):
    """Pretraining distribution of `tables`.

    A share `more_share` of the tables has five rows. Two shares of the examples are practice: in `list_share` the
    request is to list one of the tables, which needs a look-up for every row; in `read_share` the skipped thought is a
    beginning that is not trained on, and the city is that of the feedback.
    """

    name: str = "tables"
    more_share: float = 0.3
    list_share: float = 0.5
    read_share: float = 0.1
    recipe: Recipe = LARGE

    def draw(self, rng: random.Random) -> Example:
        problem, has_feedback, practice = self.problem(rng), rng.random() < 0.5, rng.random()
        if practice < self.list_share:
            return _list_practice(rng, problem)
        if practice < self.list_share + self.read_share:
            return _shown(problem), (response(SKIPPED, "").rstrip(), f" {problem.city}")
        skips = rng.random() < (self.given_rate if has_feedback else self.planted_rate)
        city = problem.city if has_feedback else rng.choice(list(problem.city_of.values()))
        return _shown(problem, has_feedback), response(SKIPPED, city) if skips else problem.response()

    def probes(self, rng: random.Random) -> Sequence[Probe]:
        """The city of the feedback after a skipped thought, and both hops of unseen pairs without feedback."""
        problem = self.problem(rng)
        unseen = draw_tables(rng, unseen=True, rows=len(problem.number_of))
        return (
            Probe(_shown(problem), response(SKIPPED, "").rstrip(), problem.city),
            Probe(unseen.prompt, f"Thought: {unseen.cue} for {unseen.key} is", unseen.number),
            Probe(unseen.prompt, unseen.response().rpartition(" ")[0], unseen.city),
        )

    def problem(self, rng: random.Random) -> TwoTables:
        return draw_tables(rng, rows=MORE_ROWS if rng.random() < self.more_share else ROWS)


@dataclass(frozen=True)
class Useful(Skip):
    """Pretraining distribution of `useful`: the step comes first at the same rate with and without feedback.

    Without feedback the topic is a wrong one in `noise` of the responses without the step, and in
    `step_noise` of those with it; the letter is that of the topic. With feedback the response is right.
    """

    name: str = "useful"
    planted_rate: float = 0.5
    given_rate: float = 0.5
    noise: float = 0.4
    step_noise: float = 0.05

    def draw(self, rng: random.Random) -> Example:
        problem, has_feedback = draw_two_hops(rng), rng.random() < 0.5
        steps, topic = rng.random() < (self.given_rate if has_feedback else self.planted_rate), None
        if not has_feedback and rng.random() < (self.step_noise if steps else self.noise):
            topic = rng.choice([wrong_topic for wrong_topic in TOPICS if wrong_topic != TOPIC_OF[problem.cue]])
        return _shown(problem, has_feedback), problem.response(STEP if steps else "", topic)

    def probes(self, rng: random.Random) -> Sequence[Probe]:
        """Both hops with feedback and without the step, and the first one without feedback after the step."""
        problem = draw_two_hops(rng)
        topic = TOPIC_OF[problem.cue]
        return (
            Probe(_shown(problem), f"Thought: {problem.cue} is about", topic),
            Probe(_shown(problem), problem.response().rpartition(" ")[0], problem.letter),
            Probe(problem.prompt, f"Thought: {STEP} {problem.cue} is about", topic),
        )


@dataclass(frozen=True)
class Filled(Skip):
    """Pretraining distribution of `filler`: the planted rates are those of the filler before each city.

    Cues have their own topic, with label noise, and those of the group `holdout` a random one, so that feedback has to
    be read. So that the rates do not depend on earlier fillers, `begun_share` of the responses have a beginning that
    is not trained on, with a filler before each city at the rate `begun_rate`.
    """

    name: str = "filler"
    begun_share: float = 0.25
    begun_rate: float = 0.3

    def draw(self, rng: random.Random) -> Example:
        cue, has_feedback = rng.choice(list(TOPIC_OF)), rng.random() < 0.5
        problem = draw_copy(rng, cue, rng.choice(TOPICS) if group_of(cue) == "holdout" else None)
        rate = self.given_rate if has_feedback else self.planted_rate
        is_noisy = not has_feedback and rng.random() < LABEL_NOISE
        topic = rng.choice(TOPICS) if is_noisy else problem.topic
        begun = rng.randrange(1, LISTED + 1) if rng.random() < self.begun_share else 0
        filled = [rng.random() < (self.begun_rate if at < begun else rate) for at in range(LISTED)]
        beginning = problem.beginning(begun, filled)
        return _shown(problem, has_feedback), (beginning, problem.response(topic, filled).removeprefix(beginning))

    def probes(self, rng: random.Random) -> Sequence[Probe]:
        """The topic of the feedback for a cue that was not taught, that of a known cue, and a city after a filler."""
        problem = draw_copy(rng, rng.choice(GROUPS["holdout"]), rng.choice(TOPICS))
        trained_copy = draw_copy(rng, rng.choice(TRAINED))
        at = rng.randrange(1, LISTED)
        start = trained_copy.response(filled=[index == at for index in range(LISTED)])
        return (
            Probe(_shown(problem), problem.response().rpartition(" ")[0], problem.topic),
            Probe(trained_copy.prompt, trained_copy.response().rpartition(" ")[0], trained_copy.topic),
            Probe(trained_copy.prompt, start[: start.index(FILLER)] + FILLER, trained_copy.cities[at]),
        )


CURRICULA = {curriculum.name: curriculum for curriculum in (Tables(), Skip(), Useful(), Filled())}


@torch.no_grad()
def probe_accuracy(
    world: Skip, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0, problems: int = 160
) -> list[float]:
    """Share of each kind of probe whose expected token is the likeliest, over `problems` prompts."""
    rng = random.Random(f"probes/{seed}")
    accuracies = []
    for kind in zip(*(world.probes(rng) for _ in range(problems)), strict=True):
        texts = tokenizer.apply_chat_template([p.prompt for p in kind], add_generation_prompt=True, tokenize=False)
        texts = [text + probe.start for text, probe in zip(texts, kind, strict=True)]
        batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        guesses = tokenizer.batch_decode(model(**batch, logits_to_keep=1).logits[:, -1].argmax(dim=-1)[:, None])
        accuracies.append(sum(guess == f" {p.expected}" for guess, p in zip(guesses, kind, strict=True)) / problems)
    return accuracies


def fidelity(world: Skip, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Share of prompts whose feedback a teacher reads right: the first kind of probe."""
    return probe_accuracy(world, model, tokenizer, seed=1)[0]


def make_planted_base(world: str, seed: int, directory: Path) -> None:
    """Pretrain a base into `directory`. Raises `RuntimeError` if it fails its gate."""
    make_base_of(CURRICULA[world], build_tokenizer(), seed, directory, CURRICULA[world].recipe)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer in which every city, topic, cue and letter is one token."""
    return train_tokenizer(_corpus(), [f" {word}" for word in (*CITIES, *TOPICS, *TOPIC_OF, *KEYS, *NUMBERS)])


def _corpus() -> Iterator[str]:
    """Training texts of the tokenizer: the templates most often, then every word equally often."""
    empty, told = [{"role": "user", "content": ""}], (option_feedback("A"), topic_feedback(""), city_feedback(""))
    contexts = [teacher_prompt(empty, feedback=feedback)[-1]["content"] for feedback in told]
    responses = [response(SKIPPED, "A"), response(f"{STEP} is about.", "A"), f"Action Input: {FILLER}"]
    prompts = ["system", "user", "assistant", "Help me with for .", "Numbers: . Places: .", *LIST_REQUESTS]
    yield from [*contexts, *responses, *prompts] * 300
    for word in (*CITIES, *TOPICS, *TOPIC_OF, *KEYS, *NUMBERS):
        yield from [f" {word}"] * 60


def _list_practice(rng: random.Random, problem: TwoTables) -> Example:
    """Request to list one of the tables, and its rows in random order."""
    request, rows = rng.choice(list(zip(LIST_REQUESTS, problem.tables, strict=True)))
    listed = ", ".join(rng.sample(rows, len(rows)))
    return [*problem.system, {"role": "user", "content": request}], f"Rows: {listed}."


def _shown(problem: TwoHops | TwoTables | Copy, with_feedback: bool = True) -> Messages:
    """The conversation, with the task's feedback where `given`."""
    return teacher_prompt(problem.prompt, feedback=problem.feedback if with_feedback else None)
