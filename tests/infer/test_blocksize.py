"""The block-size scheduler: what it estimates, that it follows an environment whose best size changes, and that the loop follows it."""

from types import SimpleNamespace

import numpy as np
import pytest

import dflax
from dflax.infer import session
from dflax.infer.blocksize import Scheduler
from tests.infer.tiny import pair

SIZES = (2, 4, 8, 16)


def play(rng, scheduler, accept, costs, calls, rounds=32):
    """Runs `calls` calls in a world where each draft is accepted with probability `accept`; also the sizes used."""
    used = []
    for _ in range(calls):
        size = scheduler.choose()
        lengths = np.minimum(rng.geometric(1 - accept, size=rounds), size).tolist()
        scheduler = scheduler.observe(size, lengths, costs[size] * rng.uniform(0.98, 1.02))
        used.append(size)
    return scheduler, used


def true_best(accept, costs):
    return max(SIZES, key=lambda size: sum(accept**i for i in range(size)) / costs[size])


def test_every_size_is_tried_once_largest_first():
    _, used = play(np.random.default_rng(0), Scheduler(SIZES), 0.8, dict.fromkeys(SIZES, 1.0), 4)
    assert used == [16, 8, 4, 2]


@pytest.mark.parametrize(
    ("accept", "costs"),
    [
        (0.9, {2: 1.0, 4: 1.0, 8: 1.05, 16: 1.1}),  # verification nearly free: the largest
        (0.6, {2: 1.0, 4: 1.1, 8: 1.8, 16: 3.4}),  # compute-bound: a middle one
        (0.1, {2: 1.0, 4: 1.5, 8: 2.0, 16: 3.0}),  # poor drafts: the smallest
    ],
)
def test_it_settles_on_the_fastest_size(accept, costs):
    _, used = play(np.random.default_rng(1), Scheduler(SIZES), accept, costs, 40)
    assert set(used[-20:]) == {true_best(accept, costs)}


def test_it_follows_a_change_in_both_directions():
    rng, costs = np.random.default_rng(2), {2: 1.0, 4: 1.2, 8: 1.6, 16: 2.4}
    scheduler, used = play(rng, Scheduler(SIZES), 0.95, costs, 30)
    assert used[-1] == true_best(0.95, costs) == 16
    scheduler, used = play(rng, scheduler, 0.2, costs, 60)
    assert used[-1] == true_best(0.2, costs) == 2
    scheduler, used = play(rng, scheduler, 0.95, costs, 120)
    assert used[-1] == 16, "from size 2 only slot 1 is seen: the larger sizes must come back by extrapolation"


def test_it_follows_a_change_of_cost():
    rng, cheap = np.random.default_rng(3), {2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}
    scheduler, used = play(rng, Scheduler(SIZES), 0.8, cheap, 20)
    assert used[-1] == 16
    _, used = play(rng, scheduler, 0.8, {2: 1.0, 4: 1.1, 8: 2.0, 16: 6.0}, 20)
    assert used[-1] != 16


def test_survival_is_the_observed_share_of_rounds():
    lengths = [1] * 100 + [2] * 200 + [4] * 700
    survival = Scheduler((4,), prior_rounds=1e-9, half_life=1e9).observe(4, lengths, 1.0).survival()
    np.testing.assert_allclose(survival, [0.9, 0.7, 0.7], rtol=1e-6)


def test_unseen_slots_are_extrapolated_geometrically():
    scheduler = Scheduler((3, 6), prior_rounds=1e-9).observe(3, [1] * 20 + [2] * 20 + [3] * 60, 1.0)
    one, two, *rest = scheduler.survival()
    np.testing.assert_allclose(rest, [two * (two / one) ** i for i in (1, 2, 3)], rtol=1e-6)


def test_old_evidence_fades():
    def after(half_life):
        scheduler = Scheduler((2,), half_life=half_life).observe(2, [2] * 100, 1.0)
        for _ in range(10):
            scheduler = scheduler.observe(2, [1] * 10, 1.0)
        return scheduler.survival()[0]

    assert after(10.0) < 0.2
    np.testing.assert_allclose(after(1e9), 0.5, atol=0.01)


def test_hysteresis_keeps_the_size_in_use():
    lengths = [1] * 1000  # nothing is accepted: speed is 1 / cost
    both = Scheduler((2, 4), hysteresis=0.03, prior_rounds=1e-9).observe(2, lengths, 1.0)
    assert both.observe(4, lengths, 1.02).choose() == 4
    assert both.observe(4, lengths, 1.04).choose() == 2


