"""`dflax inspect`: what is told of the reference checkpoints, and of ones that would not load."""

import json
import shutil

import pytest

from dflax.cli import main
from dflax.inspection import inspect, render
from tests.golden import GOLDENS

TARGET, DRAFTER = GOLDENS / "dflash_generate" / "target", GOLDENS / "dflash_generate" / "drafter_fitted"


def lines(report):
    return "\n".join(f"{title}\n" + "\n".join(found) for title, found in render(report).items())


@pytest.fixture
def edited(tmp_path):
    """A copy of a checkpoint with other values in config.json."""

    def copy(source, **changes):
        folder = tmp_path / "copy"
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copy


def test_a_target():
    report = inspect(str(TARGET))
    assert report["problems"] == []
    assert report["kind"] == "target"
    model = report["model"]
    assert (model["family"], model["layers"], model["vocabulary"], model["tied head"]) == ("qwen3", 6, 128, "no")
    assert report["parameters"] == sum(report["stored"].values())
    assert list(report["stored"]) == ["F32"]
    assert report["memory"]["weights"] == {"float32": 4 * report["parameters"], "bfloat16": 2 * report["parameters"]}
    # 2 x 6 layers x 2 heads x 16 x 1024 tokens
    assert report["memory"]["cache, per 1024 tokens of a row"]["bfloat16"] == 2 * 6 * 2 * 16 * 1024 * 2
    assert report["text"] == {"tokenizer": None, "chat_template": False, "stop_tokens": {"125": None}}
    assert {"rope_theta", "head_dim", "rms_norm_eps", "model_type"} <= set(report["keys"]["used"])
    assert {"attention_dropout", "initializer_range", "sliding_window"} <= set(report["keys"]["ignored"])
    assert not report["keys"]["unread"]
    assert report["fits"] is None


def test_a_drafter():
    report = inspect(str(DRAFTER))
    assert report["problems"] == []
    assert report["kind"] == "drafter"
    model = report["model"]
    assert (model["block size"], model["tapped target layers"], model["mask token"]) == (8, [1, 2, 4], 126)
    assert report["fits"] == {"vocabulary": 128, "hidden size": 48, "layers": 6}
    assert {"dflash_config.mask_token_id", "block_size", "num_target_layers"} <= set(report["keys"]["used"])
    assert "eos_token_id" in report["keys"]["ignored"]


def test_shards_experts_and_windows():
    sharded = inspect(str(GOLDENS / "sharded_bf16" / "model"))
    assert list(sharded["stored"]) == ["BF16"]
    assert sharded["parameters"] == sharded["stored"]["BF16"]
    experts = inspect(str(GOLDENS / "target_qwen3_moe" / "model"))
    assert experts["model"]["experts"] == "8 of width 32, 2 per token (renormalised), layers 0-2"
    assert experts["problems"] == []
    sliding = inspect(str(GOLDENS / "dflash_drafter_sliding" / "drafter_default"))
    assert "tokens in layers" in sliding["model"]["windows"]


def test_a_refused_key_is_told_with_all_the_rest(edited, capsys):
    folder = edited(TARGET, logit_scale=2.0)
    report = inspect(str(folder))
    assert report["keys"]["unread"] == {"logit_scale": 2.0}
    assert "logit_scale" in report["problems"][0]
    assert report["text"]["stop_tokens"] == {"125": None}
    assert main(["inspect", str(folder)]) == 2
    printed = capsys.readouterr()
    assert "logit_scale" in printed.out
    assert printed.err.count("\n") == 1


def test_diffusion_models():
    told = {name: inspect(str(GOLDENS / name / "model")) for name in ("llada", "dream", "llada_moe")}
    assert not any(report["problems"] for report in told.values())
    model = {name: report["model"] for name, report in told.items()}
    assert all(m["attention"].startswith("both ways") for m in model.values())
    assert [model[name]["mask token"] for name in ("llada", "dream")] == [126, 118]
    assert "mask_token_id" in model["llada_moe"]["mask token"]
    assert model["dream"]["logits"] == "row i - 1 predicts token i"
    assert "attention" not in inspect(str(TARGET))["model"]


def test_misshapen_tensors(edited):
    report = inspect(str(edited(TARGET, intermediate_size=96)))
    assert report["tensors"] is None
    assert "the config asks for [96, 48]" in report["problems"][0]


def test_does_the_drafter_fit(edited, capsys):
    assert main(["inspect", str(TARGET), "--drafter", str(DRAFTER)]) == 0
    assert f"{DRAFTER} fits" in capsys.readouterr().out
    assert main(["inspect", str(TARGET), "--drafter", str(edited(DRAFTER, num_target_layers=7))]) == 2
    assert "made for 7 target layers, the target has 6" in capsys.readouterr().err


def test_json(capsys):
    assert main(["inspect", str(DRAFTER), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == inspect(str(DRAFTER))


def test_report_is_complete_and_plain_where_it_is_not_a_terminal(capsys):
    assert main(["inspect", str(TARGET)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert [line.strip() for line in lines(inspect(str(TARGET))).splitlines()] == [
        line.strip() for line in out.splitlines()
    ]
