"""Every code block of the README and of `docs/` is executed or parsed. How, by language:

- `python`: the blocks of a page are executed one after another in one namespace, in an empty folder that holds the
  files which the page speaks of (`FILES`). Three things are made small: `Qwen/…` becomes a tiny random model
  on disk, `CreditConfig` gets the options of `SMALL`, and a page of `NEEDS_TRAINER` starts with a trainer.
- `bash`: each line is parsed by what it calls. `trl credit` goes through its real parser, configuration and launcher
  arguments (with `--use_cpu true --bf16 false`, and nothing is launched); companion commands through their parsers;
  TRL's own through TRL's list of commands; `make` targets have to exist, files and `--options` of scripts too, and
  extras of `pip install`. An unknown program fails the test. What is this project's own is then executed:
  `trl credit` trains a step, as its launcher would have it do, `credit-map`, `credit-eval`, `credit-compat`,
  `credit-compare` and `credit-sweep --dry_run` run to their end, on a tiny model and rows that are made here.
- `yaml`: a training run's goes through the same parser as on the command line, a sweep's through the sweeps', an
  accelerate file's through accelerate's fields.
- `toml`: entry points have to have a name and `module:attribute`. `json`: a record for `credit-map --responses`.
- blocks without a language, or `text`, are output and diagrams. Any other language fails the test.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from argparse import ArgumentParser
from contextlib import chdir
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import tomllib
import yaml
from blocks import BLOCKS, PAGES, ROOT, Block, commands_of, of_language

import credit_trl
from credit_trl import cli
from credit_trl.cli.credit import launch_arguments, parse
from credit_trl.cli.training import make_parser
from credit_trl.config import CreditConfig
from tiny import build_model, build_tokenizer

OFFLINE = ["--use_cpu", "true", "--bf16", "false"]
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "max_completion_length": 4,
    "max_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
QUESTIONS = [{"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "answer": str(n + 1)} for n in range(4)]


def science(domain: str) -> list[dict]:
    """Rows in the hub's form, invented here; every letter is right now and then."""
    rows = []
    for n in range(20):
        texts = [str(n), str(n - 1), str(n - 2)]
        texts.insert(n % 4, str(n + 1))
        rows.append(
            {
                "question": f"Which is larger than {n}?",
                "choices": {"text": texts, "label": ["A", "B", "C", "D"]},
                "answerKey": "ABCD"[n % 4],
                "type": "mcq-4-choices",
                "domain": domain,
                "details": {"level": "L3"},
            }
        )
    return rows


TOOLS = [
    {
        "prompt": f"Tools: getWeather(city). Question: how is the weather in city {n}?",
        "answer": json.dumps([{"Action": "getWeather", "Action_Input": json.dumps({"city": str(n)})}]),
        "idx": n,
    }
    for n in range(8)
]
CAPITALS = [
    {"prompt": [{"role": "user", "content": f"What is the capital of {country}?"}], "answer": capital}
    for country, capital in {"France": "Paris", "Italy": "Rome"}.items()
]
RESPONSE = {"prompt": QUESTIONS[0]["prompt"], "response": "2", "feedback": "It is 1.", "contrasts": ["What is 5 + 1?"]}
FILES = {
    "questions.jsonl": QUESTIONS,
    "mine.jsonl": [RESPONSE],
    "my/capitals/train.jsonl": CAPITALS,
    "data/physics.jsonl": science("Physics"),
    "data/chemistry.jsonl": science("Chemistry"),
    "data/material.jsonl": science("Material"),
    "data/sciknoweval/physics.jsonl": science("Physics"),
    "data/toolalpaca/train.jsonl": TOOLS,
}
MODULES = {
    "my_task.py": """
from datasets import Dataset
from credit_trl import Verdict

class MyTask:
    def build(self, split, path=None):
        return Dataset.from_json("questions.jsonl")
    def verify(self, response, answer, *, truncated=False):
        return Verdict(float(response == answer), f"It is {answer}.")
""",
    "my_verifier.py": next(b.text for b in of_language("python") if "def capital_verifier" in b.text),
}
NEEDS_TRAINER = {"docs/evaluation.md", "docs/token_maps.md"}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def page_folder(tmp_path, monkeypatch) -> Path:
    for name, rows in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for block in of_language("yaml"):  # `# name.yaml` on the first line gives the block a file
        if named := re.match(r"# (\w+\.yaml)", block.text):
            (tmp_path / named[1]).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_language_is_one_that_is_executed_or_parsed():
    known = {"python", "bash", "yaml", "toml", "json", "text", ""}
    assert {block.language for block in BLOCKS} <= known
    assert len(of_language("python")) >= 10
    assert len(of_language("bash")) >= 8


