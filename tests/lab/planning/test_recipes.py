"""Recipes: the paper's numbers, a plan that fits the machine, and a run on a tiny model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from credit_trl import CreditConfig, cli
from credit_trl.cli import training
from credit_trl.cli.credit_plan import parse_run
from tiny import SHARED_DATA, build_model, build_tokenizer

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
PAPERS = [recipe for recipe in RECIPES if "24gb" not in recipe.stem]

# Table 3 of the paper, column by column.
BOTH = {
    "learning rate": 1e-6,
    "batch size (problems)": 32,
    "rollouts per problem": 8,
    "training temperature": 1.0,
    "evaluation temperature": 0.6,
    "evaluation top-p": 0.95,
    "validation frequency": 5,
    "max sequence length": 18944,
    "clip ratio": 0.2,
    "update rate": 0.01,
    "C": 1,
    "lambda": 0.1,
}
LIVECODEBENCH = {"warmup": 0, "epochs": 30, "mini-batch": 8, "validation rollouts": 4, "alpha": 1.0, "top-K": 20}
OTHERS = {"warmup": 10, "epochs": 3, "mini-batch": 32, "validation rollouts": 16, "alpha": 0.5, "top-K": 100}


def parsed(recipe, *more):
    """Arguments that `trl credit` parses from a recipe on a machine without GPUs."""
    line = ["--config", str(recipe), "--use_cpu", "true", "--bf16", "false", *more]
    return training.make_parser().parse_args_and_config(line, fail_with_unknown_args=False)


def test_every_benchmark_and_model_of_the_paper_has_a_recipe():
    names = [
        f"{task}_{m}" for task in ("livecodebench", "sciknoweval", "toolalpaca") for m in ("qwen3_8b", "olmo3_7b")
    ]
    assert {recipe.stem for recipe in PAPERS} == set(names)
    assert {"lora_24gb", "qlora_24gb"} <= {recipe.stem for recipe in RECIPES}


@pytest.mark.parametrize("recipe", PAPERS, ids=lambda recipe: recipe.stem)
def test_a_recipe_has_the_numbers_of_the_papers_table(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    script, config, model, _ = parsed(recipe)
    _, _, launcher, *_ = parse_run(["--config", str(recipe)])
    rollouts_a_step = config.per_device_train_batch_size * config.gradient_accumulation_steps
    rollouts_a_step *= launcher["num_processes"]
    found = {
        "learning rate": config.learning_rate,
        "batch size (problems)": config.generation_batch_size // config.num_generations,
        "rollouts per problem": config.num_generations,
        "training temperature": config.temperature,
        "evaluation temperature": script.avg_at_k_temperature,
        "evaluation top-p": script.avg_at_k_top_p,
        "validation frequency": script.avg_at_k_steps,
        "max sequence length": config.vllm_max_model_length,
        "clip ratio": config.epsilon,
        "update rate": config.teacher_update_rate,
        "C": config.contrastive_count,
        "lambda": config.contrastive_coef,
        "warmup": config.warmup_steps,
        "epochs": config.num_train_epochs,
        "mini-batch": rollouts_a_step // config.num_generations,
        "validation rollouts": script.avg_at_k,
        "alpha": config.distillation_alpha,
        "top-K": config.distillation_topk,
    }
    assert found == BOTH | (LIVECODEBENCH if "livecodebench" in recipe.stem else OTHERS)
    assert (config.top_p, config.top_k, config.teacher_model_kind) == (1.0, 0, "ema")
    assert (config.contrastive_source, config.distillation_support) == ("batch", "teacher_topk")
    assert (config.optim, config.weight_decay, launcher["num_processes"]) == ("adamw_torch", 0.01, 8)
    assert (config.loss_type, script.max_prompt_tokens) == ("grpo", 2048)
    assert config.ddp_timeout > config.verifier_timeout
    thinks = (config.chat_template_kwargs or {}).get("enable_thinking", True)
    assert thinks == ("qwen3" not in recipe.stem)
    assert model.model_name_or_path in ("Qwen/Qwen3-8B", "allenai/Olmo-3-7B-Instruct")


ARMS = {
    "sdpo": {"contrastive_coef": 0.0},
    "grpo": {"distillation_weight": 0.0, "scale_rewards": "none"},
}


@pytest.mark.parametrize("recipe", PAPERS, ids=lambda recipe: recipe.stem)
def test_arms_differ_from_credit_in_the_advantage_alone(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    credit = parse_run(["--config", str(recipe)])
    for arm, options in ARMS.items():
        other = parse_run(["--config", str(recipe), "--config", f"examples/recipes/arms/{arm}.yaml"])
        assert (other.model, other.launcher, other.script) == (credit.model, credit.launcher, credit.script)
        ours, theirs = vars(credit.training), vars(other.training)
        differing = {name: theirs[name] for name in ours if name in theirs and ours[name] != theirs[name]}
        differing = {k: v for k, v in differing.items() if not k.startswith(("_", "logging_dir", "distributed"))}
        assert differing == options
        assert len(yaml.safe_load((RECIPES[0].parent / "arms" / f"{arm}.yaml").read_text())) <= 3


def test_only_the_papers_runs_are_called_so():
    for recipe in PAPERS:
        head = recipe.read_text().partition("#   trl")[0]
        assert ("the paper's run" in head) == (recipe.stem != "livecodebench_olmo3_7b")
        assert "Section 4.3" not in recipe.read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_fits_its_machine(recipe, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    gpus = ["4090", "3090"] if "24gb" in recipe.stem else ["h20", "h100", "a100-80gb"]
    for gpu in gpus:
        assert cli.main(["credit-plan", "--config", str(recipe), "--gpu", gpu]) == 0, capsys.readouterr().out
    if recipe in PAPERS:
        line = ["--config", str(recipe), "--gpu", "h100", "--accelerate_config"]
        assert cli.main(["credit-plan", *line, "examples/accelerate/zero3_8gpu.yaml"]) == 0, capsys.readouterr().out
        # ZeRO-2 replicates the weights and the average on every GPU.
        assert cli.main(["credit-plan", *line, "examples/accelerate/zero2_8gpu.yaml"]) == 1
        assert "It fits with:" in capsys.readouterr().out
    capsys.readouterr()
    # The paper's runs do not fit one GPU of 24 GB.
    if recipe in PAPERS:
        assert cli.main(["credit-plan", "--config", str(recipe), "--gpu", "4090"]) == 1
        assert "It fits with:" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fsdp2_8gpu", "zero2_8gpu", "zero3_8gpu"])
def test_accelerate_accepts_its_files_on_one_and_two_nodes(name):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = ROOT / "examples" / "accelerate" / f"{name}.yaml"
    for nodes in (1, 2):
        line = [
            "--config_file",
            str(path),
            "--num_machines",
            str(nodes),
            "--num_processes",
            str(8 * nodes),
            "train.py",
        ]
        args, *_ = _validate_launch_command(launch_command_parser().parse_args(line))
        assert (args.num_processes, args.num_machines, args.mixed_precision) == (8 * nodes, nodes, "bf16")
        if name == "fsdp2_8gpu":
            assert args.use_fsdp
            assert str(args.fsdp_version) == "2"
        else:
            assert args.use_deepspeed
            assert str(args.zero_stage) == name[4]


def test_the_slurm_script_keeps_the_rollouts_of_a_step(tmp_path):
    """The script's arithmetic for several numbers of nodes, with Slurm's commands replaced by ones that print."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text("#!/bin/sh\necho node-a\necho node-b\n")
    (commands / "srun").write_text('#!/bin/sh\necho "CPUs $SRUN_CPUS_PER_TASK" >&2\nshift\nexec "$@"\n')
    (commands / "trl").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    recipe = str(ROOT / "examples" / "recipes" / "livecodebench_qwen3_8b.yaml")  # 2 rollouts a GPU, 4 times
    one, joined = ["--per_device_train_batch_size", "1"], ["--per_device_train_batch_size=1"]
    cases = [(1, "4", []), (2, "2", []), (4, "1", []), (4, "2", one), (8, "1", joined), (8, "", [])]
    for nodes, accumulation, further in cases:
        environment = {
            "PATH": f"{commands}:/usr/bin:/bin",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_JOB_ID": "12",
            "SLURM_NODEID": "0",
            "SLURM_CPUS_PER_TASK": "48",
        }
        line = ["bash", str(ROOT / "examples" / "slurm" / "credit.sbatch"), recipe, "--seed", "3", *further]
        log = tmp_path / "runs" / "credit-12.log"
        log.unlink(missing_ok=True)
        finished = subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30, check=False
        )
        if not accumulation:
            assert finished.returncode == 2
            assert "add --per_device_train_batch_size with less" in finished.stderr
            continue
        assert finished.returncode == 0
        cpus, *words = log.read_text("utf-8").split("\n")
        assert cpus == "CPUs 48"  # srun does not inherit it since Slurm 22.05
        words = " ".join(words).split()
        assert words[:3] == ["credit", "--config", recipe]
        given = dict(zip(words[1::2], words[2::2], strict=further != joined))
        assert given["--gradient_accumulation_steps"] == accumulation
        assert (given["--num_processes"], given["--num_machines"]) == (str(8 * nodes), str(nodes))
        assert (given["--main_process_ip"], given["--resume_from_checkpoint"], given["--seed"]) == (
            "node-a",
            "latest",
            "3",
        )


