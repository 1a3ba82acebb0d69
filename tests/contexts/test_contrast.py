"""Contrasts: the registry of sources, and draws that are uniform, never x, and independent of the processes."""

import itertools
import random
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.contrast import SOURCES, Contrast, ContrastBatch, draw_contrasts, find_source
from credit_trl.contexts.gather import build_contexts
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.rollout.batch import GenerationBatch
from credit_trl.teacher.packing import packed_row
from credit_trl.teacher.passes import TeacherSequence, passes
from credit_trl.testing import check_source
from tables import tables_of
from tiny import context_ids

TABLES = tables_of(__file__)
PER_SAMPLE = "per_sample:per_sample"  # of examples/family

prompts = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=24)


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "family")


def batch_of(prompts, dataset=(), index=0, group_size=1, columns=None):
    z = [PrivilegedContext(feedback=f"On {i}.") for i in range(len(prompts))]
    return ContrastBatch(
        index, group_size, prompts, prompts, z, z, [i % 2 == 0 for i in range(len(prompts))], dataset, columns or {}
    )


def draw(name, batch, sample, count, seed=0):
    return [contrast.prompt for contrast in islice(draw_contrasts(find_source(name), batch, sample, seed), count)]


@pytest.mark.parametrize("name", SOURCES)
def test_registered_sources_pass_the_check_of_outside_ones(name):
    assert find_source(name) is SOURCES[name]
    check_source(SOURCES[name])


@given(batch_prompts=prompts, count=st.integers(1, 9), seed=st.integers(0, 2**40), index=st.integers(0, 2**33))
def test_a_draw_is_never_the_own_prompt_and_repeats_only_after_all(batch_prompts, count, seed, index):
    for sample, prompt in enumerate(batch_prompts):
        draws = draw("batch", batch_of(batch_prompts, index=index), sample, count, seed)
        candidates = set(batch_prompts) - {prompt}
        assert len(draws) == (count if candidates else 0)
        assert set(draws) <= candidates
        for start in range(0, len(draws), max(len(candidates), 1)):
            assert len(set(draws[start : start + len(candidates)])) == len(draws[start : start + len(candidates)])


@given(rows=prompts, prompt=st.sampled_from("abcdef"), count=st.integers(1, 8), seed=st.integers(0, 50))
def test_dataset_draws_are_distinct_and_end(rows, prompt, count, seed):
    draws = draw("dataset", batch_of([prompt], rows), 0, count, seed)
    candidates = set(rows) - {prompt}
    assert len(draws) == len(set(draws)) == min(count, len(candidates))
    assert set(draws) <= candidates


