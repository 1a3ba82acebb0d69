"""Engines draw what they should, sample by sample, and leave the model and torch's random state alone."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from credit_trl.evaluation.engines import (
    Request,
    Sampling,
    TransformersEngine,
    VLLMEngine,
    generate_ids,
    read_responses,
    weight_fingerprint,
)
from credit_trl.evaluation.protocol import make_engine

PROMPT = [{"role": "user", "content": "2+2="}]


@pytest.fixture
def engine(make_model, tokenizer):
    return TransformersEngine(make_model(), tokenizer, batch_size=4)


def draw(engine, sampling, count=12, prompts=("2+2=", "what is this?"), batch=None):
    requests = [Request([{"role": "user", "content": prompts[i % len(prompts)]}], seed=i) for i in range(count)]
    batch = batch or count
    with engine.session(sampling):
        return [r for i in range(0, count, batch) for r in engine.generate(requests[i : i + batch], sampling)]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 0.95, 0), (1.5, 0.7, 0), (1.0, 1.0, 5)]
)
def test_first_tokens_have_the_filtered_distribution(engine, tokenizer, temperature, top_p, top_k):
    count = 3000
    sampling = Sampling(temperature, top_p, top_k, max_completion_length=1)
    texts = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(texts, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        p = torch.softmax(engine.model(ids).logits[0, -1].double() / temperature, -1).numpy()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    kept = order[before < top_p][: top_k or None]
    expected = np.zeros_like(p)
    expected[kept] = p[kept] / p[kept].sum()

    drawn = generate_ids(
        engine.model, ids.tolist() * count, range(count), sampling, engine.eos_token_ids, pad_token_id=0
    )
    observed = np.bincount([row[0] for row in drawn], minlength=len(p))
    assert set(np.nonzero(observed)[0]) <= set(kept)
    often = expected * count >= 5
    counts = [*observed[often], observed[~often].sum()]
    chances = [*expected[often] * count, expected[~often].sum() * count]
    if chances[-1] < 1e-9:
        counts, chances = counts[:-1], chances[:-1]
    assert stats.chisquare(counts, chances).pvalue > 0.001


def test_a_sample_does_not_depend_on_its_batch_or_on_the_order(engine):
    sampling = Sampling(1.0, 0.9, max_completion_length=8)
    whole = draw(engine, sampling)
    assert draw(engine, sampling, batch=5) == whole == draw(engine, sampling, batch=1)
    assert len({response.text for response in whole}) > 6


def test_temperature_zero_is_greedy(engine, tokenizer):
    responses = draw(engine, Sampling(0.0, max_completion_length=5), count=4)
    ids = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2="}], add_generation_prompt=True, return_dict=False
    )
    for _ in range(5):
        with torch.no_grad():
            ids = [*ids, engine.model(torch.tensor([ids])).logits[0, -1].argmax().item()]
    expected = tokenizer.decode(ids[-5:], skip_special_tokens=True)
    assert responses[0].text == responses[2].text == expected


def test_the_models_own_sampling_defaults_have_no_say_and_come_back(engine):
    sampling = Sampling(1.0, 1.0, max_completion_length=6)
    plain = draw(engine, sampling)
    defaults = engine.model.generation_config
    defaults.repetition_penalty, defaults.top_k, defaults.do_sample = 50.0, 1, True
    assert draw(engine, sampling) == plain
    assert engine.model.generation_config is defaults
    assert defaults.repetition_penalty == 50.0


def test_sampling_leaves_random_state_and_mode_alone(engine):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    engine.model.train()
    draw(engine, Sampling(max_completion_length=3))
    assert torch.equal(torch.rand(4), expected)
    assert engine.model.training


def test_lengths_count_the_end_of_turn_and_truncation_is_its_absence(engine, tokenizer):
    word, end = tokenizer("ab")["input_ids"], tokenizer.eos_token_id
    full, cut, empty = read_responses(tokenizer, [[*word, end], word, [end]], [end])
    assert (full.text, full.length, full.truncated) == ("ab", 3, False)
    assert (cut.text, cut.length, cut.truncated) == ("ab", 2, True)
    assert (empty.text, empty.length, empty.truncated) == ("", 1, False)


def test_fingerprint_tells_weights_apart(make_model):
    model = make_model()
    before = weight_fingerprint(model)
    assert weight_fingerprint(make_model()) == before != weight_fingerprint(make_model(seed=1))
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    assert weight_fingerprint(model) != before


def test_fingerprint_reads_a_quantised_base_too(make_model):
    model = make_model()
    packed = torch.arange(12, dtype=torch.uint8)
    model.register_parameter("packed", torch.nn.Parameter(packed, requires_grad=False))
    before = weight_fingerprint(model)
    with torch.no_grad():
        model.packed[0] += 1
    assert weight_fingerprint(model) != before


class FakeLLM:
    """Answers with the first prompt tokens, in vLLM's forms."""

    def __init__(self, tokenizer, **options):
        self.tokenizer, self.options, self.calls = tokenizer, options, []

    def get_tokenizer(self):
        return self.tokenizer

    def generate(self, prompts, sampling_params, use_tqdm):
        self.calls.append((prompts, sampling_params))
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=tuple(prompt["prompt_token_ids"][1:4]),
                        finish_reason="length" if parameters.seed % 2 else "stop",
                    )
                ]
            )
            for prompt, parameters in zip(prompts, sampling_params, strict=True)
        ]