# Overrides for a machine without GPUs, with lengths and counts that take seconds.
SMALL = """
    --use_cpu true --bf16 false --use_vllm false --attn_implementation sdpa --max_steps 2 --num_train_epochs 1
    --generation_batch_size 8 --num_generations 4 --per_device_train_batch_size 4 --gradient_accumulation_steps 1
    --max_completion_length 6 --max_reprompt_len 4096 --save_steps 1 --avg_at_k 1 --avg_at_k_steps 1
    --per_device_eval_batch_size 4 --max_eval_rows 2 --max_train_rows 4 --learning_rate 1e-3 --disable_tqdm true
    --load_in_4bit false --gradient_checkpointing false
""".split()


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("tiny"), build_tokenizer()
    build_model(tokenizer, max_position_embeddings=8192).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def data_of(recipe, folder):
    """Rows in each task's own form."""
    task = yaml.safe_load(recipe.read_text(encoding="utf-8"))["task"].partition(":")[0]
    if task == "livecodebench":
        return ["--task", "livecodebench:examples"]
    if task == "sciknoweval":
        rows = [
            {
                "prompt": f"What is {i}?\n\nA: {i}\nB: {i + 1}\n",
                "answer": "A",
                "idx": i,
                "kind": "mcq",
                "dataset": "sciknoweval",
            }
            for i in range(6)
        ]
        for split in ("train", "test"):
            text = "".join(json.dumps({**row, "system": "Answer."}) + "\n" for row in rows)
            (folder / f"chemistry-{split}.jsonl").write_text(text)
    elif task == "toolalpaca":
        call = json.dumps([{"Action": "get", "Action_Input": "{}"}])
        for split, first in (("train", 0), ("test", 4046)):
            rows = [{"prompt": f"Use a tool for {i}.", "answer": call, "idx": first + i} for i in range(6)]
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--dataset_path", str(folder)]


