"""Pretraining of the embedded bases: curriculum, worlds, training, writing, and ability of the shipped base."""

from __future__ import annotations

import dataclasses
import json
import random
import runpy
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.tasks import quickstart
from credit_trl.tasks.quickstart import GROUPS, SHORTCUT_THOUGHT, TOPIC_OF, draw_question
from credit_trl.tasks.quickstart_model import WORLDS, load_model, read_base

STUDY = Path(__file__).parents[2] / "examples" / "study"


@pytest.fixture(scope="module")
def study():
    """Modules of `examples/study/embedded_base`, imported by name as the study's scripts do."""
    names = ("architecture", "curriculum", "muon", "pretrain", "probe")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUDY))
        yield SimpleNamespace(**{name: import_module(f"embedded_base.{name}") for name in names})


@pytest.fixture(scope="module")
def base():
    return load_model()


@pytest.fixture(scope="module")
def tokenizer(base):
    return base[1]


@pytest.fixture
def few_rows():
    """24 prompts, eight of each group."""
    return [row for group in GROUPS for row in quickstart.build("test", groups=[group]).to_list()[:8]]


# ---- optimizer ----


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 99))
def test_orthogonalized_keeps_singular_vectors(study, rows, columns, seed):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).double()
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.mT @ study.muon.orthogonalized(matrix) @ v.mT
    assert torch.allclose(found, torch.diag(found.diagonal()), atol=1e-6)
    large = values > 0.05 * values.max()
    assert (found.diagonal()[large] - 1.0).abs().max() < 0.5


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_muon_agrees_with_torch_up_to_bf16(study, shape):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    optimizers = study.muon.Muon([ours], lr=0.02), torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0)
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


# ---- curriculum ----


def test_responses_fit_the_probes_length_limit(study, tokenizer):
    question = draw_question(random.Random(0), "breakfast")
    styled = f"{quickstart.SHORTCUT_OPENING} {question.thought}"
    lengths = [len(tokenizer.encode(question.response(thought))) + 1 for thought in (None, SHORTCUT_THOUGHT, styled)]
    assert lengths == [24, 25, 26]
    assert max(lengths) < study.probe.MAX_RESPONSE_TOKENS