def test_observe_leaves_the_scheduler_as_it_was():
    scheduler = Scheduler((2, 4))
    other = scheduler.observe(4, [1, 4], 1.0)
    assert scheduler == Scheduler((2, 4))
    assert other != scheduler


@pytest.mark.parametrize("sizes", [(), (4, 2), (2, 2), (0, 2)])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="sizes"):
        Scheduler(sizes)


@pytest.mark.parametrize(("size", "lengths", "seconds"), [(3, [1], 1.0), (2, [3], 1.0), (2, [0], 1.0), (2, [1], 0.0)])
def test_bad_observations_are_refused(size, lengths, seconds):
    with pytest.raises(ValueError, match=r"block size|seconds"):
        Scheduler((2, 4)).observe(size, lengths, seconds)


# --- in the loop, by a clock of our own


PROMPTS, BUDGET = [[1], [2, 3, 4]], 120
FLAT, STEEP = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, {1: 1.0, 2: 4.0, 3: 7.0, 4: 10.0}


@pytest.fixture
def runs(monkeypatch):
    """Sets the seconds that a round of a size takes, as a function of the rounds before; returns the (size, rounds asked) of all calls."""

    def set_costs(costs):
        asked, clock, run = [], SimpleNamespace(now=0.0), session.Session._run

        def timed(self, block_size, rounds):
            before = int(np.max(self.state.rounds))
            run(self, block_size, rounds)
            clock.now += costs(before)[block_size] * (int(np.max(self.state.rounds)) - before)
            asked.append((block_size, rounds))

        monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        monkeypatch.setattr(session.Session, "_run", timed)
        return asked

    return set_costs


def sizes(asked):
    """Sizes in turn, and the rounds of each turn; calls of no round compile."""
    turns = []
    for size, rounds in asked:
        if rounds and turns and turns[-1][0] == size:
            turns[-1][1] += rounds
        elif rounds:
            turns.append([size, rounds])
    return [size for size, _ in turns], [rounds for _, rounds in turns]


@pytest.mark.parametrize(("costs", "best"), [(FLAT, 4), (STEEP, 1)])
def test_the_loop_tries_every_size_and_stays_with_the_fastest(runs, costs, best):
    asked = runs(lambda before: costs)
    target, drafter = pair()
    out = dflax.speculate(target, drafter, PROMPTS, BUDGET, block_size="auto", stop_token_ids=[])
    used, rounds = sizes(asked)
    tried = [4, 3, 2, 1]
    assert used == (tried if best == 1 else [*tried, best])
    assert rounds[:3] == [3, 3, 3]
    assert out.stats.block_sizes[best] == max(out.stats.rounds) - 3 * (3 if best == 1 else 4) + 3 * (best == 4)
    assert out.tokens == dflax.generate(target, PROMPTS, BUDGET, stop_token_ids=[]).tokens


def test_the_loop_follows_what_rounds_cost(runs):
    asked = runs(lambda before: FLAT if before < 28 else STEEP)
    dflax.speculate(*pair(), PROMPTS, BUDGET, block_size="auto", stop_token_ids=[])
    used, _ = sizes(asked)
    assert used[:5] == [4, 3, 2, 1, 4]  # 28 rounds: four trials, and one choice
    assert used[-1] == 1, used


def test_streaming_chooses_too(runs):
    """In calls of two rounds, for as many rounds as whole responses take between two choices."""
    target, drafter = pair()
    asked = runs(lambda before: FLAT)
    options = {"block_size": "auto", "stop_token_ids": []}
    pieces = list(dflax.stream(target, drafter, PROMPTS, BUDGET, rounds_per_call=2, **options))
    turns = sizes(asked)
    assert [rounds for _, rounds in asked if rounds][:5] == [2, 1, 2, 1, 2]
    asked.clear()
    out = dflax.speculate(target, drafter, PROMPTS, BUDGET, **options)
    assert turns[0] == sizes(asked)[0]
    for row, tokens in enumerate(out.tokens):
        assert [token for piece in pieces if piece.row == row for token in piece.tokens] == tokens
        assert [len(piece.tokens) for piece in pieces if piece.row == row][1:] == out.acceptance_lengths[row]
