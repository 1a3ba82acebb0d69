"""The configuration refuses what could not train, where it is written, with the fix in the message."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from trl import SFTConfig, TrlParser
from trl.experimental.distillation import DistillationConfig
from trl.experimental.gkd import GKDConfig
from trl.experimental.sdft import SDFTConfig
from trl.experimental.sdpo import SDPOConfig

from credit_trl import CreditConfig
from credit_trl.config import OTHER_TRAINERS, check_combinations
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.privileged import PrivilegedContext


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contrastive_coef": 2.0}, r"`contrastive_coef` must be in \[0, 1\], got 2.0"),
        ({"contrastive_coef": [0.1]}, r"`contrastive_coef` must be a number, got \[0.1\]"),
        ({"contrastive_coef": True}, "`contrastive_coef` must be a number"),
        ({"contrastive_count": 1.5}, "`contrastive_count` must be a whole number, got 1.5"),
        ({"distillation_topk": "20"}, "`distillation_topk` must be a whole number, got '20'. Remove the"),
        ({"teacher_update_rate": None}, "`teacher_update_rate` must be a number, got None"),
        ({"learning_rate": "1e-6"}, r"`learning_rate` is the text '1e-6'.*write 1.0e-06"),
        ({"teacher_update_rate": "1e-2"}, r"must be a number, got '1e-2'\. In YAML .* write 1.0e-02"),
        ({"max_steps": "20"}, "`max_steps` is the text '20' instead of a whole number. Remove the quotes"),
        ({"temperature": "0.7"}, "`temperature` is the text '0.7' instead of a number. Remove the quotes"),
        ({"include_environment_feedback": "false"}, "must be True or False, got 'false'. Remove the quotes"),
        ({"include_environment_feedback": None}, "`include_environment_feedback` must be True or False, got None"),
        ({"use_successful_as_teacher": 0}, "`use_successful_as_teacher` must be True or False, got 0"),
        ({"use_vllm": "false"}, "`use_vllm` is the text 'false' instead of True or False. Remove the quotes"),
        ({"contrastive_coef": -0.1}, r"`contrastive_coef` must be in \[0, 1\]"),
        ({"contrastive_coef": float("nan")}, r"`contrastive_coef` must be in \[0, 1\]"),
        ({"distillation_alpha": 1.1}, r"`distillation_alpha` must be in \[0, 1\]"),
        ({"distillation_weight": 1.5}, r"`distillation_weight` must be in \[0, 1\]"),
        ({"contrastive_count": 0}, "`contrastive_count` must be at least 1"),
        ({"distillation_topk": 0}, "`distillation_topk` must be at least 1"),
        ({"teacher_update_rate": 0.0}, r"`teacher_update_rate` must be in \(0, 1\]"),
        ({"teacher_sync_steps": 0}, "`teacher_sync_steps` must be at least 1 or None"),
        ({"distillation_is_clip": 0.0}, "`distillation_is_clip` must be positive or None"),
        ({"max_reprompt_len": 0}, "`max_reprompt_len` must be at least 1"),
        ({"distillation_support": "topk"}, "must be one of teacher_topk, student_topk, full, sampled"),
        ({"distillation_tail": "drop"}, "must be one of bucket, renormalize"),
        ({"contrastive_source": "web"}, "must be one of batch, dataset, hard, same_task, none, wrong_feedback"),
        ({"contrastive_coef": 2.0}, "best; only `contrastive_form='guide'` takes more than 1"),
        ({"contrastive_form": "guide", "contrastive_coef": -1.0}, "must be finite and at least 0"),
        ({"contrastive_form": "guide", "contrastive_coef": float("inf")}, "must be finite and at least 0"),
        ({"contrastive_form": "divide"}, "must be one of subtract, guide"),
        ({"contrastive_baseline": "median"}, "must be one of mean_log, log_mean"),
        ({"contrastive_gate": 1.0}, "no total variation exceeds 1.*`contrastive_coef=0`"),
        ({"contrastive_gate": -0.1}, r"`contrastive_gate` must be in \[0, 1\)"),
        ({"contrastive_source": "none", "contrastive_count": 2}, "set `contrastive_count=1`"),
        (
            {"contrastive_source": "hard", "per_device_train_batch_size": 4},
            "contrastive_source='dataset'` or `'none'`",
        ),
        ({"contrastive_source": "none", "contrastive_swap": "hint"}, "set `contrastive_source='batch'`"),
        ({"teacher_model_kind": "old"}, "must be one of ema, live, base, trust_region, model"),
        ({"teacher_context": "all"}, "must be one of solution, think, think"),
        ({"distillation_support": "sampled", "distillation_alpha": 0.5}, "needs `distillation_alpha=1`"),
        ({"per_device_train_batch_size": 4}, "holds one prompt.*contrastive_source='dataset'"),
        ({"reprompt_template": "{prompt}{solution}"}, "`reprompt_template` lacks {feedback}"),
        ({"solution_template": "nothing"}, "`solution_template` lacks {successful_previous_attempt}"),
        ({"feedback_template": "{feedback_raw}{feedback_raw}"}, "once and no other"),
        ({"feedback_template": "{feedback_raw}{other}"}, "once and no other"),
        ({"feedback_template": "{feedback_raw} {"}, "not a format string"),
        ({"success_feedback_template": "Feedback:"}, "`success_feedback_template` lacks {feedback_raw}"),
        ({"beta": 0.1}, "`beta=0.1` is an option of GRPO's loss"),
        ({"use_transformers_continuous_batching": True}, "casts the whole model.*Set `use_vllm=True`"),
        ({"entropy_coef": 0.1}, "`entropy_coef=0.1` is an option of GRPO's loss"),
        ({"importance_sampling_level": "sequence"}, "is an option of GRPO's loss.*importance_sampling_level='token'"),
        ({"delta": 1.01}, "`delta=1.01` is an option of GRPO's loss"),
        ({"epsilon_high": 0.28}, "`epsilon_high=0.28` is an option of GRPO's loss"),
        ({"enable_jit_checkpoint": True}, "saves inside a step.*save_steps"),
        ({"off_policy_mask_threshold": 0.5}, "`off_policy_mask_threshold=0.5` is an option of GRPO's loss"),
        ({"credit_use": "route", "distillation_weight": 0.0}, "has no credit to use.*`credit_use='distill'` for GRPO"),
        ({"credit_use": "modulate", "distillation_weight": 0.0}, "has no credit to use.*`credit_use='distill'` for"),
        ({"credit_use": "modulate", "reward_weights": [0.0]}, "needs the verifier's rewards, but `reward_weights`"),
        ({"credit_weight": "s"}, "no meaning for `credit_use='distill'`. Set `credit_use='modulate'`"),
        ({"credit_use": "modulate", "credit_weight": "entropy"}, "Set `credit_use='route'`"),
        ({"credit_use": "modulate", "credit_weight": "s", "contrastive_coef": 0.0}, "needs contrasts.*'delta_v'"),
        (
            {"credit_use": "modulate", "contrastive_coef": 0.3},
            "`contrastive_coef=0.3` has no effect with `credit_use=",
        ),
        (
            {"credit_use": "modulate", "distillation_alpha": 0.5},
            "`distillation_alpha=0.5` has no.*default, 1.0",
        ),
        ({"credit_use": "modulate", "contrastive_count": 2}, "no effect with `credit_weight='delta_v'`"),
        ({"credit_use": "modulate", "credit_stop_on": "fidelity"}, "Remove it from `credit_stop_on`"),
        ({"teacher_model_kind": "base", "credit_stop_on": "length|fidelity"}, "a frozen teacher"),
        ({"credit_weight_clip": 0.5}, "`credit_weight_clip=0.5` has no effect.*other than `'modulate'`"),
        ({"credit_use": "route", "credit_weight_temperature": 0.5}, "no effect with `credit_weight=None`"),
        (
            {"credit_use": "route", "credit_weight": "entropy", "distillation_support": "full"},
            "stores none. Set `distillation_support='teacher_topk'`",
        ),
        ({"credit_use": "modulate", "credit_weight_clip": 0.0}, r"`credit_weight_clip` must be in \(0, 1\]"),
        ({"credit_use": "modulate", "credit_weight_temperature": 0.0}, "`credit_weight_temperature` must be positive"),
        ({"teacher_model_kind": "model"}, "needs `teacher_model_name_or_path`"),
        ({"teacher_model_name_or_path": "a/b"}, "`teacher_model_kind='ema'` makes.*Set `teacher_model_kind='model'`"),
        ({"teacher_adapter_name_or_path": "a/b"}, "no effect with `teacher_model_kind` other than `'model'`"),
        (
            {"teacher_model_kind": "model", "teacher_model_name_or_path": "a", "teacher_update_rate": 0.1},
            "`teacher_update_rate=0.1` has no effect with `teacher_model_kind='model'`",
        ),
        ({"teacher_prompt": "student", "reprompt_style": "paper"}, "no effect with `teacher_prompt='student'`"),
        (
            {"teacher_prompt": "student", "teacher_model_kind": "live", "contrastive_coef": 0.0},
            "makes the policy its own target",
        ),
        ({"teacher_prompt": "student", "contrastive_source": "wrong_feedback"}, "exchanges the privileged context"),
        (
            {"contrastive_source": "wrong_feedback", "contrastive_swap": "self"},
            "no effect with `contrastive_swap='self'`",
        ),
        ({"teacher_trust_weight": 0.2}, "no effect with `teacher_model_kind` other than `'trust_region'`"),
        ({"teacher_trust_kl": 0.0}, "`teacher_trust_kl` must be positive or None"),
        ({"update_batch_tokens": 0}, "`update_batch_tokens` must be at least 1 or None"),
        ({"update_batch_tokens": 64, "distillation_weight": 0.5}, "lower `per_device_train_batch_size`, or set"),
        ({"update_batch_tokens": 64, "credit_use": "route"}, "lower `per_device_train_batch_size`, or set"),
        ({"teacher_rehearsal": 1.0}, r"`teacher_rehearsal` must be in \[0, 1\)"),
        ({"teacher_rehearsal": 0.1, "distillation_support": "full"}, "needs stored scores"),
        ({"teacher_rehearsal": 0.1, "distillation_weight": 0.5}, "set `distillation_weight=1`"),
        ({"teacher_rehearsal": 0.1, "teacher_model_kind": "base"}, "never changes. Or set `teacher_rehearsal=0`"),
        ({"dynamic_sampling_rounds": -1}, "`dynamic_sampling_rounds` must be at least 0"),
        (
            {"use_successful_as_teacher": False, "include_environment_feedback": False},
            "would have no privileged context",
        ),
        (
            {"teacher_context": "think", "remove_thinking_from_demonstration": True},
            "Set only one of them",
        ),
    ],
)
def test_bad_options_raise_at_construction_and_name_the_fix(make_config, options, message):
    with pytest.raises(ValueError, match=message):
        make_config(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 4, "contrastive_coef": 0.0},
        {"per_device_train_batch_size": 4, "contrastive_source": "dataset"},
        {"per_device_train_batch_size": 4, "contrastive_source": "none"},
        {"contrastive_form": "guide", "contrastive_coef": 3.0, "contrastive_gate": 0.05},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 4, "distillation_weight": 0.0},
        {"beta": 0.1, "distillation_weight": 0.5},
        {"contrastive_coef": 1.0, "distillation_alpha": 0.0},
    ],
)
def test_what_can_train_is_accepted(make_config, options):
    make_config(**options)


def test_own_options_are_checked_before_the_machine(monkeypatch):
    monkeypatch.setattr("trl.GRPOConfig.__post_init__", lambda self: pytest.fail("TRL was asked first"))
    with pytest.raises(ValueError, match="`contrastive_coef` must be in"):
        CreditConfig("out", contrastive_coef=2.0)
    with pytest.raises(ValueError, match="Set only one of them"):
        CreditConfig("out", teacher_context="think", remove_thinking_from_demonstration=True)


def test_a_machine_without_a_gpu_is_told_what_to_set(monkeypatch):
    def refuse(self):
        raise ValueError("Your setup doesn't support bf16/gpu.")

    monkeypatch.setattr("trl.GRPOConfig.__post_init__", refuse)
    with pytest.raises(ValueError, match="set `use_cpu=True` and `bf16=False`"):
        CreditConfig("out")


def test_defaults_are_the_papers_livecodebench_column(tmp_path):
    config = CreditConfig(str(tmp_path), use_cpu=True, gradient_accumulation_steps=8)
    assert (config.contrastive_count, config.contrastive_coef) == (1, 0.1)
    assert (config.distillation_alpha, config.distillation_topk, config.distillation_support) == (
        1.0,
        20,
        "teacher_topk",
    )
    assert (config.teacher_model_kind, config.teacher_update_rate) == ("ema", 0.01)
    assert (config.num_generations, config.learning_rate, config.temperature) == (8, 1e-6, 1.0)
    assert config.epsilon == 0.2


def test_names_and_wording_that_sdpo_has_are_sdpos():
    ours = {f.name: f.default for f in dataclasses.fields(CreditConfig)}
    theirs = {f.name: f.default for f in dataclasses.fields(SDPOConfig)}
    shared = {
        "distillation_alpha", "distillation_topk", "distillation_weight", "distillation_is_clip", "teacher_model_kind",
        "teacher_update_rate", "teacher_sync_steps", "success_reward_threshold", "dont_reprompt_on_self_success",
        "max_reprompt_len", "reprompt_template", "solution_template", "feedback_template",
        "include_environment_feedback", "environment_feedback_only_without_solution",
        "remove_thinking_from_demonstration", "use_successful_as_teacher",
    }  # fmt: skip
    assert shared <= ours.keys() & theirs.keys()
    for name in ("reprompt_template", "solution_template", "feedback_template", "distillation_is_clip"):
        assert ours[name] == theirs[name]


@pytest.mark.parametrize(("switch", "context"), [(True, "solution"), (False, "think+solution"), (None, "think")])
def test_sdpos_thinking_switch_settles_the_teacher_context(make_config, switch, context):
    options = {"teacher_context": "think"} if switch is None else {}
    assert make_config(remove_thinking_from_demonstration=switch, **options).teacher_context == context


@pytest.mark.parametrize("text", ["{'enable_thinking': False}", "enable_thinking=false", "[1]"])
def test_an_option_that_is_not_the_json_it_should_be_is_named(make_config, text):
    with pytest.raises(ValueError, match=r"^`chat_template_kwargs` must be a JSON object such as '\{"):
        make_config(chat_template_kwargs=text)


def test_json_options_are_parsed_and_file_names_kept(make_config):
    config = make_config(
        chat_template_kwargs='{"enable_thinking": false}', lr_scheduler_kwargs='{"num_decay_steps": 3}'
    )
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert config.lr_scheduler_kwargs == {"num_decay_steps": 3}
    with pytest.raises(FileNotFoundError):  # transformers has looked for it
        make_config(accelerator_config="no_such.json")


def test_help_of_every_option_is_its_part_of_the_docstring():
    options = {one.name: one for one in dataclasses.fields(CreditConfig)}
    own = options.keys() - {one.name for one in dataclasses.fields(CreditConfig.__mro__[1])}
    docstring = " ".join(CreditConfig.__doc__.split())
    assert own
    for name in own:
        entry, _, description = docstring.partition(options[name].metadata["help"])
        assert f"{name} (" in entry or f"{name}, " in entry
        assert description  # other entries, or the errors, follow
    assert options["teacher_model_revision"].metadata["help"] == "Branch, tag or commit of that model."


def test_file_as_output_dir_is_refused(make_config, tmp_path):
    (tmp_path / "q.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"`output_dir='.*q.jsonl'` is a file. Name a folder"):
        make_config(output_dir=str(tmp_path / "q.jsonl"))


def test_luspo_takes_the_sequence_level_that_trl_asks_for(make_config):
    assert make_config(loss_type="luspo", importance_sampling_level="sequence").loss_type == "luspo"


def test_paper_style_words_the_teachers_turn_as_the_appendix(make_config, tokenizer):
    config = make_config(reprompt_style="paper")
    builder = ContextBuilder(tokenizer, config)
    text = tokenizer.decode(builder.encode("1+1=", PrivilegedContext("2", "Test 1: ok"), None))
    solution = "\nCorrect solution:\n\n2\n\n"
    assessment = "\nPrevious assessment:\n\nTest 1: ok\n\n"
    assert text == f"1+1={solution}{assessment}\n\nNow solve this problem step by step.\n"


def test_own_template_replaces_that_of_the_style(make_config):
    own = "\nRead this: {feedback_raw}\n"
    config = make_config(reprompt_style="paper", feedback_template=own)
    assert config.feedback_template == config.success_feedback_template == own
    assert "step by step" in config.reprompt_template
    assert make_config(feedback_template=own).success_feedback_template == own
    sdpos = make_config(success_feedback_template="None")  # from a command line
    assert sdpos.success_feedback_template == sdpos.feedback_template
    both = make_config(feedback_template=own, success_feedback_template="{feedback_raw}")
    assert (both.feedback_template, both.success_feedback_template) == (own, "{feedback_raw}")


def test_sdpos_wording_of_successes_can_be_restored(make_config):
    sdpo = SDPOConfig("unused", use_cpu=True).feedback_template
    assert (
        make_config().feedback_template
        == make_config(success_feedback_template=None).success_feedback_template
        == sdpo
    )
    assert "unsuccessful" not in make_config().success_feedback_template


def test_unknown_options_name_their_counterpart():
    for name, advice in {
        "contrastive_coeff": "Did you mean `contrastive_coef`",
        "distillation_mode": "`distillation_support`: 'sampled'",
        "max_new_tokens": "Set `max_completion_length`",
        "ema_decay": "Set `teacher_update_rate` to 1",
        "contrastive_lambda": "Set `contrastive_coef`",
        "topk": "Set `distillation_topk`",
    }.items():
        with pytest.raises(TypeError, match=rf"`CreditConfig` has no option `{name}`.*{advice}"):
            CreditConfig("run", **{name: 1})


def test_options_of_other_trainers_have_advice():
    ours = {one.name for one in dataclasses.fields(CreditConfig)}
    for config in (SDPOConfig, SDFTConfig, DistillationConfig):
        own = {one.name for one in dataclasses.fields(config)} - ours - {"num_loss_tokens_to_skip"}
        assert own <= OTHER_TRAINERS.keys(), config
    gkd = {one.name for one in dataclasses.fields(GKDConfig)} - {one.name for one in dataclasses.fields(SFTConfig)}
    assert gkd - ours <= OTHER_TRAINERS.keys()
    page = (Path(__file__).parents[1] / "docs" / "moving_over.md").read_text("utf-8")
    rows = page.partition("## Options of other trainers")[2].split("\n| ")[3:]
    listed = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert len(rows) == 8
    assert listed - ours - {"grpo", "privileged_context"} <= OTHER_TRAINERS.keys()


def test_one_rollout_per_prompt_needs_feedback_and_weight_one(make_config):
    config = make_config(num_generations=1, per_device_train_batch_size=3)
    assert (config.num_generations, config.generation_batch_size) == (1, 3)
    assert type(config.num_generations) is int
    with pytest.raises(ValueError, match="at least 2 generations"):
        make_config(num_generations=1, distillation_weight=0.5)
    with pytest.raises(ValueError, match=r"`num_generations=1` gives no other rollout.*Set `include_environment_fe"):
        make_config(num_generations=1, include_environment_feedback=False)


def test_dynamic_sampling_needs_whole_groups_on_each_process(make_config):
    config = make_config(dynamic_sampling_rounds=1)
    config.per_device_train_batch_size = 6  # of two processes; one process cannot have a part of a group
    with pytest.raises(ValueError, match=r"its 6 rollouts .* no multiple of `num_generations=4`"):
        check_combinations(config)


def test_none_is_a_value_of_optional_numbers_after_parsing(make_config, tmp_path):
    """TRL's parser removes None from the types of the fields, for every later configuration too."""
    values = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 16}
    (tmp_path / "run.yaml").write_text(json.dumps(values | {"distillation_is_clip": None}))
    (parsed,) = TrlParser(CreditConfig).parse_args_and_config(["--config", str(tmp_path / "run.yaml")])
    assert parsed.distillation_is_clip is None
    assert make_config(liger_kernel_config=None).liger_kernel_config is None
    with pytest.raises(ValueError, match="`top_k` must be a whole number, got None"):
        make_config(top_k=None)
