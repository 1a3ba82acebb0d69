"""Values of token maps against `objective.py`, and their storage."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from drawn import drawn_map
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl import objective
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.formula import PAPER, CreditFormula, CreditSettings
from credit_trl.lab.analysis.responses import rollout_contexts
from credit_trl.lab.analysis.token_classes import default_classes
from credit_trl.lab.analysis.tokenmap import QUANTITIES, colour_strength, group_scales, map_response
from credit_trl.lab.analysis.tokenmap_html import render_html, shown_numbers
from credit_trl.lab.analysis.tokenmap_parquet import read_parquet, write_parquet
from credit_trl.lab.analysis.tokenmap_summary import format_summary, summarize_maps
from credit_trl.lab.analysis.tokentext import token_texts
from credit_trl.objective import ContrastRule

quick = settings(max_examples=20, deadline=None)


def plain_logps(model, context: list[int], y: tuple[int, ...], temperature: float) -> torch.Tensor:
    """(T, V), by one unpadded forward pass of the whole model."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*context, *y]])).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def from_plain_passes(checkpoint, response, config) -> dict[str, torch.Tensor]:
    """(T, V), every quantity from plain forward passes and the functions of `objective.py`."""
    contexts, y = rollout_contexts(response, config, checkpoint), response.token_ids
    student = plain_logps(checkpoint.student.student, contexts.student, y, config.temperature)
    reference = checkpoint.teacher.model
    teacher = plain_logps(reference, contexts.teacher, y, config.temperature)
    contrast = torch.stack([plain_logps(reference, c, y, config.temperature) for c in contexts.contrasts])
    return {
        "student_logps": student,
        "delta_v": objective.self_distillation_reward(teacher, student),
        "generic": objective.input_generic(contrast),
        "specific": objective.input_specific(teacher, contrast),
        "advantage": objective.credit_advantages(teacher, contrast, student, config.contrastive_coef),
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_quantities_equal_plain_forward_passes(checkpoint, respond, config, temperature):
    config.temperature, config.contrastive_coef = temperature, 0.3
    response = respond("Paris is the capital of France.\n")
    token_map = map_response(checkpoint, response, config, alternatives=4)
    y = torch.tensor(response.token_ids)[:, None]
    for quantity, values in from_plain_passes(checkpoint, response, config).items():
        torch.testing.assert_close(token_map.values(quantity), values.gather(-1, y)[:, 0], atol=1e-11, rtol=0)
        if quantity in ("advantage", "specific"):
            others = token_map.scores.alternatives
            torch.testing.assert_close(getattr(others, quantity), values.gather(-1, others.ids), atol=1e-11, rtol=0)


def test_alternatives_are_likely_under_student_or_teacher(checkpoint, respond, config):
    response = respond("Paris")
    token_map = map_response(checkpoint, response, config, alternatives=4)
    contexts = rollout_contexts(response, config, checkpoint)
    student = plain_logps(checkpoint.student.student, contexts.student, response.token_ids, 1.0)
    teacher = plain_logps(checkpoint.teacher.model, contexts.teacher, response.token_ids, 1.0)
    top = torch.maximum(student, teacher).topk(4, dim=-1).indices
    assert torch.equal(token_map.scores.alternatives.ids, top)
    assert token_map.alternatives[0] == [t.text for t in token_texts(checkpoint.tokenizer, top[0].tolist())]


def test_chunk_size_does_not_change_values(checkpoint, respond, config, monkeypatch):
    response = respond("Paris is the capital.")
    whole = map_response(checkpoint, response, config)
    monkeypatch.setattr("credit_trl.lab.analysis.passes._CHUNK_ELEMENTS", 1)
    by_token = map_response(checkpoint, response, config)
    for quantity in QUANTITIES:
        torch.testing.assert_close(by_token.values(quantity), whole.values(quantity), atol=1e-12, rtol=0)


def test_live_teacher_equals_a_copy_of_the_policy(make_model, tokenizer, respond, config):
    model = make_model(dtype=torch.float64)
    alone = map_response(Checkpoint.of(model, tokenizer), respond("Paris"), config)
    twice = map_response(Checkpoint.of(model, tokenizer, teacher=model), respond("Paris"), config)
    assert torch.equal(alone.scores.advantage, twice.scores.advantage)


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


# ------------------------------------------------------------------------------------------------------------ colours


def test_group_shares_its_scale_and_keeps_signs():
    maps = [drawn_map(["a", "b"], seed=1), drawn_map(["a", "b", "c"], seed=2, identifier="r1", checkpoint="step-2")]
    other = drawn_map(["a"] * 9, seed=3, identifier="r2", problem="another")
    scales = group_scales([*maps, other])
    assert len(scales) == 2
    for quantity in QUANTITIES:
        together = torch.cat([m.values(quantity) for m in maps]).double()
        scale = scales[maps[0].response.group][quantity]
        assert scale == pytest.approx(np.quantile(together.abs().numpy(), 0.99))
        strength = colour_strength(maps[0].values(quantity), scale)
        assert torch.equal(strength.sign(), maps[0].values(quantity).sign())
        expected = (maps[0].values(quantity) / scale).clamp(-1, 1)
        torch.testing.assert_close(strength, expected)


def test_large_values_before_and_after_have_different_colours():
    """Few tokens carry most of S_t, and their change in training is visible."""
    few = [8.0, 13.0, *[0.01] * 18]
    before, after = drawn_map(["a"] * 20), drawn_map(["a"] * 20, checkpoint="after")
    for token_map, first in ((before, 8.14), (after, 5.64)):
        contrast = token_map.scores.teacher_logps - torch.tensor([first, *few[1:]])
        object.__setattr__(token_map.scores, "contrast_logps", contrast[None])
    scale = group_scales([before, after])[before.response.group]["specific"]
    strengths = [colour_strength(m.values("specific"), scale)[0].item() for m in (before, after)]
    assert strengths[0] - strengths[1] > 0.15


def test_missing_values_have_no_colour():
    assert colour_strength(torch.tensor([math.nan, -math.inf, math.inf, 1.0]), 1.0).tolist() == [0.0, -1.0, 1.0, 1.0]
    alone = drawn_map(["a"], contrasts=0)
    assert group_scales([alone])[alone.response.group]["specific"] == 1.0


# ------------------------------------------------------------------------------------------------------------ Parquet


@quick
@given(
    tokens=st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    contrasts=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    formula=st.sampled_from([PAPER, CreditFormula(ContrastRule("guide", 0.05), "log_mean", "no question")]),
)
def test_map_round_trips_through_parquet(tmp_path_factory, tokens, seed, contrasts, dtype, formula):
    path = tmp_path_factory.mktemp("maps") / "maps.parquet"
    maps = [
        drawn_map(tokens, seed=seed, contrasts=contrasts, dtype=dtype, settings=CreditSettings(0.1, formula)),
        drawn_map(tokens, seed=seed + 1, contrasts=contrasts, dtype=dtype, checkpoint="step-2", reward=None),
    ]
    maps[1] = replace(maps[1], response=maps[0].response)
    write_parquet(maps, path)
    back = read_parquet(path)
    assert [m.response for m in back] == [m.response for m in maps]
    for one, other in zip(back, maps, strict=True):
        assert (one.checkpoint, one.tokens, one.classes) == (other.checkpoint, other.tokens, other.classes)
        assert one.alternatives == other.alternatives
        assert (one.scores.formula, one.scores.contrastive_coef) == (other.scores.formula, 0.1)
        assert torch.equal(one.scores.entered_coef, other.scores.entered_coef)
        assert torch.equal(one.scores.alternatives.advantage, other.scores.alternatives.advantage)
        assert torch.equal(one.scores.alternatives.entered_coef, other.scores.alternatives.entered_coef)
        for quantity in QUANTITIES:
            assert torch.equal(one.values(quantity).nan_to_num(99.0), other.values(quantity).nan_to_num(99.0))
        assert torch.equal(one.scores.alternatives.ids, other.scores.alternatives.ids)


def test_foreign_parquet_has_no_control_characters(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_parquet([drawn_map(["a", "b"])], path := tmp_path / "maps.parquet")
    table = pq.read_table(path)
    for name in ("checkpoint", "token", "token_class"):
        values = [f"{value}\x1b[2J" for value in table[name].to_pylist()]
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values))
    pq.write_table(table, path)
    (back,) = read_parquet(path)
    for text in (back.checkpoint, *back.classes, *(token.text for token in back.tokens)):
        assert text.endswith("⟨U+001B⟩[2J")