@pytest.fixture
def vllm(monkeypatch, tokenizer):
    module = types.ModuleType("vllm")
    module.LLM = lambda model, **options: FakeLLM(tokenizer, model=model, **options)
    module.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)


def test_vllm_gets_ids_settings_and_a_seed_a_request(vllm, tokenizer):
    engine = make_engine("some/model", engine="vllm", engine_options={"max_model_len": 512})
    assert isinstance(engine, VLLMEngine)
    assert engine.llm.options == {"model": "some/model", "max_model_len": 512}
    responses = draw(engine, Sampling(0.6, 0.95, max_completion_length=7), count=4)
    prompts, parameters = engine.llm.calls[0]
    text = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=False)
    assert prompts[0]["prompt_token_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [p.seed for p in parameters] == [0, 1, 2, 3]
    assert vars(parameters[0]) == {
        "seed": 0,
        "n": 1,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 0,
        "max_tokens": 7,
    }
    assert [r.truncated for r in responses] == [False, True, False, True]
    assert [r.length for r in responses] == [3] * 4


def test_vllm_tells_the_weights_of_a_directory_apart(vllm, tmp_path):
    """A run saves its best model under one name again and again; a half-done evaluation of the old one is not its."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100_000))
    before = make_engine(str(tmp_path), engine="vllm").identity()
    assert make_engine(str(tmp_path), engine="vllm").identity() == before
    weights.write_bytes(bytes(range(100)) * 1000)
    assert make_engine(str(tmp_path), engine="vllm").identity() != before


def test_the_packages_own_model_has_a_name_and_engines_refuse_options_that_they_lack():
    engine = make_engine("quickstart", batch_size=3)
    assert (engine.name, engine.batch_size) == ("quickstart", 3)
    with pytest.raises(ValueError, match="`chat_template_kwargs`, not max_model_len"):
        make_engine("quickstart", engine_options={"max_model_len": 512})


def test_without_vllm_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"credit-trl\[vllm\]"):
        make_engine("some/model", engine="vllm")


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"max_completion_length": 0}]
)
def test_sampling_refuses_values_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)


def test_a_bare_model_needs_its_tokenizer_and_an_engine_a_known_name(make_model):
    with pytest.raises(ValueError, match="tokenizer"):
        make_engine(make_model())
    with pytest.raises(ValueError, match="'transformers' or 'vllm'"):
        make_engine("x", engine="sglang")