@pytest.mark.parametrize(("name", "prompts", "dataset", "count"), TABLES["uniform"])
@pytest.mark.parametrize("size", [1, 2])
def test_draws_and_pairs_of_draws_are_uniform(name, prompts, dataset, count, size):
    batches = (batch_of(list(prompts), list(dataset), index) for index in range(2000))
    counts = Counter(frozenset(draw(name, batch, 0, size, seed=4)) for batch in batches)
    assert len(counts) == (count if size == 1 else count * (count - 1) // 2)
    assert chisquare(list(counts.values())).pvalue > 0.01


def test_samples_batches_and_seeds_draw_independently():
    prompts = [q for q in "abcdefgh" for _ in range(8)]
    keys = ((0, 0), (1, 0), (0, 1), (0, 0))  # index of the batch, seed
    draws = [[draw("batch", batch_of(prompts, index=i), sample, 1, seed) for sample in range(64)] for i, seed in keys]
    assert len({tuple(draws_of_sample) for draws_of_sample in draws[0][:8]}) > 2
    assert draws[0] == draws[3]
    assert draws[1] != draws[0] != draws[2]


def test_digits_of_the_stream_are_fixed():
    """Recorded when draws were keyed by the trainer's step: a run of an earlier version continues with its draws."""
    prompts = [q for q in "abcdefgh" for _ in range(2)]
    assert draw("batch", batch_of(prompts, index=5), 0, 3, seed=3) == ["f", "b", "d"]
    assert draw("batch", batch_of(prompts, index=5), 7, 3, seed=3) == ["f", "b", "c"]
    assert draw("dataset", batch_of(["a"], list("abcdefgh"), index=5), 0, 3, seed=3) == ["b", "h", "g"]


def contexts_of(tokenizer, config, prompts, dataset=None, rows=None, group_size=1, offset=0):
    """Texts of (x, z) and the contrasts of each sample, every one with feedback."""
    rows = rows or [{"prompt": prompt} for prompt in prompts]
    feedback = [f"On {i}." for i in range(len(prompts))]
    ids = [tokenizer(f"Answer {i}")["input_ids"] for i in range(len(prompts))]
    rewards = [float(i % 2 == 0) for i in range(len(prompts))]
    batch = GenerationBatch(
        rows, prompts, ids, rewards, feedback, offset, group_size=group_size, index=3, dataset=dataset
    )
    built = build_contexts(batch, ContextBuilder(tokenizer, config))
    return [[tokenizer.decode(context) for context in context_ids(sample_contexts)] for sample_contexts in built]


def test_completed_prompt_is_not_its_own_contrast(make_config, tokenizer):
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Find {name}."}]} for name in ("ape", "owl")])
    prompts = [[{"role": "user", "content": row["prompt"][0]["content"] + " You see a door."}] for row in data]
    config = make_config(contrastive_source="dataset")
    contexts = contexts_of(tokenizer, config, prompts, data, rows=list(data))
    assert ["owl" in contrast for _, contrast in contexts] == [True, False]
    assert not any("door" in contrast for _, contrast in contexts)
    assert contexts == contexts_of(tokenizer, config, prompts, {"prompt": data["prompt"]}, rows=list(data))


def test_rollouts_of_one_row_do_not_contrast_each_other(make_config, tokenizer):
    """An environment's `reset` may give each of them another first observation."""
    prompts = [f"Find {name}. You are in room {room}." for name in ("ape", "owl") for room in range(4)]
    contexts = contexts_of(tokenizer, make_config(), prompts, group_size=4)
    assert all(("owl" in teacher) == ("ape" in contrast) for teacher, contrast in contexts)


def letters(key, count):
    return "".join(random.Random(str(key)).choices("abcdefgh", k=count))


def test_one_draw_per_group_leaves_fewer_tokens_to_score(make_config, tokenizer):
    """LiveCodeBench's lengths over 16: prompt 32, completion 128, demonstration 128, feedback 16; 32 rollouts."""
    prompts = [[{"role": "user", "content": letters(f"x{row}", 32)}] for row in range(32) for _ in range(8)]
    ids = [tokenizer(letters(f"y{i}", 128))["input_ids"] for i in range(256)]
    feedback = [letters(f"z{i}", 16) for i in range(256)]
    rewards = [float(i % 8 < 2) for i in range(256)]
    batch = GenerationBatch([{}] * 256, prompts, ids, rewards, feedback, 0, group_size=8)
    words = {"solution_template": "{successful_previous_attempt}", "feedback_template": "{feedback_raw}"}
    scored = {}
    for source in ("batch", PER_SAMPLE):
        options = words | {"contrastive_source": source, "reprompt_template": "{prompt}{solution}{feedback}"}
        built = build_contexts(batch, ContextBuilder(tokenizer, make_config(**options)))
        sequences = [
            TeacherSequence(i, k, p, [0] * 128) for i in range(32) for k, p in enumerate(context_ids(built[i]))
        ]
        rows = [
            packed_row([sequence.prompt + ids[sequence.sample] for sequence in forward_pass])[0]
            for forward_pass in passes(sequences, 65536 // 16, packed=True, shares=True)
        ]
        assert max(map(len, rows)) <= 65536 // 16
        scored[source] = sum(map(len, rows)) / sum(map(len, sequences))
    assert 0.60 < scored["batch"] < 0.65  # 193 k of 306 k tokens at the full lengths
    assert 0.76 < scored[PER_SAMPLE] < 0.82  # 240 k


def test_siblings_share_a_draw_which_is_uniform_for_each_sample():
    prompts = [q for q in "abcdefgh" for _ in range(4)]

    def drawn(sample, index):
        return draw("batch", batch_of(prompts, (), index, 4), sample, 2, seed=4)

    for index in range(9):
        assert all(drawn(n, index) == drawn(n // 4 * 4, index) for n in range(32))
        assert len({tuple(drawn(n, index)) for n in range(0, 32, 4)}) > 2
    for sample in (1, 30):
        counts = Counter(drawn(sample, index)[0] for index in range(1000))
        assert len(counts) == 7
        assert chisquare(list(counts.values())).pvalue > 0.01
    first_of_group, alone = (draw(name, batch_of(prompts, (), 0, 4), 8, 3, seed=4) for name in ("batch", PER_SAMPLE))
    assert first_of_group == alone
    assert len({tuple(draw(PER_SAMPLE, batch_of(prompts, (), 0, 4), n, 3, seed=4)) for n in range(8, 12)}) == 4


def test_prompts_that_the_own_group_reads_are_no_contrast():
    """Groups of one dataset row, whose environment words the prompt differently for each rollout."""
    completed = ["a1", "a2", "a2", "a3", "b1", "b2", "a", "a9"]
    batch = replace(batch_of(completed, group_size=2), dataset_prompts=[*"aaaabbaa"])
    drawn_of_sample = [set(draw("batch", batch, sample, 9)) for sample in range(8)]
    assert drawn_of_sample[0] == drawn_of_sample[1] == {"b1"}
    assert drawn_of_sample[2] == drawn_of_sample[3] == {"a1", "b1"}
    assert drawn_of_sample[4] == drawn_of_sample[5] == {"a1", "a2", "a"}
    assert drawn_of_sample[6] == drawn_of_sample[7] == {"a1", "a2", "b1"}


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        (tmp_path / "my_source.py").write_text(text)
        sys.modules.pop("my_source", None)

    yield write
    sys.modules.pop("my_source", None)


def test_a_source_in_a_file_reads_columns_of_the_dataset(module, make_config, tokenizer):
    module(TABLES["same_task"])
    prompts = [f"question {i}" for i in range(6)]
    rows = [{"prompt": prompt, "task": "pq"[i % 2]} for i, prompt in enumerate(prompts)]
    config = make_config(contrastive_source="my_source:same_task", contrastive_count=2)
    contexts = contexts_of(tokenizer, config, prompts, rows=rows)
    for sample, (_, *contrasts) in enumerate(contexts):
        asked = {int(text[-1]) for text in contrasts}
        assert asked == {i for i in range(6) if i % 2 == sample % 2} - {sample}
    check_source(find_source("my_source:same_task"), columns={"task": list("pqq" * 4)})


@pytest.mark.parametrize("name", ["wrong_feedback:wrong_feedback", PER_SAMPLE])
def test_sources_of_the_family_pass_the_check(name):
    check_source(find_source(name))


@pytest.mark.parametrize(("name", "message"), TABLES["not_imported"])
def test_a_source_that_cannot_be_imported_names_the_fix(module, name, message):
    module("")
    with pytest.raises(ValueError, match=message):
        find_source(name)


OWN = [[Contrast("a", PrivilegedContext(feedback="On 0."))], "returned the prompt of sample 0 itself"]


@pytest.mark.parametrize(("returned", "message"), [*TABLES["returned"], OWN])
def test_what_a_source_returns_is_checked(returned, message):
    with pytest.raises((TypeError, ValueError), match=message):
        list(draw_contrasts(lambda batch, sample, rng: returned, batch_of(["a", "b"]), 0, seed=0))


def unseeded(batch, sample, rng):
    return random.sample(batch.other_prompts(sample), k=3)


CALLS = itertools.count()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (unseeded, "another draw"),
        (lambda batch, sample, rng: [batch.other_prompts(sample)[next(CALLS) % 3]], "another draw"),
        (lambda batch, sample, rng: [batch.prompts[batch.group(sample).start]], "the prompt of sample 0 itself"),
        (lambda batch, sample, rng: batch.rollouts.append(None) or ["x"], "changed the batch"),
        (lambda batch, sample, rng: [], "no contrast for any sample"),
    ],
)
def test_check_source_fails_for(source, message):
    with pytest.raises((AssertionError, ValueError), match=message):
        check_source(source)
