"""Verdicts on the paper's claims, by rules that were fixed before the runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from worlds import LAMBDAS, World, class_values, late, s_change, seed_difference

from credit_trl.lab.comparison.compare import Contrast

TOLERANCE = 0.05  # largest difference in accuracy that still supports "C = 1 suffices"


def claims(plain: World, shortcut: World, tokens: Mapping[str, Mapping]) -> list[str]:
    """One bullet per claim, with its verdict and numbers."""
    return [
        claim_methods(plain),
        claim_count(plain),
        claim_lambda(plain, shortcut),
        claim_tokens(tokens),
        claim_shortcut(shortcut, tokens),
    ]


def claim_methods(plain: World) -> str:
    sdpo = plain.contrast("SDPO", "unknown", baseline="GRPO")
    credit = plain.contrast("CREDIT λ=0.1", "unknown")
    return bullet(
        "CREDIT > SDPO > GRPO",
        f"SDPO against GRPO on unknown cues: {format_contrast(sdpo)} — **{verdict(sdpo)}**. CREDIT (λ = 0.1) against "
        f"SDPO: {format_contrast(credit)} — **{verdict(credit)}**.",
    )


def claim_count(plain: World) -> str:
    found = {c: plain.contrast(f"CREDIT λ=0.1 C={c}", "unknown", baseline="CREDIT λ=0.1") for c in (2, 4)}
    inside = [max(abs(c.difference.low), abs(c.difference.high)) <= TOLERANCE for c in found.values()]
    better = [c.difference.low > 0 for c in found.values()]
    if any(better):
        word = "does not hold: more contrasts score higher"
    elif all(inside):
        word = f"holds within {100 * TOLERANCE:g} points"
    else:
        word = f"no gain from more is seen, but the intervals are wider than ±{100 * TOLERANCE:g} points"
    listed = "; ".join(f"C = {c} against C = 1: {format_contrast(contrast)}" for c, contrast in found.items())
    return bullet("C = 1 suffices", f"{listed} — **{word}**.")


def claim_lambda(plain: World, shortcut: World) -> str:
    texts = []
    for world in (plain, shortcut):
        score = world.contrast("CREDIT λ=0.5", "unknown")
        shrink = seed_difference(world, "CREDIT λ=0.5", "CREDIT λ=0.05", lambda run: late(run, "credit/s_mean"))
        change = {value: s_change(world, f"CREDIT λ={value:g}") for value in LAMBDAS}
        listed = ", ".join(f"{100 * one:+.0f} % at {value:g}" for value, one in change.items())
        texts.append(
            f"{world.name.capitalize()} world: score of λ = 0.5 against SDPO {format_contrast(score)} — "
            f"**{verdict(score, wanted='less')}**; "
            f"S_t at the end, λ = 0.5 against 0.05: {shrink} nats; change of S_t over training: {listed}"
        )
    return bullet("λ too large shrinks S_t and the score", ". ".join(texts) + ".")


def claim_tokens(tokens: Mapping[str, Mapping]) -> str:
    specific = class_values(tokens, "plain", "S")
    inside = [min(specific[name]) for name in ("cue", "city", "topic")]
    generic = [max(map(abs, specific["generic"]))]
    word = "holds on every base" if min(inside) > 10 * max(generic) else "does not hold on every base"
    listed = ", ".join(f"{name} {statistics.fmean(specific[name]):.2f}" for name in specific if specific[name])
    return bullet(
        "S_t is high on input-specific tokens",
        f"mean S_t in nats before training: {listed} — **{word}** (plain world).",
    )


def claim_shortcut(shortcut: World, tokens: Mapping[str, Mapping]) -> str:
    return (
        f"{claim_rates(shortcut)} Before training the planted word's target is above the input's own word up to λ ≈ "
        f"{break_even(tokens)}."
    )


def claim_rates(shortcut: World) -> str:
    rates = {
        arm: shortcut.mean(arm, "unknown", "shortcut")
        for arm in ("Base", "GRPO", "SDPO", "CREDIT λ=0.1", "CREDIT λ=0.5")
    }
    weak = shortcut.contrast("CREDIT λ=0.1", "unknown", measure="shortcut")
    strong = shortcut.contrast("CREDIT λ=0.5", "unknown", measure="shortcut")
    listed = ", ".join(f"{arm} {100 * rate:.0f} %" for arm, rate in rates.items())
    return bullet(
        "Shortcut tokens lose their reward",
        f"rate of the planted thought on unknown cues at the end: {listed}. Against SDPO: λ = 0.1 "
        f"{format_contrast(weak)} — **{verdict(weak, wanted='less')}**; λ = 0.5 {format_contrast(strong)} — "
        f"**{verdict(strong, wanted='less')}**.",
    )


def claim_controls(plain: World) -> str:
    swapped = plain.contrast("hint-contrast λ=0.1", "unknown", baseline="CREDIT λ=0.1")
    foreign = plain.contrast("foreign-hint λ=0.1", "unknown")
    base = plain.mean("Base", "unknown")
    return bullet(
        "Controls",
        f"swapping the feedback instead of the input, against CREDIT: {format_contrast(swapped)}. Feedback of another "
        f"prompt, against SDPO: {format_contrast(foreign)}; it ends at "
        f"{100 * plain.mean('foreign-hint λ=0.1', 'unknown'):.1f} %, the base at {100 * base:.1f} %.",
    )


def verdict(contrast: Contrast, wanted: str = "more") -> str:
    """Verdict on a difference that the paper expects to be positive (`wanted="more"`) or negative."""
    low, high = contrast.difference.low, contrast.difference.high
    if wanted == "less":
        low, high = -high, -low
    return "holds" if low > 0 else "does not hold: the reverse" if high < 0 else "not decided"


def format_contrast(contrast: Contrast) -> str:
    d = contrast.difference
    p = "p < 0.001" if d.p_value < 0.001 else f"p = {d.p_value:.3f}"
    return f"{100 * d.difference:+.1f} points [{100 * d.low:+.1f}, {100 * d.high:+.1f}], {p}"


def break_even(tokens: Mapping[str, Mapping]) -> str:
    """The λ at which f − λ g is the same for both words, mean over bases."""
    found = []
    for name, value in tokens.items():
        if name.startswith("shortcut"):
            own, planted = value["branch"]["own"], value["branch"]["shortcut"]
            found.append((planted["f"] - own["f"]) / (planted["g"] - own["g"]))
    return f"{statistics.fmean(found):.2f} (range over bases {min(found):.2f} to {max(found):.2f})"


def bullet(claim: str, text: str) -> str:
    return f"- **{claim}.** {text[0].upper()}{text[1:]}"
