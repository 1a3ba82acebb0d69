"""`trl credit-map`: token credit of responses as an HTML page, pictures, a table and in the terminal."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.cli.arguments import add_sandbox_arguments, at_least, read_options
from credit_trl.sandbox import choose_sandbox
from credit_trl.training.run_directory import RUN_FILE

if TYPE_CHECKING:
    from credit_trl.config import CreditConfig
    from credit_trl.lab.analysis.checkpoints import Checkpoint
    from credit_trl.lab.analysis.responses import Rollout
    from credit_trl.lab.analysis.tokenmap import TokenMap

_QUANTITIES = ("specific", "delta_v", "advantage", "generic", "student_logps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample and verify responses of a task, or read them from a file, and map the credit of every token: ΔV_t, "
        "S_t, Ĝ_t, R_t, log π_θ and the alternatives. Writes maps.html, maps.parquet, summary.md and PNGs to "
        "--output_dir. With --checkpoint, the model and each checkpoint score the same responses."
    )
    count = at_least(0)
    source = parser.add_argument_group("responses")
    source.add_argument("--model", help="hub name, directory, `smollm2`, or `quickstart` for the embedded model")
    source.add_argument(
        "--checkpoint", action="append", default=[], help="checkpoint of a run of that model; repeat for several"
    )
    source.add_argument("--task", help="such as sciknoweval:chemistry, quickstart, my_package.task:Task")
    source.add_argument("--split", default="test", help="split of the task's data (default test)")
    source.add_argument("--path", help="local data file or folder, instead of the hub")
    source.add_argument("--max_prompts", type=at_least(1), default=4, help="number of prompts (default 4)")
    source.add_argument("--samples", type=at_least(1), default=2, help="responses per prompt (default 2)")
    source.add_argument("--responses", help="JSON lines with prompt, response, feedback, instead of sampling")
    source.add_argument("--maps", nargs="+", default=[], help="Parquet files of earlier maps to draw on one page")
    credit = parser.add_argument_group("scoring")
    credit.add_argument(
        "--config",
        help="YAML or run.json of a training run, for all options that R_t depends on (default: the run.json in "
        "or beside each --checkpoint, if there is one)",
    )
    credit.add_argument("--contrastive_coef", type=float, help="λ (default 0.1)")
    credit.add_argument("--contrastive_form", choices=("subtract", "guide"), help="default subtract")
    credit.add_argument(
        "--contrastive_source",
        choices=("batch", "dataset", "hard", "same_task", "none"),
        help="contrast prompts: from the task's data (dataset, the default), from the sampled prompts, or none",
    )
    credit.add_argument("--contrastive_count", type=int, help="C, contrast prompts per response (default 4)")
    credit.add_argument("--temperature", type=float, help="sampling temperature (default 1)")
    credit.add_argument("--max_completion_length", type=int, help="tokens per response (default 512)")
    credit.add_argument("--seed", type=int, help="seed of responses and contrast prompts (default 42)")
    credit.add_argument("--alternatives", type=count, default=5, help="alternatives per sampled token (default 5)")
    credit.add_argument("--pmi", action="store_true", help="also write pMI of whole responses (pmi.md; Eq. 9)")
    output = parser.add_argument_group("output")
    output.add_argument("--output_dir", default="credit_map", help="default credit_map")
    output.add_argument("--quantity", choices=_QUANTITIES, default="specific", help="in the terminal (default S_t)")
    output.add_argument("--palette", choices=("red-blue", "orange-purple"), default="red-blue")
    output.add_argument("--pictures", type=count, default=4, help="number of PNGs (default 4)")
    output.add_argument("--terminal", type=count, default=1, help="number of maps printed in the terminal (default 1)")
    output.add_argument("--top", type=count, default=10, help="token strings in each list of summary.md (default 10)")
    output.add_argument("--title", default="Token credit")
    add_sandbox_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.pictures and find_spec("matplotlib") is None:  # before sampling
        raise ImportError("The pictures need matplotlib: pip install matplotlib, or give --pictures 0.")
    choose_sandbox(args.sandbox, args.allow_unsandboxed, args.sandbox_packages)
    maps = _read_maps(args.maps) if args.maps else _make_maps(args)
    if not maps:
        raise ValueError("no response has a teacher: the task gave no feedback and no rollout succeeded.")
    _write(args, maps)
    return 0


def measuring_config(args: argparse.Namespace, run_file: Path | None = None) -> CreditConfig:
    """Options of `--config`, else of `run_file`, overridden by those of the command line."""
    from credit_trl.config import CreditConfig
    from credit_trl.lab.analysis.responses import analysis_config

    given: dict[str, Any] = {}
    if path := args.config or run_file:
        known, options = CreditConfig.__dataclass_fields__, read_options(path)
        for name, values in _TEACHER_ELSEWHERE.items():
            if options.get(name) in values:
                raise ValueError(
                    f"{path}: no checkpoint contains the teacher of `{name}={options[name]!r}`. Map such a run with "
                    "`CreditMapCallback` during training."
                )
        given |= {n: v for n, v in options.items() if n in known and _affects_credit(n)}
    given |= {n: v for n, v in vars(args).items() if v is not None and _affects_credit(n)}
    is_self = given.get("contrastive_swap") == "self"
    given.setdefault("contrastive_count", 1 if is_self or given.get("contrastive_source") == "none" else 4)
    if is_self:  # it draws no prompts, so that another source would be refused
        given.setdefault("contrastive_source", "batch")
    return analysis_config(**given)


def _run_file(checkpoint: str) -> Path | None:
    """The `run.json` of a run's final model, in its folder, or of a checkpoint, beside it."""
    folder = Path(checkpoint).resolve()
    return next((file for place in (folder, folder.parent) if (file := place / RUN_FILE).is_file()), None)


