"""What the compiled loop costs beside its arithmetic: compilations, transfers, copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflax
from dflax.infer.sampling import SamplingParams
from dflax.infer.session import Session
from dflax.infer.speculative import program
from dflax.kernels_pallas.block_attention import cpu
from tests.infer.tiny import VOCAB, drafter_config, pair, random_model

PROMPTS = [[1, 2, 3], [4], [5, 6, 1, 0], [2, 2]]


def test_a_second_call_compiles_nothing():
    """Other prompts, lengths, budgets, sampling values, stop tokens; and other weights of the same shapes."""
    target, drafter = pair()
    dflax.speculate(target, drafter, PROMPTS, 20, stop_token_ids=[])
    functions = program(target.config, drafter.config)
    before = functions.compiled()
    out = dflax.speculate(target, drafter, [[6] * 9, [1], [0, 1], [3] * 30], [40, 3, 2, 90], stop_token_ids=[2, 3], temperature=0.8,
                          top_k=3, top_p=[0.5, 0.6, 0.7, 1.0], seed=9)  # fmt: skip
    assert out.stats.compiled == 0
    other = pair(seed=7)
    assert dflax.speculate(*other, PROMPTS, 20).stats.compiled == 0
    assert functions.compiled() == before > 0
    larger = dflax.speculate(target, drafter, PROMPTS, 200, stop_token_ids=[])
    assert larger.stats.compiled > 0  # another capacity: the count does count


def test_no_implicit_transfer_in_a_whole_call():
    target, drafter = pair()
    some = random_model(drafter_config(target.config, draft_vocab_size=3), 1, draft_ids=np.array([1, 2, 5], np.int32))
    with jax.transfer_guard("disallow"):
        dflax.speculate(target, some, PROMPTS, 20, temperature=0.5)
        dflax.speculate(target, drafter, PROMPTS, 20, temperature=0.5, block_size="auto")
        dflax.generate(target, PROMPTS, 20)
        list(dflax.stream(target, drafter, PROMPTS, 20))
        with pytest.raises(Exception, match=r"[Dd]isallowed"):  # the guard is alive
            jnp.add(target.leaves[0], np.float32(1.0)).block_until_ready()


def test_the_state_is_updated_in_place():
    """All of the donated state is aliased, commits write in place, and nothing of a cache's size is made beside it."""
    target, drafter = pair()
    prompts = PROMPTS * 2  # so many that a layer is not read whole
    session = Session(target, drafter, prompts, [1000] * len(prompts), SamplingParams.build(len(prompts), VOCAB))
    state, rounds = session.state, jax.device_put(np.int32(1))
    assert state.cache.k[0].size > cpu.WHOLE
    lowered = program(target.config, drafter.config).run.lower(
        session._weights, state, session.params, rounds, block_size=4
    )
    memory = lowered.compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= size
    caches = sum(leaf.nbytes for cache in (state.cache, state.draft_cache) for leaf in (cache.k, cache.v))
    assert memory.temp_size_in_bytes < 0.25 * caches, (memory.temp_size_in_bytes, caches)


def test_rounds_per_call_are_counted():
    target, drafter = pair()
    session = Session(target, drafter, PROMPTS, [40] * 4, SamplingParams.build(4, VOCAB))
    session.prefill()
    assert session.advance(4, 3).rounds.tolist() == [3] * 4
    session.compile(4)
    assert session.progress().rounds.tolist() == [3] * 4
    assert session.advance(4, 1).rounds.tolist() == [4] * 4
