"""The loop against recorded runs of the reference: tokens, acceptance lengths, and the blocks the target was asked to verify."""

import jax
import numpy as np
import pytest

import dflax
from dflax.infer.sampling import SamplingParams
from dflax.infer.session import Session
from dflax.infer.speculative import Pair, draft
from tests.golden import load_case

NEW = 40
RUNS = [("random", 0, 8), ("random", 0, 5)] + [("fitted", p, b) for p in range(3) for b in (8, 5)]


@pytest.fixture(scope="module")
def case():
    return load_case("dflash_generate")


@pytest.fixture(scope="module")
def models(case):
    return {name: dflax.load(case.folder / name) for name in ("target", "drafter_random", "drafter_fitted")}


def greedy(case, prompt):
    ids = case.expected[f"p{prompt}_greedy_ids"]
    return ids[case.expected["prompts"].shape[1] :].tolist()


@pytest.mark.smoke
def test_plain_greedy(case, models):
    out = dflax.generate(models["target"], case.expected["prompts"].tolist(), NEW, stop_token_ids=[])
    assert out.tokens == [greedy(case, prompt) for prompt in range(3)]
    assert out.acceptance_lengths == [[1] * (NEW - 1)] * 3


@pytest.mark.parametrize(("kind", "block_size"), [("random", 8), ("random", 5), ("fitted", 8), ("fitted", 5)])
def test_whole_runs(case, models, kind, block_size):
    """All prompts in one batch, though they finish in different rounds."""
    prompts = case.expected["prompts"].tolist()
    out = dflax.speculate(
        models["target"], models[f"drafter_{kind}"], prompts, NEW, block_size=block_size, stop_token_ids=[]
    )
    assert out.tokens == [greedy(case, prompt) for prompt in range(3)]
    for prompt in range(3):
        if (kind, prompt, block_size) in RUNS:
            want = case.expected[f"{kind}_p{prompt}_b{block_size}_newer_acceptance_lengths"]
            assert out.acceptance_lengths[prompt] == want.tolist()
    assert out.stats.block_sizes == {block_size: max(out.stats.rounds)}
    assert out.stats.rounds == [len(lengths) for lengths in out.acceptance_lengths]


def test_stop_token_inside_a_block(case, models):
    """Prompt 0 stops; the others do not contain the token early and run on."""
    want, prompts = case.expected, case.expected["prompts"].tolist()
    stop = want["stop_token_ids"].tolist()
    out = dflax.speculate(models["target"], models["drafter_fitted"], prompts, NEW, stop_token_ids=[stop, [], []])
    assert prompts[0] + out.tokens[0] == want["fitted_p0_stop_output_ids"].tolist()
    assert out.acceptance_lengths[0] == want["fitted_p0_stop_newer_acceptance_lengths"].tolist()
    assert out.tokens[1:] == [greedy(case, 1), greedy(case, 2)]


@pytest.mark.parametrize(("kind", "prompt", "block_size"), [("random", 0, 8), ("fitted", 0, 8), ("fitted", 1, 5)])
def test_blocks_sent_to_the_target(case, models, kind, prompt, block_size):
    """Round by round: anchor and drafts, and the count before it is cut (the older code's)."""
    target, drafter = models["target"], models[f"drafter_{kind}"]
    params = SamplingParams.build(1, target.config.vocab_size)
    session = Session(target, drafter, [case.expected["prompts"][prompt].tolist()], [NEW], params)
    session.prefill()

    @jax.jit
    def block(state):
        pair = Pair(target.module, drafter.module, None)
        anchor = state.tokens[:, state.cursor[0]]
        return anchor, draft(pair, state, params, block_size, sampled=False)[0]

    key = f"{kind}_p{prompt}_b{block_size}"
    rounds = len(case.expected[f"{key}_newer_acceptance_lengths"])
    for i in range(rounds):
        anchor, drafts = block(session.state)
        got = [*np.asarray(anchor).tolist(), *np.asarray(drafts)[0].tolist()]
        assert got == case.expected[f"{key}_verify_blocks"][i].tolist(), f"round {i}"
        progress = session.advance(block_size, 1)
    assert progress.done.all()
    older = case.expected[f"{key}_acceptance_lengths"]
    np.testing.assert_array_equal(progress.acceptance[0, :rounds], older[:rounds])
