"""The first lines of the report: what was trained, whether it worked, and what went wrong."""

import re

import numpy as np
import pytest

from credit_trl.evaluation.statistics import bootstrap_ci, paired_bootstrap
from credit_trl.lab.report import write_report
from credit_trl.lab.report.answer import problems_of
from credit_trl.lab.report.comparison import compare_arms, gain
from credit_trl.lab.report.runs import Run, arms_of, load_run
from credit_trl.run_directory import append_lines, read_json, write_json
from credit_trl.training.card import method_name
from lab.run_folders import make_run
from tables import tables_of

TABLES = tables_of(__file__)


@pytest.mark.parametrize(("options", "name"), TABLES["methods"])
def test_arm_is_named_by_its_method(options, name):
    assert method_name(options) == name


def test_answer_has_the_paired_gain_of_the_task_and_its_groups(open_page, tmp_path, scores):
    run = make_run(tmp_path / "r", scores[0], groups=("easy", "hard"))
    path = write_report([run])
    answer = read_json(path.with_suffix(".json"))["answer"]
    at_start, at_end = scores[0][0], scores[0][-1]
    expected = paired_bootstrap(at_end, at_start, paired_seeds=True)
    line = answer["lines"][0]
    assert line.startswith("Model bases/seed0, data sums, CREDIT λ = 0.1: ")
    line = line.replace("−", "-")
    assert (
        f"{100 * at_start.mean():.1f} % → {100 * at_end.mean():.1f} %, {100 * expected.difference:+.1f} points" in line
    )
    assert f"{100 * expected.low:+.1f} to {100 * expected.high:+.1f}" in line
    assert [row["group"] for row in answer["groups"]] == ["easy", "hard"]
    rates = f"12.5 → {100 * len(scores[0]) / 8:.1f} %"
    page = open_page(path)
    assert page.locator("#answer tbody td:last-child").all_inner_texts() == [rates] * 2
    assert (
        re.findall(r"\w+_(?:low|high)\b|[{}]", page.locator("body").inner_text()) == []
    )  # words, neither keys nor JSON
    for start, row in enumerate(answer["groups"]):
        interval = bootstrap_ci(at_end[start::2])
        assert row["before"] == pytest.approx(at_start[start::2].mean())
        assert (row["after"], row["low"], row["high"]) == pytest.approx(tuple(interval))


@pytest.mark.parametrize(("shift", "status"), [(0.5, "good"), (-0.5, "bad"), (0.0, "unclear")])
def test_status_follows_the_interval_of_the_gain(tmp_path, shift, status):
    at_start = np.tile([0.25, 0.75, 0.5, 0.5], 5)
    run = make_run(tmp_path / "r", np.array([at_start, at_start + shift * np.tile([0.5, 0.5, 1.0, 1.0], 5)]))
    answer = read_json(write_report([run]).with_suffix(".json"))["answer"]
    assert answer["status"] == status


@pytest.mark.parametrize(("rows", "expected"), TABLES["problems"])
def test_runs_that_cannot_learn_are_named(rows, expected):
    log = []
    for count, metrics in rows:
        for _ in range(count):
            log.append({"step": len(log) + 1, **metrics})
    titles = [title for title, _ in problems_of(Run(None, {"distillation_weight": 1.0}, log, []))]
    assert [title.split()[0] for title in titles] == expected


def test_problems_and_warnings_stand_in_every_form_of_the_report(open_page, tmp_path, scores):
    run = make_run(tmp_path / "r", scores[0], metrics={"completions/clipped_ratio": 1.0})
    warning = {"step": 3, "time": "2026-01-02T03:04:05+00:00", "warning": "low_mass", "message": "Raise `top_k` <b>."}
    append_lines(run / "log.jsonl", [warning])
    path = write_report([run])
    answer = read_json(path.with_suffix(".json"))["answer"]
    assert [(row["step"], row["time"], row["message"]) for row in answer["warnings"]] == [
        (3, warning["time"], warning["message"])
    ]
    text = path.with_suffix(".md").read_text("utf-8")
    assert text.index("The answers are cut") < text.index("Raise `top_k` &lt;b>.")
    page = open_page(path)
    section = page.locator("main section").first
    assert section.get_attribute("id") == "answer"
    assert section.locator("h2").inner_text().startswith("The answers are cut: 100%")
    red = section.locator("h2").evaluate("title => getComputedStyle(title).color")
    assert red == "rgb(179, 38, 30)"
    assert section.locator("li").inner_text() == "step 3, 2026-01-02 03:04:05 UTC: Raise top_k <b>."


