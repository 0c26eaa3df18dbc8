"""Speculation equals plain greedy decoding for requests and models that nobody thought of.

On random weights two logits may be so close that a block and a single token round them differently: a first divergence is
allowed where the target's two best logits are within 1e-4, and nowhere else.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflax
from tests.infer.tiny import VOCAB, drafter_config, pair, random_model, target_config

TIE = 1e-4


def assert_same(target, prompts, plain, fast):
    for prompt, want, got in zip(prompts, plain.tokens, fast.tokens, strict=True):
        if got == want:
            continue
        at = next(i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b)
        best = np.sort(np.asarray(target.logits([prompt + want[:at]]))[0, -1])[-2:]
        assert best[1] - best[0] < TIE, f"token {at}: {want[at]} became {got[at]}"


def requests(batch):
    tokens = st.integers(0, VOCAB - 1)
    return st.fixed_dictionaries(
        {
            "prompts": st.lists(st.lists(tokens, min_size=1, max_size=60), min_size=batch, max_size=batch),
            "budgets": st.lists(st.integers(1, 60), min_size=batch, max_size=batch),
            "stops": st.lists(st.lists(tokens, max_size=2), min_size=batch, max_size=batch),
        }
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(request=requests(3), size=st.sampled_from([1, 2, 4]))
def test_any_request(request, size):
    target, drafter = pair()
    arguments = (request["prompts"], request["budgets"])
    plain = dflax.generate(target, *arguments, stop_token_ids=request["stops"])
    fast = dflax.speculate(target, drafter, *arguments, stop_token_ids=request["stops"], block_size=size)
    assert_same(target, request["prompts"], plain, fast)
    for tokens, stop, budget in zip(plain.tokens, request["stops"], request["budgets"], strict=True):
        assert not set(tokens[:-1]) & set(stop)
        assert len(tokens) == budget or tokens[-1] in stop


MODELS = st.fixed_dictionaries(
    {
        "family": st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe"]),
        "num_layers": st.integers(1, 3),
        "heads": st.sampled_from([(2, 1), (2, 2), (4, 2), (3, 3)]),
        "window": st.sampled_from([None, 1, 5, 20]),
        "tied": st.booleans(),
        "seed": st.integers(0, 999),
    }
)
DRAFTERS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["dflash", "dflash", "dflash_fused", "autoregressive", "autoregressive_fused"]),
        "num_layers": st.integers(1, 2),
        "window": st.sampled_from([None, 2, 9]),
        "causal": st.booleans(),
        "block_size": st.integers(2, 9),
        "draft_ids": st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1).map(sorted),
    }
)


@pytest.mark.slow
@settings(max_examples=16, deadline=None, derandomize=True)
@given(model=MODELS, draft=DRAFTERS, request=st.integers(1, 4).flatmap(requests), data=st.data())
def test_any_model(model, draft, request, data):
    layers, (heads, kv) = model["num_layers"], model["heads"]
    config = target_config(
        model["family"], num_layers=layers, num_heads=heads, num_kv_heads=kv, windows=(model["window"],) * layers,
        tie_word_embeddings=model["tied"], moe_layers=(True,) * layers if model["family"] == "qwen3_moe" else (),
    )  # fmt: skip
    taps = data.draw(st.lists(st.integers(0, layers - 1), min_size=1, max_size=layers, unique=True).map(sorted))
    ids, n = draft["draft_ids"], draft["num_layers"]
    drafter = drafter_config(
        config, kind=draft["kind"], num_layers=n, windows=(draft["window"],) * n, causal=(draft["causal"],) * n,
        block_size=draft["block_size"], target_layer_ids=tuple(taps), draft_vocab_size=None if ids is None else len(ids),
    )  # fmt: skip
    target = random_model(config, model["seed"])
    fits = random_model(drafter, model["seed"] + 1, draft_ids=None if ids is None else np.array(ids, np.int32))
    size = data.draw(st.integers(1, draft["block_size"]))
    arguments = (request["prompts"], request["budgets"])
    plain = dflax.generate(target, *arguments, stop_token_ids=request["stops"])
    fast = dflax.speculate(target, fits, *arguments, stop_token_ids=request["stops"], block_size=size)
    assert_same(target, request["prompts"], plain, fast)
