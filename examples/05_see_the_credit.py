"""Step 5 of 8: which tokens of an answer get credit before training.

python examples/05_see_the_credit.py     # runs/maps.html shows every answer, with all numbers on hover
"""

from importlib import import_module

from credit_trl.lab.analysis import Checkpoint, analysis_config, map_response, sample_rollouts
from credit_trl.lab.report import write_token_maps
from credit_trl.tasks.quickstart import TEMPLATES

task = import_module("03_evaluate").TASK

if __name__ == "__main__":
    config = analysis_config(max_completion_length=32, contrastive_count=4, **TEMPLATES)
    rows = task.build("test").to_list()
    checkpoint = Checkpoint.load("quickstart")
    rollouts = sample_rollouts(checkpoint, task, rows[:8], config, population=[row["prompt"] for row in rows])
    maps = [map_response(checkpoint, rollout, config) for rollout in rollouts]
    write_token_maps(maps, "runs/maps.html")
    wrong = next(token_map for token_map in maps if token_map.response.reward == 0.0)
    print(wrong.response.privileged.feedback)
    print("token             ΔV_t     S_t     R_t   (with feedback; of this prompt; the reward)")
    scores = wrong.scores
    for token, delta_v, specific, reward in zip(
        wrong.tokens, scores.delta_v, scores.specific, scores.advantage, strict=True
    ):
        print(f"{token.text!r:14}{delta_v:8.2f}{specific:8.2f}{reward:8.2f}")