PYTHON_PAGES = sorted({block.page for block in of_language("python")})


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_blocks_run_from_top_to_bottom(page, tiny_model, page_folder, monkeypatch):
    small = functools.partial(_small_config, SMALL)
    monkeypatch.setattr(credit_trl, "CreditConfig", small, raising=False)
    namespace = {"__name__": "__main__"}
    if page in NEEDS_TRAINER:
        namespace["trainer"] = _trainer(tiny_model, small)
    for block in of_language("python"):
        if block.page != page:
            continue
        source = re.sub(r"(['\"])Qwen/[\w.-]+\1", repr(tiny_model), block.text)
        try:
            exec(compile("\n" * block.line + source, ROOT / page, "exec"), namespace)
        except Exception as error:
            if type(error).__name__ == "SandboxError":
                pytest.skip(f"no sandbox holds on this machine: {error}")
            raise


def _small_config(small, *arguments, **options) -> CreditConfig:
    """What a block asks for, small."""
    return CreditConfig(*arguments, **{**options, **small})


def _trainer(model: str, config) -> credit_trl.CreditTrainer:
    from datasets import Dataset

    from tiny import length_verdicts

    return credit_trl.CreditTrainer(model, length_verdicts, config("run"), Dataset.from_list(QUESTIONS))


BASH = of_language("bash")


@pytest.mark.parametrize("block", BASH, ids=map(str, BASH))
def test_command_lines_parse(block, page_folder):
    for words in commands_of(block):
        program = words[0]
        if program not in PROGRAMS:
            pytest.fail(f"{block}: nothing checks the program {program!r}; teach PROGRAMS to")
        PROGRAMS[program](words[1:], page_folder)


def check_trl(arguments: list[str], folder: Path) -> None:
    from trl.cli.commands import get_commands

    name, *rest = arguments
    if name == "credit":
        check_credit(rest)
    elif name in cli.COMPANIONS:
        check_companion(name, rest)
    else:
        assert name in {command.name for command in get_commands()}


def check_credit(arguments: list[str]) -> None:
    """Make and check the dataclasses and resolve accelerate's arguments, as `trl credit` does before it launches."""
    if "--help" in arguments:
        return
    credit_words(arguments)


def credit_words(arguments: list[str]) -> list[str]:
    """What the training process of `trl credit` would get."""
    argv = [_existing(word) if word.endswith((".yaml", ".yml")) else word for word in arguments] + OFFLINE
    parser = make_parser(prog="trl credit")
    launcher, arguments = launch_arguments(argv, *parse(parser, argv)[-2:])
    return launcher.parse_args(arguments).training_script_args


def _existing(name: str) -> str:
    """A file of the page's folder or of the repository; an accelerate configuration of TRL's has no folder."""
    if Path(name).exists():
        return name
    assert (ROOT / name).exists(), f"{name} does not exist"
    return str(ROOT / name)


def check_companion(name: str, arguments: list[str]) -> None:
    module = import_module(cli.COMPANIONS[name].module)
    parser = ArgumentParser(prog=name, allow_abbrev=False)
    module.add_arguments(parser)
    if "--help" in arguments:
        return
    if getattr(module, "TAKES_OTHER_WORDS", False):
        with chdir(ROOT):  # a recipe names its accelerate file from there
            module.plan_of(*parser.parse_known_args(arguments))
        return
    parsed = parser.parse_args(arguments)
    if task := getattr(parsed, "task", None):
        _check_task(task)
    if name == "credit-sweep":
        from credit_trl.sweeps import read_spec

        read_spec(_existing(parsed.spec))


