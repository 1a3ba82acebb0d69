"""The probe: what feedback and each arm's target do on the user's prompts, verifier and model, before any training.

Text in one turn, thinking included; images, tools, turns and another model as the teacher are refused.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count, product, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from numpy.typing import NDArray
from pandas import DataFrame, Series, concat
from tqdm.auto import tqdm

from credit_trl.config import CreditConfig
from credit_trl.contexts.prompts import images_of, row_prompt
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts
from credit_trl.evaluation.config import SamplingConfig
from credit_trl.evaluation.engines import TrainerEngine, weight_fingerprint
from credit_trl.evaluation.protocol import content_digest
from credit_trl.evaluation.statistics import bootstrap_ci
from credit_trl.lab.analysis import responses
from credit_trl.lab.analysis.advice import RULE, advise
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.drift import find_branches, holding_coef
from credit_trl.lab.analysis.responses import NoTeacherError
from credit_trl.lab.analysis.targets import Arm, GroupPrompts, decode, importance_weights
from credit_trl.lab.analysis.tokenmap import map_response
from credit_trl.lab.analysis.tokentext import visible
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, vocabulary_logps
from credit_trl.rollout.batch import is_successful, prompt_key
from credit_trl.rollout.verdict import Verdict
from credit_trl.run_directory import append_lines, read_lines
from credit_trl.tasks.quickstart import TEMPLATES
from credit_trl.tasks.registry import Task
from credit_trl.teacher.models import Teacher

PROBE_FILE = "probe.jsonl"  # what is computed, one line each
STEPS = 12  # estimated training steps that the default number of prompts costs
SAMPLED = 16.0  # cost of a sampled token in tokens that are read, measured on a CPU
MIN_SUCCESSES = 20  # below which an arm has no floor
MIN_SHARE = 0.5  # effective share of the sample below which an arm has no floor
GRPO = Arm("GRPO", None)
MAX_CONTRASTS = 2  # contrast prompts of a group that its targets are computed from
CHUNK = 8  # prompts of a process between two writes
PART = "part: "  # beginning of the columns of metrics
# Conditions of answers, and beginnings and ends of their names.
WITHOUT, OWN, FOREIGN = "without z", "own z", "another prompt's z"
WORDING, OF_WRONG, OF_RIGHT, GATED = "wording: ", " of a wrong answer", " of a right answer", ", gated"


@dataclass(frozen=True)
class ProbeSettings:
    """What is probed; None takes the default."""

    prompts: int | None = None  # by default as many as `STEPS` training steps afford, 8 to 64
    arms: tuple[Arm, ...] | None = None  # by default SDPO, the run's λ, λ_hold, guide 0.2 and 1.5
    wordings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # name -> templates, beside two of papers
    lookahead: int = 0  # real steps of each arm on two seeds


class Stages:
    """Records that all processes compute and the main one stores, from which the same probe continues."""

    def __init__(self, path: Path | None, accelerator: Any, settings: Mapping[str, Any]) -> None:
        self.path = path if accelerator.is_main_process else None
        self.accelerator = accelerator
        lines = broadcast_object_list([read_lines(self.path) if self.path else []])[0]
        if lines and lines[0] != settings:
            changed = [name for name in settings if lines[0].get(name) != settings[name]]
            names = ", ".join(sorted(changed))
            raise FileExistsError(f"{path} is of a probe with other {names}. Choose another folder.")
        self.records: dict[str, dict[int, Any]] = defaultdict(dict)  # by stage and item
        for line in lines[1:]:
            self.records[line["stage"]][line["item"]] = line["record"]
        if not lines and self.path:
            append_lines(self.path, [settings])

    def run(self, stage: str, count: int, compute: Callable[[list[int]], list[Any]]) -> list[Any]:
        """Records of `count` items; `compute` returns those of this process's share of a chunk.

        A single item is computed by every process.
        """
        records = self.records[stage]
        missing = sorted(set(range(count)) - records.keys())
        processes = self.accelerator.num_processes
        starts = range(0, len(missing), CHUNK * processes)
        for start in tqdm(starts, desc=stage, disable=not self.accelerator.is_main_process):
            items = missing[start : start + CHUNK * processes]
            share = math.ceil(len(items) / processes)
            begin = self.accelerator.process_index * share
            padded = items + items[-1:] * processes  # equally many on each
            computed = gather_object(compute(padded[begin : begin + share]))
            for item, record in zip(items, computed, strict=False):
                records[item] = record
                if self.path:
                    append_lines(self.path, [{"stage": stage, "item": item, "record": record}])
        return [records[item] for item in range(count)]


class Probe:
    """The stages of a probe of a trainer before its training."""

    def __init__(self, trainer: Any, task: Task, settings: ProbeSettings, folder: Path | None) -> None:
        self.task = task
        self.settings = settings
        self.config = responses.with_contrasts(trainer.args)
        self.samples = trainer.num_generations
        self.engine = TrainerEngine(trainer)
        student = Teacher(trainer.model, trainer.accelerator)  # before training the teacher is the policy, too
        self.checkpoint = Checkpoint("policy", trainer._tokenizer, student, student, self.engine.chat_template_kwargs)
        rows = list(trainer.train_dataset.take(settings.prompts or 64))
        _refuse_unsupported(trainer, rows)
        prompts = [self.checkpoint.encode(row["prompt"]) for row in rows[:CHUNK]]
        length = float(np.mean(list(map(len, prompts))))
        self.cost = training_steps(trainer.args, self.samples, length)
        self.rows = rows[: settings.prompts or int(np.clip(STEPS / self.cost, 8, 64))]
        digests = {
            "task": task.name,
            "model": weight_fingerprint(trainer.model),
            "settings": content_digest(asdict(settings)),
            "options": content_digest(trainer.args.to_dict() | {"output_dir": None}),
            "prompts": content_digest([prompt_key(row["prompt"]) for row in self.rows]),
        }
        self.stages = Stages(folder and folder / PROBE_FILE, trainer.accelerator, digests)

    def seed(self, item: int, sample: int) -> int:
        """Seed of a random stream: of rollouts, and after them of decoded answers."""
        return (self.config.seed << 32) + (item << 12) + sample

    def grade(self, i: int, token_ids: list[list[int]], conditions: Sequence[str]) -> list[dict[str, Any]]:
        """Records of answers to the prompt i under conditions, with their verdicts."""
        verdicts = responses.grade_rollouts(self.checkpoint, self.task, [self.rows[i]] * len(token_ids), token_ids)
        ends = self.checkpoint.end_ids()
        records = []
        for ids, condition, verdict in zip(token_ids, conditions, verdicts, strict=True):
            if verdict.turn_feedback:
                raise ValueError("The verifier returns `turn_feedback`; the probe measures feedback on whole answers.")
            [success] = is_successful([float(verdict)], self.config.success_reward_threshold)
            text = visible(self.checkpoint.tokenizer.decode(ids, skip_special_tokens=True))
            record = {
                "prompt": i,
                "condition": condition,
                "ids": list(map(int, ids)),
                "text": text,
                "success": success,
                "truncated": ids[-1] not in ends,
                "reward": verdict.reward,
                "feedback": verdict.feedback,
            }
            for name, value in verdict.metrics.items():
                record[PART + name] = float(value)
            records.append(record)
        return records

    def rollouts(self) -> list[list[dict[str, Any]]]:
        """Records of the policy's answers. Sets `groups`, their rollouts, and `successes` (prompts, samples)."""
        config = self.config
        sampling = SamplingConfig(config.temperature, 1.0, max_completion_length=config.max_completion_length)

        def compute(items: list[int]) -> list[Any]:
            prompts = []
            seeds = []
            for i, k in product(items, range(self.samples)):
                prompts.append(self.checkpoint.encode(self.rows[i]["prompt"]))
                seeds.append(self.seed(i, k))
            with self.engine.session(sampling):
                ids = self.engine.sample(prompts, seeds, sampling)
            conditions = [WITHOUT] * self.samples
            return list(map(self.grade, items, self._by_prompt(ids), repeat(conditions)))

        records = self.stages.run("rollouts", len(self.rows), compute)
        flat = list(chain.from_iterable(records))
        verdicts = [Verdict(record["reward"], record["feedback"]) for record in flat]
        ids = [record["ids"] for record in flat]
        rollouts = responses.graded_rollouts(self.checkpoint, self.rows, ids, verdicts, config)
        self.groups = self._by_prompt(rollouts)
        successes = [record["success"] for record in flat]
        self.successes = np.array(self._by_prompt(successes))
        return records

    def _by_prompt(self, items: list[Any]) -> list[list[Any]]:
        """What the samples of all prompts have, in a list for each prompt."""
        return [items[start : start + self.samples] for start in range(0, len(items), self.samples)]

    def _prompts(self, i: int) -> tuple[GroupPrompts, dict[str, int]] | None:
        """What is read for the prompt i, and the indices of conditions; None without z.

        z are those of a wrong and a right rollout, where the group has both. z of another prompt is the next that
        the group does not have.
        """

        def is_right(rollout: responses.Rollout) -> bool:
            return is_successful([rollout.reward], self.config.success_reward_threshold)[0]

        group = sorted(filter(_has_teacher, self.groups[i]), key=is_right)
        elsewhere = list(filter(_has_teacher, chain.from_iterable(self.groups[i + 1 :] + self.groups[:i])))
        if not group or not elsewhere:
            return None
        chosen = group[-1:]
        if group[0].privileged != group[-1].privileged:
            chosen.insert(0, group[0])
        z_of_group = [rollout.privileged for rollout in group]
        elsewhere.sort(key=lambda rollout: rollout.privileged in z_of_group)
        try:
            built = [responses.rollout_contexts(rollout, self.config, self.checkpoint) for rollout in chosen]
            foreign = self._teacher(chosen[0], elsewhere[0].privileged)
        except NoTeacherError:
            return None
        teacher = [contexts.teacher for contexts in built]
        contrasts = list(chain.from_iterable(map(attrgetter("contrasts"), built)))[:MAX_CONTRASTS]
        ids = [built[0].student, foreign, *teacher, *contrasts]
        conditions = {FOREIGN: 1}
        for k, rollout in enumerate(chosen):
            conditions[OWN + (OF_RIGHT if is_right(rollout) else OF_WRONG)] = 2 + k
        z = chosen[0].privileged
        further = {}
        if z.demonstration is not None and z.feedback is not None:
            further["demonstration alone"] = self._teacher(chosen[0], PrivilegedContext(z.demonstration))
            further["feedback alone"] = self._teacher(chosen[0], PrivilegedContext(feedback=z.feedback))
        paper = {name: getattr(CreditConfig, name) for name in TEMPLATES}
        for name, templates in {"paper's": paper, "SDPO's": TEMPLATES, **self.settings.wordings}.items():
            further[WORDING + name] = self._teacher(chosen[0], z, templates)
        conditions |= dict(zip(further, count(len(ids)), strict=False))
        prompts = GroupPrompts([*ids, *further.values()], len(teacher), len(contrasts))
        return prompts, conditions

    def _teacher(
        self, rollout: responses.Rollout, z: PrivilegedContext, templates: Mapping[str, str] | None = None
    ) -> list[int]:
        """The teacher's prompt of a rollout with another z or other templates."""
        config = copy.copy(self.config)
        vars(config).update(templates or {})
        return responses.rollout_contexts(replace(rollout, privileged=z), config, self.checkpoint).teacher

    def default_arms(self) -> tuple[Arm, ...]:
        """SDPO, the run's λ, the median λ_hold of branches where one holds, and guide with 0.2 and 1.5."""
        coefs = []
        for rollout, *_ in self.groups[:CHUNK]:
            if rollout.privileged and rollout.token_ids:
                branches = DataFrame(find_branches(map_response(self.checkpoint, rollout, self.config)))
                rows = branches.query("delta > 0")
                coefs += map(holding_coef, rows["log_odds"], rows["delta"], rows["s"])
        hold = Series(coefs, dtype=float).quantile(0.5, interpolation="nearest")  # does not average infinities
        coef, form = self.config.contrastive_coef, self.config.contrastive_form
        arms = [Arm("SDPO", 0.0), Arm(f"guide {coef:g}" if form == "guide" else f"λ = {coef:g}", coef, form)]
        if hold <= 1.0:
            arms.append(Arm(f"λ_hold = {hold:.2f}", hold))
        arms += [Arm("guide 0.2", 0.2, "guide"), Arm("guide 1.5", 1.5, "guide")]
        return tuple({arm.name: arm for arm in arms}.values())

    def targets(self, arms: Sequence[Arm]) -> list[dict[str, Any]]:
        """Of each prompt `weights` of the rollouts, and records of `answers` of each condition and target."""
        formula = CreditFormula.from_config(self.config)
        gated = [replace(arm, name=arm.name + GATED, gated=True) for arm in arms]

        def of_prompt(i: int) -> dict[str, Any]:
            prompts_and_conditions = self._prompts(i)
            if prompts_and_conditions is None:
                return {"weights": [], "answers": []}
            prompts, conditions = prompts_and_conditions
            sources = {"policy": 0, **conditions}
            for arm in (*arms, *gated):
                sources[arm.name] = arm
            rng = np.random.default_rng(self.seed(i, self.samples))
            uniforms = rng.random(self.config.max_completion_length)
            ids = decode(self.checkpoint, prompts, list(sources.values()), formula, uniforms)
            weights = []
            for rollout in self.groups[i]:
                weights.append(importance_weights(self.checkpoint, prompts, rollout.token_ids, gated, formula))
            return {"weights": weights, "answers": self.grade(i, ids, list(sources))}

        return self.stages.run("targets", len(self.rows), lambda items: list(map(of_prompt, items)))

    def look_ahead(self, arms: Sequence[Arm], make_trainer: Callable[[dict[str, Any]], Any]) -> dict[str, list[Any]]:
        """Change of success on the rollouts after real steps of each arm, one entry a seed."""
        changes: dict[str, list[Any]] = {}
        student = self.checkpoint.student
        [start] = self.stages.run("before", 1, lambda _: [self._logps(student)])
        for arm, number in product(arms, (0, 1)):

            def train(_: list[int], arm: Arm = arm, number: int = number) -> list[Any]:
                steps = {"max_steps": self.settings.lookahead, "seed": self.config.seed + number, "warmup_steps": 0}
                trainer = make_trainer(arm.options() | steps)
                trainer.train()
                return [self._logps(Teacher(trainer.model, trainer.accelerator))]

            stage = f"look-ahead of {arm.name}, seed {number}"
            [logps] = self.stages.run(stage, 1, train)
            weights = np.exp(np.clip(np.subtract(logps, start), -8.0, 8.0)).reshape(self.successes.shape)
            changes.setdefault(arm.name, []).append(weighted_change(self.successes, weights))
        return changes

    def _logps(self, model: Teacher) -> list[float]:
        """Log-probability of each rollout."""
        sums = []
        for rollout in chain.from_iterable(self.groups):
            prompt = TokenContexts(self.checkpoint.encode(rollout.prompt))
            total = 0.0
            for rows, (logps,) in vocabulary_logps(
                [(model, prompt)], rollout.token_ids, temperature=self.config.temperature
            ):
                sampled = torch.tensor(rollout.token_ids[rows], device=logps.device)[:, None]
                total += logps[0].gather(-1, sampled).sum().item()
            sums.append(total)
        return sums


