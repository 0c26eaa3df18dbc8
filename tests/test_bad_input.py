"""Bad input of every kind through the command: exit code 2, one clear line, nothing half-written."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflax
from dflax.cli import main
from dflax.infer.fit import check_pair
from tests.golden import GOLDENS

PAIR = GOLDENS / "dflash_generate"


@pytest.fixture
def complains(capsys, tmp_path):
    """Runs a command that must fail, and returns its one line."""

    def run(*arguments):
        before = sorted(tmp_path.rglob("*"))
        assert main([str(argument) for argument in arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        line, end = printed.err[:-1], printed.err[-1]
        assert end == "\n"
        assert "\n" not in line
        assert line.startswith("dflax: ")
        assert "Traceback" not in line
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        return line.removeprefix("dflax: ")

    return run


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(PAIR / "target", tmp_path / "model")


@pytest.fixture
def prompts(tmp_path):
    """A file of prompts as token ids."""

    def write(*rows):
        path = tmp_path / "prompts.jsonl"
        path.write_text(
            "".join((row if isinstance(row, str) else json.dumps({"prompt_tokens": row})) + "\n" for row in rows)
        )
        return path

    return write


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_no_such_model(complains):
    assert "there is no model at nonsense" in complains("generate", "nonsense", "hello")


def test_folder_without_config(complains, tmp_path):
    assert "has no config.json" in complains("inspect", tmp_path)


def test_config_that_is_not_json(complains, model):
    (model / "config.json").write_text('{"model_type": ')
    assert "config.json is not valid JSON" in complains("generate", model, "hello")


def test_missing_safetensors(complains, model):
    (model / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in complains("generate", model, "hello")


@pytest.mark.parametrize("keep", [0, 4, 1000, -8])
def test_truncated_safetensors(complains, model, keep):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors is truncated or no safetensors file" in complains("generate", model, "hello")


def test_missing_shard(complains, tmp_path):
    folder = shutil.copytree(GOLDENS / "sharded_bf16" / "model", tmp_path / "model")
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors, which is missing" in complains("generate", folder, "hello")


def test_missing_tensor_and_wrong_shape(complains, model):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((7, 48), np.float32)
    save_file(tensors, model / "model.safetensors")
    line = complains("generate", model, "hello")
    assert "missing model.norm.weight" in line
    assert "model.layers.0.mlp.up_proj.weight has shape [7, 48], the config asks for [64, 48]" in line


def test_weights_that_are_not_numbers(complains, model):
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = np.full(48, np.nan, np.float32)
    save_file(tensors, model / "model.safetensors")
    assert "not finite (NaN or infinity) in model.norm.weight" in complains("generate", model, "hello")


def test_no_gguf_file(complains, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGML")
    assert "is no GGUF file" in complains("generate", tmp_path / "model.gguf", "hello")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; dflax supports Dream, llada, llama, qwen2, qwen3, qwen3_moe"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; dflax supports 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type is 'yarn'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"logit_scale": 2.0}, "keys that dflax does not know and will not ignore: logit_scale"),
        ({"hidden_size": "48"}, "hidden_size is '48'; it must be a whole number above 0"),
        ({"num_hidden_layers": None}, "no 'num_hidden_layers'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"layer_types": 5}, "layer_types is 5; it must be a list of names"),
        ({"model_type": [1]}, "model_type is [1]; dflax supports"),
        ({"architectures": 5}, "architectures is 5; it must be a list of names"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x'; it must be an object"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"eos_token_id": "125"}, "eos_token_id is '125'; it must be a token id or a list of token ids"),
    ],
)
def test_unsupported_config(complains, model, changes, message):
    edit(model, **changes)
    assert message in complains("generate", model, "hello")


def test_empty_prompt(complains, model, prompts):
    assert "a prompt is empty" in complains("generate", model, "")
    assert "there is no prompt" in complains("generate", model)
    assert "prompt 1: the prompt is empty" in complains("generate", model, "--file", prompts([1], []))


def test_prompt_too_long(complains, model, prompts):
    edit(model, max_position_embeddings=64)
    line = complains("generate", model, "--file", prompts([1, 2], [3] * 60), "--max-new-tokens", "5")
    assert "prompt 1 has 60 tokens and a budget of 5 more; the model has 64 positions" in line


@pytest.mark.parametrize("token", [-1, 128])
def test_token_out_of_range(complains, model, prompts, token):
    line = complains("generate", model, "--file", prompts([1, token]))
    assert f"prompt 0: token id {token} of the prompt is outside the vocabulary of 128" in line


def test_text_for_a_model_without_tokenizer(complains, model):
    assert "has no tokenizer; give prompts as lists of token ids" in complains("generate", model, "hello")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a"', "prompts.jsonl:2 is not JSON"),
        ("[1, 2]", "prompts.jsonl:2 is a list; each line must be a JSON object"),
        ('{"text": "a"}', "prompts.jsonl:2: key 'prompt' is missing; the row has text"),
        ('{"messages": [{"role": "user"}]}', "prompts.jsonl:2: 'messages' needs messages with a role"),
    ],
)
def test_malformed_line_is_named(complains, model, prompts, row, message):
    assert message in complains("generate", model, "--file", prompts([1], row))


def test_missing_prompt_file(complains, model, tmp_path):
    assert "there is no file or folder" in complains("generate", model, "--file", tmp_path / "none.jsonl")
    assert "cannot read" in complains("generate", model, "--file", tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 127}, "its vocabulary has 127 tokens, the target's 128"),
        ({"num_target_layers": 7}, "made for 7 target layers, the target has 6"),
        ({"num_target_layers": "6"}, "num_target_layers is '6'; it must be a whole number above 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (
            {"rope_scaling": {"type": "linear", "factor": None}},
            "rope_scaling.factor is None; it must be a number above 0",
        ),
        ({"dflash_config": 5}, "dflash_config is 5; it must be an object"),
        (
            {"dflash_config": {"mask_token_id": "126", "target_layer_ids": [1, 2, 4]}},
            "mask_token_id '126' is outside the vocabulary of 128",
        ),
        (
            {"dflash_config": {"mask_token_id": 126, "target_layer_ids": [1, 2, 4], "kind": "dflash2"}},
            "dflash_config.kind is 'dflash2'; dflax supports dflash, dflash_fused",
        ),
        (
            {"dflash_config": {"mask_token_id": 126, "target_layer_ids": [1, 2, 4], "output_multiplier": "2"}},
            "output_multiplier is '2'; it must be a number above 0",
        ),
        (
            {"dflash_config": {"mask_token_id": 126, "target_layer_ids": [1, 2, 9]}},
            "[1, 2, 9] do not fit num_target_layers 6",
        ),
        ({"dflash_config": {"target_layer_ids": [1, 2, 4]}}, "has no 'mask_token_id'"),
        (
            {"dflash_config": {"mask_token_id": 128, "target_layer_ids": [1, 2, 4]}},
            "128 is outside the vocabulary of 128",
        ),
    ],
)
def test_wrong_drafter(complains, tmp_path, model, prompts, changes, message):
    drafter = shutil.copytree(PAIR / "drafter_fitted", tmp_path / "drafter")
    edit(drafter, **changes)
    assert message in complains("generate", model, "--drafter", drafter, "--file", prompts([1]))


def test_a_drafter_that_does_not_tell_its_target_s_depth(tmp_path, model):
    drafter = shutil.copytree(PAIR / "drafter_fitted", tmp_path / "drafter")
    edit(drafter, num_target_layers=None)
    loaded = dflax.load(drafter)
    assert loaded.config.num_target_layers is None
    check_pair(dflax.load(model), loaded)
    loaded.save(tmp_path / "again")
    assert dflax.load(tmp_path / "again").config == loaded.config


def test_target_and_drafter_mistaken_for_each_other(complains, model, prompts):
    file, drafter = prompts([1]), PAIR / "drafter_fitted"
    assert "is a drafter and cannot be decoded by itself" in complains("generate", drafter, "--file", file)
    assert "is no drafter" in complains("generate", model, "--drafter", model, "--file", file)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--block-size", "9"], "was trained with 8"),
        (["--block-size", "0"], "block_size is 0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-k", "0"], "top_k"),
        (["--top-p", "1.5"], "top_p"),
        (["--batch-size", "0"], "batch-size is 0"),
    ],
)
def test_impossible_settings(complains, model, prompts, flags, message):
    assert message in complains("generate", model, "--drafter", PAIR / "drafter_fitted", "--file", prompts([1]), *flags)


@pytest.mark.parametrize("flags", [["--block-size", "4"], ["--drafts", "sampled"], ["--allow-larger-blocks"]])
def test_settings_of_a_drafter_without_drafter(complains, model, prompts, flags):
    line = complains("generate", model, "--file", prompts([1]), *flags)
    assert f"{flags[0]} is for blocks that a drafter proposes; give --drafter" in line


def test_unwritable_folder(complains, model, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert "cannot write the checkpoint" in complains("export", model, tmp_path / "file" / "out")
    assert "cannot write the checkpoint" in complains("export", model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "not a folder"


def test_unknown_flag(model, capsys):
    assert main(["generate", str(model), "hello", "--temprature", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--temperature" in printed.err
