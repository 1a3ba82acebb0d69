"""The weak world: measurement of the branch, predictions, resumption of the table, and the page."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import expit

from credit_trl.lab.sweeps.spec import make_arm
from credit_trl.tasks import quickstart
from synthetic_runs import writer

LOG_ODDS, DELTA, S = -3.0, 0.9, 11.0


@pytest.fixture
def tabular():
    """Log-odds of a table: raised by feedback, and where the prompt does not have the cue."""

    def log_odds(prompts, cues):
        texts = [prompt[-1]["content"] for prompt in prompts]
        given = np.array(["Correct option" in text for text in texts])
        foreign = np.array([f" {cue} " not in text for text, cue in zip(texts, cues, strict=True)])
        return LOG_ODDS + DELTA * given + S * foreign

    return log_odds


@pytest.fixture
def branch(study, tabular):
    module, world = study("branch"), study("predicted").PREDICTED["weak"]
    return module.measure_branch(tabular, module.branch_rows(world.task, world.point, rows_per_cue=1))


def arm_of(method, **options):
    return make_arm({"method": method, **options}, {})


def test_delta_and_s_of_a_tabular_model_are_recovered(branch):
    for values, expected in ((branch.log_odds, LOG_ODDS), (branch.delta, DELTA), (branch.s_input, S)):
        np.testing.assert_allclose(values, expected)
    np.testing.assert_allclose(branch.s_hint, 0.0, atol=1e-12)
    assert len(branch.delta) == 60  # cues that training uses


@pytest.mark.parametrize("coef", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("swap", ["input", "hint", "self"])
def test_predicted_log_odds_are_a_fixed_point_of_the_target(study, branch, coef, swap):
    found = study("branch").predict(branch, {"contrastive_coef": coef, "contrastive_swap": swap})
    s = S if swap == "input" else 0.0
    teacher = found.log_odds + DELTA
    assert teacher - coef * (teacher + s) == pytest.approx(found.log_odds)
    assert found.rate == pytest.approx(expit(found.log_odds))
    assert found.low <= found.rate <= found.high


def test_arms_without_a_fixed_point_drift_by_their_sign(study, branch):
    module = study("branch")
    sdpo = module.predict(branch, {"contrastive_coef": 0.0})
    weak, strong = (
        module.predict(branch, {"contrastive_form": "guide", "contrastive_coef": coef}) for coef in (0.05, 0.2)
    )
    assert (sdpo.rate, weak.rate, strong.rate) == (1.0, 1.0, 0.0)
    assert module.predict(branch, {"distillation_weight": 0.0}) is None
    assert module.critical_coef(branch) == pytest.approx(DELTA / (DELTA + S))
    assert module.critical_coef(branch, "guide") == pytest.approx(DELTA / S)


def test_branch_tokens_of_the_embedded_tokenizer(study):
    from credit_trl.tasks.quickstart_model import load_model

    model, tokenizer = load_model()
    world = study("predicted").PREDICTED["weak"]
    rows = study("branch").branch_rows(world.task, world.point, rows_per_cue=1)
    prompts, cues = rows.given[:3], rows.specific[:3]
    found = study("branch").model_log_odds(model, tokenizer, world.point)(prompts, cues)
    for prompt, cue, value in zip(prompts, cues, found, strict=True):
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) + "Thought:"
        assert "Correct option" in text
        logits = model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, -1]
        planted, specific = (tokenizer.encode(word, add_special_tokens=False)[0] for word in (" sure", f" {cue}"))
        assert value == pytest.approx((logits[planted] - logits[specific]).item(), abs=1e-3)


@pytest.fixture
def runs(study, tmp_path, monkeypatch, branch):
    """A world of two arms and two seeds, whose training is counted and not done."""
    module = study("world_runs")
    spec = module.SweepSpec(
        "m",
        "quickstart",
        [{"method": ["SDPO", "GRPO"]}],
        [0, 1],
        config={"max_steps": 2},
        evaluation={"eval_steps": 1},
    )
    made = []
    measured = {"format": 1.0, "length": 20.0, "log_odds": -1.0, "log_odds_given": 0.0, "teacher_fidelity": 1.0}
    rates = dict.fromkeys(module.RATES, 0.25) | measured

    def predicted(self, seed, base):
        return [self._row(seed, arm, 0) | rates | module.prediction_columns(branch, arm) for arm in self.spec.arms()]

    def train(self, seed, arm, base):
        assert module.read_rows(self.csv)["weak", seed, arm.name, 0]["delta"] == DELTA  # written before training
        made.append((seed, arm.name))
        return [self._row(seed, arm, step) | rates for step in (1, 2)]

    monkeypatch.setattr(module.WorldRuns, "_predicted_rows", predicted)
    monkeypatch.setattr(module.WorldRuns, "_train", train)

    def run(seeds=(0, 1), **options):
        file = tmp_path / "worlds.csv"
        return module.WorldRuns("weak", spec, seeds, tmp_path / "runs", file, lambda seed: tmp_path, **options).run()

    return run, made, tmp_path / "worlds.csv", module


def test_committed_table_has_one_row_per_evaluation(study):
    file = study("run").HERE / "results" / "worlds.csv"
    assert len(file.read_text("utf-8").splitlines()) - 1 == len(study("world_runs").read_rows(file)) > 1000


def test_rows_in_the_table_are_not_run_again(runs):
    run, made, file, module = runs
    assert run(seeds=[0])
    assert made == [(0, "SDPO"), (0, "GRPO")]
    before = file.read_text()
    assert run()
    assert made[2:] == [(1, "SDPO"), (1, "GRPO")]
    assert file.read_text().startswith(before)
    rows = module.read_rows(file)
    assert len(rows) == 2 * 2 * 3
    assert rows["weak", 1, "SDPO", 2]["predicted_log_odds"] == math.inf
    assert rows["weak", 1, "GRPO", 2]["predicted_rate"] is None


def test_an_interrupted_base_continues_at_the_missing_arm(runs):
    run, made, file, _ = runs
    run(seeds=[0])
    whole = file.read_text()
    file.write_text("".join(line for line in whole.splitlines(True) if not line.startswith("weak,0,GRPO,,2")))
    assert run(seeds=[0])
    assert made == [(0, "SDPO"), (0, "GRPO"), (0, "GRPO")]
    assert sorted(file.read_text().splitlines()) == sorted(whole.splitlines())


def test_no_arm_is_started_after_the_time_limit(runs):
    run, made, _, _ = runs
    assert run(minutes=0.0) is False
    assert made == []


def test_another_processs_arm_is_waited_for(runs, tmp_path, monkeypatch):
    run, made, _, module = runs
    other = module.FileLock(tmp_path / "runs" / "sdpo-seed0.lock")
    (tmp_path / "runs").mkdir()
    other.acquire()
    monkeypatch.setattr(module.time, "sleep", lambda seconds: other.release())
    assert run(seeds=[0])
    assert made == [(0, "GRPO"), (0, "SDPO")]


def same_for_every_cue(study, rows):
    """Rates by cue of rows: those of the row's groups."""
    cues = study("world_cues")
    return {
        key: {
            f"{measure} {cue}": row[f"{measure}_{group}"]
            for measure in cues.MEASURES
            for group, own in quickstart.GROUPS.items()
            for cue in own
        }
        for key, row in rows.items()
    }


