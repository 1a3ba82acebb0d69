"""A plan as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from credit_trl.lab.planning.duration import Duration, Schedule, duration_of
from credit_trl.lab.planning.fit import changes_that_fit, fits, largest_saving, usable_bytes
from credit_trl.lab.planning.limits import check_longest_prompt, engine_problem
from credit_trl.lab.planning.memory import Memory, memory_of
from credit_trl.lab.planning.setup import GIB, Setup
from credit_trl.lab.planning.shape import Shape
from credit_trl.lab.planning.work import Lengths, Work, default_lengths, work_of
from credit_trl.tasks.printable import counted


@dataclass(frozen=True)
class Plan:
    """Resources of a run."""

    shape: Shape
    setup: Setup
    lengths: Lengths
    memory: Memory  # of one GPU
    work: Work  # cost of one generation batch
    changes: tuple[str, ...] | None  # settings that make the run fit: empty if it fits, None if none are known
    duration: Duration | None = None  # None if the number of generation batches is unknown
    saving: tuple[str, float] | None = None  # setting that saves most time, and its seconds a generation batch

    @property
    def fits(self) -> bool:
        """Whether the run starts and fits its GPUs."""
        return self.changes == ()


def make_plan(shape: Shape, setup: Setup, lengths: Lengths | None = None, schedule: Schedule | None = None) -> Plan:
    """Plan a run, by default with `default_lengths`."""
    check_longest_prompt(setup)
    lengths = lengths or default_lengths(setup)
    memory, work = memory_of(shape, setup), work_of(shape, setup, lengths)
    changes = () if fits(shape, setup) else changes_that_fit(shape, setup)
    duration = None if schedule is None else duration_of(shape, setup, lengths, work, schedule)
    saving = largest_saving(shape, setup, lambda changed: sum(work_of(shape, changed, lengths).seconds.values()))
    return Plan(shape, setup, lengths, memory, work, changes, duration, saving)


def format_plan(plan: Plan) -> str:
    """Tables of memory, tokens and time, and whether the run fits."""
    return "\n\n".join([_head(plan), _memory(plan), _tokens(plan), _time(plan), _run(plan), _conclusion(plan)])


def plan_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, in bytes, tokens and seconds."""
    phase, peak = plan.memory.peak
    return {
        "model": plan.shape.name,
        "parameters": plan.shape.parameters,
        "teacher_parameters": plan.setup.teacher_model and plan.setup.teacher_model.shape.parameters,
        "processes": plan.setup.processes,
        "strategy": plan.setup.strategy,
        "memory": {"steady": plan.memory.steady, "phases": plan.memory.phases, "peak": peak, "peak_phase": phase},
        "usable": usable_bytes(plan.setup),
        "tokens": plan.work.tokens,
        "moved": plan.work.moved,
        "seconds": plan.work.seconds,
        "updates": plan.work.updates,
        "generation_batches": plan.duration and plan.duration.batches,
        "evaluations": plan.duration and plan.duration.evaluations,
        "hours": plan.duration and plan.duration.hours,
        "fits": plan.fits,
        "changes": plan.changes,
        "saving": plan.saving,
    }


def _head(plan: Plan) -> str:
    setup = plan.setup
    trained = "full fine-tuning"
    if setup.lora:
        base = f" on {setup.bits}-bit weights" if setup.bits else ""
        trained = f"{'DoRA' if setup.lora.dora else 'LoRA'} of rank {setup.lora.rank}{base}"
    where = f"{counted(setup.processes, 'GPU')} of {setup.gpu.memory / GIB:.0f} GiB"
    nodes = f" on {setup.machines} nodes" if setup.machines > 1 else ""
    prompts, teacher = setup.generation_batch // setup.group, ""
    if own := setup.teacher_model:
        stored = f"{own.bits}-bit" if own.bits else f"{8 * own.weight_bytes}-bit"
        teacher = f"teacher {own.shape.name}: {own.shape.parameters / 1e9:.2f} B parameters, {stored} weights\n"
    support = f"K = {setup.support.topk}" if setup.support.is_topk else f"support {setup.support.kind}"
    return (
        f"{plan.shape.name}: {plan.shape.parameters / 1e9:.2f} B parameters, {trained}, {setup.strategy}, "
        f"{where}{nodes}\n"
        f"{teacher}{counted(prompts, 'prompt')} x {counted(setup.group, 'rollout')} per generation batch, "
        f"{counted(plan.work.updates, 'optimizer step')} each, C = {setup.contrasts}, {support}"
    )


