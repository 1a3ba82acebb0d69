"""The scoring phase against one forward pass per prompt, for any batching."""

from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
import transformers
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from credit_trl.contexts.tokens import CompletionBatch, TokenContexts
from credit_trl.loss.head import lm_head
from credit_trl.loss.scores import SupportConfig, score_completions, score_tokens
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.packing import enable_packing, model_inputs, packed_row
from credit_trl.teacher.passes import PASSES_PER_GROUP, TeacherSequence, _samples_of_groups, passes
from families import FAMILIES, SMALL, build_family
from tables import tables_of
from tiny import context_ids

TABLES = tables_of(__file__)


class CountingTeacher(Teacher):
    """A live teacher that counts the passes and their tokens."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, Accelerator(cpu=True))
        self.tokens: list[tuple[int, int]] = []
        model.base_model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs) -> None:
        ids = kwargs["input_ids"]
        self.tokens.append((ids.numel(), int((ids != 0).sum())))  # padding is 0, and no sequence holds it

    def autocast(self):
        return nullcontext()


@pytest.fixture
def batch():
    """Completions of several lengths, one with tool tokens, with prompts of many lengths; sample 3 has no teacher."""
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 4, 12, 7, 12]
    ids = torch.randint(3, 250, (5, 12), generator=generator)
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    loss_mask = mask.bool().clone()
    loss_mask[2, 3:6] = False
    contexts = [
        [torch.randint(3, 250, (int(n),), generator=generator).tolist() for n in sizes]
        for sizes in ([5, 11, 3], [8, 8, 2], [21, 4, 9], [6, 30, 1], [4, 3, 7])
    ]
    contexts = [TokenContexts(teacher, contrasts) for teacher, *contrasts in contexts]
    contexts[3] = TokenContexts(None)
    return contexts, CompletionBatch(ids, mask, loss_mask)


def scored(teacher, batch, support, batch_tokens, packed):
    """Scores of a batch at the temperature 0.8."""
    return score_completions(teacher, *batch, support, partial(lm_head, temperature=0.8), batch_tokens, packed)


def naive_scores(model, batch, tail):
    """Scores from one unpadded forward pass per context."""
    contexts, completions = batch
    ids, mask, loss_mask = completions.ids, completions.mask, completions.loss_mask
    head, scores = lm_head(model, 0.8), {}
    for sample, sample_contexts in enumerate(contexts):
        prompts = context_ids(sample_contexts)
        if prompts is None:
            continue
        length = int(mask[sample].sum())
        hidden = []
        for prompt in prompts:
            row = torch.tensor([prompt + ids[sample, :length].tolist()])
            with torch.no_grad():
                states = model.base_model(input_ids=row, use_cache=False).last_hidden_state[0]
            hidden.append(states[len(prompt) - 1 : -1][loss_mask[sample, :length]])
        hidden = torch.stack(hidden)
        support = SupportConfig("teacher_topk", 6, tail)
        scores[sample] = score_tokens(hidden[0], hidden[1:], head, ids[sample][loss_mask[sample]], support)
    return scores


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batch_tokens", [1, 40, 100, 10_000])
def test_scores_do_not_depend_on_how_sequences_are_batched(make_model, batch, tail, packed, batch_tokens):
    model = make_model().eval()
    contexts, completions = batch
    loss_mask = completions.loss_mask
    scores = scored(CountingTeacher(model), batch, SupportConfig("teacher_topk", 6, tail), batch_tokens, packed)
    expected = naive_scores(model, batch, tail)
    for sample in range(len(contexts)):
        for name, values in scores.items():
            is_scored = loss_mask[sample] if sample in expected else torch.zeros(12, dtype=torch.bool)
            unscored = torch.arange(6) if name == "support_ids" else torch.zeros(())
            assert (values[sample][~is_scored] == unscored).all()
            if sample in expected:
                reference = getattr(expected[sample], name)
                assert_close(values[sample][is_scored], reference, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_every_prompt_is_read_once_within_the_budget(make_model, batch):
    contexts, completions = batch
    real = sum(len(p) + int(completions.mask[i].sum()) for i, c in enumerate(contexts) for p in context_ids(c) or ())
    for packed in (False, True):
        teacher = CountingTeacher(make_model().eval())
        scored(teacher, batch, SupportConfig("sampled"), 80, packed)
        assert all(size <= 80 for size, _ in teacher.tokens)
        assert sum(used for _, used in teacher.tokens) == real
        assert not packed or sum(size for size, _ in teacher.tokens) == real


sequences = st.lists(st.integers(1, 200), min_size=1, max_size=40).map(
    lambda sizes: [TeacherSequence(i, 0, [0] * size, [0] * 3) for i, size in enumerate(sizes)]
)


@given(sequences, st.integers(1, 600), st.booleans())
def test_passes_hold_every_sequence_once_within_the_budget(sequences, batch_tokens, packed):
    def fits(batch):
        real = sum(map(len, batch))
        tokens = real if packed else len(batch) * max(map(len, batch))
        return tokens <= batch_tokens and tokens - real <= batch_tokens / 16

    batches = list(passes(sequences, batch_tokens, packed))
    assert sorted(s.sample for batch in batches for s in batch) == list(range(len(sequences)))
    assert all(fits(batch) or len(batch) == 1 for batch in batches)
    assert not any(fits([*batch, following[0]]) for batch, following in pairwise(batches))


@given(sequences, st.integers(1, 100))
def test_groups_hold_samples_up_to_their_bound(sequences, batch_tokens):
    def fits(group):
        return sum(len(sequences[sample]) for sample in group) <= PASSES_PER_GROUP * batch_tokens

    groups = list(_samples_of_groups({s.sample: [s] for s in sequences}, batch_tokens, packed=False))
    assert all(fits(group) or len(group) == 1 for group in groups)
    assert not any(fits([*group, following[0]]) for group, following in pairwise(groups))


tokens_of_two = st.lists(st.integers(0, 1), max_size=20).map(lambda ids: torch.tensor(ids, dtype=torch.long))


@given(
    st.lists(st.tuples(st.integers(0, 40), tokens_of_two), min_size=1, max_size=8).map(
        lambda draws: [torch.cat([torch.zeros(1 + zeros, dtype=torch.long), ids]) for zeros, ids in draws]
    )
)
def test_shared_row_holds_every_sequence(sequences):
    row, positions, layout, indices = packed_row([ids.tolist() for ids in sequences])
    places = indices.split(list(map(len, sequences)))
    piece_of = torch.repeat_interleave(torch.arange(len(layout.lengths)), torch.tensor(layout.lengths))
    for ids, columns in zip(sequences, places, strict=True):
        assert row[columns].tolist() == ids.tolist()
        assert positions[columns].tolist() == list(range(len(ids)))
        first_piece, *later_pieces = piece_of[columns].unique_consecutive().tolist()
        assert layout.parents[first_piece] is None
        assert [layout.parents[piece] for piece in later_pieces] == [first_piece][: len(later_pieces)]
    assert len(row) <= sum(map(len, sequences))
    assert sorted(set(indices.tolist())) == list(range(len(row)))


@pytest.mark.parametrize("family", [*sorted(FAMILIES.keys() - {"Gemma2"}), "sliding window"])
def test_states_of_a_shared_row_are_those_of_its_sequences(make_model, tokenizer, family):
    """A group of four with one prompt, a contrast with another's prompt, a duplicate, and a sequence of its own."""
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
    model = make_model(**window) if family == "sliding window" else build_family(tokenizer, family)
    model.eval()
    enable_packing(model)
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randint, 2, 60, generator=generator)
    prompt = draw((30,))
    sequences = [torch.cat([prompt, draw((size,))]) for size in (1, 7, 12, 20)]
    sequences += [torch.cat([prompt[:18], draw((5,))]), sequences[1], prompt, draw((4,))]
    row, _, _, indices = packed_row([ids.tolist() for ids in sequences])
    assert len(row) == 30 + (1 + 7 + 12 + 20 + 7) + (18 + 5) + 4
    with torch.no_grad():
        inputs, _ = model_inputs(model, [ids.tolist() for ids in sequences], torch.device("cpu"), packed=True)
        states = model.base_model(**inputs, use_cache=False).last_hidden_state[0]
        for ids, places in zip(sequences, indices.split(list(map(len, sequences))), strict=True):
            expected = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            assert_close(states[places], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "implementation", "layers", "message"), TABLES["not_packed"])
def test_packing_is_refused_before_generation(make_trainer, tokenizer, family, implementation, layers, message):
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    config = getattr(transformers, f"{family}Config")(**SMALL, **window, vocab_size=len(tokenizer), pad_token_id=0)
    make = getattr(transformers, f"{family}ForCausalLM")
    model = make(config)
    with torch.device("meta"):
        sharded = make(config)  # of which this process has no weight
    model.config._attn_implementation = implementation
    if layers is not None:
        model.config.layer_types = layers
    for candidate in (model, sharded):
        with pytest.raises(ValueError, match=message):
            enable_packing(candidate)
    assert model.config._attn_implementation == implementation
    if implementation == "eager":
        with pytest.raises(ValueError, match=message):
            make_trainer(model=model, packed=True)