def test_the_page_pairs_bases_and_draws_the_rates(runs, study):
    run, _, file, module = runs
    run()
    page, rows = study("world_page"), module.read_rows(file)
    world = page.world_of(rows, same_for_every_cue(study, rows), "weak")
    assert [(one.arm, sorted(one.rows[2])) for one in world.outcomes] == [("SDPO", [0, 1]), ("GRPO", [0, 1])]
    text = page.section(world)
    assert "| SDPO | 2 | 100.0 | 25.0, 25.0 |" in text
    assert "| GRPO − SDPO | 2 | 2 | 0.0, 0.0 |" in text
    assert "The teachers' fidelity is 1.00 after 1 steps, 1.00 after 2 steps." in text
    assert page.rates_figure(world, page.THEMES[0]).startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "value"), [("format", 0.5), ("teacher_fidelity", 0.9)])
def test_arms_are_compared_where_most_runs_are_sound(runs, study, name, value):
    run, _, file, module = runs
    run()
    rows = module.read_rows(file)
    rows |= {(*key[:2], "third", key[3]): row | {"arm": "third"} for key, row in rows.items() if key[2] == "SDPO"}
    cues = same_for_every_cue(study, rows)
    page = study("world_page")
    assert page.world_of(rows, cues, "weak").compared == 2
    rows["weak", 1, "third", 2][name] = value  # on half of the bases
    world = page.world_of(rows, cues, "weak")
    sdpo, grpo, third = map(world.arm, ("SDPO", "GRPO", "third"))
    assert (world.compared, world.compared_pair(sdpo, grpo), world.compared_pair(sdpo, third)) == (1, 2, 1)


