"""`dflax compile` where no compiler for another chip is needed: what is asked, what is counted, what is refused."""

import dataclasses
import importlib.util
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from dflax import abstract, cli, configs
from dflax.config import ModelConfig, MoEConfig
from dflax.errors import DflaxError
from dflax.infer import compile_command as C
from dflax.infer import compile_table, roofline
from dflax.kernels_pallas import chips
from dflax.models import params
from dflax.sharding import MESH_AXES, make_mesh
from tests.infer.tiny import drafter_config, random_model, target_config


@pytest.fixture
def here(monkeypatch):
    """This machine's CPU in place of a chip."""
    chip = dataclasses.replace(chips.CHIPS["h100"], memory=2.0**20)
    monkeypatch.setattr(C, "topology", lambda name: chips.Topology(name, chip, tuple(jax.devices()[:1])))


@pytest.fixture
def preset(monkeypatch, tmp_path):
    """A preset of a tiny pair."""
    folder = tmp_path / "target"
    random_model(target_config("qwen3"), 0).save(folder)
    values = {
        "target": str(folder), "block_size": 4, "layers": 1, "taps": 1, "mask_token_id": 3, "length": 32, "rows_per_step": 2,
        "objective": {"anchors": 4}, "train": {"steps": 2},
    }  # fmt: skip
    monkeypatch.setattr(configs, "load", lambda name: values)
    return values


def compiled(what, out=""):
    return C.run(C.CompileConfig("tiny", "h100", what=what, context=128, dtype="float32", out=str(out)))


@pytest.mark.parametrize("what", ["speculate", "train"])
def test_a_report_of_what_the_compiler_says(here, preset, what, capsys, tmp_path):
    out = tmp_path / "report.json"
    report = compiled(what, out)
    target = abstract.config_of(preset["target"])
    assert isinstance(target, ModelConfig)
    weights = sum(leaf.nbytes for leaf in _arrays(target))
    assert report.argument_bytes > weights
    assert 0 < report.alias_bytes <= report.argument_bytes  # the state is donated
    assert report.flops > 0
    assert report.collectives == {}
    assert report.replicated == []
    printed = capsys.readouterr().out
    assert f"{report.step_flops:.3g} over all chips" in printed
    assert "fits" in printed
    assert ("predicted speed-up" in printed) == (report.speedup is not None) == (what == "speculate")
    assert '"fits"' in out.read_text()


def test_what_a_mesh_does_not_cut_is_named_once():
    thrice = np.array(jax.devices()[:1] * 3).reshape(1, 1, 3)
    target = target_config("qwen3")
    assert target.num_kv_heads % 3
    lines = C._not_cut(Mesh(thrice, MESH_AXES), {"one": target, "other": target})
    assert "one and other: vocab of size 7 is replicated: tensor = 3 does not divide it" in lines
    assert any(line.startswith("one and other: kv_heads of size 2 is replicated: tensor = 3") for line in lines)
    assert C._not_cut(make_mesh(""), {"target": target}) == []


def test_a_page_of_several_programs(here, preset, monkeypatch, tmp_path):
    cases = tuple({"preset": "tiny", "topology": "h100", "what": what} for what in ("speculate", "train"))
    monkeypatch.setattr(compile_table, "CASES", cases)
    page, out = tmp_path / "compile.md", tmp_path / "reports"
    config = C.CompileConfig(table=str(page), out=str(out), context=128, dtype="float32")
    C.run(config)
    text = page.read_text()
    assert text.count(": yes |") == 2
    assert "| speculate tiny | h100, one device |" in text
    record = json.loads((out / "tiny-train-h100.json").read_text())
    assert record["report"]["alias_bytes"] > 0
    monkeypatch.setattr(C, "compiled", lambda config: pytest.fail("compiled again"))
    C.run(config)
    assert page.read_text() == text
    with pytest.raises(pytest.fail.Exception):
        C.run(dataclasses.replace(config, context=256))  # other settings


def test_a_draft_vocabulary_is_compiled_too(here, preset):
    target = abstract.config_of(preset["target"])
    whole = compiled("speculate")
    preset["draft_vocabulary"] = 5
    part = compiled("speculate")
    assert part.argument_bytes - whole.argument_bytes == 5 * 4 + 5 * target.hidden_size * 4  # ids, rows of the head
    assert part.flops < whole.flops
    assert compiled("train").flops > 0


