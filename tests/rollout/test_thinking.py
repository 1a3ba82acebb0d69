"""Thinking and answer of a response, by the marks of the model's chat template."""

import json
import time
from types import SimpleNamespace

import marks_verifier
import pytest

from credit_trl import Verdict
from credit_trl.evaluation.generation import read_responses
from credit_trl.evaluation.verdicts import task_verdicts
from credit_trl.rollout.thinking import (
    COMMON_MARKS,
    ThinkingMarks,
    mark_thinking,
    marks_in_use,
    split_thinking,
    thinking_marks,
)
from credit_trl.tasks import Task
from credit_trl.tasks.task import response_text
from tables import rows_of
from tiny import build_tokenizer

THINK = COMMON_MARKS[:1]


@pytest.mark.parametrize(("text", "answer"), rows_of(__file__, "answers"))
def test_answer_is_what_follows_the_thinking(text, answer):
    assert split_thinking(text)[1] == answer


@pytest.mark.parametrize("unit", ["<think>", "</think>", "<think>x", "<think></think>", "x</think>", " <think>"])
def test_a_million_characters_of_marks_are_split_without_a_hang(unit):
    start = time.process_time()
    split_thinking("<think>x" + unit * (1_000_000 // len(unit)))
    split_thinking(unit * (1_000_000 // len(unit)))
    assert time.process_time() - start < 20.0


@pytest.mark.parametrize(("text", "opened", "expected"), rows_of(__file__, "opened_thinking"))
def test_the_generation_prompt_decides_where_thinking_begins(text, opened, expected):
    assert split_thinking(text, THINK, opened=opened) == tuple(expected)


@pytest.mark.parametrize(("template", "tokens", "marks"), rows_of(__file__, "marks"))
def test_marks_are_those_that_template_or_tokenizer_declare(template, tokens, marks):
    added = {i: SimpleNamespace(content=token) for i, token in enumerate(tokens)}
    assert thinking_marks(SimpleNamespace(added_tokens_decoder=added, chat_template=template)) == tuple(
        map(tuple, marks)
    )


def marked(tokenizer, text, prompt, as_message):
    """What reward functions read of a response."""
    ids = tokenizer(text)["input_ids"]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    completion = [{"role": "assistant", "content": decoded}] if as_message else decoded
    [graded] = mark_thinking([completion], [ids], tokenizer, lambda _: prompt, thinking_marks(tokenizer))
    return graded[0]["content"] if as_message else graded


@pytest.mark.parametrize("as_message", [True, False])
@pytest.mark.parametrize(("prompt", "text", "expected"), rows_of(__file__, "unclosed_thinking"))
def test_unclosed_thinking_of_the_prompt_is_marked(tokenizer, prompt, text, expected, as_message):
    assert marked(tokenizer, text, prompt, as_message) == expected


@pytest.mark.parametrize("listed", [True, False], ids=["in all_special_tokens", "not listed"])
@pytest.mark.parametrize(("tokens", "text", "expected"), rows_of(__file__, "special_marks"))
def test_marks_that_are_special_tokens_are_kept(tokens, text, expected, listed):
    tokenizer = build_tokenizer()
    if listed:
        tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    else:
        tokenizer.add_tokens(tokens, special_tokens=True)
    assert marked(tokenizer, text, f"assistant\n{tokens[0]}\n", True) == expected


@pytest.mark.parametrize("options", [{}, {"verifier_timeout": 60.0}], ids=["in the main thread", "in a thread"])
@pytest.mark.parametrize("kind", ["plain", "asynchronous", "in_process"])
def test_verifiers_of_a_run_read_the_marks_of_its_tokenizer(make_trainer, kind, options):
    tokenizer = build_tokenizer()
    tokenizer.chat_template += "{# <mm:think> and </mm:think> #}"
    marks = (("<mm:think>", "</mm:think>"),)
    graded: list[ThinkingMarks] = []

    def plain(completions, **columns):
        graded.append(marks_in_use())
        return [0.0] * len(completions)

    async def asynchronous(completions, **columns):
        return plain(completions)

    functions = {"plain": plain, "asynchronous": asynchronous, "in_process": marks_verifier.read_marks}
    trainer = make_trainer(functions[kind], processing_class=tokenizer, max_steps=1, **options)
    trainer.train()
    if kind == "in_process":
        feedback = trainer._verdicts.feedback(trainer.args.generation_batch_size)[0]
        graded.append(tuple(map(tuple, json.loads(feedback))))
    assert trainer.context_builder.marks == marks
    assert graded == [marks]
    assert marks_in_use() is None


def test_verifiers_of_an_evaluation_read_the_marks_of_its_tokenizer():
    tokenizer = build_tokenizer()
    tokenizer.chat_template += "{# <mm:think> and </mm:think> #}"
    prompt = [{"role": "user", "content": "1+1="}]
    texts = ["<mm:think>2</mm:think>3", "<think>2</think>3"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    marks = thinking_marks(tokenizer)
    responses = read_responses(tokenizer, [prompt] * 2, [[]] * 2, ids, [tokenizer.eos_token_id], marks)

    def reward(completions, **columns):
        return [Verdict(0.0, split_thinking(response_text(completion))[1]) for completion in completions]

    task = Task("sums", lambda split: None, reward, reward)
    verdicts = task_verdicts(task, [{"prompt": prompt}] * 2, responses)
    assert [verdict.feedback for verdict in verdicts] == ["3", "<think>2</think>3"]


def test_marks_of_processor_tokenizer_and_run_count():
    tokenizer = SimpleNamespace(added_tokens_decoder={}, chat_template="<think></think>")
    processor = SimpleNamespace(tokenizer=tokenizer, chat_template="<mm:think></mm:think>")
    of_tokenizer, of_processor, of_run = COMMON_MARKS[0], ("<mm:think>", "</mm:think>"), COMMON_MARKS[1]
    assert set(thinking_marks(processor)) == {of_tokenizer, of_processor}
    assert set(thinking_marks(processor, "[THINK][/THINK]")) == {of_tokenizer, of_processor, of_run}
    assert thinking_marks(tokenizer) == (of_tokenizer,)