FAST = ("sciknoweval_qwen3_8b", "qlora_24gb")


@pytest.mark.parametrize(
    "recipe", [pytest.param(r, id=r.stem, marks=() if r.stem in FAST else pytest.mark.slow) for r in RECIPES]
)
def test_a_recipe_runs_on_a_tiny_model(recipe, tiny_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    line = [*SMALL, "--model_name_or_path", str(tiny_directory), "--output_dir", str(run), *data_of(recipe, tmp_path)]
    options = parsed(recipe, *line)
    training.train(training.make_trainer(*options), options[0])
    config = next(part for part in options if isinstance(part, CreditConfig))
    per_batch = max(1, config.steps_per_generation * config.num_iterations // config.gradient_accumulation_steps)
    log = [json.loads(row) for row in (run / "log.jsonl").read_text().splitlines()]
    losses = [row for row in log if "loss" in row]
    assert [row["step"] for row in losses] == [1, 2]
    assert all("credit/s_mean" in row for row in losses)
    assert losses[0]["credit/frac_verifier_skipped"] == 0.0
    evaluations = [json.loads(row) for row in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == sorted({0, *range(per_batch, 3, per_batch), 2})
    assert (run / "checkpoint-2" / "credit_state.json").is_file()
    assert not (run / "unfinished").exists()


@pytest.mark.slow
def test_the_qlora_recipe_trains_an_adapter_on_four_bits(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: `make test-slow` installs it")
    monkeypatch.chdir(ROOT)
    recipe, model, run = ROOT / "examples" / "recipes" / "qlora_24gb.yaml", tmp_path / "model", tmp_path / "run"
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "max_position_embeddings": 8192}
    build_model(tokenizer, **sizes).save_pretrained(model)  # bitsandbytes quantizes blocks of 64 weights
    tokenizer.save_pretrained(model)
    line = [*SMALL, "--model_name_or_path", str(model), "--output_dir", str(run), *data_of(recipe, tmp_path)]
    line[line.index("--load_in_4bit") + 1] = "true"
    options = parsed(recipe, *line)
    training.train(training.make_trainer(*options), options[0])
    losses = [row for row in map(json.loads, (run / "log.jsonl").read_text().splitlines()) if "loss" in row]
    assert [row["credit/frac_lost_gradient"] for row in losses] == [0.0, 0.0]
    base = json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(model)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the data sets in ../shared/data")
@pytest.mark.parametrize("domain", ["biology", "chemistry", "material", "physics"])
def test_the_science_recipe_runs_on_the_real_questions(tiny_directory, tmp_path, monkeypatch, domain):
    monkeypatch.chdir(ROOT)
    recipe = ROOT / "examples" / "recipes" / "sciknoweval_olmo3_7b.yaml"
    questions = SHARED_DATA / "sciknoweval"
    train, held_out = (questions / f"{domain}-{split}.jsonl" for split in ("train", "test"))
    line = [*SMALL, "--model_name_or_path", str(tiny_directory), "--output_dir", str(tmp_path)]
    line += ["--task", f"sciknoweval:{domain}", "--dataset_path", str(train)]
    if held_out.is_file():
        line += ["--eval_dataset_path", str(held_out)]
    else:  # two domains have no test split
        line += ["--dataset_test_split", "all"]
    options = parsed(recipe, *line)
    training.train(training.make_trainer(*options), options[0])
    # Both steps are one generation batch.
    assert json.loads((tmp_path / "summary.json").read_text())["evaluations"] == 2
