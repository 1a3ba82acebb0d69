"""Sampling engines: distribution, seeds, unchanged model and random state."""

import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl.chat_template_utils import parse_response

from credit_trl.evaluation import EvaluationConfig, SamplingConfig
from credit_trl.evaluation.engines import TransformersEngine, VLLMEngine, encode_prompt, seeded, weight_fingerprint
from credit_trl.evaluation.generation import generate_ids, read_responses
from credit_trl.evaluation.protocol import make_engine
from credit_trl.rollout.thinking import COMMON_MARKS
from tables import rows_of

PROMPT = [{"role": "user", "content": "2+2="}]


@pytest.fixture
def engine(make_model, tokenizer):
    return TransformersEngine(make_model(), tokenizer, batch_size=4)


def make(model, **options):
    return make_engine(model, EvaluationConfig(**options))


def draw(engine, sampling, count=12, prompts=("2+2=", "what is this?"), batch=None):
    conversations = [[{"role": "user", "content": prompts[i % len(prompts)]}] for i in range(count)]
    seeds = list(range(count))
    batch = batch or count
    with engine.session(sampling):
        starts = range(0, count, batch)
        return [
            r for i in starts for r in engine.generate(conversations[i : i + batch], seeds[i : i + batch], sampling)
        ]


def test_sample_does_not_depend_on_its_batch(engine):
    sampling = SamplingConfig(1.0, 0.9, max_completion_length=8)
    in_one_batch = draw(engine, sampling)
    assert draw(engine, sampling, batch=5) == in_one_batch == draw(engine, sampling, batch=1)
    assert len({response.text for response in in_one_batch}) > 6


@pytest.mark.parametrize("filters", [(1.3, 1.0, 0), (0.6, 0.95, 0), (1.5, 0.7, 0), (1.0, 1.0, 5)])
def test_generate_ids_inverts_the_filtered_distribution(engine, filters):
    """Peer: one row at a time without padding or cache, with numpy's sums over the most likely tokens."""
    prompts = [[5, 9, 11], [7], [5, 9, 11, 12]]
    temperature, top_p, top_k = filters
    sampling = SamplingConfig(*filters, max_completion_length=6, seed=4)
    options = {"eos_token_ids": engine.eos_token_ids}
    expected = []
    for row, prompt in enumerate(prompts):
        ids = list(prompt)
        for uniform in np.random.default_rng([4, row]).random(6):
            with torch.no_grad():
                logits = engine.model(torch.tensor([ids])).logits[0, -1].double() / temperature
            p = torch.softmax(logits, -1).numpy()
            order = np.argsort(-p)
            nucleus = order[np.cumsum(p[order]) - p[order] < top_p][: top_k or None]
            p[np.setdiff1d(order, nucleus)] = 0.0
            ids.append(int(np.searchsorted(np.cumsum(p / p.sum()), uniform, side="right")))
            if ids[-1] in engine.eos_token_ids:
                break
        expected.append(ids[len(prompt) :])
    for batch_size in (None, 1, 2):
        assert generate_ids(engine.model, prompts, sampling, batch_size=batch_size, **options) == expected
    assert generate_ids(engine.model, [], sampling, **options) == []
    endless = generate_ids(engine.model, prompts, sampling, eos_token_ids=[])
    assert [len(ids) for ids in endless] == [6, 6, 6]


def test_sampling_keeps_random_state_and_training_mode(engine):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    engine.model.train()
    draw(engine, SamplingConfig(max_completion_length=3))
    assert torch.equal(torch.rand(4), expected)
    assert engine.model.training


THOUGHT = "<think>\nhotels(Oslo) would be wrong\n</think>\n\nweather(Oslo)"


def completion_ids(tokenizer, text, end=True):
    return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * end


@pytest.mark.parametrize("text", rows_of(__file__, "responses"))
@pytest.mark.parametrize("end", [True, False])
def test_responses_to_conversations_are_parsed_as_trl_does(parsing, text, end):
    ids, prefix = completion_ids(parsing, text, end), encode_prompt(parsing, PROMPT)
    [response] = read_responses(parsing, [PROMPT], [prefix], [ids], [parsing.eos_token_id], COMMON_MARKS)
    assert response.message == parse_response(parsing, ids, prefix=prefix)
    assert response.text == response.message["content"]
    assert (response.length, response.truncated) == (len(ids), not end)