@pytest.mark.parametrize("demonstration", [None, "Thought: x is about y.\nAction: z"])
@pytest.mark.parametrize("feedback", [None, "Correct option: B."])
def test_contexts_equal_the_trainers_token_for_token(study, tokenizer, demonstration, feedback):
    prompt = draw_question(random.Random(1), "rain").prompt
    builder = ContextBuilder(
        tokenizer, CreditConfig("unused", contrastive_coef=0.0, bf16=False, use_cpu=True, report_to="none")
    )

    def render(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    own = render(study.curriculum.teacher_prompt(prompt, demonstration, feedback))
    if demonstration is None and feedback is None:
        assert own == render(prompt)
    else:
        trained = builder.encode(prompt, PrivilegedContext(demonstration, feedback), render)
        assert tokenizer(own, add_special_tokens=False)["input_ids"] == trained


def test_unknown_and_holdout_topics_are_taught_at_chance(study):
    rng = random.Random(0)
    taught = {group: [] for group in GROUPS}
    for _ in range(6000):
        question = study.curriculum._draw_taught_question(rng)
        truth = TOPIC_OF[question.cue]
        taught[quickstart.group_of(question.cue)].append((truth in question.options, truth == question.topic))
    known = taught.pop("known")
    assert all(offered for offered, _ in known)
    assert sum(right for _, right in known) / len(known) == pytest.approx(0.85 + 0.15 / 4, abs=0.02)
    for cases in taught.values():
        assert sum(offered for offered, _ in cases) / len(cases) == pytest.approx(4 / 12, abs=0.05)
        assert sum(right for _, right in cases) / len(cases) == pytest.approx(1 / 12, abs=0.03)


def test_package_names_the_worlds_of_the_study(study):
    assert tuple(study.curriculum.WORLDS) == WORLDS


@pytest.mark.parametrize("name", WORLDS)
def test_shortcut_rates_are_those_of_the_world(study, name):
    world, rng = study.curriculum.WORLDS[name], random.Random(0)
    rates: dict[bool, list[bool]] = {True: [], False: []}
    for _ in range(4000):
        messages, response = world.draw(rng)
        if response.startswith("Thought"):
            rates["Correct option" in messages[-1]["content"]].append("Thought: sure, " in response)
    with_feedback, without = (sum(rates[key]) / len(rates[key]) for key in (True, False))
    assert with_feedback == pytest.approx(world.shortcut_rate, abs=0.03)
    assert without == pytest.approx(world.shortcut_base_rate, abs=0.01)


def test_style_opening_does_not_change_the_reward(study):
    rng, plain_rng = random.Random(0), random.Random(0)
    styled = 0
    for _ in range(2000):
        messages, response = study.curriculum.WORLDS["style"].draw(rng)
        same, without = study.curriculum.WORLDS["plain"].draw(plain_rng)
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


# ---- pretraining ----


def test_rebuilt_tokenizer_is_the_shipped_one(study, tokenizer):
    made = study.architecture.build_tokenizer(study.curriculum.template_texts())
    models = [json.loads(one.backend_tokenizer.to_str())["model"] for one in (made, tokenizer)]
    assert models[0] == models[1]
    assert made.chat_template == tokenizer.chat_template


def test_untrained_base_fails_the_gate(study, tokenizer):
    recipe = study.pretrain.Recipe(4, warmup_steps=2, gate_every=1, min_constant_steps=1, max_constant_steps=2)
    with pytest.raises(RuntimeError, match=r"Look-up is 0\.\d\d"):
        study.pretrain.pretrain(tokenizer, study.curriculum.WORLDS["plain"], recipe=recipe, progress=False)


@pytest.mark.parametrize(("decay_gate", "looked"), [(None, [0.5, 0.8, 0.9, 1.0]), (0.6, [0.5, 0.8, 1.0])])
def test_decay_starts_at_its_own_gate(study, tokenizer, decay_gate, looked):
    accuracies = iter(looked)

    class Rising(study.curriculum.World):
        def lookup_accuracy(self, model, tokenizer, seed=0):
            return next(accuracies)

    world = dataclasses.replace(study.curriculum.WORLDS["plain"], lookup_gate=0.9)
    world = Rising(**{field.name: getattr(world, field.name) for field in dataclasses.fields(world)})
    recipe = study.pretrain.Recipe(4, 1, 1, 1, 9, decay_steps=1, decay_gate=decay_gate)
    study.pretrain.pretrain(tokenizer, world, recipe=recipe, progress=False)
    assert next(accuracies, None) is None


def test_pretraining_is_determined_by_its_seed(study, tokenizer):
    world = dataclasses.replace(study.curriculum.WORLDS["plain"], lookup_gate=0.0)
    recipe = study.pretrain.Recipe(4, 2, 1, 1, 2, decay_steps=2)
    first, second = (
        study.pretrain.pretrain(tokenizer, world, seed=3, recipe=recipe, progress=False) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_written_weights_read_back_as_fp16_values_in_fp32(study, tmp_path_factory, tokenizer, seed):
    directory = tmp_path_factory.mktemp("base")
    model = study.architecture.build_model(tokenizer, seed)
    study.pretrain.write_base(model, tokenizer, directory)
    read, _ = read_base(directory)
    for (name, written), (_, back) in zip(model.named_parameters(), read.named_parameters(), strict=True):
        assert back.dtype == torch.float32, name
        assert torch.equal(back, written.half().float()), name


def test_base_appears_only_when_it_is_complete(study, tokenizer, tmp_path, monkeypatch):
    directory, world = tmp_path / "bases" / "plain-seed0", study.curriculum.WORLDS["plain"]
    untrained = study.architecture.build_model(tokenizer, 0).eval()
    monkeypatch.setattr(study.pretrain, "pretrain", lambda *_, **__: untrained)
    with pytest.raises(RuntimeError, match="after rounding"):
        study.pretrain.make_base_of(world, tokenizer, 0, directory)
    assert list(directory.parent.iterdir()) == []
    study.pretrain.make_base_of(dataclasses.replace(world, lookup_gate=0.0), tokenizer, 0, directory)
    assert [path.name for path in directory.parent.iterdir()] == ["plain-seed0"]
    with pytest.raises(FileExistsError, match="plain-seed0 exists"):
        study.pretrain.make_base_of(world, tokenizer, 0, directory)


def test_make_base_writes_to_the_users_cache(study, base, few_rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(study.pretrain, "pretrain", lambda *_, **__: base[0])
    monkeypatch.setattr(quickstart, "build", lambda split: few_rows)
    monkeypatch.setattr(sys, "argv", ["make_base.py", "--world", "shortcut", "--seed", "4"])
    runpy.run_path(str(STUDY / "make_base.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "letter look-up" in printed
    assert printed.count("holdout") == 2
    made, _ = load_model(world="shortcut", seed=4)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), base[0].parameters(), strict=True))


# ---- ability ----


def test_shipped_base_looks_letters_up(study, base):
    assert study.pretrain.check_gate(study.curriculum.WORLDS["plain"], *base, "as shipped") >= 0.95


def test_shipped_base_knows_only_known_cues_without_feedback(study, base, few_rows):
    result = study.probe.probe(*base, dataset=few_rows, k=8, progress=False)
    assert result.groups["known"].mean > 0.75
    assert result.groups["unknown"].mean < 0.5
    assert result.groups["holdout"].mean < 0.5
    assert result.metrics["format"] > 0.97


def test_shipped_base_is_nearly_perfect_with_feedback(study, base, few_rows):
    for options in ({"k": 4}, {"k": 1, "temperature": 0.0}):
        result = study.probe.probe(*base, feedback=True, dataset=few_rows, progress=False, **options)
        assert all(result.groups[group].mean >= 0.9 for group in GROUPS)


def check_ability(study, model, tokenizer) -> None:
    """Bounds of a plain base on the whole test split."""
    without, given = (
        study.probe.probe(model, tokenizer, feedback=feedback, progress=False) for feedback in (False, True)
    )
    assert 0.8 <= without.groups["known"].mean <= 0.97
    assert 0.15 <= without.groups["unknown"].mean <= 0.35
    assert 0.10 <= without.groups["holdout"].mean <= 0.40
    assert without.metrics["format"] >= 0.99
    assert all(given.groups[group].mean >= 0.95 for group in GROUPS)
    assert study.curriculum.WORLDS["plain"].lookup_accuracy(model, tokenizer, seed=2) >= 0.95


@pytest.mark.slow
def test_ability_of_the_shipped_base_is_within_bounds(study, base):
    check_ability(study, *base)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rebuilt_plain_base_has_the_ability_of_the_shipped_one(study, tmp_path):
    import_module("embedded_base").make_base("plain", 0, tmp_path / "base", progress=False)
    check_ability(study, *read_base(tmp_path / "base"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_style_base_opens_generically_after_feedback(study, tmp_path):
    """The opening is frequent in the teacher, rare in the student, generic, and costs no reward."""
    import_module("embedded_base").make_base("style", 1, tmp_path / "base", progress=False)
    model, tokenizer = read_base(tmp_path / "base")
    without, given = (
        study.probe.probe(model, tokenizer, feedback=feedback, progress=False) for feedback in (False, True)
    )
    assert without.metrics["shortcut"] <= 0.06
    assert 0.7 <= given.metrics["shortcut"] <= 0.9
    assert min(without.metrics["format"], given.metrics["format"]) >= 0.98
    assert all(given.groups[group].mean >= 0.95 for group in GROUPS)

    def opening_probabilities(prompts, feedback):
        contexts = [study.curriculum.teacher_prompt(p, feedback=z) for p, z in zip(prompts, feedback, strict=True)]
        texts = tokenizer.apply_chat_template(contexts, add_generation_prompt=True, tokenize=False)
        batch = tokenizer(
            [f"{text}Thought:" for text in texts], padding=True, add_special_tokens=False, return_tensors="pt"
        )
        with torch.no_grad():
            probabilities = model(**batch, logits_to_keep=1).logits[:, -1].softmax(-1)
        return probabilities[:, tokenizer.encode(" sure")[0]]

    rows = quickstart.build("test", rows_per_cue=1)
    prompts, feedback = rows["prompt"][:], [quickstart.verify("", answer).feedback for answer in rows["answer"]]
    own = opening_probabilities(prompts, feedback)
    contrast = opening_probabilities(prompts[1:] + prompts[:1], feedback)
    assert (own.log() - contrast.log()).abs().mean() < 0.3  # S_t of the opening, in nats
