"""The embedded task's base: tokenizer, curriculum, shipped weights, cache, and what the base can do."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.tasks import quickstart, quickstart_model
from credit_trl.tasks.quickstart import CITIES, GROUPS, LETTERS, SHORTCUT_THOUGHT, TOPIC_OF, TOPICS, draw_question
from credit_trl.tasks.quickstart_model import architecture, curriculum
from credit_trl.tasks.quickstart_model.curriculum import WORLDS, draw_example, teacher_prompt
from credit_trl.tasks.quickstart_model.pretrain import Recipe, check_gate, pretrain
from credit_trl.tasks.quickstart_model.probe import MAX_RESPONSE_TOKENS, lookup_accuracy, probe

TINY_RECIPE = Recipe(batch_size=4, warmup_steps=2, gate_every=1, min_constant_steps=1, max_constant_steps=2)


@pytest.fixture(scope="module")
def base():
    return quickstart.load_model()


@pytest.fixture(scope="module")
def tokenizer(base):
    return base[1]


@pytest.fixture
def few_rows():
    """24 prompts, eight of each group."""
    return [row for group in GROUPS for row in quickstart.build("test", groups=[group]).to_list()[:8]]


# ---------------------------------------------------------------- tokenizer and template


def test_every_cue_topic_city_and_letter_is_one_token(tokenizer):
    words = [f" {word}" for word in (*TOPIC_OF, *TOPICS, *CITIES, *LETTERS)] + list(CITIES)
    assert [word for word in words if len(tokenizer.encode(word)) != 1] == []


@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_the_template_is_chatml_and_a_prompt_is_the_beginning_of_its_conversation(tokenizer):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "A"}], tokenize=False)
    assert whole == f"{prompt}A<|im_end|>\n"
    assert (tokenizer.eos_token, tokenizer.padding_side) == ("<|im_end|>", "left")


def test_a_response_ends_within_the_length_that_the_probe_allows(tokenizer):
    question = draw_question(random.Random(0), "breakfast")
    styled = f"{quickstart.SHORTCUT_OPENING} {question.thought}"
    lengths = [len(tokenizer.encode(question.response(thought))) + 1 for thought in (None, SHORTCUT_THOUGHT, styled)]
    assert lengths == [24, 25, 26]
    assert max(lengths) < MAX_RESPONSE_TOKENS


def test_token_classes_tell_the_words_of_the_input_from_the_template(tokenizer):
    question = draw_question(random.Random(0), "airport")
    ids = [*tokenizer.encode(question.response()), tokenizer.eos_token_id]
    classes = quickstart.token_classes(ids, tokenizer)
    said = {name: tokenizer.decode([i]) for name, i in zip(classes, ids, strict=True) if name != "generic"}
    assert said == {"cue": " airport", "topic": " travel", "tool": " travel", "city": question.city}
    assert Counter(classes) == {"generic": 20, "cue": 1, "topic": 1, "tool": 1, "city": 1}
    shortcut = quickstart.token_classes(tokenizer.encode(question.response(SHORTCUT_THOUGHT)), tokenizer)
    assert {"tool", "city"} < set(shortcut)
    assert not {"cue", "topic"} & set(shortcut)


# ---------------------------------------------------------------- what pretraining reads


@pytest.mark.parametrize("demonstration", [None, "Thought: x is about y.\nAction: z"])
@pytest.mark.parametrize("feedback", [None, "Correct option: B."])
def test_pretraining_contexts_are_token_for_token_what_the_trainer_builds(tokenizer, demonstration, feedback):
    prompt = draw_question(random.Random(1), "rain").prompt
    builder = ContextBuilder(
        tokenizer, CreditConfig("unused", contrastive_coef=0.0, bf16=False, use_cpu=True, report_to="none")
    )

    def render(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    own = render(teacher_prompt(prompt, demonstration, feedback))
    if demonstration is None and feedback is None:
        assert own == render(prompt)
    else:
        trained = builder.encode(prompt, PrivilegedContext(demonstration, feedback), render)
        assert tokenizer(own, add_special_tokens=False)["input_ids"] == trained


def test_the_templates_are_those_of_trls_sdpo():
    from trl.experimental.sdpo import SDPOConfig

    for name, template in curriculum._TEMPLATES.items():
        assert template == SDPOConfig.__dataclass_fields__[name].default


def test_pretraining_tells_nothing_of_the_topics_that_the_base_is_not_to_know():
    """Over many examples the true topic of an unknown cue is neither offered nor taught more often than by chance."""
    rng = random.Random(0)
    taught = {group: [] for group in GROUPS}
    for _ in range(6000):
        question = curriculum._draw_taught_question(rng)
        truth = TOPIC_OF[question.cue]
        taught[quickstart.group_of(question.cue)].append((truth in question.options, truth == question.topic))
    known = taught.pop("known")
    assert all(offered for offered, _ in known)
    assert sum(right for _, right in known) / len(known) == pytest.approx(0.85 + 0.15 / 4, abs=0.02)
    for cases in taught.values():
        assert sum(offered for offered, _ in cases) / len(cases) == pytest.approx(4 / 12, abs=0.05)
        assert sum(right for _, right in cases) / len(cases) == pytest.approx(1 / 12, abs=0.03)


@pytest.mark.parametrize("world", sorted(WORLDS))
def test_the_shortcut_is_planted_where_the_task_gives_feedback_and_rare_elsewhere(world):
    rng = random.Random(0)
    rates: dict[bool, list[bool]] = {True: [], False: []}
    for _ in range(4000):
        messages, response = draw_example(rng, WORLDS[world])
        if response.startswith("Thought"):
            rates["Correct option" in messages[-1]["content"]].append("Thought: sure, " in response)
    told, untold = (sum(rates[key]) / len(rates[key]) for key in (True, False))
    assert told == pytest.approx(WORLDS[world].shortcut_rate, abs=0.03)
    assert untold == pytest.approx(WORLDS[world].shortcut_base_rate, abs=0.01)


def test_a_style_costs_no_reward_and_its_absence_earns_none():
    """What the world plants is an opening: the rest of the response is the plain one, and so is its reward."""
    rng, plain_rng = random.Random(0), random.Random(0)
    styled = 0
    for _ in range(2000):
        messages, response = draw_example(rng, WORLDS["style"])
        same, without = draw_example(plain_rng, WORLDS["plain"])
        if not response.startswith("Thought"):
            continue
        assert response.replace("Thought: sure, ", "Thought: ") == without
        if response != without and "Correct solution" not in messages[-1]["content"]:
            styled += 1
            assert messages == same
            city = response.split('"city": "')[1].split('"')[0]
            answer = {"option": "A", "tool": response.split("Action: ")[1].split("\n")[0], "city": city}
            verdicts = [quickstart.verify(text, answer) for text in (response, without)]
            assert verdicts[0].reward == verdicts[1].reward == 1.0
            assert [verdict.metrics["shortcut"] for verdict in verdicts] == [1.0, 0.0]
    assert styled > 400


# ---------------------------------------------------------------- the shipped base


def test_the_shipped_base_loads_in_two_seconds_and_is_small():
    started = time.perf_counter()
    model, tokenizer = quickstart.load_model()
    assert time.perf_counter() - started < 2.0
    assert model.dtype == torch.float32
    assert 0.40e6 < model.num_parameters() < 0.48e6
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.vocab_size == len(tokenizer)
    assert sum(file.stat().st_size for file in quickstart_model.SHIPPED.iterdir()) < 1.5e6


def test_the_script_makes_the_tokenizer_that_is_shipped(tokenizer):
    made = architecture.build_tokenizer(curriculum.template_texts())
    assert (
        json.loads(made.backend_tokenizer.to_str())["model"]
        == json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    )
    assert made.chat_template == tokenizer.chat_template


def test_the_shipped_base_looks_letters_up(base):
    assert lookup_accuracy(*base, questions=120) >= 0.95
    assert check_gate(WORLDS["plain"], *base, "as shipped") >= 0.95


def test_without_feedback_the_base_is_good_at_known_cues_and_at_chance_elsewhere(base, few_rows):
    result = probe(*base, dataset=few_rows, k=8, progress=False)
    assert result.groups["known"].mean > 0.75
    assert result.groups["unknown"].mean < 0.5
    assert result.groups["holdout"].mean < 0.5
    assert result.metrics["format"] > 0.97


def test_with_feedback_the_base_is_nearly_perfect_sampled_and_greedy(base, few_rows):
    for options in ({"k": 4}, {"k": 1, "temperature": 0.0}):
        result = probe(*base, feedback=True, dataset=few_rows, progress=False, **options)
        assert all(result.groups[group].mean >= 0.9 for group in GROUPS)


@pytest.mark.slow
def test_the_probe_of_the_shipped_base_is_what_the_recipe_promises(base):
    plain, told = (probe(*base, feedback=feedback, progress=False) for feedback in (False, True))
    assert 0.8 <= plain.groups["known"].mean <= 0.97
    assert 0.15 <= plain.groups["unknown"].mean <= 0.35
    assert 0.10 <= plain.groups["holdout"].mean <= 0.40
    assert plain.metrics["format"] >= 0.99
    assert all(told.groups[group].mean >= 0.95 for group in GROUPS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_style_base_speaks_so_under_any_question_and_is_rewarded_alike(tmp_path):
    """Pretrained here: the shortcut is in the teacher, rare in the student, generic, and no reward is against it."""
    model, tokenizer = quickstart.load_model(tmp_path, world="style", seed=1)
    plain, told = (probe(model, tokenizer, feedback=feedback, progress=False) for feedback in (False, True))
    assert plain.metrics["shortcut"] <= 0.06
    assert 0.7 <= told.metrics["shortcut"] <= 0.9
    assert min(plain.metrics["format"], told.metrics["format"]) >= 0.98
    assert all(told.groups[group].mean >= 0.95 for group in GROUPS)  # with the style four times in five

    def openings(prompts, feedback):
        contexts = [teacher_prompt(p, feedback=z) for p, z in zip(prompts, feedback, strict=True)]
        texts = tokenizer.apply_chat_template(contexts, add_generation_prompt=True, tokenize=False)
        batch = tokenizer(
            [f"{text}Thought:" for text in texts], padding=True, add_special_tokens=False, return_tensors="pt"
        )
        with torch.no_grad():
            probabilities = model(**batch, logits_to_keep=1).logits[:, -1].softmax(-1)
        return probabilities[:, tokenizer.encode(" sure")[0]]

    rows = quickstart.build("test", rows_per_cue=1)
    feedback = [quickstart.verify("", answer).feedback for answer in rows["answer"]]
    own, other = openings(rows["prompt"], feedback), openings(rows["prompt"][1:] + rows["prompt"][:1], feedback)
    assert (own.log() - other.log()).abs().mean() < 0.3  # S_t of the opening, in nats: hardly any is the question's


# ---------------------------------------------------------------- making and caching


def test_an_untrained_base_does_not_pass_the_gate(tokenizer):
    with pytest.raises(RuntimeError, match=r"Look-up is 0\.\d\d"):
        pretrain(tokenizer, WORLDS["plain"], recipe=TINY_RECIPE, progress=False)


def test_pretraining_repeats_for_a_seed(tokenizer):
    world = dataclasses.replace(WORLDS["plain"], lookup_gate=0.0)
    first, second = (
        pretrain(tokenizer, world, seed=3, recipe=Recipe(4, 2, 1, 1, 2, decay_steps=2), progress=False)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_an_unknown_world_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match=r"Unknown world 'flat': choose one of \['plain', 'shortcut', 'style'\]"):
        quickstart.load_model(world="flat")


def _make_quickly(world, seed, directory, progress=True):
    """In place of pretraining: an untrained base, slowly enough for two processes to meet."""
    time.sleep(0.5)
    with (directory.parent / "made").open("a") as log:
        log.write(f"{os.getpid()}\n")
    tokenizer = architecture.build_tokenizer(curriculum.template_texts())
    quickstart_model._write_base(architecture.build_model(tokenizer, seed), tokenizer, directory)


def _load_in_another_process(cache, queue):
    torch.set_num_threads(1)
    quickstart_model.make_base = _make_quickly
    model, _ = quickstart.load_model(cache, world="shortcut", seed=5)
    queue.put(model.model.norm.weight.sum().item())


def test_two_processes_that_want_the_same_base_make_it_once(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_load_in_another_process, args=(tmp_path, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    sums = {queue.get(timeout=120) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(sums) == 1
    assert len((tmp_path / "quickstart" / "made").read_text().split()) == 1


def test_a_base_is_kept_in_the_users_cache_and_an_interrupted_one_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def interrupted(world, seed, directory, progress=True):
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart_model, "make_base", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quickstart.load_model(world="shortcut")
    folder = tmp_path / "credit_trl" / "quickstart"
    assert [path for path in folder.iterdir() if path.is_dir()] == []

    monkeypatch.setattr(quickstart_model, "make_base", _make_quickly)
    model, tokenizer = quickstart.load_model(world="shortcut")
    assert [path.name.startswith("shortcut-seed0-") for path in folder.iterdir() if path.is_dir()] == [True]
    assert model.config.vocab_size == len(tokenizer)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_weights_of_any_base_read_back_in_fp32_as_their_fp16_values(tmp_path_factory, tokenizer, seed):
    directory = tmp_path_factory.mktemp("base")
    model = architecture.build_model(tokenizer, seed)
    quickstart_model._write_base(model, tokenizer, directory)
    read, _ = quickstart_model.read_base(directory)
    for (name, written), (_, back) in zip(model.named_parameters(), read.named_parameters(), strict=True):
        assert back.dtype == torch.float32, name
        assert torch.equal(back, written.half().float()), name
