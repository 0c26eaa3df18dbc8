"""generate, speculate, stream: speculation writes what plain decoding writes, whatever the batch, the settings and the drafter."""

import functools
import itertools
import operator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflax
from dflax.errors import DflaxError
from dflax.infer import speculative
from dflax.infer.generate import auto_sizes
from dflax.infer.sampling import SamplingParams
from dflax.infer.session import Session
from dflax.infer.state import capacity, chunks
from tests.infer.tiny import DRAFTER_SEED, VOCAB, drafter_config, pair, random_model, target_config

PROMPTS = [[1], [2, 3, 4], [5, 6, 5, 1, 2, 0, 3], [(3 * i) % VOCAB for i in range(45)]]
BUDGETS = [24, 1, 40, 33]
SAMPLED = {
    "temperature": [0.0, 0.7, 1.0, 1.6],
    "top_k": [None, None, 4, 3],
    "top_p": [None, 0.9, None, 0.8],
    "seed": [1, 2, 3, 3],
}
KINDS = ["dflash", "dflash_fused", "autoregressive", "autoregressive_fused"]


@pytest.fixture(scope="module")
def models():
    return pair()


def mean(lengths):
    return np.mean([n for row in lengths for n in row])


@pytest.mark.smoke
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_equals_plain_decoding(models, settings):
    """Mixed prompt lengths, budgets and stop tokens, greedy and sampled rows side by side."""
    target, drafter = models
    stops = [[], [], [4], [0, 5]]
    plain = dflax.generate(target, PROMPTS, BUDGETS, stop_token_ids=stops, **settings)
    fast = dflax.speculate(target, drafter, PROMPTS, BUDGETS, stop_token_ids=stops, **settings)
    assert fast.tokens == plain.tokens
    assert mean(fast.acceptance_lengths) > 1.1
    for row, (tokens, lengths) in enumerate(zip(fast.tokens, fast.acceptance_lengths, strict=True)):
        assert sum(lengths) == len(tokens) - 1
        assert not set(tokens[:-1]) & set(stops[row])
        assert len(tokens) == BUDGETS[row] or tokens[-1] in stops[row]
    assert any(tokens[-1] in stop for tokens, stop in zip(plain.tokens, stops, strict=True))
    assert plain.texts is None
    if settings:
        assert plain.tokens != dflax.generate(target, PROMPTS, BUDGETS, stop_token_ids=stops).tokens


def test_rows_do_not_depend_on_their_batch(models):
    """Each prompt alone, under its number in the batch, and the batch in another order."""
    target, drafter = models
    whole = dflax.speculate(target, drafter, PROMPTS, BUDGETS, stop_token_ids=[], **SAMPLED)

    def rows(which):
        pick = lambda values: [values[i] for i in which]
        settings = {name: pick(values) for name, values in SAMPLED.items()}
        params = SamplingParams.build(len(which), VOCAB, index=which, **settings)
        session = Session(target, drafter, pick(PROMPTS), pick(BUDGETS), params)
        session.prefill()
        progress = session.advance(4)
        return [progress.tokens[i, n : progress.cursor[i] + 1].tolist() for i, n in enumerate(session.lengths)]

    assert rows([2, 0, 3, 1]) == [whole.tokens[i] for i in (2, 0, 3, 1)]
    assert [rows([i])[0] for i in (2, 3)] == [whole.tokens[i] for i in (2, 3)]