def test_page_of_a_run_that_trains_shows_progress_and_reads_itself_again(open_page, tmp_path, scores):
    run = make_run(tmp_path / "r", scores[0], metrics={"credit/seconds_rollout": 30.0})
    write_json(run / "run.json", read_json(run / "run.json") | {"last_step": 10})
    page = open_page(write_report([run]))
    page.clock.install()
    page.reload()
    assert page.locator("#answer h2").inner_text().startswith("Step 4 of 10. So far: ")
    assert page.locator("#answer progress").evaluate("bar => [bar.value, bar.max]") == [4, 10]
    assert "about 3 minutes left" in page.locator("#answer .note").inner_text()
    page.select_option("#theme", "dark")
    append_lines(run / "log.jsonl", [{"step": 10, "train_runtime": 1.0}])
    write_report([run])
    page.clock.fast_forward(15_000)
    page.locator("#answer progress").wait_for(state="detached")
    assert page.locator("#theme").input_value() == "dark"
    assert not page.locator("#answer h2").inner_text().startswith("Step")


def test_page_of_a_killed_run_does_not_wait_for_it(open_page, tmp_path, scores):
    run = make_run(tmp_path / "r", scores[0])
    write_json(run / "run.json", read_json(run / "run.json") | {"last_step": 10})
    path = write_report([run])
    path.write_text(re.sub(r'"written":[\d.]+', '"written":0', path.read_text("utf-8")), "utf-8")
    page = open_page(path)
    assert "may have ended before its last step" in page.locator("#answer .note").inner_text()


def test_intervals_of_two_seeds_stay_within_the_possible(tmp_path):
    drawn_scores = np.random.default_rng(0).integers(0, 5, size=(2, 8)) / 4
    final = np.stack([np.ones(8), drawn_scores[1]])
    paths = [make_run(tmp_path / f"{i}", np.stack([drawn_scores[0], final[i]]), seed=i) for i in range(2)]
    paths += [make_run(tmp_path / f"b{i}", final[i] - final[i], seed=i, contrastive_coef=0.0) for i in range(2)]
    base, compared = compare_arms(arms_of([load_run(path) for path in paths]))
    raw = paired_bootstrap(final, np.zeros(8))
    assert raw.high > 1.0  # of Student's t
    assert (base["high"], compared["difference_low"]) == (1.0, -1.0)
    result = gain([load_run(path) for path in paths[:2]])
    assert -1.0 <= result["difference_low"] < result["difference_high"] <= 1.0
    scaled = [make_run(tmp_path / f"s{i}", 10 * final[i], seed=i) for i in range(2)]
    [row] = compare_arms(arms_of([load_run(path) for path in scaled]))
    assert row["high"] == pytest.approx(10 * raw.high)  # rewards may have another range


def test_curves_that_coincide_are_told_apart(open_page, tmp_path, scores):
    paths = [make_run(tmp_path / f"r{i}", scores[i], contrastive_coef=0.1 * i) for i in range(2)]
    page = open_page(write_report(paths, tmp_path / "x.html"))
    figure = page.locator("figure", has_text="Reward of the rollouts")
    assert figure.locator("g.over1").count() == 1
    assert figure.locator("p").inner_text().endswith("CREDIT λ = 0.1")
    dashes = figure.locator("polyline").evaluate_all("all => all.map(line => getComputedStyle(line).strokeDasharray)")
    assert len(set(dashes)) == 2
    assert page.locator("figure", has_text="avg@k").locator("g.over1").count() == 0


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("runs", [1, 3, 12])
def test_no_table_is_cut(open_page, tmp_path, scores, width, runs):
    paths = []
    for i in range(runs):
        options = {f"a_long_name_of_an_option_{n}": f"value_{n}_" * (4 + i) for n in range(14)}
        paths.append(make_run(tmp_path / f"r{i}", scores[i % 6], seed=i % 2, **options))
    page = open_page(write_report(paths, tmp_path / "x.html"), width=width)
    page.locator("details").evaluate_all("all => all.forEach(details => { details.open = true; })")
    cut = "all => all.filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.outerHTML.slice(0, 200))"
    assert page.locator("#answer, #summary").evaluate_all(cut) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_symbols_explain_themselves_on_hover_and_focus(open_page, tmp_path, scores):
    paths = [make_run(tmp_path / f"r{i}", scores[i], contrastive_coef=0.1 * i) for i in range(2)]
    page = open_page(write_report(paths, tmp_path / "x.html"))
    tip = page.locator("#tip")
    assert not tip.is_visible()
    page.locator("th .term", has_text="p (Holm)").hover()
    assert tip.inner_text().startswith("p (Holm): probability of so large a difference by chance")
    symbol = page.locator("figure h3 .term", has_text="S_t")
    symbol.focus()
    assert "what is specific to this prompt" in tip.inner_text()
    assert symbol.get_attribute("aria-describedby") == "tip"
    box = tip.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.viewport_size["width"]
    page.keyboard.press("Escape")
    assert not tip.is_visible()