def probe(
    trainer: Any,
    task: Task,
    settings: ProbeSettings | None = None,
    *,
    folder: str | Path | None = None,
    make_trainer: Callable[[dict[str, Any]], Any] | None = None,
) -> dict[str, Any]:
    """Probe a trainer before its training: model, engine, options and rows are its own. Every process calls it.

    Args:
        trainer: a `CreditTrainer` that has not trained.
        task: its verifier grades.
        settings: what is measured; see `ProbeSettings`.
        folder: directory of `probe.jsonl`, from which an interrupted probe continues; None stores nothing.
        make_trainer: a new trainer with changed options of `CreditConfig`, for the look-ahead.

    Returns:
        The content of `probe.json`: `facts`, `arms`, `lookahead`, `leads`, `examples`, `advice`, `rule`.

    Raises:
        ValueError: fewer than four rows, or data, a verifier or options that are not supported, by their name.
        FileExistsError: `folder` holds a probe with other settings.
    """
    settings = settings or ProbeSettings()
    run = Probe(trainer, task, settings, folder and Path(folder))
    steps = run.cost * len(run.rows) + 2 * settings.lookahead * (1 + len(settings.arms or range(5)))
    trainer.accelerator.print(
        f"{len(run.rows)} prompts, {run.samples} rollouts each: about {steps:.0f} training steps"
    )
    records = run.rollouts()
    arms = settings.arms or run.default_arms()
    targets = run.targets(arms)
    lookahead = {}
    if settings.lookahead and make_trainer:
        lookahead = run.look_ahead([GRPO, *arms], make_trainer)
    title = {
        "title": f"Probe of {visible(task.name)}",
        "prompts": len(run.rows),
        "samples": run.samples,
        "steps": steps,
    }
    return title | summarize_probe(run, records, arms, targets, lookahead)