def _memory(plan: Plan) -> str:
    lines = ["memory per GPU, GiB" + "".join(f"{phase:>12}" for phase in plan.memory.phases)]
    for name, size in plan.memory.steady.items():
        lines.append(f"  {name:<18}" + f"{size / GIB:>12.2f}" * len(plan.memory.phases))
    for name in dict.fromkeys(name for items in plan.memory.phases.values() for name in items):
        sizes = [items.get(name, 0) for items in plan.memory.phases.values()]
        if any(sizes):
            lines.append(f"  {name:<18}" + "".join(f"{size / GIB:>12.2f}" for size in sizes))
    totals = "".join(f"{plan.memory.total(phase) / GIB:>12.2f}" for phase in plan.memory.phases)
    return "\n".join([*lines, f"  {'total':<18}{totals}"])


def _tokens(plan: Plan) -> str:
    tokens = plan.work.tokens
    lines = [
        f"tokens per generation batch, for mean lengths of {plan.lengths.prompt} (prompt), {plan.lengths.completion} "
        f"(completion) and {plan.lengths.context} (teacher prompt)"
    ]
    lines += [f"  {name:<18}{count:>14,}" for name, count in tokens.items()]
    lines.append("received by each GPU, GB per generation batch")
    lines += [f"  {name:<22}{moved / 1e9:>10.3f}" for name, moved in plan.work.moved.items() if moved]
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    total = sum(plan.work.seconds.values())
    lines = ["time per generation batch (estimated from the GPU's data sheet)"]
    for name, seconds in plan.work.seconds.items():
        if seconds:
            lines.append(f"  {name:<22}{seconds:>10.1f} s {100 * seconds / total:>5.0f} %")
    lines.append(f"  {'total':<22}{total:>10.1f} s")
    if plan.saving:
        setting, saved = plan.saving
        lines.append(f"largest saving: {setting} ({saved:.1f} s, {100 * saved / total:.0f} %)")
    return "\n".join(lines)


def _run(plan: Plan) -> str:
    run = plan.duration
    if run is None:
        return "the run: give --rows, the number of training rows, for its hours"
    line = f"the run: {counted(run.batches, 'generation batch', 'es')}, {run.training / 3600:.1f} h"
    evaluations = counted(run.evaluations, "evaluation")
    if run.evaluations and run.evaluating is None:
        return f"{line}, and {evaluations} (give --eval_rows for their hours)"
    if run.evaluations:
        line += f", and {evaluations}, {run.evaluating / 3600:.1f} h: {run.hours:.1f} h"
    return line


def _conclusion(plan: Plan) -> str:
    phase, peak = plan.memory.peak
    usable = usable_bytes(plan.setup)
    if plan.fits:
        return f"It fits: {peak / GIB:.1f} of {usable / GIB:.1f} usable GiB, in the phase {phase!r}."
    problem = engine_problem(plan.shape, plan.setup)
    refusal = (
        problem or f"It does not fit: the phase {phase!r} needs {peak / GIB:.1f} GiB of {usable / GIB:.1f} usable."
    )
    if plan.changes is None:
        return f"{refusal} No known change is enough. Use a smaller model, shorter sequences or larger GPUs."
    return f"{refusal} It fits with:\n" + "\n".join(f"  {change}" for change in plan.changes)
