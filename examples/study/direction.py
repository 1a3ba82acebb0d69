"""Which tokens should the gradient raise? ΔV_t, S_t and R_t against the effect on success, without any training.

    python direction.py weak --first_seed 320 --seeds 8    # pretrains the bases and writes results/direction.csv

Responses of the worlds are few enough to be enumerated: every token of at least `MIN_PROBABILITY` continues a prefix.
P(O = 1 | prefix) then follows backwards from the verdicts of the whole responses. The ideal is the gradient of success
by the logits of a policy that is a table, p(v) (P(O = 1 | v) − P(O = 1)) at a prefix, with the order of r^cf (Appendix
F). A quantity Q gives p(v) (Q(v) − E_p Q). `cosine` compares both over all prefixes of a prompt, weighted by their
probability. `concordance` is the share of pairs of tokens whose success differs by a hundredth that Q orders alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from run import HERE, PROVENANCE, base_of, row_of
from scipy.stats import somersd
from worlds import WORLDS, World

from credit_trl import objective
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.responses import Rollout, analysis_config, draw, grade_rollouts, rollout_contexts
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, CreditLogps, RolloutContexts, credit_logps
from credit_trl.tasks.quickstart import TEMPLATES

MIN_PROBABILITY = 0.01  # of a token after its prefix
MIN_PREFIX = 1e-3  # probability of a prefix that is continued
MAX_LENGTH = 32
PROMPTS = 8  # of each group
QUANTITIES = {
    "ΔV": CreditFormula(0.0),
    "S": None,
    **{f"subtract λ={coef}": CreditFormula(coef) for coef in (0.05, 0.1, 0.2, 0.5)},
    **{f"guide λ={coef}": CreditFormula(coef, "guide") for coef in (0.2, 1.0, 1.5)},
}
Prefix = tuple[int, ...]
Tree = dict[Prefix, tuple[float, dict[int, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=sorted(WORLDS))
    parser.add_argument("--seeds", type=int, default=8, help="number of bases (default 8)")
    parser.add_argument("--first_seed", type=int, default=320, help="seed of the first base (default 320)")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/study"), help="folder of the bases, as in run.py"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # as run.py, which makes the same bases
    world = WORLDS[args.world]
    rows = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        rows += measure(world, base_of(world, seed, args.output_dir), seed, PROMPTS)
        print(f"{world.name}, base {seed}", flush=True)
    pd.DataFrame(rows).to_csv(HERE / "results" / "direction.csv", index=False, float_format="%.4f")


def measure(world: World, base: Path, seed: int, prompts: int) -> Iterator[dict[str, Any]]:
    """A row for every group and quantity: means over prompts."""
    made_by = {name: row_of(world, seed, "", 0, {"contrastive_coef": 0.0})[name] for name in PROVENANCE}
    checkpoint = Checkpoint.load(str(base), name="base")
    config = analysis_config(contrastive_count=4, use_successful_as_teacher=False, **TEMPLATES)
    for group in ("known", "unknown"):
        rows = [row for row in world.task.build("test") if row["group"] == group][:prompts]
        contrasts = draw([row["prompt"] for row in rows], world.task.build("train")["prompt"], config)
        agreements_of: dict[str, list[tuple[float, float]]] = {name: [] for name in QUANTITIES}
        success = []
        for row, contrast_prompts in zip(rows, contrasts, strict=True):
            z = PrivilegedContext(feedback=world.task.verify("", row["answer"]).feedback)
            contexts = rollout_contexts(
                Rollout(row["id"], row["prompt"], (), z, tuple(contrast_prompts)), config, checkpoint
            )
            tree = enumerate_responses(checkpoint, contexts.student)
            values = success_of(checkpoint, world, row, tree)
            success.append(values[()])
            for name, agreement in agreements(checkpoint, contexts, tree, values).items():
                agreements_of[name].append(agreement)
        for name, pairs in agreements_of.items():
            cosine, concordance = np.nanmean(pairs, axis=0)
            key = {"world": world.name, "base": seed, "group": group, "quantity": name, "prompts": len(rows)}
            yield key | {"cosine": cosine, "concordance": concordance, "success": np.mean(success)} | made_by


@torch.no_grad()
def enumerate_responses(checkpoint: Checkpoint, context: list[int]) -> Tree:
    """Prefixes of the likely responses → their probability, and those of the tokens that continue them."""
    tree: Tree = {}
    frontier: dict[Prefix, float] = {(): 1.0}
    while frontier and len(next(iter(frontier))) < MAX_LENGTH:
        ids = torch.tensor([[*context, *prefix] for prefix in frontier])  # all of one length
        logits = checkpoint.student.student(input_ids=ids, logits_to_keep=1).logits[:, -1]
        following: dict[Prefix, float] = {}
        for (prefix, reach), probabilities in zip(frontier.items(), logits.softmax(-1).tolist(), strict=True):
            least = min(max(MIN_PROBABILITY, MIN_PREFIX / reach), max(probabilities))
            likely = {token: p for token, p in enumerate(probabilities) if p >= least}
            tokens = {token: p / sum(likely.values()) for token, p in likely.items()}
            tree[prefix] = (reach, tokens)
            following |= {(*prefix, token): p * reach for token, p in tokens.items()}
        ends = checkpoint.end_ids()
        frontier = {prefix: reach for prefix, reach in following.items() if prefix[-1] not in ends}
    return tree


def success_of(checkpoint: Checkpoint, world: World, row: dict[str, Any], tree: Tree) -> dict[Prefix, float]:
    """P(O = 1) after every prefix and after each of its tokens."""
    following = ((*prefix, token) for prefix, (_, tokens) in tree.items() for token in tokens)
    leaves = [prefix for prefix in following if prefix not in tree]
    verdicts = grade_rollouts(checkpoint, world.task, [row] * len(leaves), leaves)
    values = {leaf: float(float(verdict) == 1.0) for leaf, verdict in zip(leaves, verdicts, strict=True)}
    for prefix in sorted(tree, key=len, reverse=True):
        values[prefix] = sum(p * values[*prefix, token] for token, p in tree[prefix][1].items())
    return values


def agreements(
    checkpoint: Checkpoint, contexts: RolloutContexts, tree: Tree, values: dict[Prefix, float]
) -> dict[str, tuple[float, float]]:
    """Cosine and concordance of every quantity for the responses to one prompt."""
    branches = {prefix: node for prefix, node in tree.items() if len(node[1]) > 1}
    logps = logps_at(checkpoint, contexts, branches, [leaf for leaf in values if leaf not in tree])
    result = {}
    for name, formula in QUANTITIES.items():
        products, pairs = np.zeros(3), np.zeros(2)
        for prefix, (reach, tokens) in branches.items():
            ids = torch.tensor([list(tokens)])
            p = np.array(list(tokens.values()))
            success = np.array([values[*prefix, token] for token in tokens])
            prefix_logps = logps[prefix]
            specific = objective.input_specific(prefix_logps.teacher, prefix_logps.contrasts).gather(-1, ids)
            quantity = (specific if formula is None else formula.advantages(prefix_logps, ids))[0].double().numpy()
            ideal = reach * p * (success - p @ success)
            direction = reach * p * (quantity - p @ quantity)
            products += ideal @ direction, ideal @ ideal, direction @ direction
            if np.ptp(success.round(2)) > 0:
                pairs += reach * (1.0 + somersd(success.round(2), quantity).statistic) / 2.0, reach
        cosine = products[0] / np.sqrt(products[1] * products[2]) if products[1] > 0 else np.nan
        result[name] = (cosine, pairs[0] / pairs[1] if pairs[1] > 0 else np.nan)
    return result


def logps_at(
    checkpoint: Checkpoint, contexts: RolloutContexts, prefixes: Iterable[Prefix], leaves: Sequence[Prefix]
) -> dict[Prefix, CreditLogps]:
    """Log-probabilities of student, teacher and contrasts after every prefix, from passes over whole responses."""
    logps_of: dict[Prefix, CreditLogps] = {}
    for prefix in prefixes:
        if prefix not in logps_of:
            leaf = next(leaf for leaf in leaves if leaf[: len(prefix)] == prefix)
            for rows, logps in credit_logps(checkpoint, contexts, leaf, 1.0):
                for n, t in enumerate(range(len(leaf))[rows]):
                    logps_of[leaf[:t]] = CreditLogps(logps.student[[n]], logps.teacher[[n]], logps.contrasts[:, [n]])
    return logps_of


if __name__ == "__main__":
    main()