def summarize_probe(
    run: Probe,
    records: list[list[dict[str, Any]]],
    arms: Sequence[Arm],
    targets: list[dict[str, Any]],
    lookahead: dict[str, list[Any]],
) -> dict[str, Any]:
    """Facts, arms, examples and advice of the records of rollouts and targets."""
    weights_of_prompt = {i: target["weights"] for i, target in enumerate(targets) if target["weights"]}
    if not weights_of_prompt:
        raise ValueError("No answer has feedback or a successful sibling, so there is no z to probe.")
    taught = list(weights_of_prompt)
    answers = [target["answers"] for target in targets]
    frame = DataFrame(list(chain.from_iterable(records + answers)))
    frame["lead"] = frame["text"].str.split().str[:3].str.join(" ")
    facts = summarize_facts(frame)
    leads = _risen_leads(frame)
    weights = np.array(list(weights_of_prompt.values()))
    results = []
    for k, arm in enumerate(arms):
        floor = weighted_change(run.successes[taught], weights[..., k])
        results.append(summarize_arm(arm, frame, leads, floor))
    advice = advise(facts, results, lookahead)
    names = ["policy", *map(attrgetter("name"), arms)]
    examples = frame[frame["prompt"].isin(taught[:3]) & frame["condition"].isin(names)]
    texts = {}
    for i in taught[:3]:
        prompt_ids = run.checkpoint.encode(run.rows[i]["prompt"])
        texts[str(i)] = visible(run.checkpoint.tokenizer.decode(prompt_ids))
    return {
        "facts": facts,
        "arms": results,
        "lookahead": lookahead,
        "leads": leads,
        "texts": texts,
        "examples": examples[["prompt", "condition", "success", "text"]].to_dict("records"),
        "advice": asdict(advice) | {"sentence": advice.sentence},
        "rule": RULE,
    }


