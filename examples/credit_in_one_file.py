"""CREDIT in one file: TRL's SDPOTrainer with contrast prompts. Nothing of the package credit_trl is used.

    python examples/credit_in_one_file.py --model_name_or_path Qwen/Qwen3-0.6B --max_steps 100

SDPO distils the model's own distribution f = log p(y_t | x, z), where z is the feedback to the sampled response and
demonstrations of its group. CREDIT subtracts what the model says under the same z and other prompts x' of the batch:

    Ĝ = mean over x' of log p(y_t | x', z)        target ∝ exp(f − λ Ĝ)

With λ = 0 this is SDPO, bit for bit.
"""

import random
import re
from dataclasses import dataclass, field

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from trl import ModelConfig, TrlParser
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl.experimental.sdpo.sdpo_trainer import SuccessfulRolloutTeacherContextBuilder


@dataclass
class CreditSDPOConfig(SDPOConfig):
    contrastive_coef: float = field(default=0.1, metadata={"help": "λ, the weight of Ĝ. 0 is SDPO."})
    contrastive_count: int = field(default=1, metadata={"help": "Number of contrast prompts of a sample."})


class ContrastContexts(SuccessfulRolloutTeacherContextBuilder):
    """Builds (x', z) beside SDPO's (x, z): the sample's own z, in the same wording, with prompts of other groups."""

    def _build_reprompt_text(self, prompt_text, solution_text, feedback_text):
        self.privileged.append((solution_text, feedback_text))
        return super()._build_reprompt_text(prompt_text, solution_text, feedback_text)

    def build(self, output, prompts, rewards, feedbacks=None):
        """Add `contrast_ids` and `contrast_mask`, (B, C, S), to the batch `output`."""
        args = self.trainer.args
        self.privileged = []
        contexts = super().build(output, prompts, rewards, feedbacks)
        if args.contrastive_coef == 0.0:
            return contexts
        training = self.trainer.model.training
        group_size = self.trainer.num_generations if training else self.trainer.num_generations_eval
        groups = gather_object(prompts)[::group_size]  # one prompt a group, of all processes
        offset = self.trainer.accelerator.process_index * len(prompts)
        privileged = iter(self.privileged)
        messages = []
        for sample, has_context in enumerate(contexts["self_distillation_mask"].tolist()):
            if not has_context:  # such a sample has no loss
                messages += [prompts[sample]] * args.contrastive_count
                continue
            z = next(privileged)
            group = (offset + sample) // group_size
            candidates = [prompt for prompt in groups if prompt != groups[group]]
            rng = random.Random(f"{args.seed}/{self.trainer.state.global_step}/{offset + sample}")
            messages += [
                self._with_context(contrast, z) for contrast in rng.sample(candidates, args.contrastive_count)
            ]
        tokens = self._tokenize_teacher_messages(messages)
        ids = output["completion_ids"].repeat_interleave(args.contrastive_count, dim=0)
        mask = output["completion_mask"].repeat_interleave(args.contrastive_count, dim=0)
        shape = (len(prompts), args.contrastive_count, -1)
        output["contrast_ids"] = torch.cat([tokens["prompt_ids"], ids], dim=1).view(shape)
        output["contrast_mask"] = torch.cat([tokens["prompt_mask"], mask], dim=1).view(shape)
        return contexts

    def _with_context(self, prompt, z):
        """A prompt with the privileged context in its last turn, as SDPO writes it."""
        if isinstance(prompt, str):
            return super()._build_reprompt_text(prompt, *z)
        text = super()._build_reprompt_text(prompt[-1]["content"], *z)
        return [*prompt[:-1], {"role": "user", "content": text}]


class CreditSDPOTrainer(SDPOTrainer):
    """SDPO whose target is f − λ Ĝ."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher_context_builder = ContrastContexts(self)

    def _compute_teacher_student_logits(self, model, teacher_model, inputs):
        logits = super()._compute_teacher_student_logits(model, teacher_model, inputs)
        if self.args.contrastive_coef == 0.0:
            return logits
        width = inputs["completion_ids"].size(1)
        target = logits.teacher_logits.log_softmax(-1)
        with torch.no_grad(), self._get_teacher_context_for_self_distillation():
            for ids, mask in zip(inputs["contrast_ids"].unbind(1), inputs["contrast_mask"].unbind(1), strict=True):
                contrast = self._forward_logits(teacher_model, ids, mask, width).log_softmax(-1)
                target = target - self.args.contrastive_coef / self.args.contrastive_count * contrast
        logits.teacher_logits = target  # SDPO's losses normalize it
        return logits


def make_rows(count=64):
    """Sums with feedback that does not depend on the response: SDPO reads the column `privileged_context`."""
    pairs = [divmod(number * 37 % 10_000, 100) for number in range(count)]
    prompts = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in pairs]
    feedback = [f"The last digit of the sum is {(a + b) % 10}." for a, b in pairs]
    return Dataset.from_dict({"prompt": prompts, "answer": [a + b for a, b in pairs], "privileged_context": feedback})


def reward(completions, answer, **columns):
    numbers = [re.findall(r"\d+", completion[-1]["content"]) for completion in completions]
    return [float(digits[-1:] == [str(right)]) for digits, right in zip(numbers, answer, strict=True)]


if __name__ == "__main__":
    parser = TrlParser((CreditSDPOConfig, ModelConfig), description=__doc__)
    parser.set_defaults(output_dir="runs/credit_in_one_file", include_environment_feedback=True, report_to="none")
    parser.set_defaults(
        gradient_accumulation_steps=4
    )  # four groups in a batch: contrast prompts are the other groups'
    config, model = parser.parse_args_and_config()
    CreditSDPOTrainer(model.model_name_or_path, reward, config, make_rows()).train()
