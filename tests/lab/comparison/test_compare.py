"""Tables, paired tests and curves of run directories with known scores."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from credit_trl.evaluation.statistics import holm, paired_bootstrap, two_level_ci
from credit_trl.lab.comparison import compare, find_runs, read_run, write_report
from credit_trl.lab.comparison.compare import BASE, BEST, FINAL
from credit_trl.lab.comparison.report import remarks, tables_markdown
from credit_trl.lab.comparison.runs import differing_options, method_of
from credit_trl.lab.comparison.tables import contrast_row, p_text, score_markdown, steps_row
from credit_trl.training.run_directory import append_lines, write_json

PROMPTS = [f"q{i}" for i in range(40)]


def scores(mean: float, seed: int, spread: float = 0.1) -> dict[str, float]:
    difficulty = np.linspace(-0.3, 0.3, len(PROMPTS))
    noise = np.random.default_rng(seed).normal(0, spread, len(PROMPTS))
    return {p: float(np.clip(mean + d + e, 0, 1)) for p, d, e in zip(PROMPTS, difficulty, noise, strict=True)}


@pytest.fixture
def three_arms(write_run, tmp_path):
    """GRPO, SDPO and CREDIT with three seeds: final means .4, .5, .6; SDPO scores best in the middle."""
    for position, (arm, final) in enumerate({"GRPO": 0.4, "SDPO": 0.5, "CREDIT λ=0.1": 0.6}.items()):
        for seed in (1, 2, 3):
            middle = 0.7 if arm == "SDPO" else 0.3
            write_run(
                f"{arm}-{seed}",
                {
                    0: scores(0.2, seed),
                    5: scores(middle, 10 * position + seed),
                    10: scores(final, 100 * position + seed),
                },
                arm=arm,
                seed=seed,
                log=[{"step": s, "loss": 1.0, "entropy": 0.5 * seed + s, "credit/s_mean": s / 10} for s in (1, 2, 10)],
            )
    return tmp_path / "runs"


def test_cells_have_best_and_final_scores_with_intervals(three_arms):
    result = compare([three_arms])
    assert result.arms == [BASE, "GRPO", "SDPO", "CREDIT λ=0.1"]
    cell = result.cells["SDPO", "letters", FINAL]
    runs = [run for run in result.runs if run.arm == "SDPO"]
    matrix = [[run.per_prompt(10)[p] for p in PROMPTS] for run in runs]
    assert cell.interval == two_level_ci(matrix)
    assert cell.by_seed == pytest.approx([np.mean(row) for row in matrix])
    assert cell.steps == [10] * 3
    best = result.cells["SDPO", "letters", BEST]
    assert best.steps == [5] * 3
    assert best.interval.mean > cell.interval.mean + 0.15
    base = result.cells[BASE, "letters", FINAL]
    assert base.seeds == 3  # one per seed, not one per run
    assert base.interval.mean == pytest.approx(0.2, abs=0.05)


def test_intervals_of_rates_only_are_clipped_to_zero_and_one(write_run, tmp_path):
    for seed, wrong in ((1, 3), (2, 0), (3, 0)):
        rates = {p: 0.0 if i < wrong else 1.0 for i, p in enumerate(PROMPTS)}
        write_run(f"a{seed}", {10: rates}, arm="A", seed=seed)
    assert compare([tmp_path]).cells["A", "letters", FINAL].interval.high == 1.0
    write_run("b", {10: dict.fromkeys(PROMPTS, 1.5)}, arm="B")
    assert compare([tmp_path]).cells["A", "letters", FINAL].interval.high > 1.0


def test_differences_are_paired_by_prompt_and_seed(three_arms):
    result = compare([three_arms])
    assert result.baseline == "SDPO"
    (contrast,) = [c for c in result.contrasts if c.when == FINAL and c.arm.startswith("CREDIT")]
    by_seed = {run.seed: run for run in result.runs if run.arm == "SDPO"}
    ours = sorted((run for run in result.runs if run.arm.startswith("CREDIT")), key=lambda run: run.seed)
    expected = paired_bootstrap(
        [[run.per_prompt(10)[p] for p in PROMPTS] for run in ours],
        [[by_seed[run.seed].per_prompt(10)[p] for p in PROMPTS] for run in ours],
        paired_seeds=True,
    )
    assert contrast.difference == expected
    assert contrast.paired_seeds
    assert contrast.difference.low < 0.1 < contrast.difference.high
    assert not compare([three_arms], arms=["SDPO"]).contrasts


@pytest.mark.parametrize(("seeds", "has_interval"), [((1,), True), ((1, 2), False), ((1, 2, 3), True)])
def test_two_seeds_have_points_and_no_interval(write_run, tmp_path, seeds, has_interval):
    for arm, mean in (("SDPO", 0.3), ("CREDIT", 0.5)):
        for seed in seeds:
            write_run(f"{arm}{seed}", {10: scores(mean + 0.05 * seed, seed)}, arm=arm, seed=seed)
    result = compare([tmp_path])
    cell, contrast = result.cells["CREDIT", "letters", FINAL], result.contrasts[0]
    assert cell.interval.mean == pytest.approx(sum(cell.by_seed) / len(seeds))
    assert contrast.difference.difference == pytest.approx(sum(contrast.by_seed) / len(seeds))
    for value in (cell.interval.low, contrast.difference.low, contrast.difference.p_value, contrast.adjusted_p):
        assert math.isnan(value) != has_interval
    table, row = score_markdown(result, FINAL), contrast_row(contrast)
    assert ("±" in table) == has_interval
    if not has_interval:
        first, second = cell.by_seed
        assert f"({100 * first:.1f}, {100 * second:.1f})" in table
        assert row[3:] == [", ".join(f"{100 * one:+.1f}" for one in contrast.by_seed), "–", "–"]


def test_runs_without_evaluations_are_compared_by_curves(write_run, tmp_path):
    for arm in ("SDPO", "CREDIT"):
        log = [{"step": step, "reward": 0.1 * step, "credit/s_mean": 0.2} for step in (1, 2, 3)]
        write_run(arm, {}, arm=arm, log=log, finished=False)
    result = compare([tmp_path])
    assert result.arms == ["SDPO", "CREDIT"]
    assert {(curve.arm, curve.title) for curve in result.curves} == {
        (arm, title) for arm in result.arms for title in ("Reward of the rollouts", "S_t, mean (nats)")
    }
    assert not result.cells
    assert "Without an evaluation, so curves only" in tables_markdown(result)
    page = write_report(result, tmp_path / "report").read_text()
    assert "Training dynamics" in page
    assert "Final score" not in page


def test_arms_with_different_seeds_are_not_paired_by_seed(write_run, tmp_path):
    for arm, seeds in (("SDPO", (1, 2)), ("CREDIT", (3, 4))):
        for seed in seeds:
            write_run(f"{arm}{seed}", {10: scores(0.5, seed)}, arm=arm, seed=seed)
    (final, best) = compare([tmp_path]).contrasts
    assert not final.paired_seeds
    assert (final.when, best.when) == (FINAL, BEST)


def test_arms_with_different_seeds_have_a_remark(three_arms):
    assert not [remark for remark in remarks(compare([three_arms])) if "seeds" in remark]
    shutil.rmtree(three_arms / "SDPO-2")
    [remark] = remarks(compare([three_arms]))
    assert "(letters: CREDIT λ=0.1 1, 2, 3; GRPO 1, 2, 3; SDPO 1, 3)" in remark


def test_two_runs_with_one_name_and_seed_are_an_error(write_run, tmp_path):
    """`trl credit` has one default seed, and the name of an arm does not show the learning rate."""
    for name, rate in (("slow", 1e-6), ("fast", 1e-5)):
        write_run(name, {10: scores(0.5, 1)}, arm="", config={"learning_rate": rate})
    with pytest.raises(
        ValueError, match=r"same seed \(1\).*fast.*slow.*differ in learning_rate.*`arm` in its run.json"
    ):
        compare([tmp_path])
    described = json.loads((tmp_path / "runs" / "fast" / "run.json").read_text())
    write_json(tmp_path / "runs" / "fast" / "run.json", {**described, "arm": "fast"})
    assert compare([tmp_path]).arms == ["CREDIT λ=0.1 C=1", "fast"]


def test_evaluated_models_are_named_by_run_and_checkpoint(write_run, tmp_path):
    folder = write_run("a", {10: scores(0.5, 1)}, arm="A")
    result = json.loads((folder / "evaluations" / "step-000010" / "result.json").read_text())
    for run in ("one", "two"):
        write_json(tmp_path / "evaluated" / run / "result.json", {**result, "model": f"runs/{run}/checkpoint-50"})
    assert compare([tmp_path / "evaluated"]).arms == ["one/checkpoint-50", "two/checkpoint-50"]


def test_planned_job_with_a_base_evaluation_is_not_a_run(write_run, tmp_path):
    done = write_run("done", {0: scores(0.2, 1), 10: scores(0.5, 1)}, arm="A")
    planned = tmp_path / "runs" / "planned"
    shutil.copytree(done / "evaluations" / "step-000000", planned / "evaluations" / "step-000000")
    write_json(planned / "job.json", {"arm": "B"})
    assert compare([tmp_path]).arms == [BASE, "A"]


def test_rewritten_run_is_read_again(write_run, tmp_path):
    for mean in (0.5, 0.9):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        write_run("a", {10: dict.fromkeys(PROMPTS, mean)}, arm="A")
        assert compare([tmp_path]).cells["A", "letters", FINAL].interval.mean == pytest.approx(mean)


def test_markdown_escapes_hostile_names(write_run, tmp_path):
    for seed, arm in enumerate(("SDPO", "a|b", "<img src=x>", "red\x1b[31m", "two\nlines")):
        write_run(f"run{seed}", {10: scores(0.5, seed)}, arm=arm)
    text = tables_markdown(compare([tmp_path], targets=[0.5]))
    assert "a\\|b" in text
    assert "&lt;img src=x>" in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert "two⟨U+000A⟩lines" in text


def test_groups_of_prompts_are_columns_with_an_average(write_run, tmp_path):
    groups = {p: "easy" if i < 10 else "hard" for i, p in enumerate(PROMPTS)}
    write_run("a", {10: {p: 1.0 if groups[p] == "easy" else 0.0 for p in PROMPTS}}, arm="A", groups=groups)
    write_run("b", {10: dict.fromkeys(PROMPTS, 0.5)}, arm="B", groups=groups)
    result = compare([tmp_path])
    assert result.domains == ["letters: easy", "letters: hard"]
    assert result.prompts == {"letters: easy": 10, "letters: hard": 30}
    assert result.mean("A", None, FINAL) == result.mean("B", None, FINAL) == 0.5
    assert result.ranks("letters: easy", FINAL) == {"A": 1, "B": 2}
    assert result.ranks("letters: hard", FINAL) == {"A": 2, "B": 1}
    assert result.ranks(None, FINAL) == {"A": 1, "B": 1}
    table = score_markdown(result, FINAL).splitlines()
    assert table[2] == "| + A | **100.0** ±0.0 | <u>0.0</u> ±0.0 | **50.0** |"


def test_tasks_are_columns_and_missing_cells_have_no_average(write_run, tmp_path):
    write_run("a1", {10: scores(0.5, 1)}, arm="A", task="letters")
    write_run("a2", {10: scores(0.6, 2)}, arm="A", task="numbers")
    write_run("b1", {10: scores(0.5, 1)}, arm="B", task="letters")
    result = compare([tmp_path])
    assert math.isnan(result.mean("B", None, FINAL))
    assert score_markdown(result, FINAL).splitlines()[3].endswith("| – | – |")


def test_only_shared_prompts_count_and_at_least_one_is_needed(write_run, tmp_path):
    write_run("a", {10: {"q0": 0.0, "q1": 1.0, "q2": 1.0}}, arm="A")
    write_run("b", {10: {"q1": 0.0, "q2": 1.0, "q3": 1.0}}, arm="B")
    result = compare([tmp_path])
    assert result.prompts == {"letters": 2}
    assert result.cells["A", "letters", FINAL].interval.mean == 1.0
    write_run("c", {10: {"q9": 0.0}}, arm="C")
    with pytest.raises(ValueError, match="share no prompt"):
        compare([tmp_path])


def test_prompts_are_those_of_the_first_best_and_last_evaluation(write_run, tmp_path):
    every = {f"q{i}": 0.5 for i in range(4)}
    for arm in "AB":
        write_run(arm, {0: {"q0": 0.0, "q1": 0.0}, 5: {**every, "q1": 1.0}, 10: {"q1": 0.0, "q2": 0.5}}, arm=arm)
    result = compare([tmp_path])
    assert result.prompts == {"letters": 1}
    assert result.cells["Base", "letters", FINAL].interval.mean == 0.0
    assert result.cells["A", "letters", BEST].interval.mean == 1.0


def test_evaluation_above_runs_hides_none_of_them(write_run, tmp_path):
    folder = write_run("a", {0: scores(0.2, 1), 10: scores(0.5, 1)}, arm="A")
    shutil.copy(folder / "evaluations" / "step-000010" / "result.json", tmp_path / "result.json")
    assert {run.folder for run in compare([tmp_path]).runs} == {folder, tmp_path}


def test_evaluation_in_the_folder_of_a_run_does_not_replace_it(write_run, tmp_path):
    folder = write_run("a", {0: scores(0.2, 1), 10: scores(0.5, 1)}, arm="A")
    shutil.copy(folder / "evaluations" / "step-000010" / "result.json", folder / "result.json")
    assert compare([tmp_path]).arms == ["Base", "A"]


def test_result_of_another_tool_is_named(tmp_path):
    write_json(tmp_path / "other" / "result.json", {"accuracy": 0.5})
    with pytest.raises(ValueError, match=r"other/result.json is no result of `trl credit-eval`: it has no k, model"):
        compare([tmp_path])


def test_steps_to_a_score_are_listed_for_each_run(three_arms):
    result = compare([three_arms], targets=[0.55])
    steps = {row.arm: row.steps for row in result.steps_to}
    assert steps == {"GRPO": [None] * 3, "SDPO": [5] * 3, "CREDIT λ=0.1": [10] * 3}
    assert steps_row(result.steps_to[0])[2:] == ["55 %", "never, never, never", "never"]
    assert steps_row(result.steps_to[1])[3:] == ["5, 5, 5", "5"]


def test_a_score_reaches_a_target_that_its_rounding_misses(write_run, tmp_path):
    write_run("a", {10: dict.fromkeys(PROMPTS[:7], 0.1)})
    assert np.mean([0.1] * 7) < 0.1
    assert [row.steps for row in compare([tmp_path], targets=[0.1]).steps_to] == [[10]]


def test_curves_are_means_and_ranges_over_seeds(three_arms):
    curves = {(c.arm, c.title): c for c in compare([three_arms]).curves}
    entropy = curves["SDPO", "Entropy (nats)"]
    assert entropy.steps == [1, 2, 10]
    assert entropy.mean == pytest.approx([2.0, 3.0, 11.0])
    assert entropy.low == pytest.approx([1.5, 2.5, 10.5])
    assert entropy.high == pytest.approx([2.5, 3.5, 11.5])
    assert curves["GRPO", "Score (avg@k)"].steps == [0, 5, 10]
    assert ("SDPO", "Response length (tokens)") not in curves


def test_metric_can_replace_the_score(write_run, tmp_path):
    write_run("a", {10: scores(0.5, 1)}, arm="A", metrics={"format": 0.25})
    write_run("b", {10: scores(0.5, 1)}, arm="B", metrics={"format": 0.75})
    result = compare([tmp_path], measure="format")
    assert result.cells["A", "letters", FINAL].interval.mean == 0.25
    with pytest.raises(ValueError, match="score, majority, format"):
        compare([tmp_path], measure="speed")


def test_log_falls_back_to_the_last_trainer_state(write_run):
    folder = write_run("a", {0: scores(0.5, 1), 20: scores(0.5, 1)})
    for step in (10, 20):
        state = {"global_step": step, "log_history": [{"step": s, "entropy": 0.1 * s} for s in (1, step)]}
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    run = read_run(folder)
    assert run.log_source == "checkpoint-20/trainer_state.json"
    assert run.series("entropy") == ([1, 20], [0.1, 2.0])


def test_runs_and_evaluations_are_found_at_any_depth(write_run, tmp_path):
    folder = write_run("deep/er/a", {10: scores(0.5, 1)}, arm="A")
    alone = tmp_path / "runs" / "evaluated"
    shutil.copytree(folder / "evaluations" / "step-000010", alone)
    found = {run.arm: run for run in find_runs([tmp_path])}
    assert found.keys() == {"A", "m"}
    assert found["m"].per_prompt(0) == found["A"].per_prompt(10)
    result = compare([tmp_path], baseline="m")
    assert result.contrasts[0].difference.difference == 0.0


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"distillation_weight": 0.0, "contrastive_coef": 0.1}, "GRPO"),
        ({"distillation_weight": 1.0, "contrastive_coef": 0.0}, "SDPO"),
        ({"distillation_weight": 1.0, "contrastive_coef": 0.1}, "CREDIT"),
        ({"distillation_weight": 1.0, "contrastive_coef": 0.1, "contrastive_swap": "hint"}, "hint-contrast"),
        ({"distillation_weight": 1.0, "contrastive_coef": 0.1, "contrastive_swap": "self"}, "temper-only"),
        ({"distillation_weight": 1.0, "contrastive_coef": 0.0, "teacher_hint": "foreign"}, "foreign-hint"),
        ({"distillation_weight": 1.0, "credit_use": "modulate", "contrastive_coef": 0.1}, "modulate"),
        ({"distillation_weight": 1.0, "credit_use": "modulate", "credit_weight": "s"}, "modulate-s"),
        ({"distillation_weight": 1.0, "credit_use": "route", "contrastive_coef": 0.0}, "route"),
        ({"beta": 0.0}, "GRPO"),
    ],
)
def test_method_follows_from_the_configuration(config, method):
    assert method_of(config) == method


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({}, "CREDIT λ=0.1 C=1"),
        ({"contrastive_form": "guide", "contrastive_coef": 1.0}, "CREDIT λ=1 C=1 form=guide"),
        ({"contrastive_source": "none", "contrastive_gate": 0.2}, "CREDIT λ=0.1 C=1 source=none gate=0.2"),
        ({"contrastive_baseline": "log_mean", "contrastive_count": 4}, "CREDIT λ=0.1 C=4 baseline=log_mean"),
        ({"contrastive_plausibility": 0.1}, "CREDIT λ=0.1 C=1 plausibility=0.1"),  # an option of version 0.1
        ({"contrastive_coef": "auto"}, "CREDIT λ=auto C=1"),  # λ of version 0.1
        ({"contrastive_coef": 0.0}, "SDPO"),
        ({"distillation_weight": 0.0}, "GRPO"),
    ],
)
def test_unnamed_runs_show_non_default_options_of_the_contrast(make_config, write_run, options, label):
    removed = {name: value for name, value in options.items() if name == "contrastive_plausibility" or value == "auto"}
    config = make_config(**{name: options[name] for name in options if name not in removed}).to_dict() | removed
    folder = write_run("run", {0: {"a": 1.0}}, arm="", config=config)
    assert read_run(folder).arm == label


def test_holm_multiplies_the_smallest_by_all_and_never_decreases():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.5]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_differences_are_in_percentage_points(three_arms):
    contrast = compare([three_arms]).contrasts[0]
    row = contrast_row(contrast)
    assert row[2] == f"{100 * contrast.difference.difference:+.1f}"
    assert p_text(0.0004) == "< 0.001"
    assert p_text(0.05) == "0.050"


def test_unfinished_runs_are_compared_only_on_request(write_run, tmp_path):
    write_run("a", {0: scores(0.2, 1), 10: scores(0.6, 1)}, arm="A")
    write_run("b", {0: scores(0.2, 1), 5: scores(0.3, 1)}, arm="B", finished=False)
    result = compare([tmp_path])
    assert result.arms == [BASE, "A"]
    assert [run.arm for run in result.unfinished] == ["B"]
    assert compare([tmp_path], include_unfinished=True).cells["B", "letters", FINAL].steps == [5]
    with pytest.raises(ValueError, match=r"1 unfinished.*`--include_unfinished` \(`include_unfinished=True`\)"):
        compare([tmp_path / "runs" / "b"])


def test_an_arm_named_twice_is_compared_once(write_run, tmp_path):
    write_run("a", {10: scores(0.6, 1)}, arm="A")
    assert compare([tmp_path], arms=["A", "A"]).arms == ["A"]


def test_differing_sampling_settings_are_listed_with_runs(write_run, tmp_path):
    sampled = {"temperature": 0.6, "top_p": 0.95, "seed": 0, "template": {}}
    for seed in (1, 2):
        write_run(f"a-{seed}", {10: scores(0.6, 1)}, arm="A", seed=seed, settings={**sampled, "seed": seed})
    write_run("unknown", {10: scores(0.6, 1)}, arm="C")  # written before settings were recorded
    assert compare([tmp_path]).differing_settings == []
    write_run("b", {10: scores(0.4, 1)}, arm="B", settings={**sampled, "temperature": 1.0})
    result = compare([tmp_path])
    (line,) = result.differing_settings
    runs = tmp_path / "runs"
    assert line == f"letters, temperature: 0.6 in {runs / 'a-1'} and 1 more; 1.0 in {runs / 'b'}"
    tables = tables_markdown(result)
    assert tables.startswith("These evaluations use different sampling settings")
    assert line in tables


def test_options_that_differ_within_an_arm_are_listed(write_run, tmp_path):
    rate = {"learning_rate": 1e-6}
    for seed in (1, 2):
        folders = {"output_dir": f"runs/{seed}", "seed": seed, "save_steps": 10 * seed, "resume_from_checkpoint": None}
        write_run(f"a-{seed}", {10: scores(0.6, 1)}, arm="A", seed=seed, config={**rate, **folders})
    write_run("b", {10: scores(0.4, 1)}, arm="B", config={"learning_rate": 1e-4})  # another arm, another option
    assert differing_options(compare([tmp_path]).runs) == []
    write_run("a-3", {10: scores(0.6, 1)}, arm="A", seed=3, config={"learning_rate": 1e-4})
    result = compare([tmp_path])
    assert differing_options(result.runs) == ["A on letters: learning_rate (1e-06, 0.0001)"]
    assert "also differ in options" in tables_markdown(result).partition("## ")[0]


def test_arms_from_different_models_have_no_common_base(write_run, tmp_path):
    trained = {0: scores(0.2, 1), 10: scores(0.6, 1)}
    for seed in (1, 2):  # one base per seed, as a sweep with `bases/seed{seed}`
        write_run(f"a-{seed}", trained, arm="A", seed=seed, model=f"bases/seed{seed}")
        write_run(f"b-{seed}", trained, arm="B", seed=seed, model=f"bases/seed{seed}")
    result = compare([tmp_path])
    assert differing_options(result.runs) == []
    assert BASE in result.arms
    write_run("a-3", trained, arm="A", seed=3, model="org/other")
    assert differing_options(compare([tmp_path]).runs) == ["A on letters: model (bases/seed1, bases/seed2, org/other)"]
    write_run("b-3", trained, arm="B", seed=3, model="bases/seed3")
    result = compare([tmp_path])
    assert BASE not in result.arms
    assert "started from different models" in tables_markdown(result).partition("## ")[0]


def test_base_of_all_seeds_is_one_evaluation(write_run, tmp_path):
    for seed in (1, 2):
        write_run(f"a-{seed}", {0: scores(0.2, 1), 10: scores(0.6, seed)}, arm="A", seed=seed, model="org/one")
    result = compare([tmp_path])
    assert result.cells[BASE, "letters", FINAL].seeds == 1
    assert "±" in score_markdown(result, FINAL).splitlines()[2]
    write_run("a-3", {0: scores(0.2, 1), 10: scores(0.6, 3)}, arm="A", seed=3, model="org/3")
    assert compare([tmp_path]).cells[BASE, "letters", FINAL].seeds == 2  # a base per seed is separate


def test_digits_of_a_model_are_not_taken_for_the_seed(write_run, tmp_path):
    for seed in (0, 1, 2):
        write_run(f"a-{seed}", {10: scores(0.6, 1)}, arm="A", seed=seed, model="org/SmolLM2-0.1B")
    assert differing_options(compare([tmp_path]).runs) == []


def test_prompts_without_a_group_are_a_separate_column(write_run, tmp_path):
    groups = {p: "hard" if i < 10 else None for i, p in enumerate(PROMPTS)}
    write_run("a", {10: {p: float(groups[p] is None) for p in PROMPTS}}, arm="A", groups=groups)
    result = compare([tmp_path])
    assert result.prompts == {"letters: hard": 10, "letters: other": 30}
    assert result.mean("A", None, FINAL) == 0.5


def test_an_arm_cannot_have_the_name_of_the_base(write_run, tmp_path):
    write_run("a", {0: scores(0.2, 1), 10: scores(0.9, 1)}, arm=BASE)
    with pytest.raises(ValueError, match=f"called '{BASE}'.*another name"):
        compare([tmp_path])


def test_metric_missing_for_some_prompts_is_an_error(write_run, tmp_path):
    folder = write_run("a", {10: scores(0.5, 1)}, arm="A", metrics={"format": 1.0})
    path = folder / "evaluations" / "step-000010" / "result.json"
    result = json.loads(path.read_text())
    result["prompts"][3]["metrics"] = {}
    write_json(path, result)
    with pytest.raises(ValueError, match=f"'format' of 39 prompts of 40, not of '{result['prompts'][3]['id']}'"):
        compare([tmp_path], measure="format")


def test_best_step_follows_the_reward_for_every_measure(write_run, tmp_path):
    folder = write_run("a", {5: scores(0.9, 1), 10: scores(0.5, 1)}, arm="A")
    for step, share in ((5, 0.2), (10, 0.95)):
        path = folder / "evaluations" / f"step-{step:06d}" / "result.json"
        result = json.loads(path.read_text())
        for prompt in result["prompts"]:
            prompt["metrics"] = {"format": share}
        write_json(path, result)
    compared = compare([tmp_path], measure="format")
    assert compared.cells["A", "letters", BEST].interval.mean == pytest.approx(0.2)
    assert "highest mean reward over all of these prompts" in tables_markdown(compared)


def test_errors_name_missing_and_damaged_runs(tmp_path, write_run):
    with pytest.raises(FileNotFoundError, match="credit-eval"):
        compare([tmp_path])
    folder = write_run("a", {})
    with pytest.raises(ValueError, match="EvaluationCallback"):
        compare([folder])
    write_run("b", {10: scores(0.5, 1)}, arm="B")
    with pytest.raises(ValueError, match="baseline 'C'; there are B"):
        compare([tmp_path], baseline="C")
    with pytest.raises(ValueError, match="No run of arm C"):
        compare([tmp_path], arms=["C"])
    for broken in ("{", '{"a":' * 100_000):
        (folder / "run.json").write_text(broken)
        with pytest.raises(ValueError, match=r"run\.json is not JSON"):
            compare([tmp_path])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"step": None, "task": "letters", "score": 0.5}, r"evaluations\.jsonl, line 2: `step` is None"),
        ({"task": "letters", "score": 0.5}, "line 2: `step` is None"),
        ({"step": 10, "task": "letters", "score": None}, "line 2: `score` is None"),
        ({"step": 10, "score": 0.5}, "line 2: `task` is None"),
        ({"step": 15, "task": "letters", "score": 0.5}, r"lacks evaluations/step-000015/result\.json"),
    ],
)
def test_damaged_lines_of_evaluations_are_named(write_run, tmp_path, line, message):
    append_lines(write_run("a", {10: scores(0.5, 1)}) / "evaluations.jsonl", line)
    with pytest.raises(ValueError, match=message):
        compare([tmp_path])


@pytest.mark.parametrize("prompts", [None, [], ["q0"], [{"id": "q0", "score": 0.5}]])
def test_results_without_scores_of_prompts_are_named(write_run, tmp_path, prompts):
    result = write_run("a", {10: scores(0.5, 1)}) / "evaluations" / "step-000010" / "result.json"
    write_json(result, {"task": "letters"} | ({} if prompts is None else {"prompts": prompts}))
    with pytest.raises(ValueError, match=r"step-000010/result\.json has no list `prompts`"):
        compare([tmp_path])


def test_log_lines_without_a_step_are_skipped(write_run):
    rows = [{"step": 1, "entropy": 0.5}, {"step": "2", "entropy": 1.0}, {"step": None}, {"step": 3, "entropy": 0.25}]
    assert read_run(write_run("a", {}, log=rows)).series("entropy") == ([1, 3], [0.5, 0.25])


@pytest.mark.timeout(60)
def test_links_to_a_folder_above_end_no_search(write_run, tmp_path):
    folder = write_run("a", {10: scores(0.5, 1)})
    for name in ("latest", "other", "third"):
        (tmp_path / "runs" / name).symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "0").symlink_to(folder)
    assert [run.folder for run in find_runs([tmp_path])] == [folder]
