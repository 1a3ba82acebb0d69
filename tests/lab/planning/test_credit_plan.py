"""`trl credit-plan`: output, errors, and the same arguments as `trl credit`; counts of tokens and operations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from credit_trl import cli
from credit_trl.cli.credit_plan import parse_run
from credit_trl.lab.planning.fit import largest_saving
from credit_trl.lab.planning.memory import memory_of
from credit_trl.lab.planning.setup import GPUS, make_setup
from credit_trl.lab.planning.shape import load_shape
from credit_trl.lab.planning.work import Lengths, default_lengths, padding_factor, work_of
from credit_trl.loss.scores import SupportConfig
from credit_trl.training.micro_batches import even_groups

LINE = ["--model_name_or_path", "Qwen/Qwen3-0.6B", "--generation_batch_size", "64", "--max_completion_length", "1024"]
ENGINE = ["--use_vllm", "true", "--vllm_mode", "colocate"]


def plan(capsys, *line):
    code = cli.main(["credit-plan", *line])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_run_that_fits_prints_memory_by_phase(capsys):
    code, out, _ = plan(capsys, *LINE, "--gpu", "a100-80gb", "--attn_implementation", "flash_attention_2")
    assert code == 0
    for word in ("rollout", "scores", "update", "weights", "optimizer", "teacher", "generated", "It fits"):
        assert word in out, word
    code, out, _ = plan(capsys, *LINE, "--json")
    printed = json.loads(out)
    assert code == 0
    assert printed["parameters"] == 596_049_920
    assert printed["memory"]["peak"] <= printed["usable"]
    assert printed["tokens"]["generated"] == 64 * 256


def test_a_run_that_does_not_fit_prints_changes_that_fit(capsys):
    line = [
        "--model_name_or_path",
        "Qwen/Qwen3-8B",
        "--generation_batch_size",
        "64",
        "--max_completion_length",
        "1024",
    ]
    code, out, _ = plan(capsys, *line, "--gpu", "3090")
    assert code == 1
    assert "It does not fit: the phase 'update' needs" in out
    assert out.rstrip().splitlines()[-1].startswith("  ")
    code, out, _ = plan(capsys, *LINE, "--gpu_memory", "1")
    assert code == 1
    assert "No known change is enough" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ((*LINE, "--gpu", "abacus"), "unknown GPU 'abacus'"),
        ((*LINE, "--learning_rte", "1"), "Did you mean --learning_rate?"),
        ((*LINE, "--max_promt", "3"), "Did you mean --max_prompt?"),
        ((*LINE, "--gpu_mem", "3"), "Did you mean --gpu_memory?"),
        ((*LINE, "--model_config", "nothere.json"), "`--model_config nothere.json`: no such file"),
        ((*LINE, "--rows", "5"), "--rows 5: a generation batch of 64 rollouts with `num_generations=8` needs 8"),
        ((*LINE, "--contrastive_coef", "2"), "`contrastive_coef`"),
        ((*LINE, "--num_processes", "3"), "must be divisible by the global batch size (24)"),
        (("--model_name_or_path", "someone/unknown", "--generation_batch_size", "64"), "--model_config"),
        (("--generation_batch_size", "64"), "--model_name_or_path"),
        ((*LINE, "--accelerate_config", "fsdp1"), "fsdp_version: 2"),
        (
            (*LINE, *ENGINE, "--vllm_max_model_length", "1024"),
            "`max_completion_length=1024` leaves no token of `vllm_max_model_length=1024`",
        ),
        (
            (*LINE, *ENGINE, "--vllm_max_model_length", "2048"),
            "`--max_prompt 2048` leaves no token of `vllm_max_model_length=2048`",
        ),
        (
            (*LINE, "--num_processes", "8", "--verifier_timeout", "1800"),
            "`verifier_timeout=1800` s is not below `ddp_timeout=1800` s",
        ),
    ],
)
def test_mistakes_are_one_line(capsys, line, message):
    code, out, err = plan(capsys, *line)
    assert (code, out) == (2, "")
    assert message in err


def test_configuration_and_accelerate_files_are_read(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        "model_name_or_path: Qwen/Qwen3-0.6B\nbf16: false\ngeneration_batch_size: 64\naccelerate_config: zero2\n"
    )
    _, _, launcher, mixed, _ = parse_run(["--config", str(config)])
    assert (launcher["num_processes"], launcher["deepspeed_config"]["zero_stage"], mixed) == (8, 2, False)
    _, _, launcher, mixed, _ = parse_run(["--config", str(config), "--num_processes", "4", "--bf16", "true"])
    assert (launcher["num_processes"], mixed) == (4, True)


def test_batches_are_computed_for_the_launched_processes(tmp_path):
    """TRL computes them from the number of processes, which is one on the planning machine."""
    sizes = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "32")
    line = ["--model_name_or_path", "Qwen/Qwen3-8B", *sizes]
    training, *_ = parse_run([*line, "--accelerate_config", "fsdp2", "--num_processes", "8"])
    assert (training.generation_batch_size, training.steps_per_generation) == (512, 32)
    alone, *_ = parse_run(line)
    assert alone.generation_batch_size == 64
    small = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4", "--num_processes", "8"]
    training, *_ = parse_run(["--model_name_or_path", "Qwen/Qwen3-8B", *small])
    assert training.generation_batch_size == 32  # one process would have 4 rollouts, less than a group
    config = tmp_path / "run.yaml"
    config.write_text("num_processes: 2\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 4\n")
    training, _, launcher, *_ = parse_run(["--config", str(config)])
    assert (training.generation_batch_size, launcher["num_processes"]) == (32, 2)


def run_of(*words, gpu="h20"):
    training, model, launcher, mixed, _ = parse_run([*LINE, *words])
    return make_setup(training, model, launcher, GPUS[gpu], mixed=mixed)


def test_tokens_and_operations_equal_counts_by_hand():
    shape = load_shape("Qwen/Qwen3-0.6B")
    setup = run_of("--contrastive_count", "3", "--gradient_checkpointing", "true")
    work = work_of(shape, setup, Lengths(prompt=10, completion=100, context=50))
    padding = round(64 * 110 * (padding_factor(setup, Lengths(10, 100, 50)) - 1))
    assert work.tokens == {
        "generated": 6400,
        "scored": 64 * 4 * 150,
        "trained": 64 * 110,
        "padding": padding,
        # The batch is several steps, so that a ratio needs them.
        "old_logps": round(64 * 110 * padding_factor(setup, Lengths(10, 100, 50), whole_batch=True)),
    }
    assert work.operations["scores"] == 2 * shape.parameters * 64 * 4 * 150
    assert work.operations["update"] == 8 * shape.parameters * (
        64 * 110 + padding
    )  # forward, recomputation, twice backward
    one = work_of(shape, replace(setup, processes=8, strategy="ddp"), Lengths(10, 100, 50))
    assert one.seconds["scores"] == pytest.approx(work.seconds["scores"] / 8)


TEACHER = ["--teacher_model_kind", "model", "--teacher_model_name_or_path", "Qwen/Qwen3-8B", "--contrastive_coef", "0"]


def test_another_model_is_planned_with_its_own_sizes(capsys):
    code, out, _ = plan(capsys, *LINE, *TEACHER, "--teacher_prompt", "student", "--gpu", "h200")
    assert code == 0
    assert "teacher Qwen/Qwen3-8B: 8.19 B parameters, 16-bit weights" in out
    _, out, _ = plan(capsys, *LINE, *TEACHER, "--teacher_prompt", "student", "--json")
    planned, large = json.loads(out), load_shape("Qwen/Qwen3-8B")
    assert planned["memory"]["steady"]["teacher"] == 2 * large.parameters
    assert planned["tokens"]["scored"] == 64 * (2048 // 4 + 1024 // 4)  # the student's prompt and the completion
    _, out, _ = plan(capsys, *LINE, "--contrastive_coef", "0", "--json")
    own = json.loads(out)
    by_token = [p["seconds"]["scores"] / p["tokens"]["scored"] for p in (planned, own)]
    assert by_token[0] / by_token[1] == pytest.approx(large.parameters / own["parameters"])
    code, _, err = plan(capsys, *LINE, *TEACHER[:3], "someone/unknown")
    assert (code, "`--teacher_config path/to/config.json`" in err) == (2, True)


def test_rehearsal_and_trust_region_are_planned_with_their_passes():
    shape, lengths = load_shape("Qwen/Qwen3-0.6B"), Lengths(prompt=10, completion=100, context=50)
    setup = run_of()
    assert work_of(shape, replace(setup, teacher="trust_region"), lengths).tokens["scored"] == 64 * 2 * 2 * 150
    tokens = work_of(shape, run_of("--teacher_rehearsal", "0.25"), lengths).tokens
    assert tokens["scored"] == 64 * (0.75 * 2 + 0.25) * 150  # no contrasts on a rehearsal batch
    assert tokens["trained"] == 64 * (0.75 * 110 + 0.25 * 150)


def test_scores_of_a_step_are_planned_for_each_micro_batch():
    shape, lengths = load_shape("Qwen/Qwen3-0.6B"), Lengths(10, 100, 50)
    stored = replace(run_of("--num_iterations", "2"), strategy="fsdp2", processes=8, per_device=2, accumulation=4)
    in_step = replace(stored, support=SupportConfig("full"))
    once, often = work_of(shape, stored, lengths), work_of(shape, in_step, lengths)
    assert often.tokens["scored"] == 2 * once.tokens["scored"]
    assert often.moved["scores"] == 2 * (stored.rollouts // 2) * once.moved["scores"]  # a pass and the head for each
    phases = memory_of(shape, in_step).phases
    assert phases["scores"]["gradients"] == phases["update"]["gradients"]


def test_time_per_contrast_is_that_of_the_papers_ablation():
    """Table 2: 481 s at C = 2, 607 s at C = 8, 765 s at C = 16; 21.0 and 19.8 s per contrast.

    The paper gives no lengths; 2,800 tokens of context and completion are consistent with its curves.
    """
    shape, seconds = load_shape("Qwen/Qwen3-8B"), {}
    for count in (2, 8, 16):
        setup = replace(
            run_of("--contrastive_count", str(count)),
            generation_batch=256,
            processes=8,
            strategy="fsdp2",
            flash=True,
            completion=8192,
            context=10240,
        )
        seconds[count] = work_of(shape, setup, Lengths(512, 1100, 1700)).seconds["scores"]
    slopes = [(seconds[8] - seconds[2]) / 6, (seconds[16] - seconds[8]) / 8]
    assert slopes[0] == pytest.approx(slopes[1], rel=0.05)
    assert slopes[0] == pytest.approx(20.4, rel=0.1)


def test_only_a_sharded_model_is_gathered_for_every_pass():
    shape = load_shape("Qwen/Qwen3-0.6B")
    lengths = Lengths(10, 100, 50)
    setup = replace(run_of(), processes=8, per_device=2, accumulation=4)
    sharded = work_of(shape, replace(setup, strategy="fsdp2"), lengths).moved
    replicated = work_of(shape, replace(setup, strategy="ddp"), lengths).moved
    assert replicated["scores"] == 0.0
    assert sharded["scores"] > shape.parameters * 2 * 7 / 8
    assert sharded["update"] > replicated["update"] > 0.0


def test_hours_count_generation_batches_and_evaluations(capsys):
    line = [*LINE, "--num_train_epochs", "3", "--avg_at_k", "4", "--avg_at_k_steps", "5", "--json"]
    code, out, _ = plan(capsys, *line, "--rows", "100", "--eval_rows", "50")
    printed = json.loads(out)
    assert code == 0
    assert printed["generation_batches"] == 3 * (100 // 8)  # 64 rollouts are 8 prompts
    assert printed["evaluations"] == 1 + -(-36 // 5)
    training = printed["generation_batches"] * sum(printed["seconds"].values()) / 3600
    assert printed["hours"] > training
    *_, unevaluated = plan(capsys, *LINE, "--num_train_epochs", "3", "--rows", "100", "--json")[1:2]
    assert json.loads(unevaluated)["hours"] == pytest.approx(training)
    code, out, _ = plan(capsys, *LINE, "--max_steps", "40")
    assert "the run: 5 generation batches" in out  # eight steps each
    assert "give --rows" in plan(capsys, *LINE)[1]


def test_counts_of_one_are_singular(capsys):
    line = [*LINE, "--gradient_accumulation_steps", "8", "--max_steps", "1", "--avg_at_k", "4"]
    out = plan(capsys, *line)[1]
    assert "8 prompts x 8 rollouts per generation batch, 1 optimizer step each" in out
    assert "the run: 1 generation batch," in out
    assert "and 2 evaluations (give" in out


def test_step_of_several_generation_batches_counts_all_of_them(capsys):
    line = [*LINE[:2], "--max_steps", "100", "--json", "--steps_per_generation", "8", "--gradient_accumulation_steps"]
    found = [json.loads(plan(capsys, *line, str(steps))[1]) for steps in (8, 16, 12)]
    assert [plan["generation_batches"] for plan in found] == [100, 200, 150]
    assert found[1]["hours"] == pytest.approx(2 * found[0]["hours"], rel=0.05)


def test_an_engine_starts_with_the_share_that_is_named(capsys):
    line = [*LINE, *ENGINE, "--gpu", "4090", "--vllm_enable_sleep_mode", "true", "--vllm_gpu_memory_utilization"]
    code, out, _ = plan(capsys, *line, "0.02")
    assert code == 1
    assert "`vllm_gpu_memory_utilization=0.02` is 0.5 GiB of a GPU, and its weights and one sequence need" in out
    share = out.partition("Set it to ")[2].split()[0]
    assert "does not start" not in plan(capsys, *line, share)[1]
    assert "does not start" in plan(capsys, *line, f"{float(share) - 0.02:.2f}")[1]
    shape = load_shape("Qwen/Qwen3-0.6B")
    cache = 2 * shape.config.max_position_embeddings * shape.key_value_elements
    needed = (2 * shape.parameters + cache) / GPUS["4090"].memory
    assert float(share) - 0.01 <= needed <= float(share)


@pytest.mark.parametrize("per_device", [2, 4, 8])
def test_planned_padding_is_that_of_arranged_batches(per_device):
    """Within 5 %, for exponential lengths up to the maximum."""
    setup = replace(run_of(), per_device=per_device, accumulation=32 // per_device, generation_batch=32, processes=1)
    lengths, generator = Lengths(50, 300, 100), torch.Generator().manual_seed(0)
    read = valid = 0
    for _ in range(200):
        drawn = torch.empty(32).exponential_(1 / 300, generator=generator).clamp(1, setup.completion)
        sizes = [50 + int(n) for n in drawn]
        for group in even_groups(sizes, 32 // per_device, by_total=False):
            read += len(group) * max(sizes[i] for i in group)
        valid += sum(sizes)
    assert padding_factor(setup, lengths) == pytest.approx(read / valid, rel=0.05)
    assert padding_factor(replace(setup, packed=True, shares_prompts=False), lengths) == 1.0
    assert padding_factor(replace(setup, per_device=1), lengths) == 1.0


def test_pass_of_old_logps_is_planned_where_it_runs():
    once, twice = ["--gradient_accumulation_steps", "8"], ["--gradient_accumulation_steps", "4"]
    assert not run_of(*once).old_logps
    assert run_of(*twice).old_logps
    assert not run_of(*once, "--use_vllm", "true").old_logps
    assert run_of(*once, "--use_vllm", "true", "--distillation_weight", "0.5").old_logps
    modulated = run_of(*twice, "--credit_use", "modulate")
    assert modulated.old_logps
    assert modulated.support.kind == "sampled"
    route = ["--use_vllm", "true", "--credit_use", "route"]
    assert run_of(*once, *route).old_logps


def test_recipe_of_livecodebench_rolls_out_within_55_seconds():
    recipe = str(Path(__file__).parents[3] / "examples" / "recipes" / "livecodebench_qwen3_8b.yaml")
    training, model, launcher, mixed, _ = parse_run(["--config", recipe])
    setup = make_setup(training, model, launcher, GPUS["h100"], mixed=mixed)
    shape = load_shape("Qwen/Qwen3-8B")
    lengths = default_lengths(setup)
    assert setup.vllm.parallel == 4
    assert work_of(shape, setup, lengths).seconds["rollout"] <= 55.0
    alone = replace(setup, vllm=replace(setup.vllm, parallel=1))
    assert work_of(shape, alone, lengths).seconds["rollout"] > 75.0

    def seconds(changed):
        return sum(work_of(shape, changed, lengths).seconds.values())

    setting, saved = largest_saving(shape, alone, seconds)
    assert setting.startswith("vllm_tensor_parallel_size")
    assert saved == pytest.approx(seconds(alone) - seconds(replace(setup, vllm=replace(setup.vllm, parallel=8))))