def test_a_collapsed_run_is_not_in_the_means(runs, study, monkeypatch):
    run, _, file, module = runs
    run()
    rows = module.read_rows(file)
    rows["weak", 1, "SDPO", 2] |= {"format": 0.5, "thought_unknown": 0.0}
    page = study("world_page")
    monkeypatch.setattr(page, "SOUND_SHARE", 0.5)
    world = page.world_of(rows, same_for_every_cue(study, rows), "weak")
    sdpo, grpo = map(world.arm, ("SDPO", "GRPO"))
    assert (world.compared, sdpo.sound(2), sdpo.mean(2, "thought_unknown").mean) == (2, [0], 0.25)
    assert page.shared(sdpo, grpo, 2) == [0]
    assert page.paired(2, sdpo, grpo) == [(0.25, 0.25)]


def test_an_unfinished_arm_is_not_on_the_page(runs, study):
    run, _, file, module = runs
    run()
    rows = module.read_rows(file)
    cues = same_for_every_cue(study, rows)
    del rows["weak", 1, "SDPO", 2], cues["weak", 0, "GRPO", 2]
    world = study("world_page").world_of(rows, cues, "weak")
    assert list(world.arm("SDPO").rows[2]) == [0]
    assert list(world.arm("GRPO").rows[2]) == [1]  # rates by cue are missing
    assert (list(world.arm("SDPO").rows[1]), world.compared) == ([0, 1], 1)  # the last step of all bases


def test_intervals_resample_bases_and_cues(study):
    """Noise of either level alone widens the interval of a rate; a paired difference removes that of the cues."""
    module, rng = study("world_cues"), np.random.default_rng(0)
    unknown = quickstart.GROUPS["unknown"]
    of_cue = dict(zip(unknown, rng.uniform(0.2, 0.8, len(unknown)), strict=True))

    def rows(by_base, by_cue):
        return [{f"thought {cue}": base + by_cue.get(cue, 0.0) for cue in unknown} for base in by_base]

    def width(*arms):
        found = module.resampled(arms[0], arms[1] if len(arms) > 1 else [], "thought_unknown", "weak")
        return found.high - found.low

    constant, bases, cues = rows([0.3] * 8, {}), rows(rng.uniform(0.1, 0.5, 8), {}), rows([0.1] * 8, of_cue)
    assert width(constant) == pytest.approx(0.0, abs=1e-9)
    assert width(bases) > 0.1
    assert width(cues) > 0.1
    assert width(rows([0.15] * 8, of_cue), cues) == pytest.approx(0.0, abs=1e-9)


def test_rates_by_cue_are_the_means_of_its_prompts(study, tmp_path):
    module = study("world_cues")
    prompts = {row["id"]: row for row in quickstart.build("test")}
    scores = {name: float(index % 5 == 0) for index, name in enumerate(prompts)}
    write = writer(tmp_path / "weak")
    write("run", {60: scores}, arm="SDPO", seed=3, task="quickstart", metrics={"shortcut": 0.25})
    rows = module.cue_rows_of_runs(tmp_path / "weak", "weak")
    assert list(rows) == [("weak", 3, "SDPO", 60)]
    found = rows["weak", 3, "SDPO", 60]
    assert found.keys() == set(module.columns_of("weak"))
    for cue in (cue for cues in quickstart.GROUPS.values() for cue in cues):
        own = [scores[name] for name, row in prompts.items() if row["cue"] == cue]
        assert found[f"accuracy {cue}"] == pytest.approx(np.mean(own))
        assert found[f"thought {cue}"] == 0.25
    module.write_cue_rows(tmp_path / "cues.csv", rows)
    assert module.read_cue_rows(tmp_path / "cues.csv") == rows
    assert module.cue_rows_of_runs(tmp_path / "missing", "weak") == {}


def test_a_table_with_fewer_columns_is_extended(runs):
    run, made, file, module = runs
    run(seeds=[0])
    whole = module.read_rows(file)
    lines = [line.split(",") for line in file.read_text().splitlines()]
    keep = len(module.COLUMNS) - 2
    file.write_text("".join(",".join(line[:keep]) + "\n" for line in lines))
    run()
    rows = module.read_rows(file)
    assert file.read_text().startswith(",".join(module.COLUMNS) + "\n")
    assert {key: row | {"length": None, "log_odds_given": None} for key, row in whole.items()}.items() <= rows.items()
    assert rows["weak", 1, "SDPO", 2]["length"] == 20.0
    assert len(made) == 4


@pytest.mark.parametrize("world", ["weak", "tables", "skip", "filler", "useful"])
def test_arms_of_a_predicted_world(study, world):
    spec = study("run").read_sweep("methods", world)
    assert [arm.name for arm in spec.arms()] == [
        "SDPO",
        "CREDIT λ=0.1",
        "CREDIT λ=0.05",
        "CREDIT λ=0.2",
        "temper-only λ=0.1",
        "CREDIT form=guide λ=0.2",
        "hint-contrast λ=0.1",
        "GRPO",
    ]