def _has_teacher(rollout: responses.Rollout) -> bool:
    return bool(rollout.privileged)


def _refuse_unsupported(trainer: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    config = trainer.args
    refused = {
        "fewer than four rows": len(rows) < 4,
        "prompts with images": any(images_of(row_prompt(row)) for row in rows),
        "tools": bool(trainer.tools or trainer.environment_factories),
        "FSDP or DeepSpeed": trainer.accelerator.distributed_type in ("FSDP", "DEEPSPEED"),
        "`teacher_prompt='student'`": config.teacher_prompt == "student",
        "`teacher_model_kind='model'`": config.teacher_model_kind == "model",
    }
    names = [name for name, is_refused in refused.items() if is_refused]
    if names:
        raise ValueError(f"The probe does not support {' and '.join(names)}.")


def training_steps(config: CreditConfig, samples: int, prompt: float, arms: int = 5) -> float:
    """Cost of probing one prompt in training steps, by the tokens that models read, for answers of full length.

    A sampled token counts `SAMPLED` times. A step samples, scores 1 + C prompts and trains, which counts three times.
    `prompt` is the length of a prompt.
    """
    sequence_length = prompt + config.max_completion_length
    sampled = prompt + SAMPLED * config.max_completion_length
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
    contrasts = config.contrastive_count if config.contrasts else 0
    step = batch * (sampled + (1 + contrasts + 3) * sequence_length)
    rows = samples + 8 + arms * 2 * (3 + MAX_CONTRASTS)
    return (rows * sampled + samples * (4 + MAX_CONTRASTS) * sequence_length) / step


def weighted_change(successes: NDArray[Any], weights: NDArray[np.float64]) -> dict[str, float]:
    """Change of success where the rollouts (prompts, samples) are weighted, self-normalised.

    Returns:
        `change`, its bootstrap `error` over prompts, and `share`, the effective share of the sample.
    """
    sums = np.stack([(weights * successes).sum(1), weights.sum(1), successes.sum(1), np.ones_like(weights).sum(1)])
    prompts = len(weights)
    picks = np.random.default_rng(0).integers(prompts, size=(1000, prompts))

    def change(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        return totals[0] / totals[1] - totals[2] / totals[3]

    share = weights.sum() ** 2 / (weights**2).sum() / weights.size
    return {
        "change": float(change(sums.sum(1))),
        "error": float(change(sums[:, picks].sum(-1)).std()),
        "share": float(share),
    }


def paired_change(values: Series, baseline: Series) -> dict[str, float]:
    """Means over the prompts that both have, and their difference with its standard error."""
    pairs = concat([values, baseline], axis=1, join="inner", keys=["values", "baseline"]).astype(float).dropna()
    differences = pairs["values"] - pairs["baseline"]
    return {
        "mean": float(pairs["values"].mean()),
        "baseline": float(pairs["baseline"].mean()),
        "change": float(differences.mean()),
        "error": float(differences.sem()) if len(pairs) > 1 else math.inf,
    }


def _by_prompt(frame: DataFrame, condition: str, column: str = "success") -> Series:
    """Mean of a column over the answers to each prompt under the conditions that begin so."""
    chosen = frame["condition"] == condition
    if condition == OWN:  # of wrong and right answers
        chosen = frame["condition"].str.startswith(OWN)
    return frame[chosen].groupby("prompt")[column].mean()


def summarize_facts(frame: DataFrame) -> dict[str, Any]:
    """What the policy does, what z changes of success and of every part of the verdict; means over prompts."""
    answers = frame[frame["condition"] == WITHOUT]
    success = _by_prompt(frame, WITHOUT)
    best = answers.groupby("prompt")["success"].max()
    measured = {"success": success, "mixed": (success > 0) & (success < 1), "best": best}
    measured["truncated"] = _by_prompt(frame, WITHOUT, "truncated")
    facts: dict[str, Any] = {name: bootstrap_ci(values)._asdict() for name, values in measured.items()}
    facts["read"] = paired_change(_by_prompt(frame, OWN), success)
    facts["conditions"] = {}
    for name in frame["condition"].unique():
        if name.startswith((FOREIGN, OWN, WORDING)) or name.endswith(" alone"):
            facts["conditions"][name] = paired_change(_by_prompt(frame, name), success)
    facts["parts"] = {}
    rewards = answers["reward"].astype(float)
    for name in frame.columns[frame.columns.str.startswith(PART)]:
        if answers[name].astype(float).corr(rewards) > 0.0:  # more of it is better
            change = paired_change(_by_prompt(frame, OWN, name), _by_prompt(frame, WITHOUT, name))
            facts["parts"][name.removeprefix(PART)] = change
    return facts


def _risen_leads(frame: DataFrame) -> list[dict[str, Any]]:
    """Up to three first words of answers whose share rises with z, those that rise most."""
    conditions = frame["condition"]
    shares = {
        "without": frame["lead"][conditions == WITHOUT].value_counts(normalize=True),
        "with": frame["lead"][conditions.str.startswith(OWN)].value_counts(normalize=True),
    }
    leads = concat(shares, axis=1).fillna(0.0)
    rises = (leads["with"] - leads["without"]).nlargest(3)
    return leads.loc[rises[rises > 0.05].index].rename_axis("words").reset_index().to_dict("records")


def summarize_arm(arm: Arm, frame: DataFrame, leads: list[dict[str, Any]], floor: dict[str, float]) -> dict[str, Any]:
    """Floor of an arm (gated reweighting and gated answers), ceiling, length and share of risen first words.

    The floor is None with fewer than `MIN_SUCCESSES` successes or an effective share below `MIN_SHARE`.
    """
    answers = frame[frame["condition"] == WITHOUT]
    full = frame[frame["condition"] == arm.name]
    success = _by_prompt(frame, arm.name)
    policy = _by_prompt(frame, "policy")
    return {
        "name": arm.name,
        "contrastive_coef": arm.contrastive_coef,
        "form": arm.form,
        "floor": floor if answers["success"].sum() >= MIN_SUCCESSES and floor["share"] >= MIN_SHARE else None,
        "gated": paired_change(_by_prompt(frame, arm.name + GATED), policy),
        "ceiling": paired_change(success, policy),
        "above_best": paired_change(success, answers.groupby("prompt")["success"].max()),
        "length": float(full["ids"].str.len().mean()),
        "leads": float(full["lead"].isin([lead["words"] for lead in leads]).mean()),
    }
