"""The loop against recorded runs of the published samplers: tokens, the pass that wrote each of them, and the number of passes."""

from functools import cache

import numpy as np
import pytest

import dflax
from dflax import policies
from tests.golden import load_case


@cache
def once(name, **options):
    """A case and its model, loaded once."""
    case = load_case(name)
    return case, dflax.load(case.folder / "model", **options)


def runs(name):
    return {run["name"]: run for run in load_case(name).info["runs"]}


def answers(case, run, prompts):
    """Recorded tokens behind the prompts."""
    ids = np.atleast_2d(case.expected[f"{run}_output_ids"])
    return ids[:, len(prompts[0]) :].tolist()


def quick(names, *chosen):
    """Every run is a program to compile: the chosen ones are for every day, the others are slow."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


LLADA, FAST, DREAM, MOE = runs("llada"), runs("llada_fast"), runs("dream"), runs("llada_moe")


def test_one_run_with_a_dual_cache():
    check_fast(*once("llada_fast"), "fast_dual_threshold_0.7")


def test_one_run_of_a_shifted_model():
    check_dream(*once("dream"), "full_entropy_s7_b2")


@pytest.mark.parametrize("name", quick(LLADA, "gen0", "gen3"))
def test_the_sampler_of_llada(name):
    case, model = once("llada")
    run = LLADA[name]
    prompts = case.expected["prompts"][: run["batch"]].tolist()
    settings = {key: run[key] for key in ("gen_length", "block_length", "steps", "cfg_scale")}
    out = dflax.denoise(model, prompts, **settings)
    assert out.tokens == answers(case, name, prompts)
    np.testing.assert_array_equal(out.commit_steps, case.expected[f"{name}_commit_step"])
    assert out.nfe == [run["forward_calls"]] * run["batch"]


def test_rows_of_different_lengths():
    case, model = once("llada")
    real = case.expected["pad_attention_mask"].astype(bool)
    prompts = [ids[mask].tolist() for ids, mask in zip(case.expected["pad_prompts"], real, strict=True)]
    settings = {key: LLADA["gen0"][key] for key in ("gen_length", "block_length", "steps")}
    out = dflax.denoise(model, prompts, **settings)
    assert [prompt + answer for prompt, answer in zip(prompts, out.tokens, strict=True)] == [
        case.expected["pad_output_row0"].tolist(),
        case.expected["pad_output_row1"].tolist(),
    ]


RULES = {
    "threshold": policies.Threshold,
    "schedule": lambda _: policies.Schedule(),
    "factor": lambda factor: policies.Factor(factor, one_more=True),
    "frechet": policies.Frechet,
}


@pytest.mark.parametrize("name", quick(FAST, *(name for name in FAST if "threshold" in name)))
def test_parallel_decoding_with_every_cache(name):
    check_fast(*once("llada_fast"), name)


def check_fast(case, model, name):
    """Code called fast counts an empty pass where the full one completes a block; that called plus does not."""
    run = FAST[name]
    prompts = case.expected["prompt"].tolist()
    # One length of the suffix compiles in a fraction of the time of four.
    lengths = 2 if run["rule"] == "threshold" else 4 if run["rule"] == "schedule" else 1
    empty = run["code"] == "fast" and run["cache"] != "none"
    kept = dflax.Cache(run["cache"], suffix_lengths=lengths, count_empty_pass=empty)
    policy = RULES[run["rule"]](run["value"])
    out = dflax.denoise(model, prompts, 32, 8, run["steps_argument"], policy, kept)
    assert out.tokens == answers(case, name, prompts)
    np.testing.assert_array_equal(out.commit_steps[0], case.expected[f"{name}_commit_step"])
    assert out.nfe == [run["forward_calls"]]
    if not kept.count_empty_pass:
        assert out.stats.full_passes + out.stats.short_passes == run["nfe"]


@pytest.mark.parametrize(
    "name", quick([n for n in DREAM if n.startswith("full")], "full_entropy_s7_b2", "full_confidence_threshold_s8_b1")
)
def test_the_samplers_of_dream(name):
    check_dream(*once("dream"), name)


def check_dream(case, model, name):
    run = DREAM[name]
    prompts = case.expected["prompts"][: run["batch"]].tolist()
    policy = policies.Threshold(run["threshold"], budgeted=True) if run["threshold"] else policies.Schedule(run["alg"])
    out = dflax.denoise(model, prompts, 24, 24, run["steps"], policy)
    assert out.tokens == answers(case, name, prompts)
    np.testing.assert_array_equal(out.commit_steps, case.expected[f"{name}_commit_step"])
    if run["alg"] != "confidence_threshold" and run["batch"] == 1:
        counts = [out.commit_steps[0].count(step) for step in range(run["steps"])]
        assert counts == case.expected[f"{name}_counts"].tolist()
    assert out.nfe == [run["forward_calls"]] * run["batch"]


@pytest.mark.parametrize("name", quick([n for n in DREAM if not n.startswith("full")], "dual_threshold_bl8_s24_0.5"))
def test_the_cached_loops_of_dream_as_published(name):
    """The full pass writes a block's first token unconditionally, and short passes do not see the column before the block."""
    case, model = once("dream")
    run = DREAM[name]
    prompts = case.expected["prompts"][:1].tolist()
    policy = policies.Threshold(run["threshold"]) if run["threshold"] else policies.Schedule(run["alg"])
    kept = dflax.Cache("dual" if run["dual"] else "prefix", suffix_lengths=1, unconditional_first=True)
    out = dflax.denoise(model, prompts, 24, run["block_length"], run["steps"], policy, kept)
    assert out.tokens == answers(case, name, prompts)
    assert out.nfe == [run["forward_calls"]]


@pytest.mark.parametrize("name", quick(MOE, "gen0"))
def test_the_sampler_of_llada_moe(name):
    case, model = once("llada_moe", mask_token_id=109)
    run = MOE[name]
    prompts = case.expected["prompt"].tolist()
    out = dflax.denoise(model, prompts, run["gen_length"], run["block_length"], run["steps"])
    assert out.tokens == answers(case, name, prompts)


def test_truncation_at_the_most_probable_end_as_published():
    """Learn2PD's loop without its filter: one token per step, and a cut after the most confident end token anywhere."""
    case, model = once("learn2pd")
    run = runs("learn2pd")["vanilla_eot"]
    prompts = case.expected["prompt"].tolist()
    end = dflax.EndOfText((1,), stop=False, truncate=True, committed=False, floor=0.0, in_order=False, anywhere=True)
    out = dflax.denoise(model, prompts, 96, 32, end_of_text=end)
    want = answers(case, "vanilla_eot", prompts)[0]
    assert out.tokens[0] == want + [1] * (96 - len(want))
    assert out.nfe == [run["forward_calls"]]
    assert out.commit_steps[0][len(want) :] == [-1] * (96 - len(want))