def test_parquet_has_one_row_a_token(model_map, tmp_path):
    import pyarrow.parquet as pq

    write_parquet([model_map], tmp_path / "maps.parquet")
    rows = pq.read_table(tmp_path / "maps.parquet").to_pylist()
    assert [row["token_id"] for row in rows] == list(model_map.response.token_ids)
    assert [row["specific"] for row in rows] == model_map.scores.specific.tolist()
    assert [a["advantage"] for a in rows[2]["alternatives"]] == model_map.scores.alternatives.advantage[2].tolist()


def test_duplicate_maps_and_foreign_tables_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pytest.raises(ValueError, match="Two maps of response 'r0'"):
        write_parquet([drawn_map(["a"]), drawn_map(["a"])], tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="Two different responses"):
        render_html([drawn_map(["a"]), drawn_map(["a", "b"], checkpoint="other")])
    with pytest.raises(ValueError, match="Two different responses"):
        render_html([drawn_map(["a"]), drawn_map(["a"], problem="q", checkpoint="other")])
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="no table of token maps"):
        read_parquet(tmp_path / "other.parquet")


# --------------------------------------------------------------------------------------------------------------- page


def page_data(page: str) -> dict:
    start = page.index('id="data">') + len('id="data">')
    return json.loads(page[start : page.index("</script>", start)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_page_data_holds_exact_values(dtype):
    token_map = drawn_map(["a", "b", "c"], dtype=dtype)
    data = page_data(render_html([token_map]))
    [shown] = data["responses"][0]["maps"]
    for quantity in QUANTITIES:
        assert torch.equal(torch.tensor(shown[quantity], dtype=dtype), token_map.values(quantity))
    advantages = torch.tensor(shown["alternatives"]["advantage"], dtype=dtype)
    assert torch.equal(advantages, token_map.scores.alternatives.advantage)
    [scales] = data["scales"]
    assert scales == group_scales([token_map])[token_map.response.group]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_page_shows_maps_with_values_that_are_not_finite(value):
    token_map = drawn_map(["a", "b", "c"])
    token_map.scores.teacher_logps[1] = value
    data = page_data(render_html([token_map]))
    shown = "inf" if value == math.inf else None
    assert data["responses"][0]["maps"][0]["specific"][1] == shown
    assert data["summaries"][0]["classes"][0]["mean_specific"] == shown


@quick
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=20),
)
def test_every_float_round_trips_through_the_page(values):
    tensor = torch.tensor(values)
    back = json.loads(json.dumps(shown_numbers(tensor), allow_nan=False))
    restored = torch.tensor([math.nan if v is None else float(v) for v in back])
    assert torch.equal(restored.nan_to_num(7.0, 8.0, 9.0), tensor.nan_to_num(7.0, 8.0, 9.0))