def _affects_credit(name: str) -> bool:
    """Whether R_t of a response depends on an option of its run."""
    from credit_trl.config import PRIVILEGED_OPTIONS

    return name.startswith("contrastive_") or name in PRIVILEGED_OPTIONS or name in _SCORING


_SCORING = (
    *("distillation_support", "distillation_tail", "distillation_topk", "success_reward_threshold"),
    *("chat_template_kwargs", "max_completion_length", "seed", "temperature"),
)


# Options of a run whose teacher is more than another state of the policy that reads the feedback.
_TEACHER_ELSEWHERE = {"teacher_model_kind": ("model",), "teacher_prompt": ("student",)}


def _read_maps(paths: list[str]) -> list[TokenMap]:
    from credit_trl.lab.analysis.naming import unique_maps
    from credit_trl.lab.analysis.tokenmap_parquet import read_parquet

    if missing := [path for path in paths if not Path(path).is_file()]:
        raise FileNotFoundError(f"--maps {missing[0]}: no such file.")
    return unique_maps(paths, [read_parquet(path) for path in paths])


def _make_maps(args: argparse.Namespace) -> list[TokenMap]:
    from credit_trl.lab.analysis.checkpoints import Checkpoint
    from credit_trl.lab.analysis.formula import CreditSettings
    from credit_trl.lab.analysis.naming import short_names
    from credit_trl.lab.analysis.token_classes import default_classes, task_classes
    from credit_trl.lab.analysis.tokenmap import map_response
    from credit_trl.tasks.registry import load_task

    if args.model is None or (args.task is None) == (args.responses is None):
        raise ValueError("give --model and either --task or --responses, or earlier --maps.")
    task = None if args.task is None else load_task(args.task)
    configs = [measuring_config(args, _run_file(path)) for path in args.checkpoint]
    _check_same_context(args.checkpoint, configs)
    configs = [configs[0] if configs else measuring_config(args), *configs]
    names = [None, *short_names(args.checkpoint, parts=2)]  # `runs/first/checkpoint-50` → `first/checkpoint-50`
    checkpoints = [
        Checkpoint.load(args.model, path, name=name, chat_template_kwargs=config.chat_template_kwargs)
        for path, name, config in zip([None, *args.checkpoint], names, configs, strict=True)
    ]
    for checkpoint, config in zip(checkpoints, configs, strict=True):
        print(f"{checkpoint.describe()}; {CreditSettings.of(config).text}")
    responses = _responses(args, task, checkpoints[-1], configs[-1])
    classify = default_classes if task is None else task_classes(task, checkpoints[-1].tokenizer)
    if args.pmi:
        _write_pmi(args, checkpoints, responses, configs)
    return [
        map_response(checkpoint, response, config, alternatives=args.alternatives, classify=classify)
        for checkpoint, config in zip(checkpoints, configs, strict=True)
        for response in responses
    ]


def _check_same_context(paths: list[str], configs: list[CreditConfig]) -> None:
    """Check that the teachers of all runs read the same z, since one z per response is scored."""
    from credit_trl.config import PRIVILEGED_OPTIONS

    for path, config in zip(paths, configs, strict=True):
        for name in PRIVILEGED_OPTIONS:
            last, own = getattr(configs[-1], name), getattr(config, name)
            if own != last:
                raise ValueError(
                    f"{path} was trained with `{name}={own!r}` and {paths[-1]} with {last!r}, so their teachers read "
                    "different contexts. Map each by itself and join the results with --maps, or give the options "
                    "of all with --config."
                )


