"""Advice before training: which arm, by the facts and targets of a probe. The rule is one function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

MIXED = 0.1  # share of groups with right and wrong answers, from which GRPO learns
LOST = 0.05  # success that a gated target may lose against the policy
NEAR = 0.05  # a target at most this far above the best answer of a group shows nothing that GRPO cannot find
FAR = 0.1  # a target at least this far above it does
SMALL = 0.01  # difference of gated changes that is a tie whatever its error
PART_ERRORS = 3.0  # standard errors from which a part of the verdict counts as harmed; there are several parts
SIGMAS = 2.0  # standard errors of every other comparison

RULE = f"""\
1. Feedback harms where z lowers success by more than {SIGMAS:g} standard errors, or a part of the verdict by more than
   {PART_ERRORS:g}. Then: the wording under which z raises success by more than {SIGMAS:g}, if there is one; else GRPO
   if {MIXED:.0%} of the groups are mixed, else guide if its target beats the policy, else another wording.
2. An arm is dropped whose gated rollouts lose more than {SIGMAS:g} errors, or whose gated answers lose more than that
   and more than {LOST:.0%}.
3. Where the best target is at most {NEAR:.0%} above the best answer of a group, GRPO suffices.
4. Where it is at least {FAR:.0%} and {SIGMAS:g} errors above, and z raises success, distil with the arm of the
   highest gated change; arms within {SIGMAS:g} errors or {SMALL:.0%} of it are a tie.
5. Otherwise the look-ahead decides, where both seeds agree by {SIGMAS:g} errors; without one it is undecided."""


@dataclass(frozen=True)
class Advice:
    """A choice of one arm, of several in a tie, or of none."""

    kind: str  # "arm", "tie", "undecided" or "wording"
    because: str
    arms: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)  # arm -> reason

    @property
    def sentence(self) -> str:
        names = " or ".join(self.arms)
        heads = {
            "arm": f"Train with {names}",
            "tie": f"A tie of {names}: take the first",
            "undecided": f"Undecided: train {names or 'the arms'} for 20 steps and compare",
            "wording": "Do not distil yet: try another wording of the feedback",
        }
        return f"{heads[self.kind]}, because {self.because}."


def advise(
    facts: Mapping[str, Any], arms: Sequence[Mapping[str, Any]], lookahead: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Advice:
    """The advice for facts and arms of `probe.json`, by `RULE`. `lookahead` has a change of each seed by arm.

    It never rests on a difference inside its interval.
    """
    mixed, best = facts["mixed"]["mean"], facts["best"]["mean"]
    learns = mixed >= MIXED
    harmed = [name for name, part in facts["parts"].items() if part["change"] < -PART_ERRORS * part["error"]]
    if facts["read"]["change"] < -SIGMAS * facts["read"]["error"]:
        harmed.insert(0, "success")
    dropped: dict[str, str] = {}
    for arm in arms:
        floor, gated = arm["floor"], arm["gated"]
        if harmed and arm["form"] == "subtract":
            dropped[arm["name"]] = f"reading z lowers {harmed[0]}"
        elif floor is not None and floor["change"] < -SIGMAS * floor["error"]:
            dropped[arm["name"]] = "its gated target loses successes of the policy"
        elif gated["change"] < -max(LOST, SIGMAS * gated["error"]):
            dropped[arm["name"]] = "its gated answers are worse than the policy's"
    remaining = [arm for arm in arms if arm["name"] not in dropped]
    if harmed:
        because = f"reading z lowers {harmed[0]}, so SDPO and subtract can only unlearn"
        wording = _readable_wording(facts["conditions"])
        if wording is not None:
            success = facts["conditions"][wording]["mean"]
            name = wording.removeprefix("wording: ")
            because = f"reading z lowers {harmed[0]}, and in {name} wording {success:.0%} succeed"
            return Advice("wording", because, [], dropped)
        if learns:
            return Advice("arm", f"{because}, and {mixed:.0%} of the groups are mixed", ["GRPO"], dropped)
        rising = [arm for arm in remaining if arm["ceiling"]["change"] > SIGMAS * arm["ceiling"]["error"]]
        if not rising:
            return Advice("wording", because, [], dropped)
        guide = max(rising, key=lambda arm: arm["ceiling"]["mean"])
        return Advice("arm", f"{because}, and guide's target beats the policy", [guide["name"]], dropped)
    top = max(remaining, key=lambda arm: arm["ceiling"]["mean"], default=None)
    above = top["above_best"] if top else {"change": -1.0, "error": 0.0}
    points = f"{100 * above['change']:+.0f} points"
    because = f"the best answer of a group is right in {best:.0%} and the best target differs by {points}"
    if learns and above["change"] <= NEAR:
        return Advice("arm", because, ["GRPO"], dropped)
    is_read = facts["read"]["change"] > SIGMAS * facts["read"]["error"]
    if is_read and above["change"] >= max(FAR, SIGMAS * above["error"]):
        scored = [arm for arm in remaining if arm["floor"] is not None]
        near = remaining
        if scored:
            highest = max(map(itemgetter("floor"), scored), key=itemgetter("change"))
            near = [arm for arm in scored if _within(arm["floor"], highest)]
        near = sorted(near, key=lambda arm: (arm["form"] != "subtract", arm["contrastive_coef"] != 0.1))
        names = [arm["name"] for arm in near]
        return Advice("arm" if len(names) == 1 else "tie", f"{because}, and z is read", names, dropped)
    candidates = [arm["name"] for arm in remaining]
    if learns:
        candidates.insert(0, "GRPO")
    winners = _agreed(lookahead)
    if winners:
        return Advice("arm", "both seeds of the look-ahead agree", winners, dropped)
    return Advice("undecided", "neither facts nor targets separate them", candidates, dropped)


def _readable_wording(conditions: Mapping[str, Mapping[str, float]]) -> str | None:
    """The condition `wording: …` under which z raises success most, by more than the errors; None without any."""
    best = None
    for name, fact in conditions.items():
        is_better = best is None or fact["mean"] > conditions[best]["mean"]
        if name.startswith("wording: ") and fact["change"] > SIGMAS * fact["error"] and is_better:
            best = name
    return best


def _within(change: Mapping[str, float], top: Mapping[str, float]) -> bool:
    return top["change"] - change["change"] <= max(SMALL, SIGMAS * change["error"], SIGMAS * top["error"])


def _agreed(lookahead: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The arm that is best under each seed by more than the errors, if there is one."""
    winners = set()
    for of_seed in zip(*lookahead.values(), strict=True):
        ranked = sorted(zip(lookahead, of_seed, strict=True), key=lambda item: -item[1]["change"])
        (name, top), (_, second) = ranked[:2]
        winners.add(None if _within(second, top) else name)
    return [*winners] if len(winners) == 1 and None not in winners else []
