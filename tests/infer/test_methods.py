"""Methods as they are written: labels, sweeps, families, and one clear line for what cannot be meant."""

import dataclasses

import pytest
from flax import nnx

from dflax import controllers
from dflax.config import ControllerConfig, FilterConfig
from dflax.errors import DflaxError
from dflax.infer.extrapolation import ConfidenceExtrapolation
from dflax.infer.methods import PLAIN, parse
from dflax.infer.policies import Credit, Prophet, Threshold
from dflax.models.controller import AcceptanceFilter, Controller


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    controller = Controller(ControllerConfig(block_length=8, layers=1, hidden_size=2), rngs=nnx.Rngs(0))
    controllers.save(folder / "controller", controller)
    controllers.save_extrapolation(folder / "controller", ConfidenceExtrapolation(observation_noise=0.5, horizon=7))
    controllers.save(folder / "filter", AcceptanceFilter(FilterConfig(8), rngs=nnx.Rngs(0)))
    return str(folder)


def labels(home, *written):
    return [method.label for method in parse(written, home)]


def test_labels_and_families(home):
    found = parse(["threshold:0.8,0.90", "plain", "threshold:0.9", "tspd@0.3+ce:z=1,2", "learn2pd", "factor"], home)
    assert [(method.label, method.family) for method in found] == [
        ("plain", "plain"),
        ("threshold:0.8", "threshold"),
        ("threshold:0.9", "threshold"),
        ("tspd@0.3+ce:z=1", "tspd+ce"),
        ("tspd@0.3+ce:z=2", "tspd+ce"),
        ("learn2pd@0.96", "learn2pd"),
        ("factor:1", "factor"),
    ]
    assert found[0] is PLAIN
    assert found[1].policy == Threshold(0.8)
    assert found[3].policy.threshold == 0.3  # pyright: ignore
    assert found[3].ahead == ConfidenceExtrapolation(observation_noise=0.5, horizon=7, z=1.0)


def test_every_combination_of_knobs(home):
    found = parse(["credit:0.8,0.9:weight=0.5,0.7:decay=0.5"], home)[1:]
    assert [method.label for method in found] == [
        f"credit:{t}:weight={w}:decay=0.5" for t in (0.8, 0.9) for w in (0.5, 0.7)
    ]
    assert found[1].policy == Credit(0.8, weight=0.7, decay=0.5)
    switched = parse(["factor:1:one_more=true", "threshold:0.9+ce:default:horizon=10:literal=true"], home)[1:]
    assert switched[0].policy.one_more is True  # pyright: ignore
    assert switched[1].label == "threshold:0.9+ce:default:horizon=10:literal=true"
    assert switched[1].family == "threshold+ce:default"
    assert switched[1].ahead == ConfidenceExtrapolation(horizon=10, literal=True)


def test_a_folder_of_its_own(home, tmp_path):
    written = f"tspd:{home}@0.4,0.6+ce"
    found = parse([written], str(tmp_path / "nothing"))[1:]
    assert [method.label for method in found] == [f"tspd:{home}@0.4+ce", f"tspd:{home}@0.6+ce"]
    assert {method.family for method in found} == {f"tspd:{home}+ce"}
    assert found[0].ahead.observation_noise == 0.5  # pyright: ignore


def test_knobs_that_stand_for_several_fields(home):
    two, half = parse(["schedule:2", "prophet:0.5"], home)[1:]
    assert two.steps(64, 32) == 32
    assert parse(["schedule:3"], home)[1].steps(64, 32) == 22
    assert PLAIN.steps(64, 32) == 64
    assert half.policy == Prophet(3.75, 2.5, 1.25)


def test_identity_tells_weights_apart(home):
    tspd = parse(["tspd"], home)[1]
    other = dataclasses.replace(tspd.policy, weights={name: leaf + 1 for name, leaf in tspd.policy.weights.items()})  # pyright: ignore
    assert tspd.identity == parse(["tspd"], home)[1].identity
    assert len({tspd.identity, dataclasses.replace(tspd, policy=other).identity, PLAIN.identity}) == 3
    assert len({method.identity for method in parse(["threshold:0.5,0.6", "schedule:2"], home)}) == 4


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("treshold:0.9", "there is no policy 'treshold'; there are plain, schedule"),
        ("threshold:abc", "threshold is 'abc'; it must be a number"),
        ("threshold:0.8,,0.9", "threshold is ''"),
        ("threshold:", "threshold is ''"),
        ("threshold:-1", "threshold of the policy is -1.0"),
        ("threshold:0.9:wait=3", "threshold has no knob 'wait'; it has threshold, budgeted"),
        ("threshold:budgeted=yes", "budgeted is 'yes'; it must be true or false"),
        ("credit:0.8:0.9", "threshold is given twice"),
        ("schedule:1.5", "tokens is '1.5'; it must be a whole number"),
        ("schedule:0", "tokens is 0; it must be at least 1"),
        ("random:2", "belongs to no knob"),
        ("plain+ce", "plain decoding takes nothing behind it"),
        ("entropy+ce:default", "a look-ahead acts by the confidence, which entropy does not read"),
        ("tspd+ce:0.9", "'0.9' belongs to no knob; write one of horizon"),
        ("tspd+ce:speed=1", "the look-ahead has no knob 'speed'"),
        ("tspd+ce:z=-1", "z of the look-ahead is -1.0"),
        ("tspd:", "comes its folder"),
        ("tspd:nowhere", "there is no model at nowhere"),
        ("tspd@0.5+CE", "threshold is '0.5"),
    ],
)
def test_what_cannot_be_meant(home, written, words):
    with pytest.raises(DflaxError) as caught:
        parse([written], home)
    assert f"method {written!r}" in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
