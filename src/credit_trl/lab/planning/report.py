"""The plan as text, and as JSON for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from credit_trl.lab.planning.fit import changes_that_fit, fits, usable
from credit_trl.lab.planning.memory import Memory, memory_of
from credit_trl.lab.planning.setup import GIB, Setup
from credit_trl.lab.planning.shape import Shape
from credit_trl.lab.planning.work import Lengths, Work, default_lengths, work_of


@dataclass(frozen=True)
class Plan:
    """What `trl credit-plan` says.

    Args:
        shape, setup, lengths: what was planned.
        memory, work: what it needs.
        changes: what would make it fit; empty where it fits, None where nothing known would.
    """

    shape: Shape
    setup: Setup
    lengths: Lengths
    memory: Memory
    work: Work
    changes: tuple[str, ...] | None

    @property
    def fits(self) -> bool:
        return self.changes == ()


def make_plan(shape: Shape, setup: Setup, lengths: Lengths | None = None) -> Plan:
    """Plan a run."""
    lengths = lengths or default_lengths(setup)
    memory = memory_of(shape, setup)
    changes = () if fits(memory, setup) else changes_that_fit(shape, setup)
    return Plan(shape, setup, lengths, memory, work_of(shape, setup, lengths), changes)


def format_plan(plan: Plan) -> str:
    """Three tables: memory, tokens, time; and a verdict."""
    return "\n\n".join([_head(plan), _memory(plan), _tokens(plan), _time(plan), _verdict(plan)])


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Everything in bytes, tokens and seconds."""
    phase, peak = plan.memory.peak
    return {
        "model": plan.shape.name,
        "parameters": plan.shape.parameters,
        "processes": plan.setup.processes,
        "strategy": plan.setup.strategy,
        "memory": {"steady": plan.memory.steady, "phases": plan.memory.phases, "peak": peak, "peak_phase": phase},
        "usable": usable(plan.setup),
        "tokens": plan.work.tokens,
        "moved": plan.work.moved,
        "seconds": plan.work.seconds,
        "updates": plan.work.updates,
        "fits": plan.fits,
        "changes": plan.changes,
    }


def _head(plan: Plan) -> str:
    setup = plan.setup
    trained = "full fine-tuning"
    if setup.lora_rank:
        base = f" on {setup.bits}-bit weights" if setup.bits else ""
        trained = f"{'DoRA' if setup.dora else 'LoRA'} of rank {setup.lora_rank}{base}"
    where = f"{setup.processes} GPU{'s' if setup.processes > 1 else ''} of {setup.gpu.memory / GIB:.0f} GiB"
    nodes = f" on {setup.machines} nodes" if setup.machines > 1 else ""
    problems = setup.generation_batch // setup.group
    return (
        f"{plan.shape.name}: {plan.shape.parameters / 1e9:.2f} B parameters, {trained}, {setup.strategy}, "
        f"{where}{nodes}\n"
        f"{problems} problems x {setup.group} rollouts a generation batch, {plan.work.updates} optimizer steps each, "
        f"C = {setup.contrasts}, K = {setup.topk}"
    )


def _memory(plan: Plan) -> str:
    lines = ["memory of a GPU, GiB" + "".join(f"{phase:>12}" for phase in plan.memory.phases)]
    for name, size in plan.memory.steady.items():
        lines.append(f"  {name:<18}" + f"{size / GIB:>12.2f}" * len(plan.memory.phases))
    for name in dict.fromkeys(name for items in plan.memory.phases.values() for name in items):
        sizes = [items.get(name, 0) for items in plan.memory.phases.values()]
        if any(sizes):
            lines.append(f"  {name:<18}" + "".join(f"{size / GIB:>12.2f}" for size in sizes))
    totals = "".join(f"{plan.memory.total(phase) / GIB:>12.2f}" for phase in plan.memory.phases)
    return "\n".join([*lines, f"  {'together':<18}{totals}"])


def _tokens(plan: Plan) -> str:
    tokens = plan.work.tokens
    lines = [
        f"tokens of a generation batch, at a mean prompt of {plan.lengths.prompt}, answer of "
        f"{plan.lengths.completion} and context of {plan.lengths.context}"
    ]
    lines += [f"  {name:<18}{count:>14,}" for name, count in tokens.items()]
    lines.append("received by a GPU from others, GB a generation batch")
    lines += [f"  {name:<22}{moved / 1e9:>10.3f}" for name, moved in plan.work.moved.items() if moved]
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    total = sum(plan.work.seconds.values())
    lines = ["time of a generation batch (an estimate from the GPU's data sheet; measure before you promise)"]
    for name, seconds in plan.work.seconds.items():
        if seconds:
            lines.append(f"  {name:<22}{seconds:>10.1f} s {100 * seconds / total:>5.0f} %")
    return "\n".join([*lines, f"  {'together':<22}{total:>10.1f} s"])


def _verdict(plan: Plan) -> str:
    phase, peak = plan.memory.peak
    room = usable(plan.setup)
    if plan.fits:
        return f"It fits: {peak / GIB:.1f} of {room / GIB:.1f} usable GiB, in the phase {phase!r}."
    refusal = f"It does not fit: the phase {phase!r} needs {peak / GIB:.1f} GiB of {room / GIB:.1f} usable."
    if plan.changes is None:
        return f"{refusal} No change known here is enough: take a smaller model, shorter sequences or larger GPUs."
    return f"{refusal} It would with:\n" + "\n".join(f"  {change}" for change in plan.changes)