def _check_task(name: str) -> None:
    from credit_trl.tasks import load_task

    if ":" not in name or name.partition(":")[0] in ("sciknoweval", "toolalpaca", "livecodebench"):
        load_task(name)


def check_make(arguments: list[str], folder: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    for target in arguments:
        assert target in targets, f"make {target}: no such target"


def check_pip(arguments: list[str], folder: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert arguments[0] == "install"
    for word in arguments[1:]:
        if match := re.fullmatch(r"(?:\.|credit-trl)\[([\w,]+)\]", word):
            assert set(match[1].split(",")) <= extras.keys(), word
        elif word.endswith(".txt"):
            assert (ROOT / word).is_file(), word


def check_python(arguments: list[str], folder: Path) -> None:
    """The script exists, and so do the options that it is given."""
    if arguments[:1] == ["-m"]:
        import_module(arguments[1].partition(".")[0])
        return
    if arguments[:1] == ["-c"]:
        compile(arguments[1], "-c", "exec")
        return
    script = next(ROOT / word for word in arguments if word.endswith(".py"))
    assert script.is_file(), f"{script.relative_to(ROOT)} does not exist"
    source = script.read_text("utf-8")
    options = {word.split("=")[0] for word in arguments[arguments.index(str(script.relative_to(ROOT))) :]}
    known = {option for action in make_parser()._actions for option in action.option_strings}
    for option in (option for option in options if option.startswith("--")):
        assert f'"{option}"' in source or ("TrlParser" in source and option in known), f"{script.name} has no {option}"


def check_accelerate(arguments: list[str], folder: Path) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert arguments[0] == "launch"
    parsed = launch_command_parser().parse_args(arguments[1:])
    check_python([parsed.training_script, *parsed.training_script_args], folder)


def check_file(arguments: list[str], folder: Path) -> None:
    """The first word that is no option is a file of the repository."""
    assert (ROOT / next(word for word in arguments if not word.startswith("-"))).exists()


PROGRAMS = {
    "trl": check_trl,
    "credit-trl": check_trl,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "accelerate": check_accelerate,
    "sbatch": check_file,
}


YAML = of_language("yaml")


@pytest.mark.parametrize("block", YAML, ids=map(str, YAML))
def test_yaml_blocks_go_through_the_parser_that_will_read_them(block: Block, page_folder):
    path = page_folder / "block.yaml"
    path.write_text(block.text, encoding="utf-8")
    content = yaml.safe_load(block.text)
    if "grid" in content:
        from credit_trl.sweeps import read_spec

        assert read_spec(path).arms()
    elif {"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config"} & content.keys():
        from accelerate.commands.config.config_args import ClusterConfig

        assert content.keys() <= ClusterConfig.__dataclass_fields__.keys()
    else:
        check_credit(["--config", str(path)])


OWN = [
    pytest.param(words[1:], id=f"{block}-{number}")
    for block in BASH
    for number, words in enumerate(commands_of(block))
    if words[0] in ("trl", "credit-trl") and "--help" not in words
]
STEP = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
STEP += ["--max_train_rows", "8", "--eval_strategy", "no"]
EACH = {  # what makes a command beside `trl credit` small
    "credit-eval": ["--max_prompts", "2", "--k", "2", "--max_completion_length", "4"],
    "credit-map": ["--max_completion_length", "4", "--pictures", "1"],
    "credit-compat": ["--per_letter", "1", "--letters", "ABCD"],
    "credit-sweep": ["--dry_run"],
}


@pytest.mark.parametrize("words", OWN)
def test_commands_of_this_project_run_to_their_end(words, tiny_model, page_folder, monkeypatch):
    monkeypatch.syspath_prepend(page_folder)
    name, *arguments = [re.sub(r"^(Qwen|allenai)/.*", tiny_model, word) for word in words]
    if name == "credit":
        train_a_step(arguments, tiny_model, Path("run"))
    elif name != "credit-quickstart":  # which tests/cli and `make quickstart` run
        prepare(name, arguments, tiny_model)
        if any(word.startswith("sciknoweval:") for word in arguments):
            arguments += ["--path", "data"]
        with chdir(ROOT if name == "credit-plan" else page_folder):  # recipes lie there
            assert cli.main([name, *arguments, *EACH.get(name, [])]) == 0


def train_a_step(arguments: list[str], model: str, output: Path) -> None:
    """What a process of `trl credit` does, on rows that are here where the line names the hub's."""
    from credit_trl.cli import training

    line = [*credit_words(arguments), *STEP, "--model_name_or_path", model, "--output_dir", str(output)]
    if "--dataset_path" not in line and "--reward_funcs" not in line:
        line += ["--dataset_path", "data"]
    assert training.run(line) == 0
    assert (output / "model.safetensors").is_file()


def prepare(name: str, arguments: list[str], model: str) -> None:
    """The checkpoint, the maps, the runs or the models that a line speaks of."""
    for option, path in pairwise(arguments):
        if option == "--checkpoint":
            shutil.copytree(model, path)
    for path in (Path(word) for word in arguments if word.endswith(".parquet")):
        own = shutil.copytree(model, path.parts[1])  # maps of one response are told apart by their models
        drawn = ["credit-map", "--model", str(own), "--responses", "mine.jsonl", "--output_dir", "drawn"]
        assert cli.main([*drawn, *EACH[name]]) == 0
        path.parent.mkdir(parents=True)
        shutil.move("drawn/maps.parquet", path)
    if name == "credit-compare":
        methods = {"grpo": ["--distillation_weight", "0"], "sdpo": ["--contrastive_coef", "0"], "credit": []}
        for run in (Path(word) for word in arguments if word.startswith("runs/")):
            line = ["--task", "sciknoweval:physics", "--gradient_accumulation_steps", "8", *methods[run.name]]
            train_a_step([*line, "--avg_at_k", "1", "--max_eval_rows", "2"], model, run)
    if name == "credit-sweep":
        spec = yaml.safe_load(Path(arguments[0]).read_text("utf-8"))
        spec["config"] |= {"use_cpu": True, "bf16": False}
        Path(arguments[0]).write_text(yaml.safe_dump({**spec, "model": model}), encoding="utf-8")


@pytest.mark.parametrize("block", of_language("toml"), ids=str)
def test_toml_blocks_declare_entry_points(block: Block):
    points = tomllib.loads(block.text)["project"]["entry-points"]
    for group, names in points.items():
        assert group == "credit_trl.tasks"
        assert all(re.fullmatch(r"[\w.]+:\w+", value) for value in names.values())


@pytest.mark.parametrize("block", of_language("json"), ids=str)
def test_json_blocks_are_responses_that_can_be_mapped(block: Block, tmp_path):
    from credit_trl.analysis import Checkpoint, analysis_config, read_responses

    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(json.loads(block.text)) + "\n", encoding="utf-8")
    (response,) = read_responses(path, Checkpoint.load("quickstart"), analysis_config())
    assert response.evidence.feedback


def test_a_typo_in_a_block_would_be_seen(tmp_path, monkeypatch):
    """The checks above can fail."""
    monkeypatch.chdir(tmp_path)
    wrong = [
        "trl credit --contrastive_coeff 0.1",
        "trl credit --contrastive_coef 2",
        "trl credit-map --modle quickstart",
        "trl credits",
        "make tests",
        "pip install 'credit-trl[vizz]'",
        "python examples/no_such.py",
        "python examples/sciknoweval.py --no_such_option 1",
    ]
    for line in wrong:
        (words,) = commands_of(Block("page", 1, "bash", line))
        with pytest.raises((AssertionError, ValueError, SystemExit)):
            PROGRAMS[words[0]](words[1:], tmp_path)


@pytest.mark.parametrize(
    "path", [*PAGES, *(ROOT / f"{n}.md" for n in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))], ids=str
)
def test_relative_links_lead_somewhere(path: Path):
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "#", "mailto")):
            assert (path.parent / target.partition("#")[0]).exists(), f"{path.name}: {target}"
