"""The report of run directories: curves, comparison, rollouts, names of arms, files beside the page."""

import html
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from credit_trl import Verdict
from credit_trl.evaluation.statistics import bootstrap_ci, paired_bootstrap
from credit_trl.lab.analysis.tokenmap import QUANTITIES, write_maps
from credit_trl.lab.analysis.tokentext import visible
from credit_trl.lab.report import ReportCallback, callback, write_report, write_token_maps
from credit_trl.lab.report.comparison import compare_arms, curves, training_table
from credit_trl.lab.report.runs import arms_of, differing_options, load_run
from credit_trl.lab.report.token_maps import headline_token
from credit_trl.run_directory import append_lines, read_json, write_json
from lab.drawn import HOSTILE, drawn_map
from lab.run_folders import make_run, write_steps
from tables import tables_of

TABLES = tables_of(__file__)


def arms(paths: list[Path]) -> dict[str, list[Any]]:
    return arms_of([load_run(path) for path in paths])


def test_arms_are_named_by_what_most_of_them_do_not_share(tmp_path, scores):
    options = [{}, {"distillation_topk": 5}, {"contrastive_coef": 0.0, "logging_steps": 7}]
    paths = [make_run(tmp_path / f"r{i}", scores[i], seed=i, **run_options) for i, run_options in enumerate(options)]
    paths.append(make_run(tmp_path / "r3", scores[3], seed=7))
    arms_by_name = arms(paths)
    assert list(arms_by_name) == ["CREDIT λ = 0.1", "CREDIT λ = 0.1, top-K 5", "SDPO"]
    assert [run.seed for run in arms_by_name["CREDIT λ = 0.1"]] == [0, 7]
    assert list(arms(paths[:2])) == ["CREDIT λ = 0.1, top-K none", "CREDIT λ = 0.1, top-K 5"]  # neither is usual
    write_json(paths[3] / "run.json", {"config": {}, "seed": 7, "model": "other"})
    assert {"model", "reward_funcs", "rows"} < set(differing_options([load_run(path) for path in paths]))
    twin = make_run(tmp_path / "again", scores[4])
    assert list(arms([paths[0], twin])) == ["CREDIT λ = 0.1", "CREDIT λ = 0.1 (again)"]


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "bases/{}", "bases/Seed0{}", "seeds/{}", "base-s{}/model"])
def test_runs_of_different_seeds_are_one_arm(tmp_path, scores, model):
    paths = [make_run(tmp_path / f"r{i}", scores[i], seed=i) for i in range(4)]
    for path in paths:
        write_json(path / "run.json", read_json(path / "run.json") | {"model": model.format(path.name[1:])})
    assert [len(runs) for runs in arms(paths).values()] == [4]


def test_arms_are_not_named_by_options_that_one_run_lacks(tmp_path, scores):
    run = make_run(tmp_path / "r", scores[0])
    evaluation = {"model": "base", "score": 0.5, "task": "own", "prompts": [], "step": 0}
    write_json(tmp_path / "eval" / "result.json", evaluation)
    assert list(arms([run, tmp_path / "eval"])) == ["CREDIT λ = 0.1, model bases/seed{seed}", "model base"]


def test_evaluations_with_other_settings_are_compared_with_a_warning(tmp_path, scores, caplog):
    paths = [make_run(tmp_path / f"{i}", scores[i], contrastive_coef=0.1 * i) for i in range(2)]
    for path in paths:
        result = max(path.glob("evaluations/step-*/result.json"))
        write_json(result, read_json(result) | {"settings": {"temperature": float(path.name), "k": 4}})
    compare_arms(arms(paths))
    assert "evaluations differ in temperature." in caplog.text


def test_files_that_are_of_no_report_are_kept(tmp_path, scores):
    run = make_run(tmp_path / "r", scores[0])
    with pytest.raises(FileExistsError, match="were not written by a report"):
        write_report([run], run / "run.html")
    assert "config" in read_json(run / "run.json")
    assert write_report([run]) == write_report([run])
    (run / "report.json").unlink()
    write_report([run])
    (run / "report.json").unlink()
    (run / "report.md").write_text("# Notes", "utf-8")
    with pytest.raises(FileExistsError, match="were not written by a report"):
        write_report([run])