def _responses(args: argparse.Namespace, task: Any, checkpoint: Checkpoint, config: CreditConfig) -> list[Rollout]:
    """Responses that have a teacher, sampled by the last checkpoint or read from `--responses`."""
    from credit_trl.lab.analysis.responses import read_rollouts, sample_rollouts
    from credit_trl.tasks.printable import counted

    if task is None:
        responses = [r for r in read_rollouts(args.responses, checkpoint, config) if r.privileged]
        if not responses:
            raise ValueError(
                f"no record of {args.responses} has feedback or a demonstration, which the teacher needs."
            )
        if not any(r.contrasts for r in responses):
            raise ValueError(
                f"the records of {args.responses} have no contrast prompt, which S_t needs. Add `contrasts`, a list "
                "of prompts, to a record, or records with other prompts, or use --contrastive_source none."
            )
        _directory(args)
        return responses
    dataset = task.build(args.split, args.path)
    rows = list(dataset.take(args.max_prompts))
    _directory(args)  # one that cannot be made costs no samples
    sampled = sample_rollouts(checkpoint, task, rows, config, samples=args.samples, population=list(dataset["prompt"]))
    responses = [r for r in sampled if r.privileged and r.token_ids]
    if config.contrasts and responses and not any(r.contrasts for r in responses):
        raise ValueError(
            f"the {len(rows)} prompts contain no contrast prompt for "
            f"`contrastive_source={config.contrastive_source!r}`. Raise --max_prompts, or use --contrastive_source "
            "dataset to draw from the task's data."
        )
    print(f"{counted(len(sampled), 'response')} to {counted(len(rows), 'prompt')}, {len(responses)} with a teacher")
    return responses


def _write_pmi(
    args: argparse.Namespace, checkpoints: list[Checkpoint], responses: list[Rollout], configs: list[CreditConfig]
) -> None:
    from credit_trl.lab.analysis import pmi
    from credit_trl.lab.analysis.formula import CreditSettings

    texts = []
    for checkpoint, config in zip(checkpoints, configs, strict=True):
        reports = [pmi.measure_pmi(checkpoint, r, config) for r in responses if r.contrasts]
        settings = CreditSettings.of(config)
        texts.append(f"## {checkpoint.name}\n\n{settings.text}\n\n{pmi.format_reports(reports)}")
    path = _directory(args) / "pmi.md"
    path.write_text("\n".join(texts), encoding="utf-8")
    count = sum(bool(r.contrasts) for r in responses)
    print(f"{path}: pMI, contrastive pMI and the anti-genericity bonus; responses: {count}")


def _write(args: argparse.Namespace, maps: list[TokenMap]) -> None:
    from credit_trl.lab.analysis.branches import format_branches, summarize_branches
    from credit_trl.lab.analysis.tokenmap import group_scales
    from credit_trl.lab.analysis.tokenmap_html import write_html
    from credit_trl.lab.analysis.tokenmap_parquet import write_parquet
    from credit_trl.lab.analysis.tokenmap_summary import format_summary, summarize_maps
    from credit_trl.lab.analysis.tokenmap_terminal import print_map
    from credit_trl.tasks.printable import counted

    directory, scales = _directory(args), group_scales(maps)
    write_html(maps, directory / "maps.html", title=args.title)
    write_parquet(maps, directory / "maps.parquet")
    of_checkpoint = {m.checkpoint: [one for one in maps if one.checkpoint == m.checkpoint] for m in maps}
    branches = {name: format_branches(summarize_branches(own)) for name, own in of_checkpoint.items()}
    summaries = [
        f"## {name}\n\n{format_summary(summarize_maps(own, top=args.top))}\n{branches[name]}"
        for name, own in of_checkpoint.items()
    ]
    (directory / "summary.md").write_text("\n".join(summaries), encoding="utf-8")
    if args.pictures:
        from credit_trl.lab.analysis.tokenmap_png import draw_png

        for number, one in enumerate(maps[: args.pictures], 1):
            draw_png(one, directory / f"map-{number:03d}.png", scales[one.response.group], palette=args.palette)
    for one in maps[: args.terminal]:
        print_map(one, args.quantity, scales[one.response.group][args.quantity], palette=args.palette)
    for name, table in branches.items():
        print(f"\n{name}\n{table}")
    count = counted(len(maps), "map")
    print(f"{directory / 'maps.html'}: {count}, with maps.parquet, summary.md and pictures in the same folder")


def _directory(args: argparse.Namespace) -> Path:
    directory = Path(args.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    return directory
