"""Environment with tools and several turns, with feedback for single turns.

    python examples/multi_turn_tools.py --max_steps 20                       # Qwen3-0.6B, one GPU
    accelerate launch examples/multi_turn_tools.py --model_name_or_path Qwen/Qwen3-4B --use_vllm true

Copy and change `Shop`: public methods are tools, `reset` receives the row, `get_reward` returns the verdict.
"""

import random

from datasets import Dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from credit_trl import CreditConfig, CreditTrainer, Verdict

PRICES = {"apple": 3, "pear": 4, "bread": 7, "cheese": 12, "candle": 5, "spoon": 6}
DEFAULTS = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "output_dir": "runs/multi_turn_tools",
    "per_device_train_batch_size": 8,  # 8 rollouts of one problem; 4 problems per step
    "gradient_accumulation_steps": 4,
    "max_completion_length": 1024,  # all turns of a rollout with the outputs of the tools
    "max_tool_calling_iterations": 5,
    "chat_template_kwargs": {"enable_thinking": False},
    "logging_steps": 1,
    "report_to": "none",
}


def make_rows(count: int = 256) -> Dataset:
    rng, rows = random.Random(0), []
    for _ in range(count):
        items, pieces = rng.sample(sorted(PRICES), 2), rng.choices(range(1, 10), k=2)
        wish = f"Look up prices, one a turn, and pay for {pieces[0]} x {items[0]} and {pieces[1]} x {items[1]}."
        rows.append({"prompt": [{"role": "user", "content": wish}], "items": items, "pieces": pieces})
    return Dataset.from_list(rows)


class Shop:
    current_turn = 0  # set by the trainer before the tools of a turn run

    def reset(self, items: list[str], pieces: list[int], **columns) -> None:
        self._missing = list(items)
        self._total = sum(n * PRICES[item] for n, item in zip(pieces, items, strict=True))
        self._paid, self._feedback = None, {}

    def price(self, item: str) -> str:
        """Price of one piece.

        Args:
            item: its name.
        """
        if item in self._missing:
            self._missing.remove(item)
        else:  # feedback for this turn, which the teacher reads right before it
            self._feedback[self.current_turn] = f"Ask for: {self._missing[0]}." if self._missing else "Pay now."
        return str(PRICES.get(item, "not sold here"))

    def pay(self, total: int) -> str:
        """Pay the whole sum.

        Args:
            total: the sum.
        """
        self._paid = total
        if total != self._total:
            self._feedback[self.current_turn] = f"Pay {self._total}, not {total}."
        return "paid"

    def get_reward(self) -> Verdict:
        feedback = None if self._paid is not None else "Nothing was paid."  # for the whole rollout
        return Verdict(float(self._paid == self._total), feedback, turn_feedback=self._feedback)


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, CreditConfig, ModelConfig), description=__doc__)
    parser.set_defaults(**DEFAULTS)
    _, config, model = parser.parse_args_and_config()
    options = {"train_dataset": make_rows(), "environment_factory": Shop, "peft_config": get_peft_config(model)}
    CreditTrainer(model.model_name_or_path, args=config, **options).train()