def test_block_size_one_and_auto(models):
    target, drafter = models
    plain = dflax.generate(target, PROMPTS, BUDGETS, stop_token_ids=[], **SAMPLED)
    for size in (1, "auto"):
        out = dflax.speculate(target, drafter, PROMPTS, BUDGETS, block_size=size, stop_token_ids=[], **SAMPLED)
        assert out.tokens == plain.tokens
    assert set(out.stats.block_sizes) <= set(auto_sizes(4)) == {1, 2, 3, 4}
    assert sum(out.stats.block_sizes.values()) == max(out.stats.rounds)
    # Rounds of all sizes count alike, and only a row's last one can have been cut.
    committed, rounds = sum(map(sum, out.acceptance_lengths)), sum(map(len, out.acceptance_lengths))
    assert committed / rounds <= out.stats.acceptance_length <= (committed + 3 * len(PROMPTS)) / rounds
    assert auto_sizes(16) == (1, 3, 5, 8, 16)
    assert auto_sizes(1) == (1,)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_drafter(models, kind):
    """Same tokens; and both caches hold what one pass over the finished text gives."""
    target = models[0]
    drafter = random_model(drafter_config(target.config, kind=kind), seed=DRAFTER_SEED)
    plain = dflax.generate(target, PROMPTS, BUDGETS, stop_token_ids=[])
    session = Session(target, drafter, PROMPTS, BUDGETS, SamplingParams.build(4, VOCAB))
    session.prefill()
    for _ in range(3):
        session.advance(4, 2)
    state = session.state
    progress = session.advance(4)
    assert [
        progress.tokens[i, n : progress.cursor[i] + 1].tolist() for i, n in enumerate(session.lengths)
    ] == plain.tokens
    assert progress.acceptance.max() > 1
    state = session.state  # the last anchors are in no cache

    @jax.jit
    def whole(tokens):
        block = target.module.read(tokens, target.module.empty_cache(tokens), taps=drafter.config.target_layer_ids)
        fused = drafter.module.fuse(block.features)
        empty = state.draft_cache.empty(drafter.config, tokens.shape[0], 0, jnp.float32)
        return block, fused, drafter.module.context(target.module.embed_tokens(tokens), fused, empty)

    block, fused, (k, v) = whole(state.tokens)
    for row, length in enumerate(progress.cursor):
        for got, want in (
            (state.cache.k, block.k),
            (state.cache.v, block.v),
            (state.draft_cache.k, k),
            (state.draft_cache.v, v),
        ):
            want = want[:, row, :length].transpose(0, 2, 1, 3)
            np.testing.assert_allclose(got[:, row, :, :length], want, rtol=2e-3, atol=2e-4)
            assert not np.asarray(got[:, row, :, length:]).any()
        if drafter.config.fused:
            np.testing.assert_allclose(state.last_fused[row], fused[row, length - 1], rtol=2e-3, atol=2e-4)


def test_draft_vocabulary(models):
    """A drafter that scores four of seven tokens drafts only those, and changes no output."""
    target = models[0]
    ids = np.array([1, 2, 4, 6], np.int32)
    drafter = random_model(drafter_config(target.config, draft_vocab_size=4), seed=DRAFTER_SEED, draft_ids=ids)
    plain = dflax.generate(target, PROMPTS, BUDGETS, stop_token_ids=[], **SAMPLED)
    out = dflax.speculate(target, drafter, PROMPTS, BUDGETS, stop_token_ids=[], **SAMPLED)
    assert out.tokens == plain.tokens
    assert mean(out.acceptance_lengths) > 1.0
    for tokens, lengths in zip(out.tokens, out.acceptance_lengths, strict=True):
        at = 1
        for n in lengths:
            assert set(tokens[at : at + n - 1]) <= set(ids.tolist())
            at += n


