"""Draws of contrast prompts: uniform, never the own prompt, independent of the number of processes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from credit_trl.contexts.contrast import draw_from_batch, draw_from_dataset
from credit_trl.rollout.batch import prompt_key

batches = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=24)


@given(keys=batches, count=st.integers(1, 9), seed=st.integers(0, 2**40), step=st.integers(0, 2**33))
def test_a_draw_is_never_the_own_prompt_nor_its_duplicate(keys, count, seed, step):
    draws = draw_from_batch(keys, range(len(keys)), count, seed=seed, step=step)
    others = set(keys)
    for sample, draw in enumerate(draws):
        others = set(keys) - {keys[sample]}
        assert len(draw) == (count if others else 0)
        assert all(keys[i] != keys[sample] for i in draw)


@given(keys=batches, count=st.integers(1, 9), seed=st.integers(0, 99))
def test_draws_repeat_only_after_all_prompts(keys, count, seed):
    for sample, draw in enumerate(draw_from_batch(keys, range(len(keys)), count, seed=seed, step=0)):
        drawn = [keys[i] for i in draw]
        others = len(set(keys) - {keys[sample]})
        for start in range(0, len(drawn), max(others, 1)):
            part = drawn[start : start + others]
            assert len(set(part)) == len(part)


@given(keys=batches, split=st.integers(1, 23), count=st.integers(1, 4))
def test_ranks_draw_what_one_process_draws(keys, split, count):
    whole = draw_from_batch(keys, range(len(keys)), count, seed=3, step=5)
    parts = [range(0, min(split, len(keys))), range(min(split, len(keys)), len(keys))]
    assert [d for part in parts for d in draw_from_batch(keys, part, count, seed=3, step=5)] == whole


def test_draws_are_uniform_over_contrast_prompts():
    keys = [q for q in "abcdefgh" for _ in range(4)]
    counts: Counter[str] = Counter()
    for step in range(2000):
        (draw,) = draw_from_batch(keys, [9], 1, seed=11, step=step)
        counts[keys[draw[0]]] += 1
    assert set(counts) == set("abdefgh")
    assert chisquare(list(counts.values())).pvalue > 0.01


def test_pairs_of_draws_are_uniform_too():
    counts: Counter[frozenset[int]] = Counter()
    for step in range(3000):
        (draw,) = draw_from_batch(list("abcde"), [0], 2, seed=4, step=step)
        counts[frozenset(draw)] += 1
    assert len(counts) == 6
    assert chisquare(list(counts.values())).pvalue > 0.01


def test_samples_and_steps_draw_independently():
    keys = [q for q in "abcdefgh" for _ in range(8)]
    first = draw_from_batch(keys, range(64), 1, seed=0, step=0)
    second = draw_from_batch(keys, range(64), 1, seed=0, step=1)
    assert len({d[0] for d in first[:8]}) > 2
    assert first != second
    assert first == draw_from_batch(keys, range(64), 1, seed=0, step=0)
    assert first != draw_from_batch(keys, range(64), 1, seed=1, step=0)


@given(rows=batches, own=st.sampled_from("abcdef"), count=st.integers(1, 8), seed=st.integers(0, 50))
def test_dataset_draws_are_distinct_while_possible(rows, own, count, seed):
    (draw,) = draw_from_dataset(rows, [own], [0], count, seed=seed, step=1)
    others = set(rows) - {own}
    assert len(draw) == (count if others else 0)
    assert own not in {rows[i] for i in draw}
    assert len({rows[i] for i in draw}) == min(count, len(others))


def test_dataset_draws_are_uniform_over_rows():
    rows = list("abcdef")
    counts = Counter(draw_from_dataset(rows, ["a"], [0], 1, seed=2, step=s)[0][0] for s in range(2000))
    assert set(counts) == {1, 2, 3, 4, 5}
    assert chisquare(list(counts.values())).pvalue > 0.01


def test_a_dataset_of_one_repeated_prompt_terminates():
    assert draw_from_dataset(["a"] * 50, ["a"], [0], 2, seed=0, step=0) == [[]]


def test_prompt_key_ignores_the_order_of_message_keys():
    first = [{"role": "user", "content": "x"}]
    assert prompt_key(first) == prompt_key([{"content": "x", "role": "user"}])
    assert prompt_key(first) != prompt_key([{"role": "user", "content": "x "}])
