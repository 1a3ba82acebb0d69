"""Values of token maps against `objective.py`, and their storage."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl import objective
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.lab.analysis.responses import Rollout, rollout_contexts, teacher_contexts
from credit_trl.lab.analysis.token_classes import default_classes
from credit_trl.lab.analysis.tokenmap import format_summary, map_response, read_maps, summarize_maps, write_maps
from credit_trl.lab.analysis.tokentext import token_texts
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, RolloutContexts
from dense import logps
from lab.drawn import drawn_map

quick = settings(max_examples=20, deadline=None)


@torch.no_grad()
@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, 2**26), (0.7, 1)])
def test_quantities_equal_plain_forward_passes(checkpoint, respond, config, monkeypatch, temperature, chunk):
    monkeypatch.setattr("credit_trl.lab.analysis.vocabulary_logps._CHUNK_ELEMENTS", chunk)
    config.temperature, config.contrastive_coef = temperature, 0.3
    response = respond("Paris is the capital of France.\n")
    scores = map_response(checkpoint, response, config, alternatives=4).scores
    contexts, y = rollout_contexts(response, config, checkpoint), list(response.token_ids)
    student = logps(checkpoint.student.student, contexts.student, y, temperature)
    reference = checkpoint.teacher.model
    teacher = logps(reference, contexts.teacher, y, temperature)
    contrast = torch.stack([logps(reference, c, y, temperature) for c in contexts.contrasts])
    expected = {
        "student_logps": student,
        "delta_v": objective.self_distillation_reward(teacher, student),
        "generic": objective.input_generic(contrast),
        "specific": objective.input_specific(teacher, contrast),
        "advantage": objective.credit_advantages(teacher, contrast, student, 0.3),
    }
    for quantity, values in expected.items():
        sampled, alternatives = getattr(scores, quantity), getattr(scores.alternatives, quantity)
        torch.testing.assert_close(sampled, values.gather(-1, torch.tensor(y)[:, None])[:, 0], atol=1e-11, rtol=0)
        torch.testing.assert_close(alternatives, values.gather(-1, scores.alternatives.ids), atol=1e-11, rtol=0)


def test_context_inside_the_completion_is_read_where_it_stands(checkpoint, respond, config):
    """Feedback on single turns: the teacher reads tokens of its prompt between those of the response."""
    student, teacher, contrast, between = [3, 4], [5, 6, 7], [8, 9, 10], [11, 12]
    columns = [0, 0, 0, 4, 4]  # two tokens before the fifth of the response
    contexts = RolloutContexts(student, [*teacher, *between], [[*contrast, *between]], [columns, columns])
    response = respond("Paris is it.", contexts=contexts)
    assert Rollout.from_json(json.loads(json.dumps(asdict(response)))) == response
    scores = map_response(checkpoint, response, config).scores
    y = list(response.token_ids)
    for prompt, actual in ((teacher, scores.teacher_logps), (contrast, scores.contrast_logps[0])):
        sequence = torch.tensor([[*prompt, *y[:4], *between, *y[4:]]])
        with torch.no_grad():
            logps = torch.log_softmax(checkpoint.teacher.model(input_ids=sequence).logits[0], dim=-1)
        positions = [len(prompt) - 1 + t + (len(between) if t >= 4 else 0) for t in range(len(y))]
        torch.testing.assert_close(actual, logps[positions, y], atol=1e-11, rtol=0)


def test_map_without_contrast_prompts_has_no_s(checkpoint, respond, config):
    token_map = map_response(checkpoint, respond("Paris", contrasts=()), config)
    assert torch.equal(token_map.scores.advantage, token_map.scores.delta_v)
    assert token_map.scores.specific.isnan().all()
    assert token_map.scores.generic.isnan().all()
    assert token_map.scores.alternatives.advantage.isfinite().all()


def test_unmappable_responses_are_refused(checkpoint, respond, config):
    with pytest.raises(ValueError, match="neither feedback nor a demonstration"):
        map_response(checkpoint, respond("Paris", privileged=PrivilegedContext()), config)
    with pytest.raises(ValueError, match="empty"):
        map_response(checkpoint, respond("Paris", token_ids=()), config)
    config.max_reprompt_len = 10
    with pytest.raises(ValueError, match="max_reprompt_len=10"):
        map_response(checkpoint, respond("Paris"), config)


def test_responses_with_a_teacher_are_those_whose_feedback_fits_beside_the_prompt(checkpoint, respond, config):
    config.max_reprompt_len = 200
    long = [{"role": "user", "content": "Name the capital of France. " * 20}]
    remaining = [{"prompt": long}, {"privileged": PrivilegedContext()}, {"token_ids": ()}]
    responses = [respond("Paris", **changed) for changed in (*remaining, {})]
    *without, contexts = teacher_contexts(responses, config, checkpoint)
    assert without == [None] * 3
    assert contexts == rollout_contexts(responses[-1], config, checkpoint)
    with pytest.raises(ValueError, match=r"no contrast prompt that fits.*more prompts, or raise `max_reprompt_len`"):
        teacher_contexts([respond("Paris", contrasts=())], config, checkpoint)


@quick
@given(
    tokens=st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    contrasts=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    formula=st.sampled_from([CreditFormula(0.1), CreditFormula(2.0, "guide", 7, "renormalize", 0.7)]),
)
def test_maps_round_trip_through_json(tmp_path_factory, tokens, seed, contrasts, dtype, formula):
    path = tmp_path_factory.mktemp("maps") / "maps.json"
    options = {"contrasts": contrasts, "dtype": dtype, "formula": formula}
    maps = [drawn_map(tokens, seed=seed, **options), drawn_map(tokens, seed=seed + 1, checkpoint="step-2", **options)]
    write_maps(maps, path)
    for written, restored in zip(maps, read_maps(path), strict=True):
        for name in ("response", "checkpoint", "tokens", "classes", "alternatives"):
            assert getattr(written, name) == getattr(restored, name)
        assert written.scores.formula == restored.scores.formula
        for mine, restored_scores in (
            (written.scores, restored.scores),
            (written.scores.alternatives, restored.scores.alternatives),
        ):
            for name in ("ids", "student_logps", "teacher_logps", "contrast_logps", "advantage", "policy_mean"):
                assert torch.equal(getattr(mine, name), getattr(restored_scores, name)), name


def test_maps_from_elsewhere_have_no_control_characters(tmp_path):
    write_maps([drawn_map(["a", "b"])], tmp_path / "maps.json")
    [record] = json.loads((tmp_path / "maps.json").read_text())
    record["checkpoint"] += "\x1b[2J"
    record["tokens"][0]["text"] += "\x1b[2J"
    record["classes"][0] += "\x1b[2J"
    (tmp_path / "maps.json").write_text(json.dumps([record]))
    [back] = read_maps(tmp_path / "maps.json")
    for text in (back.checkpoint, back.classes[0], back.tokens[0].text):
        assert text.endswith("⟨U+001B⟩[2J")


@pytest.mark.parametrize("text", ["", "[1]", '[{"response": 1}]', "[" * 100_000])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "maps.json").write_text(text)
    with pytest.raises(ValueError, match="holds no token maps"):
        read_maps(tmp_path / "maps.json")


def test_summary_shares_and_means_equal_those_of_the_tokens():
    maps = [drawn_map(["a", "b", "a"], seed=5), drawn_map(["b", "c"], seed=6, identifier="r1")]
    maps = [replace(m, classes=c) for m, c in zip(maps, (["x", "<y|", "x"], ["<y|", "x"]), strict=True)]
    summary = summarize_maps([*maps, drawn_map(["c"] * 5, contrasts=0, identifier="r2")])  # skipped, without S_t
    assert summary["tokens"].to_dict() == {"x": 3, "<y|": 2}
    delta_v = torch.cat([m.scores.delta_v for m in maps]).double()
    specific = torch.cat([m.scores.specific for m in maps]).double()
    x = torch.tensor([True, False, True, False, True])
    assert summary["of_delta_v"]["x"] == pytest.approx((delta_v[x].abs().sum() / delta_v.abs().sum()).item())
    assert summary["of_specific"]["<y|"] == pytest.approx((specific[~x].abs().sum() / specific.abs().sum()).item())
    assert summary["of_tokens"]["x"] == 0.6
    assert summary["specific"]["x"] == pytest.approx(specific[x].mean().item())
    assert "| &lt;y\\| |" in format_summary(summary)
    assert summarize_maps([]).empty


def test_classes_follow_the_word_of_a_token(tokenizer, respond):
    response = respond("Let's name Paris, the 12 capital\n")
    tokens = token_texts(tokenizer, response.token_ids)
    classes = default_classes(response, tokens)
    text = "".join(t.text for t in tokens).replace("↵\n", "\n")
    at = lambda word: classes[text.index(word) : text.index(word) + len(word)]  # noqa: E731
    assert set(at("Paris")) == {"other word"}
    assert set(at("name")) == set(at("capital")) == {"prompt word"}
    assert set(at("the")) == {"prompt word"}
    assert set(at("12")) == {"number"}
    assert at(",") == ["punctuation"]
    assert at(" Paris")[0] == "white space"
    assert classes[-1] == "control"