@pytest.mark.parametrize("vocabulary", [None, [0, 2, 3, 6]], ids=["all", "part"])
def test_sampled_drafts_have_the_target_distribution(models, vocabulary):
    """Chi-square of three tokens against their exact probabilities, a token that top-k drops among them."""
    target, rows, new = models[0], 3000, 3
    ids = None if vocabulary is None else np.array(vocabulary, np.int32)
    config = drafter_config(target.config, draft_vocab_size=None if ids is None else len(ids))
    drafter = random_model(config, seed=DRAFTER_SEED, draft_ids=ids)
    prompt, settings = [2, 5, 1], {"temperature": 1.2, "top_k": 5}
    out = dflax.speculate(
        target, drafter, [prompt] * rows, new, drafts="sampled", block_size=3, stop_token_ids=[], seed=5, **settings
    )
    assert mean(out.acceptance_lengths) > 1.2
    texts = np.array(list(itertools.product(range(VOCAB), repeat=new)))
    logits = np.asarray(target.logits(np.array([[*prompt, *text] for text in texts])))[:, len(prompt) - 1 : -1]
    logits = np.where(logits >= np.sort(logits, axis=-1)[..., -5:-4], logits / 1.2, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = np.take_along_axis(p / p.sum(-1, keepdims=True), texts[..., None], -1)[..., 0].prod(-1)
    seen = np.zeros(len(texts))
    np.add.at(seen, np.array(out.tokens) @ VOCAB ** np.arange(new)[::-1], 1)
    assert not seen[p == 0].any()
    order = np.argsort(p)[::-1]
    big = order[: np.searchsorted(-p[order], -5 / rows)]
    expected = np.append(p[big] * rows, (1 - p[big].sum()) * rows)
    observed = np.append(seen[big], rows - seen[big].sum())
    chi = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert freedom > 30
    assert chi < freedom + 4.5 * np.sqrt(2 * freedom), (chi, freedom)


def test_sampled_drafts_beside_greedy_rows(models):
    """In a batch with sampled rows, a greedy row still takes the target's argmax."""
    target, drafter = models
    out = dflax.speculate(
        target, drafter, PROMPTS, BUDGETS, drafts="sampled", stop_token_ids=[], temperature=[0, 0.9, 1, 0]
    )
    plain = dflax.generate(target, PROMPTS, BUDGETS, stop_token_ids=[])
    assert out.tokens[0] == plain.tokens[0]
    assert out.tokens[3] == plain.tokens[3]


def test_perfect_drafts_fill_every_block(models, monkeypatch):
    """With the true continuation as drafts every round commits block_size tokens, the last one what is left."""
    target, drafter = models
    plain = dflax.generate(target, PROMPTS[:1], 30, stop_token_ids=[])
    truth = jnp.asarray([*PROMPTS[0], *plain.tokens[0], 0, 0, 0, 0], jnp.int32)

    def know(pair, state, params, block_size, sampled):
        return truth[state.cursor[:, None] + jnp.arange(1, block_size)], None

    monkeypatch.setattr(speculative, "draft", know)
    speculative.program.cache_clear()
    out = dflax.speculate(target, drafter, PROMPTS[:1], 30, stop_token_ids=[])
    speculative.program.cache_clear()
    assert out.tokens == plain.tokens
    assert out.acceptance_lengths == [[4] * 7 + [1]]
    assert out.stats.acceptance_by_slot[0] == 1.0


def test_a_cache_that_is_exactly_full(models):
    """Prompt + budget = capacity: nothing is lost at the end, and nothing written past it lands elsewhere."""
    target, drafter = models
    prompt = [i % VOCAB for i in range(30)]
    assert capacity(128) == 128
    out = dflax.speculate(target, drafter, [prompt, [1]], [98, 127], stop_token_ids=[])
    plain = dflax.generate(target, [prompt, [1]], [98, 127], stop_token_ids=[])
    roomy = dflax.generate(target, [prompt, [1]], [140, 140], stop_token_ids=[])
    assert out.tokens == plain.tokens == [roomy.tokens[0][:98], roomy.tokens[1][:127]]


def test_finished_rows_stay_untouched(models):
    """Bit for bit, caches and statistics included, while the others go on."""
    target, drafter = models
    session = Session(target, drafter, PROMPTS, [24, 1, 90, 5], SamplingParams.build(4, VOCAB))
    session.prefill()
    while not (done := session.advance(4, 2).done)[3]:
        pass
    assert not done.all()

    def row(state, b):
        caches = (state.cache, state.draft_cache)
        columns = [np.asarray(c.k[:, b]) for c in caches] + [np.asarray(c.v[:, b]) for c in caches]
        return [
            *columns,
            *(np.asarray(x[b]) for x in (state.cursor, state.tokens, state.done, state.rounds, state.acceptance)),
        ]

    before = [row(session.state, b) for b in (1, 3)]
    running = row(session.state, 2)
    session.advance(4)
    for b, old in zip((1, 3), before, strict=True):
        for got, want in zip(row(session.state, b), old, strict=True):
            np.testing.assert_array_equal(got, want)
    assert any((got != want).any() for got, want in zip(row(session.state, 2), running, strict=True))


class Letters:
    """A tokenizer whose tokens are letters."""

    chat_template = None
    eos_token_id = None

    def encode(self, text, **options):
        return [ord(c) - ord("a") for c in text]

    def decode(self, token_ids, **options):
        return "".join(chr(ord("a") + t) for t in token_ids)


@pytest.mark.parametrize("per_call", [1, 3])
def test_stream(models, per_call):
    target, drafter = replace(models[0], tokenizer=Letters(), stop_token_ids=(4,)), models[1]
    prompts = [Letters().decode(prompt) for prompt in PROMPTS]
    out = dflax.speculate(target, drafter, prompts, BUDGETS)
    assert out.texts == [Letters().decode(tokens) for tokens in out.tokens]
    pieces = list(dflax.stream(target, drafter, prompts, BUDGETS, rounds_per_call=per_call))
    for row in range(4):
        own = [piece for piece in pieces if piece.row == row]
        assert functools.reduce(operator.iadd, (piece.tokens for piece in own), []) == out.tokens[row]
        assert "".join(piece.text for piece in own) == out.texts[row]
        assert [len(piece.tokens) for piece in own[1:]] == out.acceptance_lengths[row]
        assert [piece.accepted for piece in own[:1]] == [0]
        assert all(piece.accepted == len(piece.tokens) - 1 for piece in own[1:-1])
        assert [piece.done for piece in own] == [False] * (len(own) - 1) + [True]
    # A target without drafter takes what `generate` takes, in its order: here stop tokens behind the seed.
    whole = dflax.generate(target, prompts, BUDGETS, 0.7, None, 0.9, 3, [5])
    for alone in (None,), ():
        plain = list(dflax.stream(target, *alone, prompts, BUDGETS, 0.7, None, 0.9, 3, [5]))
        for row in range(4):
            assert [piece.tokens for piece in plain if piece.row == row] == [[token] for token in whole.tokens[row]]


def test_statistics(models):
    target, drafter = models
    out = dflax.speculate(target, drafter, PROMPTS, BUDGETS, stop_token_ids=[])
    stats = out.stats
    assert stats.rounds == [len(lengths) for lengths in out.acceptance_lengths]
    assert len(stats.acceptance_by_slot) == 3
    assert sorted(stats.acceptance_by_slot, reverse=True) == stats.acceptance_by_slot
    assert stats.acceptance_length >= mean(out.acceptance_lengths)
    # Row 1 has a budget of one token, which belongs to no round; the others' shares, weighed by their rounds, are the batch's.
    own = stats.acceptance_by_slot_per_prompt
    assert [len(slots) for slots in own] == [3, 0, 3, 3]
    rounds = [len(lengths) for lengths in out.acceptance_lengths]
    pooled = sum(n * np.array(slots) for n, slots in zip(rounds, own, strict=True) if n) / sum(rounds)
    np.testing.assert_allclose(pooled, stats.acceptance_by_slot, rtol=1e-12)
    for slots, lengths in zip(own, out.acceptance_lengths, strict=True):
        whole = lengths[:-1]  # the last round may have been cut
        for slot, share in enumerate(slots, 1):
            assert round(share * len(lengths)) - sum(n > slot for n in whole) in (0, 1)
    assert own[0] != own[2]
    weights = sum(leaf.nbytes for leaf in drafter.leaves)
    assert stats.drafter_bytes == weights + 2 * 4 * 128 * 8 * 4 + 4 * 4  # keys and values of 4 rows, and their cursors
    assert stats.tokens_per_second > 0


def test_bfloat16(models):
    config = target_config()
    target = random_model(config, 0, "bfloat16")
    drafter = random_model(drafter_config(config), 1, "bfloat16")
    out = dflax.speculate(target, drafter, PROMPTS, BUDGETS, stop_token_ids=[])
    assert [len(tokens) for tokens in out.tokens] == BUDGETS
    assert out.stats.drafter_bytes < 2 * (sum(leaf.nbytes for leaf in drafter.leaves) + 4 * 128 * 8 * 4)


def test_sizes():
    assert chunks(1) == [(0, 32)]
    assert chunks(257) == [(0, 256), (256, 32)]
    assert chunks(600) == [(0, 256), (256, 256), (512, 128)]
    assert [capacity(n) for n in (1, 128, 129, 1024, 1025)] == [128, 128, 256, 1024, 1536]


CASES = {
    "vocabulary": ({"vocab_size": 9}, "vocabulary has 9 tokens, the target's 7"),
    "width": ({"hidden_size": 24}, "hidden size is 24, the target's 16"),
    "layers": ({"num_target_layers": 3}, "made for 3 target layers, the target has 2"),
    "taps": ({"target_layer_ids": (0, 2)}, r"taps layers \[0, 2\]"),
    "mask": ({"mask_token_id": 7}, "mask token id 7 is outside"),
    "draft ids": ({"draft_vocab_size": 3}, "scores 3 tokens"),
}


@pytest.mark.parametrize("fault", CASES)
def test_a_drafter_that_does_not_fit(models, fault):
    changes, message = CASES[fault]
    drafter = random_model(drafter_config(models[0].config, **changes))
    with pytest.raises(DflaxError, match=message):
        dflax.speculate(models[0], drafter, PROMPTS, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, d: dflax.generate(d, PROMPTS, 4), "is a drafter"),
        (lambda t, d: dflax.speculate(t, t, PROMPTS, 4), "is no drafter"),
        (lambda t, d: dflax.speculate(t, random_model(d.config, dtype="bfloat16"), PROMPTS, 4), "weights are bfloat16"),
        (lambda t, d: dflax.speculate(t, d, PROMPTS, 4, block_size=5), "block_size is 5, .* trained with 4"),
        (lambda t, d: dflax.speculate(t, d, PROMPTS, 4, block_size=0), "block_size is 0"),
        (lambda t, d: dflax.speculate(t, d, PROMPTS, 4, drafts="best"), "drafts is 'best'"),
        (lambda t, d: dflax.generate(t, PROMPTS, 0), "max_new_tokens is 0"),
        (lambda t, d: dflax.generate(t, PROMPTS, [4, 4]), "2 values for 4 prompts"),
        (lambda t, d: dflax.generate(t, [[1], []], 4), "prompt 1: the prompt is empty"),
        (lambda t, d: dflax.generate(t, [[1, 7]], 4), "token id 7 of the prompt"),
        (lambda t, d: dflax.generate(t, [[1], [1] * 1000], 30), "prompt 1 has 1000 tokens and a budget of 30 more"),
        (lambda t, d: dflax.generate(t, ["text"], 4), "no tokenizer"),
        (lambda t, d: dflax.generate(t, PROMPTS, 4, temperature=-1.0), "temperature is -1"),
        (lambda t, d: dflax.generate(t, PROMPTS, 4, stop_token_ids=[9]), "stop id 9"),
        (lambda t, d: dflax.stream(t, d, PROMPTS, 4, rounds_per_call=0), "rounds_per_call is 0"),
        (lambda t, d: dflax.stream(t, d, [[]], 4), "the prompt is empty"),
        (lambda t, d: dflax.stream(t, d, PROMPTS, 4, block_size="Auto"), "block_size is 'Auto'"),
    ],
)  # fmt: skip
def test_impossible_requests(models, call, message):
    with pytest.raises(DflaxError, match=message):
        call(*models)


def test_a_larger_block_than_trained_if_asked(models):
    target, drafter = models
    out = dflax.speculate(target, drafter, PROMPTS, BUDGETS, block_size=6, allow_larger_blocks=True, stop_token_ids=[])
    assert out.tokens == dflax.generate(target, PROMPTS, BUDGETS, stop_token_ids=[]).tokens
