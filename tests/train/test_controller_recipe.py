"""`dflax train controller` from a folder and a file of prompts to folders that the policies load."""

import json
import shutil

import numpy as np
import pytest

import dflax
from dflax import cli, controllers
from dflax.errors import DflaxError
from dflax.infer.learned import TSPD, Learn2PD
from dflax.train import metrics
from dflax.train.controller_recipe import ControllerRecipe
from tests.infer.tiny import random_model, target_config

VOCAB, MASK, GEN, BLOCK = 13, 12, 16, 8
STEPS = "--{0}.steps 40 --{0}.eval-every 20 --{0}.checkpoint-every 20 --{0}.log-every 20 --{0}.learning-rate 0.01"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The command's output folder, and the arguments that made it."""
    folder = tmp_path_factory.mktemp("recipe")
    random_model(target_config("llada", vocab_size=VOCAB, head_dim=4, bidirectional=True, mask_token_id=MASK), 3).save(
        folder / "model"
    )
    rows = [{"prompt_tokens": [1 + i % 11, 1 + i * 5 % 11, 1 + i * 7 % 11]} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        "train", "controller", "--model", str(folder / "model"), "--data", str(folder / "prompts.jsonl"), "--out", str(folder / "out"),
        "--gen-length", str(GEN), "--block-length", str(BLOCK), "--batch", "8", "--own-rounds", "1",
        *STEPS.format("train").split(), *STEPS.format("filter-train").split(),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "plot", lambda *paths: None)
        assert cli.main(arguments) == 0
    return folder, arguments


def test_what_it_writes(made):
    folder, _ = made
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["prompts"] == 20
    assert result["steps_per_block"]["standard"] == BLOCK
    assert 1 <= result["steps_per_block"]["greedy"] < BLOCK
    assert result["extrapolation"]["nll_after"] < result["extrapolation"]["nll_before"]
    for name in ("controller", "controller-1"):
        assert result[name]["loss"] < result[name]["constant_loss"]
    ce = controllers.load_extrapolation(folder / "out" / "controller")
    assert ce.observation_noise == result["constants"]["observation_noise"] != 0.25


def test_what_it_writes_decodes(made):
    folder, _ = made
    model = dflax.load(folder / "model")
    prompts = [[1, 2, 3], [4, 5, 6]]
    settings = {"gen_length": GEN, "block_length": BLOCK}
    plain = dflax.denoise(model, prompts, **settings)
    ce = controllers.load_extrapolation(folder / "out" / "controller")
    policy = TSPD.load(str(folder / "out" / "controller"))
    fast = dflax.denoise(model, prompts, **settings, policy=policy, extrapolation=ce)
    assert max(fast.nfe) < min(plain.nfe)
    never = TSPD.load(str(folder / "out" / "controller"), threshold=2.0)
    assert dflax.denoise(model, prompts, **settings, policy=never, extrapolation=ce).tokens == plain.tokens
    other = Learn2PD.load(str(folder / "out" / "filter"), threshold=2.0)
    assert dflax.denoise(model, prompts, **settings, policy=other).tokens == plain.tokens
    with pytest.raises(DflaxError, match="trained for blocks of 8 tokens, but block_length is 16"):
        dflax.denoise(model, prompts, gen_length=GEN, block_length=16, policy=policy)


def test_a_second_call_finds_everything_done(made, monkeypatch):
    folder, arguments = made
    out = folder / "out"
    before = {name: (out / name / "model.safetensors").read_bytes() for name in ("controller", "filter")}
    shutil.rmtree(out / "controller")
    monkeypatch.setattr("dflax.train.controller_recipe.record_batch", None)  # the traces are there
    assert cli.main(arguments) == 0
    for name, content in before.items():
        assert (out / name / "model.safetensors").read_bytes() == content


def test_impossible_recipes(made, capsys):
    _, arguments = made
    assert cli.main([*arguments, "--gen-length", "12"]) == 2
    assert "gen_length 12 is no multiple of block_length 8" in capsys.readouterr().err
    assert cli.main([*arguments, "--block-length", "16"]) == 2
    assert "was begun with block_length = 8, now it is 16" in capsys.readouterr().err
    with pytest.raises(DflaxError, match="give prompts by data, or a number of stories"):
        ControllerRecipe(model="m")
    for wrong in ({"layers": 0}, {"hidden_size": 0}, {"features": ("colour",)}):  # before anything is recorded
        with pytest.raises(DflaxError, match=next(iter(wrong))):
            ControllerRecipe(model="m", stories=1, **wrong)
    with pytest.raises(DflaxError, match="z of the look-ahead is -1"):
        ControllerRecipe(model="m", stories=1, z=-1.0)
    assert np.isclose(ControllerRecipe(model="m", stories=1, z=1.0).look_ahead.z, 1)