# ------------------------------------------------------------------------------------------------------------ summary


def test_summary_shares_and_means_equal_those_of_the_tokens():
    maps = [drawn_map(["a", "b", "a"], seed=5), drawn_map(["b", "c"], seed=6, identifier="r1")]
    maps = [replace(m, classes=c) for m, c in zip(maps, (["x", "y", "x"], ["y", "x"]), strict=True)]
    summary = summarize_maps(maps)
    delta_v = torch.cat([m.scores.delta_v for m in maps]).double()
    specific = torch.cat([m.scores.specific for m in maps]).double()
    x = torch.tensor([True, False, True, False, True])
    shares = {c.name: c for c in summary.classes}
    assert shares["x"].share_of_delta_v == pytest.approx((delta_v[x].abs().sum() / delta_v.abs().sum()).item())
    assert shares["y"].share_of_specific == pytest.approx((specific[~x].abs().sum() / specific.abs().sum()).item())
    assert shares["x"].share_of_tokens == 0.6
    assert sum(c.share_of_specific for c in summary.classes) == pytest.approx(1.0)
    a = torch.tensor([True, False, True, False, False])
    by_text = {s.text: s for s in summary.most_specific}
    assert by_text["a"].mean_specific == pytest.approx(specific[a].mean().item())
    assert (by_text["a"].class_name, by_text["a"].count) == ("x", 2)
    means = [s.mean_specific for s in summary.most_specific]
    assert means == sorted(means, reverse=True)
    generic = [s.mean_generic_credit for s in summary.most_generic]
    assert generic == sorted(generic, reverse=True)
    # ΔV − S = Ĝ − log π.
    by_hand = torch.cat([m.scores.generic - m.scores.student_logps for m in maps]).double()[a].mean().item()
    assert by_text["a"].mean_generic_credit == pytest.approx(by_hand, rel=1e-5)