def test_texts_and_other_tokenizers_are_not_parsed(parsing, tokenizer):
    prompts = ["2+2=", PROMPT]
    ids = [completion_ids(parsing, THOUGHT)] * 2
    text, answer = read_responses(parsing, prompts, [[1], [2, 3]], ids, [], COMMON_MARKS)
    assert (text.text, text.message) == (THOUGHT, None)
    assert (answer.text, answer.message["role"]) == ("weather(Oslo)", "assistant")
    for response in read_responses(tokenizer, prompts, [[1], [2, 3]], ids, [], COMMON_MARKS):
        assert "hotels(Oslo)" in response.text


def test_fingerprint_changes_with_the_weights(make_model):
    model = make_model()
    fingerprint = weight_fingerprint(model)
    assert weight_fingerprint(make_model()) == fingerprint != weight_fingerprint(make_model(seed=1))
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    assert weight_fingerprint(model) != fingerprint


class FakeLLM:
    """Returns the first prompt tokens in vLLM's output classes."""

    def __init__(self, tokenizer, **options):
        self.tokenizer, self.options, self.calls = tokenizer, options, []
        self.model_config = SimpleNamespace(is_multimodal_model=False)

    def get_tokenizer(self):
        return self.tokenizer

    def generate(self, prompts, sampling_params, use_tqdm):
        self.calls.append((prompts, sampling_params))
        ids = [tuple(prompt["prompt_token_ids"][1:4]) for prompt in prompts]
        reasons = ["length" if parameters.seed % 2 else "stop" for parameters in sampling_params]
        outputs = [SimpleNamespace(token_ids=i, finish_reason=r) for i, r in zip(ids, reasons, strict=True)]
        return [SimpleNamespace(outputs=[output]) for output in outputs]


@pytest.fixture
def vllm(monkeypatch, tokenizer):
    module = types.ModuleType("vllm")
    module.LLM = lambda model, **options: FakeLLM(tokenizer, model=model, **options)
    module.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)


def test_vllm_requests_have_ids_settings_and_seeds(vllm, tokenizer):
    engine = make("some/model", engine="vllm", engine_options={"max_model_len": 512})
    assert isinstance(engine, VLLMEngine)
    assert engine.llm.options == {"model": "some/model", "max_model_len": 512}
    responses = draw(engine, SamplingConfig(0.6, 0.95, max_completion_length=7), count=4)
    prompts, parameters = engine.llm.calls[0]
    text = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=False)
    assert prompts[0]["prompt_token_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [p.seed for p in parameters] == [0, 1, 2, 3]
    expected = {"seed": 0, "n": 1, "temperature": 0.6, "top_p": 0.95, "top_k": 0, "max_tokens": 7}
    assert vars(parameters[0]) == expected
    assert [r.truncated for r in responses] == [False, True, False, True]
    assert [r.length for r in responses] == [3] * 4


@pytest.mark.parametrize(("options", "message"), rows_of(__file__, "options_out_of_range"))
def test_values_out_of_range_name_their_option(options, message):
    with pytest.raises(ValueError, match=message):
        EvaluationConfig(**options)


def test_models_without_a_tokenizer_or_vllm_say_what_to_do(make_model, monkeypatch):
    with pytest.raises(ValueError, match="pass `tokenizer`"):
        make(make_model())
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="pip install vllm"):
        make("some/model", engine="vllm")
    with pytest.raises(TypeError, match="max_model_len"):  # before the weights are loaded
        make("no/such/model", engine_options={"max_model_len": 512})


def test_seeded_engine_sets_one_seed_per_request():
    def generate(prompts, sampling_params, use_tqdm):
        return [(prompt, p.seed, p.temperature) for prompt, p in zip(prompts, sampling_params, strict=True)]

    engine = SimpleNamespace(generate=generate)
    shared = SimpleNamespace(seed=None, temperature=0.5)
    shared.clone = lambda: SimpleNamespace(**vars(shared))
    with seeded(SimpleNamespace(llm=engine), [7, 8]):
        answers = engine.generate(["a", "b"], sampling_params=shared, use_tqdm=False)
    assert answers == [("a", 7, 0.5), ("b", 8, 0.5)]
    assert shared.seed is None
    assert engine.generate is generate
