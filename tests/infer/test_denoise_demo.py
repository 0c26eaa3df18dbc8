"""`dflax demo --diffusion` with random weights in place of the shipped ones: what is drawn, what is counted, what is said."""

import io
import re

import pytest
from flax import nnx
from rich.console import Console

import dflax
from dflax import cli, controllers, model
from dflax.config import ControllerConfig
from dflax.infer import denoise_demo
from dflax.infer.demo import DemoConfig, run
from dflax.infer.denoise_command import MASK
from dflax.infer.extrapolation import ConfidenceExtrapolation
from dflax.models.controller import build
from dflax.train import stories
from tests.infer.tiny import random_model, target_config

BLOCK = denoise_demo.BLOCK_LENGTH


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder as the shipped one: a model that writes stories' words at random, and a controller."""
    folder = tmp_path_factory.mktemp("arith-llada")
    words = stories.tokenizer()
    config = target_config(
        "llada", vocab_size=len(words), bidirectional=True, mask_token_id=words.mask_token_id,
        eos_token_ids=(words.eos_token_id,), max_positions=128, head_dim=4,
    )  # fmt: skip
    random_model(config, 1, tokenizer=words).save(folder)
    controllers.save(folder / "controller", build(ControllerConfig(BLOCK), nnx.Rngs(0)))
    controllers.save_extrapolation(folder / "controller", ConfidenceExtrapolation())
    return folder


@pytest.fixture
def installed(home, monkeypatch):
    monkeypatch.setitem(model.BUILT_IN, denoise_demo.MODEL, lambda: home)
    monkeypatch.setattr(denoise_demo, "PACE", 0.0)


def test_a_problem_of_ours(installed):
    out = io.StringIO()
    result = run(DemoConfig(diffusion=True, seed=5), Console(file=out, width=100))
    printed = out.getvalue()
    problem = stories.generate(0, 5, "test")
    assert problem.prompt in printed.replace("\n", " ")
    plain, adaptive, cached = result.outputs
    assert plain.nfe == [denoise_demo.GEN_LENGTH]
    assert adaptive.nfe[0] <= plain.nfe[0]
    for way, output in zip(result.ways, (plain, adaptive, cached), strict=True):
        assert output.tokens == dflax.denoise(dflax.load(denoise_demo.MODEL), [problem.prompt], **way.options).tokens
        assert output.stats.compiled == 0  # the first round only warms up
        assert re.search(rf"{re.escape(way.name)}\s+{output.nfe[0]}\s", printed)
    right = problem.check(plain.texts[0])
    assert f"(wrong: {problem.value})" in printed or right
    assert MASK not in printed  # where it is not a terminal only the end is printed


def test_masks_turn_into_text_on_a_terminal(installed):
    out = io.StringIO()
    console = Console(file=out, width=100, height=40, force_terminal=True, color_system=None)
    loaded, ways = dflax.load(denoise_demo.MODEL), denoise_demo.default_ways()
    written = denoise_demo.show(console, loaded, "Q: Ann has 34 pens.", ways, 0.0)
    counts = [int(n) for n in re.findall(r"(\d+) forward passes", out.getvalue())]
    assert counts[:2] == [1, 1]
    slower = [max(pair) for pair in zip(counts[::2], counts[1::2], strict=True)]  # a shorter panel's line comes first
    assert slower[-1] == denoise_demo.GEN_LENGTH
    assert sorted(slower) == slower
    assert MASK in out.getvalue()
    assert MASK not in "".join(written)


def test_a_question_of_the_reader_has_no_right_answer(installed):
    loaded, ways = dflax.load(denoise_demo.MODEL), denoise_demo.default_ways()[:1]
    lines = denoise_demo.race(loaded, "Q: Ann has 34 pens.", ways, 1).lines()
    assert "right" not in lines
    assert "wrong" not in lines


def test_what_cannot_be_shown(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(model.BUILT_IN, denoise_demo.MODEL, lambda: tmp_path / "arith-llada")
    assert cli.main(["demo", "--diffusion"]) == 2
    assert "'arith-llada' is not in this installation" in capsys.readouterr().err
    assert cli.main(["demo", "--diffusion", "--pair", "tiny"]) == 2
    assert "pair is 'tiny', which means nothing to --diffusion" in capsys.readouterr().err
    assert cli.main(["demo", "--repeats", "0"]) == 2
    assert "repeats is 0; it must be at least 1" in capsys.readouterr().err