def test_summary_skips_maps_without_contrast_prompts():
    summary = summarize_maps([drawn_map(["a", "b"]), drawn_map(["c"] * 5, contrasts=0, identifier="r1")])
    assert (summary.responses, summary.tokens) == (1, 2)
    assert summarize_maps([]).classes == []


def test_summary_skips_rare_token_strings():
    summary = summarize_maps([drawn_map(["a", "b", "a"])], min_count=2)
    assert [s.text for s in summary.most_specific] == ["a"]


def test_summary_escapes_hostile_tokens():
    text = format_summary(summarize_maps([drawn_map(["`|<b>", "\n", "x"])]))
    assert "| `ˋ\\|<b>` |" in text
    assert "| `↵` |" in text


def test_summary_escapes_hostile_classes():
    drawn = replace(drawn_map(["a", "b"]), classes=["own|class", "<b>"])
    text = format_summary(summarize_maps([drawn]))
    assert text.count("| own\\|class |") == 3  # of classes, and of the most specific and the most generic tokens
    assert text.count("| &lt;b> |") == 3


def test_classes_follow_the_word_of_a_token(tokenizer, respond):
    response = respond("Let's name Paris, the 12 capital\n")
    tokens = token_texts(tokenizer, response.token_ids)
    classes = default_classes(response, tokens)
    text = "".join(t.text for t in tokens).replace("↵\n", "\n")
    at = lambda word: classes[text.index(word) : text.index(word) + len(word)]  # noqa: E731
    assert set(at("Paris")) == {"other word"}
    assert set(at("name")) == set(at("capital")) == {"prompt word"}
    assert set(at("the")) == {"function word"}
    assert set(at("12")) == {"number"}
    assert at(",") == ["punctuation"]
    assert at(" Paris")[0] == "white space"
    assert classes[-1] == "control"


def test_classes_of_split_and_hidden_characters(tokenizer, respond):
    response = respond("café 12\u200b 🙂", prompt="A café?")
    classes = default_classes(response, token_texts(tokenizer, response.token_ids))
    assert classes[:5] == ["prompt word"] * 5  # é is two tokens
    assert classes[5:8] == ["white space", "number", "number"]
    assert classes[8:11] == ["punctuation"] * 3
    assert classes[11:] == ["white space", *["punctuation"] * 4, "control"]
