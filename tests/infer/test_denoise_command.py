"""`dflax denoise`: JSON lines for many prompts, text for one, one line for what cannot be."""

import json

import pytest
from flax import nnx

from dflax import controllers, policies
from dflax.cli import main
from dflax.config import ControllerConfig, FilterConfig
from dflax.errors import DflaxError
from dflax.infer.policy_names import build_policy
from dflax.models.controller import build
from tests.golden import load_case

CASE = load_case("llada")
MODEL = str(CASE.folder / "model")
ASK = ["--gen-length", "32", "--block-length", "8", "--steps", "16", "--policy", "schedule"]  # the run gen0


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_tokens": ids}) + "\n" for ids in CASE.expected["prompts"].tolist()))
    return str(path)


def test_a_file_is_answered_in_json_lines(prompts, capsys):
    assert main(["denoise", MODEL, "--file", prompts, *ASK]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == [0, 1]
    assert [line["tokens"] for line in lines] == CASE.expected["gen0_output_ids"][:, 10:].tolist()
    assert [line["commit_steps"] for line in lines] == CASE.expected["gen0_commit_step"].tolist()
    assert [line["nfe"] for line in lines] == [16, 16]


@pytest.fixture
def refused(capsys):
    """Runs a command that must fail, and returns its one line."""

    def run(*arguments):
        assert main(["denoise", *map(str, arguments)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        return printed.err

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gen-length", "30"], "gen_length 30 is no multiple of block_length 8"),
        (["--steps", "18"], "steps 18 is no multiple of the 4 blocks"),
        (["--steps", "0"], "steps is 0"),
        (["--policy", "schedule", "--value", "3"], "policy schedule has no number to tune"),
        (["--policy", "tspd"], "policy tspd needs --controller"),
        (["--policy", "threshold", "--controller", "x"], "policy threshold is not learned"),
        (["--policy", "tspd", "--controller", "/nowhere"], "/nowhere"),
        (["--mask-token-id", "5"], "config.json says 126"),
        (["--batch-size", "0"], "batch-size is 0"),
    ],
)
def test_what_is_refused(prompts, refused, arguments, words):
    assert words in refused(MODEL, "--file", prompts, *ASK, *arguments)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[1], []], "prompt 1: the prompt is empty"),
        ([[126, 126]], "prompt 0 holds the mask token 126"),
        ([[1], [1, 126]], "prompt 1 holds the mask token 126"),
        ([], "there is no prompt"),
    ],
)
def test_prompts_that_are_refused(tmp_path, refused, rows, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_tokens": ids}) + "\n" for ids in rows))
    assert words in refused(MODEL, "--file", path, *ASK)


@pytest.mark.parametrize("command", ["denoise", "generate"])
def test_an_empty_text_is_refused(command, capsys):
    """Though the tokenizer would make a begin token of it."""
    assert main([command, "arith-llada", " "]) == 2
    assert capsys.readouterr().err == "dflax: a prompt is empty; a model needs at least one token to continue\n"


def test_a_mask_token_that_nobody_knows_is_refused(prompts, refused):
    assert "has no mask_token_id" in refused(load_case("llada_moe").folder / "model", "--file", prompts, *ASK)


@pytest.mark.parametrize(
    ("policy", "config"), [("tspd", ControllerConfig(block_length=4)), ("learn2pd", FilterConfig(4))]
)
def test_a_controller_of_another_block_length_is_refused(tmp_path, prompts, refused, policy, config):
    controllers.save(tmp_path, build(config, nnx.Rngs(0)))
    line = refused(MODEL, "--file", prompts, *ASK, "--policy", policy, "--controller", tmp_path)
    assert "trained for blocks of 4 tokens, but block_length is 8" in line


def test_policies_by_name():
    assert build_policy("threshold", 0.7) == policies.Threshold(0.7)
    assert build_policy("frechet") == policies.Frechet(0.25)
    assert build_policy("entropy", 0.5) == policies.Schedule("entropy", alg_temp=0.5)
    with pytest.raises(DflaxError, match="no number"):
        build_policy("origin", 1.0)