def _arrays(config):
    made = abstract.parameters(config, make_mesh(""), "float32")
    return [np.zeros(leaf.shape, leaf.dtype) for leaf in made.values()]


def test_a_denoising_loop(here, monkeypatch, tmp_path, capsys):
    config = target_config("llada", bidirectional=True, mask_token_id=6, head_dim=4)
    random_model(config, 0).save(tmp_path / "model")
    monkeypatch.setattr(configs, "load", lambda name: {"model": str(tmp_path / "model")})
    report = C.run(C.CompileConfig("tiny", "h100", context=32, gen_length=16, block_length=8, dtype="float32"))
    cache = 2 * config.num_layers * config.num_kv_heads * 32 * config.head_dim * 4
    assert cache <= report.alias_bytes < cache + 2**14
    assert report.plain_seconds is None
    printed = capsys.readouterr().out
    assert "DOES NOT FIT" not in printed
    assert report.deciding is not None
    weights = 2 * 8 * (4 * 12 * (6 + 12) + 4 * 12 * (12 + 12) + 12)  # 2 FLOPs a weight in each of 8 slots
    assert weights < report.deciding[0] < 2 * weights  # features, gates, entropy and the filter beside
    assert "TSPD and CE add" in printed


def test_the_training_step_of_a_diffusion_model(here, monkeypatch, tmp_path):
    config = target_config("llada", bidirectional=True, mask_token_id=6, head_dim=4)
    random_model(config, 0).save(tmp_path / "model")
    values = {
        "model": str(tmp_path / "model"), "length": 32, "gen_length": 0, "rows_per_step": 2, "train": {"steps": 2},
        "objective": {"next_token_share": 0.5},
    }  # fmt: skip
    monkeypatch.setattr(configs, "load", lambda name: values)
    report = C.run(C.CompileConfig("tiny", "h100", what="train"))
    masters = sum(4 * leaf.size for leaf in _arrays(config))
    assert report.alias_bytes >= 3 * masters  # masters and two moments are donated
    assert report.settings["rows"] == 2


def test_abstract_leaves_are_those_of_the_model(tmp_path):
    model = random_model(target_config("qwen3"), 0)
    leaves = abstract.leaves(model.config, make_mesh(""), "float32")
    assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in model.leaves]
    assert params.flatten(model.module).keys() == abstract.parameters(model.config, make_mesh(""), "float32").keys()


def test_least_work_by_hand():
    config = dataclasses.replace(
        target_config("qwen3"), hidden_size=10, num_heads=2, num_kv_heads=1, head_dim=4, num_layers=3, intermediate_size=7,
        vocab_size=11,
    )  # fmt: skip
    layers = 3 * ((2 * 2 + 2 * 1) * 4 * 10 + 3 * 10 * 7)
    assert roofline.layer_parameters(config) == (layers, layers)
    work = roofline.forward(config, rows=2, block=5, live=100, width=2, head_rows=1, vocabulary=11)
    kept = 2 * 3 * 1 * 4 * 100 * 2
    assert work.bytes == (layers + 110 + kept) * 2
    assert work.flops == 2 * layers * 10 + 2 * 110 * 2 + 4 * 3 * 2 * 4 * 105 * 10
    chip = dataclasses.replace(chips.CHIPS["h100"], flops=1e6, bandwidth=1e3, link=10.0)
    windowed = dataclasses.replace(config, windows=(None, 30, 300))
    assert roofline.forward(windowed, 2, 5, 100, 2, 1, 11).caches == ((1, 2 * 1 * 4 * (100 + 30 + 100) * 2 * 2),)
    ways = roofline.Ways(weights=2, rows=2, heads=2)
    assert roofline.Work(5e3, ((4, 8e3),), 2e6).seconds(chip, ways, 20.0) == 5e3 / 1e3 / 2 + 8e3 / 1e3 / 4
    assert roofline.Work(5e3, (), 2e6).seconds(chip, ways, 40.0) == 4.0
    assert roofline.Work(1e3, (), 9e6).seconds(chip, roofline.Ways()) == 9.0


def test_a_cache_whose_heads_are_not_cut_is_read_whole():
    chip = dataclasses.replace(chips.CHIPS["h100"], flops=1e6, bandwidth=1e3, link=10.0)
    work = roofline.Work(0.0, ((8, 4e3),), 0.0) + roofline.Work(0.0, ((2, 6e3),), 0.0)
    assert work.bytes == 1e4
    assert work.seconds(chip, roofline.Ways(weights=4, rows=2, heads=4)) == 4.0 / 8 + 6.0 / 2


