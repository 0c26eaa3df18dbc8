"""What the compiled denoising loop costs beside its arithmetic: compilations, transfers, copies; and what is refused before it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dflax
from dflax import policies
from dflax.config import ControllerConfig, FilterConfig
from dflax.errors import DflaxError
from dflax.infer.denoise import program
from dflax.infer.diffuse import prepare
from dflax.models.controller import build
from tests.infer.tiny import pair
from tests.infer.tiny_diffusion import MASK, diffusion_model

PROMPTS = [[1, 2, 3], [4], [5, 3, 1, 0]]


def test_a_second_call_compiles_nothing():
    """Other prompts, lengths, thresholds, sampling values, end tokens, steps, guidance; and other weights of the same shapes."""
    model, other = diffusion_model(), diffusion_model(seed=8)
    ask = lambda model, prompts, **settings: (
        dflax.denoise(model, prompts, 12, 4, cache="dual", **settings).stats.compiled
    )
    ahead = dflax.ConfidenceExtrapolation
    first = {
        "policy": policies.Threshold(0.9),
        "extrapolation": ahead(),
        "end_of_text": dflax.EndOfText((2,)),
        "cfg_scale": 0.5,
        "temperature": 0.3,
    }
    assert ask(model, PROMPTS, **first) > 0
    second = {
        "policy": policies.Threshold(0.4), "extrapolation": ahead(z=1.0), "end_of_text": dflax.EndOfText((1, 3), floor=0.2),
        "cfg_scale": [0.0, 1.0, 2.0], "temperature": 0.8, "top_k": 3, "top_p": 0.9, "seed": 5, "steps": 6,
    }  # fmt: skip
    assert ask(model, [[1] * 17, [2] * 3, [0]], **second) == 0
    assert ask(other, PROMPTS, **second) == 0
    assert ask(model, PROMPTS, **first | {"policy": policies.Frechet()}) > 0  # another policy: the count does count


@pytest.mark.parametrize(("kind", "config"), [(policies.TSPD, ControllerConfig), (policies.Learn2PD, FilterConfig)])
def test_another_controller_compiles_nothing(kind, config):
    """Other weights, another gate, other constants of the look-ahead."""
    model = diffusion_model()

    def ask(seed, gate, **constants):
        policy = kind.of(build(config(block_length=4), nnx.Rngs(seed)), gate)
        ahead = dflax.ConfidenceExtrapolation(**constants)
        return dflax.denoise(model, PROMPTS, 12, 4, policy=policy, cache="dual", extrapolation=ahead).stats.compiled

    assert ask(0, 0.5) > 0
    others = {"coverage": 0.3, "z": 1, "min_confidence": 0.7, "level_noise": 0.1, "observation_noise": 0.5}
    assert ask(1, 0.9, min_observations=2, **others) == 0


def test_no_implicit_transfer_in_a_whole_call():
    model = diffusion_model()
    settings = {
        "policy": policies.Threshold(0.4),
        "cache": dflax.Cache("prefix", 3, suffix_lengths=1),
        "temperature": 0.5,
    }
    with jax.transfer_guard("disallow"):
        dflax.denoise(model, PROMPTS, 12, 4, **settings)
        list(dflax.stream(model, PROMPTS, 12, 4, **settings))
        with pytest.raises(Exception, match=r"[Dd]isallowed"):  # the guard is alive
            jnp.add(model.leaves[0], np.float32(1.0)).block_until_ready()


def test_the_state_is_updated_in_place_and_the_canvas_has_no_logits():
    """All of the donated state is aliased, and no array of the program has the shape [B, S, V]."""
    model = diffusion_model()
    prompts = [[1] * 400] * 2
    end = dflax.EndOfText((2,), truncate=True, anywhere=True)
    session = prepare(model, prompts, 512, policy=policies.Threshold(0.9), cache="dual", end_of_text=end)
    lowered = program(model.config).run.lower(
        model.leaves, session.state, session.request, jax.device_put(np.int32(1)), plan=session.plan
    )
    memory = lowered.compile().memory_analysis()
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(session.state))
    assert memory.alias_size_in_bytes >= state
    text = lowered.as_text()
    assert "<2x32x7xf32>" in text  # the block's
    assert "<2x64x7xf32>" in text  # a chunk's of the question where the text ends
    assert "2x960x7x" not in text


def test_passes_per_call_are_counted():
    model = diffusion_model()
    session = prepare(model, PROMPTS, 12, 4, cache="dual")
    assert session.advance(3).nfe.tolist() == [3] * 3
    written = session.advance(2)  # in the middle of the second block
    assert written.passes.tolist() == [2, 3]
    assert session.advance().passes.tolist() == [3, 9]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gen_length": 10}, "gen_length 10 is no multiple of block_length 4"),
        ({"steps": 7}, "steps 7 is no multiple of the 3 blocks"),
        ({"gen_length": 0}, "gen_length is 0"),
        ({"steps": True}, "steps is True"),
        ({"cache": "whole"}, "cache is 'whole'"),
        ({"cache": dflax.Cache("dual", refresh_every=0)}, "refresh_every is 0"),
        ({"cache": dflax.Cache("none", refresh_every=4)}, "with cache none every pass is a full one"),
        ({"cache": dflax.Cache("none", count_empty_pass=True)}, "count_empty_pass is about short passes"),
        ({"cache": dflax.Cache("dual", refresh_every=1, unconditional_first=True)}, "again and again; refresh later"),
        ({"cache": dflax.Cache("dual", unconditional_first=True)}, "shifted logits"),
        ({"policy": policies.Threshold(-1.0)}, "threshold of the policy is -1.0"),
        ({"extrapolation": dflax.ConfidenceExtrapolation(horizon=0)}, "horizon"),
        ({"extrapolation": dflax.ConfidenceExtrapolation(min_observations=2.5)}, "counts steps, a whole number"),
        (
            {"policy": policies.Schedule("entropy"), "extrapolation": dflax.ConfidenceExtrapolation()},
            "a look-ahead acts by the confidence",
        ),
        (
            {"policy": policies.Schedule("random"), "end_of_text": dflax.EndOfText((1,), delay=True)},
            "delay=True.* acts by the confidence",
        ),
        ({"end_of_text": dflax.EndOfText()}, "names no end token"),
        ({"end_of_text": dflax.EndOfText((1,), floor=2)}, "floor of the end of text is 2"),
        ({"end_of_text": dflax.EndOfText((9,))}, "stop id 9 is not in the vocabulary"),
        ({"cfg_scale": [1.0]}, "cfg_scale has 1 values for 3 prompts"),
        ({"cfg_scale": -1}, "cfg_scale is -1"),
        ({"temperature": -1}, "temperature is -1"),
        ({"prompts": [[1], [], [2]]}, "prompt 1: the prompt is empty"),
        ({"prompts": [[1, MASK]]}, "prompt 0 holds the mask token 6"),
        ({"prompts": [[1], [MASK, MASK]]}, "prompt 1 holds the mask token 6"),
        ({"prompts": [[7]]}, "token id 7"),
        ({"prompts": [[1] * 1020]}, "the model has 1024 positions"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(settings, words):
    asked = {"prompts": PROMPTS, "gen_length": 12, "block_length": 4} | settings
    with pytest.raises((DflaxError, TypeError), match=words) as caught:
        dflax.denoise(diffusion_model(), **asked)
    assert "\n" not in str(caught.value)


def test_models_of_the_other_kind_are_refused():
    target, drafter = pair()
    with pytest.raises(DflaxError, match=r"no diffusion language model; use dflax\.generate"):
        dflax.denoise(target, PROMPTS, 12, 4)
    with pytest.raises(DflaxError, match=r"use dflax\.denoise"):
        dflax.generate(diffusion_model(), PROMPTS)
    with pytest.raises(DflaxError, match=r"use dflax\.denoise"):
        dflax.speculate(diffusion_model(), drafter, PROMPTS)


def test_a_mask_token_that_nobody_knows():
    model = diffusion_model()
    unknown = dataclasses.replace(model, config=dataclasses.replace(model.config, mask_token_id=None))
    with pytest.raises(DflaxError, match="has no mask_token_id"):
        dflax.denoise(unknown, PROMPTS, 12, 4)