def test_differences_are_paired_by_prompt_and_seed(tmp_path, scores):
    paths = [make_run(tmp_path / f"a{i}", scores[i], seed=i) for i in range(3)]
    paths += [make_run(tmp_path / f"b{i}", scores[3 + i], seed=(2, 0, 1)[i], contrastive_coef=0.0) for i in range(3)]
    base, compared = compare_arms(arms(paths))
    ours, theirs = scores[3:, -1], scores[[2, 0, 1], -1]
    expected = paired_bootstrap(ours, theirs, paired_seeds=True)
    assert compared["difference"] == pytest.approx(ours.mean() - theirs.mean())
    assert (compared["difference_low"], compared["difference_high"]) == pytest.approx((expected.low, expected.high))
    assert compared["p"] == compared["p_holm"] == expected.p_value
    assert base["before"] == pytest.approx(scores[:3, 0].mean())
    assert base["best"] == pytest.approx(scores[:3].mean(-1).max(-1).mean())
    assert base["low"] < base["score"] < base["high"]
    assert "difference" not in base


def test_two_seeds_have_a_wider_interval_than_their_prompts_alone(tmp_path, scores):
    paths = [make_run(tmp_path / f"{i}", scores[i], seed=i % 2, contrastive_coef=0.1 * (i // 2)) for i in range(4)]
    base, compared = compare_arms(arms(paths))
    expected = paired_bootstrap(scores[2:4, -1], scores[:2, -1], paired_seeds=True)
    assert (compared["difference_low"], compared["difference_high"]) == pytest.approx((expected.low, expected.high))
    alone = bootstrap_ci(scores[:2, -1].mean(0))
    assert base["high"] - base["low"] > alone.high - alone.low


@pytest.mark.parametrize("count", [15, 1])
def test_runs_are_compared_on_shared_prompts(tmp_path, scores, count):
    base_run = make_run(tmp_path / "one", scores[0])
    two = make_run(tmp_path / "two", scores[1][:, :count], contrastive_coef=0.0)
    base, compared = compare_arms(arms([base_run, two]))
    assert base["prompts"] == compared["prompts"] == count
    assert base["score"] == pytest.approx(scores[0, -1, :count].mean())
    assert base["before"] == pytest.approx(scores[0, 0, :count].mean())
    assert base["best"] == pytest.approx(scores[0, :, :count].mean(-1).max())
    expected = (scores[1, -1, :count] - scores[0, -1, :count]).mean() if count > 1 else None
    assert compared.get("difference") == (expected if expected is None else pytest.approx(expected))


def test_curves_have_the_interval_of_one_run_and_the_range_of_several(tmp_path, scores):
    paths = [make_run(tmp_path / f"r{i}", scores[i], seed=i) for i in range(2)]
    by_title = {figure["title"]: figure["series"] for figure in curves(arms(paths[:1]))}
    expected = [[2 * i, mean, mean - 0.1, mean + 0.1] for i, mean in enumerate(scores[0].mean(-1))]
    assert np.array(by_title["avg@k of the evaluations"][0]["points"]) == pytest.approx(np.array(expected))
    assert by_title["Reward of the rollouts"][0]["points"][1] == [2, 0.2, None, None]
    curves_of_two = {figure["title"]: figure["series"] for figure in curves(arms(paths))}
    assert curves_of_two["Reward of the rollouts"][0]["points"][0] == pytest.approx([1, 0.6, 0.1, 1.1])
    assert "Fidelity of the teacher (nats)" not in curves_of_two


def test_training_table_has_the_columns_of_table_2(tmp_path, scores):
    """Logs of steps 2 and 5 are means over two and three steps."""
    settings = {"sdpo": (0.0, 1, 1.0), "credit": (0.1, 4, 1.0), "grpo": (0.1, 1, 0.0)}
    logs = {
        "sdpo": [(2, 0.25, 3.0, 1.0, None, None), (5, 0.5, 3.0, 2.0, None, None)],
        "credit": [(2, 0.75, 4.0, 1.0, 0.2, 1.0), (5, 0.5, 5.0, 2.0, 0.1, 0.5)],
        "grpo": [(5, 0.125, 2.0, 0.0, None, None)],
    }
    names = ("step", "reward", "credit/seconds_rollout", "credit/seconds_update", "credit/s_mean", "credit/s_std")
    for (name, (coef, count, weight)), row in zip(settings.items(), scores, strict=False):
        options = {"contrastive_coef": coef, "contrastive_count": count, "distillation_weight": weight}
        make_run(tmp_path / name, row, **options)
        (tmp_path / name / "log.jsonl").unlink()
        append_lines(tmp_path / name / "log.jsonl", (dict(zip(names, values, strict=True)) for values in logs[name]))
    page = write_report([tmp_path / name for name in settings], tmp_path / "x.html")
    rows = json.loads(page.with_suffix(".json").read_text())["training"]
    columns = ("contrasts", "train_score", "seconds", "ratio", "s_mean", "s_std")
    cells = [[row[name] for name in columns] for row in rows]
    sdpo, credit = (2 * 4.0 + 3 * 5.0) / 5, (2 * 5.0 + 3 * 7.0) / 5
    assert cells[0] == [0, 0.5, pytest.approx(sdpo), pytest.approx(1.0), None, None]
    assert cells[1] == [4, 0.75, *map(pytest.approx, (credit, credit / sdpo, (0.4 + 0.3) / 5, (2.0 + 1.5) / 5))]
    assert cells[2] == [None, 0.125, pytest.approx(2.0), pytest.approx(2.0 / sdpo), None, None]
    assert [row["score"] for row in rows] == pytest.approx(scores[:3, -1].mean(-1).tolist())
    assert f"| 4 | {100 * scores[1, -1].mean():.1f} | 0.750 | 6.200 | 1.348 | 0.140 | 0.700 |" in (
        page.with_suffix(".md").read_text()
    )
    assert training_table(arms([tmp_path / "grpo"]))[0]["ratio"] == 1.0


def test_files_of_a_run_that_is_being_written_are_read(tmp_path, scores):
    folder = make_run(tmp_path / "r", scores[0])
    for name in ("log.jsonl", "evaluations.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 9, "rew')
    (folder / "completions" / "completions_00004.parquet").write_bytes(b"PAR1")
    assert write_report([folder]) == folder / "report.html"


def test_markdown_escapes_hostile_names(tmp_path, scores):
    paths = [make_run(tmp_path / f"r{i}", scores[i], run_text=text) for i, text in enumerate(("a|<b>\x1b[2J", "c"))]
    text = write_report(paths, tmp_path / "x.html").with_suffix(".md").read_text()
    assert "a\\|&lt;b>⟨U+001B⟩[2J" in text


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 390)])
def test_page_of_one_run_shows_curves_rollouts_and_maps(open_page, tmp_path, scores, scheme, width):
    folder = make_run(tmp_path / "r", scores[0], text="averyverylongword" * 20)
    maps = [drawn_map(["a ", "b "], seed=i, checkpoint=f"step-{i}") for i in (1, 3)]
    write_steps(folder, maps)
    page = open_page(write_report([folder]), width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.locator("#contents a").all_inner_texts() == ["Token maps", "Curves", "Rollouts", "Run", "Symbols"]
    assert page.locator(".pane").count() == 2
    assert page.locator("#quantities input:checked").get_attribute("value") == "centred"
    titles = page.locator("figure h3").all_inner_texts()
    assert titles[:3] == ["avg@k of the evaluations", "Reward of the rollouts", "Response length (tokens)"]
    page.locator("figure svg").nth(1).focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("figcaption").nth(1).inner_text() == "step 3: 0.300"
    assert page.locator("#step option").all_inner_texts() == [f"step {step}" for step in range(1, 5)]
    assert page.locator(".rollout").count() == 8
    page.select_option("#step", "0")
    card = page.locator(".rollout").first
    assert card.locator(".reward").inner_text() == "reward 1.00 · mean S_t 0.250"
    assert card.locator("h3").all_inner_texts() == ["user", "completion", "feedback"]
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_page_of_a_run_begins_with_harmful_feedback(open_page, tmp_path, scores):
    folder = make_run(tmp_path / "r", scores[0])
    (folder / "log.jsonl").unlink()
    for step in range(1, 5):
        fidelity = {"credit/teacher_fidelity": -0.3, "credit/fidelity_groups": 5}
        append_lines(folder / "log.jsonl", [{"step": step, "reward": 0.5, **fidelity}])
    page = open_page(write_report([folder]), width=1280, color_scheme="light")
    assert page.locator("main h2").first.inner_text().startswith("Feedback harms")
    text = page.locator(".problem").first.inner_text()
    assert text.startswith("Feedback harms: over 20 groups of the first 4 logs the teacher's fidelity is -0.30")


def test_scores_whose_mean_differs_in_the_last_digit_are_drawn(open_page, tmp_path):
    paths = [make_run(tmp_path / f"r{seed}", np.full(1, 0.7), seed=seed) for seed in range(3)]
    page = open_page(write_report(paths, tmp_path / "page.html"))
    assert 3 <= page.locator("figure svg").first.locator("text").count() < 20


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_first_view_shows_the_largest_change_in_its_colours(open_page, tmp_path, scores, scheme, width, height):
    folder = make_run(tmp_path / "r", scores[0])
    tokens = ["a ", "long ", "wrong ", "answer\n"] * 200
    maps = [drawn_map(tokens, seed=i, checkpoint=f"step-{i}", problem="word " * 2000) for i in (1, 3)]
    write_steps(folder, maps)
    page = open_page(write_report([folder]), width=width, color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": height})
    page.reload()
    cells = page.locator(".pane").first.locator(".t")
    colours = cells.evaluate_all("cells => cells.map(cell => getComputedStyle(cell).backgroundColor)")
    legend = page.locator(".bar").evaluate("bar => getComputedStyle(bar).backgroundImage")
    punished, rewarded = (re.findall(r"rgba\((\d+, \d+, \d+), 0\.", legend)[i] for i in (0, -1))
    assert punished != rewarded
    values = maps[0].values("centred")
    changes = (maps[1].values("student_logps") - maps[0].values("student_logps")).abs()
    for value, colour in zip(values.tolist(), colours, strict=True):
        assert f"({punished if value < 0 else rewarded}" in colour
    box = cells.nth(int(changes.argmax())).bounding_box()  # of the token whose probability changed most
    frame = page.locator(".map").first.bounding_box()
    assert frame["y"] <= box["y"]
    assert box["y"] + box["height"] <= frame["y"] + frame["height"]
    assert width < 1280 or box["y"] + box["height"] <= height  # a phone shows the answer first
    centred = as_shown(values[changes.argmax()][None])
    assert page.locator("table.numbers td:nth-child(2)").first.inner_text() == centred[0]
    assert page.locator("#low").inner_text().endswith("punished")


def numbers(page: Any) -> dict[str, list[str]]:
    """The inspector's table: symbol → the cells of its row."""
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#inspector table.numbers tbody tr").all()]
    return {symbol: cells for symbol, *cells in rows}


def as_shown(values: torch.Tensor, digits: int = 4) -> list[str]:
    """Numbers as the page prints them: a zero has no sign."""
    texts = [f"{float(f'{v:.9g}'):.{digits}f}" for v in values.tolist()]
    return [text.lstrip("-") if float(text) == 0 else text.replace("-", "−") for text in texts]


def test_pointer_and_keys_show_numbers_and_alternatives_of_a_token(open_page, tmp_path):
    token_map = drawn_map(["a", "b", "c", "d"])
    write_token_maps([token_map], tmp_path / "maps.html")
    page = open_page(tmp_path / "maps.html")
    tokens = page.locator(".pane").first.locator(".t")
    for index in (0, 3):
        tokens.nth(index).hover()
        displayed = numbers(page)
        for quantity, symbol in QUANTITIES.items():
            assert displayed[symbol] == [as_shown(token_map.values(quantity))[index]], quantity
        assert displayed["f"] == [as_shown(token_map.scores.teacher_logps)[index]]
        rows = page.locator("#inspector table.alternatives tbody tr").all()
        cells = [row.locator("td").all_inner_texts() for row in rows]
        assert [row[0] for row in cells] == token_map.alternatives[index]
        alternatives = token_map.scores.alternatives
        columns = (alternatives.centred, alternatives.specific, alternatives.teacher_logps, alternatives.student_logps)
        for column, values in enumerate(columns, start=1):
            assert [row[column] for row in cells] == as_shown(values[index], digits=2)
    tokens.nth(1).click()
    tokens.nth(3).hover()
    assert "token 2 of 4" in page.locator("#inspector").inner_text()
    page.keyboard.press("ArrowRight")
    assert "token 3 of 4" in page.locator("#inspector").inner_text()


def scores_at(token_map, student, preferred, centred):
    """The map with one token whose log-probability, credit and alternatives are set, and zeros elsewhere."""
    length = len(token_map.tokens)
    zeros = torch.zeros(length)
    alternatives = token_map.scores.alternatives
    teacher = torch.tensor([[0.0, -5.0]] * length)
    teacher[1] = torch.tensor(preferred)
    alternatives = replace(
        alternatives,
        ids=torch.tensor([[index, 99] for index in range(length)]),
        teacher_logps=teacher,
        advantage=torch.tensor([[0.0, 7.8]] * length),
        policy_mean=torch.zeros(length, 2),
    )
    values = {"student_logps": zeros.clone(), "advantage": zeros.clone(), "policy_mean": zeros}
    values["student_logps"][1] = student
    values["advantage"][1] = centred
    return replace(token_map, scores=replace(token_map.scores, alternatives=alternatives, **values))


def test_headline_of_a_map_is_where_the_teacher_prefers_another_token():
    """Also where the sampled token is rewarded, as any token above the policy's mean."""
    base = drawn_map(["a", "b", "c"], alternatives=("x", "y"))
    headline = headline_token([scores_at(base, 0.0, [-5.0, 0.0], 2.2)])
    assert (headline.index, headline.pair) == (1, 1)
    assert headline.size == pytest.approx(7.8 - 2.2)
    agreed = headline_token([scores_at(base, 0.0, [0.0, -5.0], -1.0)])
    assert (agreed.index, agreed.pair) == (1, None)


def test_first_response_is_the_one_that_training_changed_most(open_page, tmp_path):
    maps = []
    for name, change in (("still", -0.1), ("moved", -3.0)):
        start = drawn_map(["a", "b", "c"], alternatives=("x", "y"), identifier=name)
        maps.append(scores_at(start, 0.0, [-5.0, 0.0], 2.2))
        maps.append(replace(scores_at(start, change, [-5.0, 0.0], 2.2), checkpoint="step-9"))
    write_token_maps(maps, tmp_path / "maps.html")
    page = open_page(tmp_path / "maps.html", width=1280)
    assert page.locator("#response option").first.inner_text().startswith("moved")
    assert page.locator("#headline").inner_text() == (
        "Token 2, “b”: its probability went from 100.0 % (step-1) to 5.0 % (step-9). With the feedback the teacher "
        "prefers “y”: R_t − mean is +7.8 for that and +2.2 for “b”."
    )
    assert page.locator(".t.at").first.inner_text() == "b"
    boxes = [page.locator(name).bounding_box() for name in ("#panes", "#inspector", "#context")]
    for upper, lower in pairwise(boxes):
        assert lower["y"] - (upper["y"] + upper["height"]) < 60  # no empty area
        assert lower["width"] == upper["width"]


def test_hostile_text_is_shown_as_text(open_page, tmp_path, scores):
    paths = [make_run(tmp_path / f"r{i}", scores[i], text="\n".join(HOSTILE), arm_text=HOSTILE[i]) for i in range(2)]
    texts = {"identifier": HOSTILE[1], "problem": HOSTILE[2], "feedback": HOSTILE[3], "checkpoint": HOSTILE[0]}
    token_map = drawn_map([*HOSTILE, "end"], alternatives=HOSTILE, **texts)
    token_map.classes[:] = [*HOSTILE, "end"]
    for path in paths:
        write_maps([token_map], path / "credit_maps" / "step-000001.json")
    page = open_page(write_report(paths, tmp_path / "x.html"))
    tokens = page.locator(".pane .t")
    displayed = [visible(text).replace("\n", "↵") for text in (*HOSTILE, "end")]
    assert tokens.evaluate_all("cells => cells.map(c => c.textContent)") == displayed
    context = page.locator("#context pre").evaluate_all("all => all.map(e => e.textContent)")
    assert context[:2] == [visible(texts["problem"]), visible(texts["feedback"])]
    tokens.nth(1).hover()
    listed = page.locator("#inspector td.code").evaluate_all("all => all.map(e => e.textContent)")
    assert listed == [visible(text) for text in HOSTILE]
    assert HOSTILE[0] in page.locator(".rollout pre").first.evaluate("e => e.textContent")
    elements = page.evaluate("() => [...document.querySelectorAll('*')].map(e => e.tagName.toLowerCase())")
    assert elements.count("script") == 2  # the data and the page's own
    assert not {"img", "iframe", "link", "object", "embed", "base"} & set(elements)
    assert page.locator("[onerror], [onload], [onmouseover], [onclick], #pwned").count() == 0
    assert page.evaluate("window.pwned") is None


def test_content_security_policy_blocks_injected_scripts(open_page, tmp_path):
    write_token_maps([drawn_map(["a"])], tmp_path / "maps.html")
    page = open_page(tmp_path / "maps.html")
    with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.evaluate(TABLES["injection"])
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None
    page.complaints.clear()


def reward(completions, **kwargs):
    return [Verdict(float(i % 2), "Count again.") for i in range(len(completions))]


def test_a_run_saves_rollouts_and_maps_and_prints_the_link_last(run_callbacks, make_trainer, capsys, monkeypatch):
    trainer = make_trainer(reward, max_steps=3)
    displayed = []
    monkeypatch.setattr(callback, "is_in_notebook", lambda: True)
    monkeypatch.setattr(
        "IPython.display.display", lambda data, **options: displayed.append((data["text/html"], options))
    )
    trainer.train()
    folder = Path(trainer.args.output_dir)
    page = folder / "report.html"
    assert capsys.readouterr().out.splitlines()[-1] == f"Report: {page.resolve().as_uri()}"
    curves = {
        figure["title"]: figure["series"] for figure in json.loads(page.with_suffix(".json").read_text())["curves"]
    }
    assert [step for step, *_ in curves["Reward of the rollouts"][0]["points"]] == [1, 2, 3]
    tables = [pq.read_table(path).to_pylist() for path in sorted(folder.glob("completions/*.parquet"))]
    assert [[row["step"] for row in rows] for rows in tables] == [[step] * 8 for step in (1, 2, 3)]
    for row in tables[0]:
        assert row["feedback"] == "Count again."
        assert "Count again." in row["teacher_prompt"]
        assert row["completion"][0]["role"] == "assistant"
        assert math.isfinite(row["s_mean"])
    assert any(row["s_mean"] != 0.0 for row in tables[0])
    [(frame, options)] = displayed  # in a notebook
    assert html.unescape(re.search('srcdoc="([^"]*)"', frame)[1]) == page.read_text("utf-8")
    assert options == {"raw": True, "display_id": "credit-report-0", "update": False}
    assert [row["reward"] for row in tables[2]] == [0.0, 1.0] * 4
    assert [path.stem for path in sorted(folder.glob("credit_maps/*.json"))] == ["step-000001", "step-000003"]


def test_a_plain_script_writes_its_page_without_a_warning_of_dependencies(tmp_path):
    (tmp_path / "train.py").write_text(TABLES["script"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == f"Report: {(tmp_path / 'run' / 'report.html').as_uri()}"
    assert done.stdout.count("Report: ") == 1
    assert '"maps":' in (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "step 1/1  reward" in done.stdout
    assert "FutureWarning" not in done.stderr


def test_reports_during_training_take_little_time(tmp_path, monkeypatch):
    """At the earliest after ten seconds, and fifty times as long as the last one took."""
    now = [100.0]
    written = []

    def write(folders):
        written.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(callback, "write_report", write)
    monkeypatch.setattr(callback.time, "monotonic", lambda: now[0])
    args, state = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(is_world_process_zero=True)
    report = ReportCallback(SimpleNamespace(run_log=SimpleNamespace(has_begun=True)))
    report.on_train_begin(args, state, None)
    for now[0] in (105.0, 110.0, 120.0, 160.0, 161.0, 300.0):
        report.on_log(args, state, None)
    assert written == [110.0, 161.0, 300.0]


def logged_credit(trainer):
    """Logged values of S_t, ΔV_t and R_t by their names in dashboards."""
    names = {"S_t": "s_mean", "ΔV_t": "delta_v_mean", "R_t": "advantage_mean"}
    rows = [row for row in trainer.state.log_history if "reward" in row]
    return {f"CREDIT/{name}": [row[f"credit/{metric}"] for row in rows] for name, metric in names.items()}


def test_dashboards_show_the_credit_first_and_rollouts_as_traces(run_callbacks, make_trainer, tmp_path, monkeypatch):
    storage = pytest.importorskip("trackio.sqlite_storage", reason="needs trackio: pip install credit-trl[dashboards]")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path)
    trainer = make_trainer(reward, report_to=["trackio", "tensorboard"], project="credit")
    trainer.train()
    expected = logged_credit(trainer)
    [run] = storage.SQLiteStorage.get_runs("credit")
    rows = [row for row in storage.SQLiteStorage.get_logs("credit", run) if "CREDIT/S_t" in row]
    assert {name: [row[name] for row in rows] for name in expected} == expected
    assert [row["step"] for row in rows] == [1, 2]
    traces = storage.SQLiteStorage.get_traces("credit", run)
    assert len(traces) == 2 * 8
    assert [message["role"] for message in traces[0]["messages"]][-2:] == ["assistant", "feedback"]
    assert "Count again." in traces[0]["metadata"]["teacher_prompt"]
    [events] = Path(trainer.args.output_dir).rglob("events.*")
    board = accumulator.EventAccumulator(str(events)).Reload()
    for name, values in expected.items():
        assert [scalar.value for scalar in board.Scalars(name)] == pytest.approx(values)
    assert min(board.Tags()["scalars"]).startswith("CREDIT/")


def test_wandb_has_the_credit_first_and_tables_of_completions(run_callbacks, make_trainer, tmp_path, monkeypatch):
    """The file of an offline run, as `wandb leet inspect` reads it."""
    wandb = pytest.importorskip("wandb", minversion="0.31", reason="needs wandb: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    trainer = make_trainer(reward, report_to=["wandb"], log_completions=True)
    trainer.train()
    wandb.finish()
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(tmp_path / "wandb" / "latest-run")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    logged = [record["history"]["item"] for record in map(json.loads, lines) if record["type"] == "history"]
    rows = [row for row in logged if "CREDIT/S_t" in row]
    assert {name: [row[name] for row in rows] for name in logged_credit(trainer)} == logged_credit(trainer)
    assert [row["train/global_step"] for row in rows] == [1, 2]
    assert min(name for row in logged for name in row if "/" in name).startswith("CREDIT/")
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("completions_*.table.json")]
    assert {len(table["data"]) for table in tables} == {8}
    assert {"prompt", "completion", "feedback", "teacher_prompt"} < set(tables[0]["columns"])


def test_reports_and_maps_that_fail_warn_once_and_end_no_run(run_callbacks, make_trainer, monkeypatch, caplog):
    def fail(*arguments, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(callback, "_SECONDS", 0.0)
    monkeypatch.setattr(callback, "write_report", fail)
    monkeypatch.setattr("credit_trl.lab.analysis.callback.map_response", fail)
    trainer = make_trainer(reward, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    messages = [record.message for record in caplog.records if "Training continues" in record.message]
    assert [message.split(":")[0] for message in messages] == ["CreditMapCallback", "ReportCallback"]


def test_options_that_a_resumed_run_changed_have_their_steps(tmp_path, scores):
    run = make_run(tmp_path / "run", scores[0], contrastive_coef=0.2)
    segments = [{"step": 0, "options": {"contrastive_coef": 0.1, "seed": 1}}]
    segments += [{"step": 3, "options": {"contrastive_coef": 0.2}}]
    write_json(run / "run.json", read_json(run / "run.json") | {"segments": segments})
    page = write_report([run])
    document = read_json(page.with_suffix(".json"))
    assert document["options"][0]["contrastive_coef"] == "0.1 up to step 3, then 0.2"
    assert document["changes"] == [3]
    assert "0.1 up to step 3, then 0.2" in page.with_suffix(".md").read_text()