def test_least_work_of_diffusion_training_by_hand():
    config = dataclasses.replace(target_config("qwen3"), vocab_size=11)
    layers = roofline.layer_parameters(config)[0]
    head = 11 * config.hidden_size
    work = roofline.diffusion_training(config, rows=3, length=20, answer_columns=8)
    assert work.flops == 6 * layers * 60 + 6 * head * 24
    assert work.bytes == 32 * (layers + 2 * head)


def test_experts_are_read_as_often_as_tokens_meet_them():
    moe = MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=5, norm_topk_prob=True)
    config = dataclasses.replace(target_config("qwen3"), moe=moe, num_layers=1, moe_layers=(True,))
    dense = (config.num_heads + config.num_kv_heads) * 2 * config.head_dim * config.hidden_size
    expert = 3 * config.hidden_size * 5
    one, many = roofline.layer_parameters(config, 1), roofline.layer_parameters(config, 1000)
    assert one[0] == pytest.approx(dense + 2 * expert)
    assert many[0] == pytest.approx(dense + 8 * expert)
    assert one[1] == many[1] == dense + 2 * expert


def test_a_drafter_adds_to_a_round_and_a_bound_speed_up_cannot_exceed_the_acceptance():
    target = target_config("qwen3")
    drafter = drafter_config(target)
    plain = roofline.speculative_round(target, None, 1, 1, 64, 2)
    both = roofline.speculative_round(target, drafter, 1, drafter.block_size, 64, 2)
    assert both.bytes > plain.bytes
    assert both.flops > plain.flops * drafter.block_size
    ways = roofline.Ways(4, 1, 4)
    assert all(plain.seconds(chip, ways) < both.seconds(chip, ways) for chip in chips.CHIPS.values())


def test_training_by_hand():
    target = target_config("qwen3")
    drafter = dataclasses.replace(drafter_config(target), block_size=4, draft_vocab_size=None)
    work = roofline.drafter_training(target, drafter, rows=3, length=20, anchors=5, width=2)
    read, own = roofline.layer_parameters(target)[0], roofline.layer_parameters(drafter)[0]
    fuse = len(drafter.target_layer_ids) * drafter.hidden_size**2
    context = 2 * drafter.num_layers * drafter.num_kv_heads * drafter.head_dim * drafter.hidden_size
    head, slots = target.vocab_size * target.hidden_size, 3 * 5 * 4
    assert work.flops == 60 * (2 * read + 4 * fuse + 6 * context) + slots * (6 * own + 4 * head)
    assert work.bytes == 2 * (read + head) + 12 * (own + fuse)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["qwen3-8b-dflash", "--topology", "v9:2x2"], "there is no chip 'v9'"),
        (["qwen3-8b-dflash", "--topology", "v5e:two"], "should read CHIP:SHAPE"),
        (["qwen3-8b-dflash", "--what", "denoise"], "is for speculate or train, not denoise"),
        (["arith"], "names neither a target nor a model"),
        (["no-such-preset"], "there is no preset"),
        ([], "name a preset, or give --table"),
        (["qwen3-8b-dflash", "--context", "0"], "context is 0"),
    ],
)
def test_what_is_refused(arguments, says, capsys):
    assert cli.main(["compile", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--block-length", "48"], "gen_length 256 is no multiple of block_length 48"),
        (["--context", "256"], "leaves no room for a prompt in a context of 256"),
    ],
)
def test_answers_that_do_not_fit_are_refused(here, arguments, says, capsys):
    assert cli.main(["compile", "llada-8b-sft", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_either_plugin_for_cuda_will_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: True if module == "jax_cuda12_plugin" else None)
    monkeypatch.setattr(chips.topologies, "get_topology_desc", lambda **_: SimpleNamespace(devices=["a", "b"]))
    assert chips.topology("h100:2").devices == ("a", "b")
    with pytest.raises(DflaxError, match="aot-tpu"):
        chips.topology("v5e:2x2")


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x2", "aot-tpu"), ("h100", "aot-gpu")])
def test_a_missing_compiler_is_told_with_its_extra(name, extra, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert cli.main(["compile", "qwen3-8b-dflash", "--topology", name]) == 2
    assert f"dflax[{extra}]" in capsys.readouterr().err
