"""The small models that come with the package: they answer problems that nobody trained on, and do what their cards say."""

import numpy as np
import pytest

import dflax
from dflax import controllers, policies
from dflax.train import language, stories

PROBLEMS = [stories.generate(0, 50_000 + number, "test") for number in range(16)]
PROMPTS = [problem.prompt for problem in PROBLEMS]


def right(texts):
    return sum(problem.check(text) for problem, text in zip(PROBLEMS, texts, strict=True))


def test_the_pair():
    target, drafter = dflax.load("arith"), dflax.load("arith-dflash")
    plain = dflax.generate(target, PROMPTS, max_new_tokens=language.BUDGET)
    fast = dflax.speculate(target, drafter, PROMPTS, max_new_tokens=language.BUDGET)
    assert fast.tokens == plain.tokens
    assert right(plain.texts) >= 15
    assert np.mean([np.mean(row) for row in fast.acceptance_lengths]) > 5


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_the_diffusion_model(cache):
    """Its controller answers as rightly as plain decoding in an eighth of the passes, its filter errs more often, as its card says."""
    model = dflax.load("arith-llada")
    options = {"gen_length": 64, "block_length": 32, "cache": cache}
    look_ahead = controllers.load_extrapolation("arith-llada")
    ways = {"plain": {}, "tspd": {"policy": policies.TSPD.load("arith-llada"), "extrapolation": look_ahead}}
    ways["learn2pd"] = {"policy": policies.Learn2PD.load("arith-llada")}
    least, most = {"plain": 14, "tspd": 14, "learn2pd": 11}, {"plain": 64, "tspd": 8, "learn2pd": 10}
    for name, way in ways.items():
        if (name, cache) == ("plain", "dual"):
            continue
        out = dflax.denoise(model, PROMPTS, **options, **way)
        assert right(out.texts) >= least[name], name
        assert np.mean(out.nfe) <= most[name], name
