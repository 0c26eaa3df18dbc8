"""The ablations of adaptive denoising in miniature: what is trained, what is measured, what is written, and how a killed run goes on."""

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx

from dflax import cli, configs
from dflax.config import CONTROLLER_FEATURES, ControllerConfig, FilterConfig
from dflax.errors import DflaxError
from dflax.infer.extrapolation import ConfidenceExtrapolation
from dflax.models import params
from dflax.models.controller import AcceptanceFilter, build
from dflax.train import controller_ablations, controller_recipe, metrics
from dflax.train.controller_ablations import ControllerAblationConfig
from dflax.train.controller_recipe import ControllerRecipe
from dflax.train.controller_variants import NETS, TABLES, VARIANTS, changed, hidden_size, network_size
from dflax.train.trainer import TrainConfig
from tests.infer.tiny_diffusion import counting_model

GEN, BLOCK, PROMPTS = 16, 8, [[5, 6, 7], [8, 9], [10, 5, 14, 12], [6, 6], [11]]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablations")
    counting_model(folder / "model", PROMPTS, GEN, BLOCK, right=3)
    rows = [{"prompt_tokens": [5 + i % 10, 5 + i * 7 % 10]} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = TrainConfig(steps=20, learning_rate=0.01, eval_every=10, checkpoint_every=20)
    recipe = ControllerRecipe(
        model=str(folder / "model"), data=(str(folder / "prompts.jsonl"),), gen_length=GEN, block_length=BLOCK, batch=10,
        layers=1, hidden_size=2, train=steps, fit=False,
    )  # fmt: skip
    return ControllerAblationConfig(
        data=(str(folder / "model" / "problems.jsonl"),), batch=2, coverages=(0.4, 0.6), gen_lengths=(1024,),
        out=str(folder / "out"), only=("base", "coverage", "lengths"), controller=recipe,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ran(config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "plot", lambda *paths: None)
        return controller_ablations.run(config)


def test_what_is_written(config, ran):
    text = ran.read_text()
    data = json.loads((ran.parent / "ablations.json").read_text())
    rows = {row["method"]: row for row in data["results"]}
    assert list(rows) == [
        "plain", "base@0.5", "base+ce@0.5", "base+ce:coverage=0.4@0.5", "base+ce:coverage=0.6@0.5",
    ]  # fmt: skip
    assert (rows["plain"]["accuracy"], rows["plain"]["passes"], rows["plain"]["problems"]) == (0.6, GEN, 5)
    assert all(row["passes"] <= GEN for row in rows.values())
    # 0.6 is the recipe's coverage, so that row repeats the base's.
    same = ("accuracy", "difference", "passes", "tokens_per_pass")
    assert [rows["base+ce:coverage=0.6@0.5"][name] for name in same] == [rows["base+ce@0.5"][name] for name in same]
    assert set(data["runs"]) == {"base"}
    assert data["runs"]["base"]["parameters"] == 4 * 2 * (6 + 2 + 1)
    assert data["runs"]["base"]["settings"]["share"] == 1
    cells = next(line for line in text.splitlines() if line.startswith("| without CE: TSPD alone")).split("|")
    alone = rows["base@0.5"]
    wanted = [
        f"{100 * alone['accuracy']:.1f} ± {100 * alone['accuracy_error']:.1f}",
        f"{alone['passes']:.4g}",
        f"{alone['fewer_passes']:.4g}",
    ]
    assert [cells[i].strip() for i in (2, 3, 5, 6)] == ["0.5", *wanted]
    assert cells[-2].strip() == "30.3, 4.4x, 79.5"
    assert "## CE's coverage" in text
    assert "## CE's horizon" not in text  # nothing of it was measured
    assert "no problem's prompt leaves room" in text
    assert "Not trained yet: without-confidence" in text
    assert (ran.parent / "ablations.png").stat().st_size > 0


def test_rows_that_are_not_finished_say_so(config, ran, tmp_path):
    calls = [json.loads(line) for line in (ran.parent / "calls" / "calls.jsonl").read_text().splitlines()]
    part = dataclasses.replace(config, out=str(tmp_path))
    controller_ablations.publish(part, calls[:-1], ConfidenceExtrapolation(), None)
    marked = [line for line in (tmp_path / "ablations.md").read_text().splitlines() if "so far" in line]
    assert len(marked) == 1
    assert marked[0].startswith("| coverage 0.6 (4 problems so far) ")
    assert "so far" not in ran.read_text()


def test_a_second_call_finds_everything_done(config, ran, monkeypatch):
    before = ran.read_text()
    monkeypatch.setattr(controller_recipe, "learn", None)
    monkeypatch.setattr("dflax.infer.diffusion_bench._warm", None)
    controller_ablations.run(config)
    assert ran.read_text() == before


def test_a_killed_run_goes_on(config, ran, monkeypatch):
    """A training's result and the last lines of the calls are gone: only they are made again, and come out the same."""
    calls = ran.parent / "calls" / "calls.jsonl"
    lines = calls.read_bytes().splitlines(keepends=True)
    calls.write_bytes(b"".join(lines[:-7]) + lines[-7][:30])
    (ran.parent / "base" / "result.json").unlink()
    monkeypatch.setattr(metrics, "plot", lambda *paths: None)
    controller_ablations.run(config)
    again = calls.read_bytes().splitlines(keepends=True)
    assert again[:-7] == lines[:-7]
    told = lambda line: {k: v for k, v in json.loads(line).items() if k not in ("seconds", "session", "commit")}
    assert sorted(map(str, map(told, again))) == sorted(map(str, map(told, lines)))


def test_other_settings_in_the_same_folder_are_refused(config, ran):
    other = dataclasses.replace(config.controller, smoothing=0.5)
    with pytest.raises(DflaxError, match=r"result\.json was made with other settings \(smoothing\)"):
        controller_ablations.run(dataclasses.replace(config, controller=other))
    with pytest.raises(DflaxError, match="was begun with batch = 2, now it is 3"):
        controller_ablations.run(dataclasses.replace(config, batch=3))


def test_impossible_settings(config, tmp_path, capsys):
    for changes, words in [
        ({"only": ("nonsense",)}, "only names unknown runs .nonsense.; runs are policies, base"),
        ({"gates": ()}, "gates is empty"),
        ({"batch": 0}, "batch is 0"),
        ({"gen_lengths": (12,)}, "gen_length 12 is no multiple of block_length 8"),
        ({"gen_lengths": (GEN,)}, "gen_lengths names 16, at which everything is measured anyway"),
    ]:
        with pytest.raises(DflaxError, match=words):
            dataclasses.replace(config, **changes)
    unanswered = tmp_path / "unanswered.jsonl"
    unanswered.write_text('{"prompt_tokens": [5]}\n')
    arguments = [
        "train",
        "controller-ablations",
        "--controller.model",
        config.controller.model,
        "--controller.stories",
        "0",
    ]
    arguments += [
        "--controller.data",
        *config.controller.data,
        "--controller.gen-length",
        "16",
        "--controller.block-length",
        "8",
    ]
    arguments += ["--controller.batch", "10", "--out", config.out, "--data", str(unanswered)]
    assert cli.main(arguments) == 2
    assert "some of the data have no answer that can be checked" in capsys.readouterr().err


# --- variants

POLICIES = ("threshold", "factor", "frechet", "learn2pd", "credit")


def test_every_table_names_runs_that_exist():
    known = {"plain"} | {name + look for name in POLICIES for look in ("", "+ce")}
    known |= {name + look for name in VARIANTS for look in ("", "+ce")}
    named = {family for _, _, rows in TABLES for _, family, _ in rows}
    assert named <= known
    assert {name for name in VARIANTS if name not in named} == set()


def test_variants_change_one_thing():
    base = ControllerRecipe(model="m", stories=1)
    asked = {name: changed(base, name, "out") for name in VARIANTS}
    assert asked["base"] == dataclasses.replace(base, out="out")
    assert asked["without-entropy"].features == tuple(name for name in CONTROLLER_FEATURES if name != "entropy")
    assert (asked["mlp-4"].kind, asked["mlp-4"].layers, asked["mlp-4"].hidden_size) == ("mlp", 4, 24)
    assert asked["traces-mixed"] == dataclasses.replace(base, rule="mixed", out="out")
    assert asked["straight-through"].objective.straight_through
    assert asked["own-rounds"].own_rounds == 2
    shipped = configs.build(ControllerRecipe, configs.load("arith-llada-controller"), "preset")
    for name in ("own_rounds", "neighbours", "slots", "objective"):
        assert getattr(asked["ours"], name) == getattr(shipped, name)
    distinct = [name for name, variant in VARIANTS.items() if variant.share == 1]
    assert len({str(asked[name]) for name in distinct}) == len(distinct)


def test_sizes_are_the_published_ones():
    """Hidden sizes 8, 12, 17, 25 give 1K, 2K, 4K, 8K parameters: 1,024, 2,112, 4,012, 8,300."""
    assert [hidden_size("lstm", 2, 1000 * k, 6) for k in (1, 2, 4, 8)] == [8, 12, 17, 25]
    assert [network_size("lstm", 2, size, 6) for size in (8, 12, 17, 25)] == [1024, 2112, 4012, 8300]
    for kind, layers in NETS:
        config = ControllerConfig(8, kind, layers, hidden_size(kind, layers, 2000, 6))
        leaves = params.flatten(params.abstract(lambda rngs, config=config: build(config, rngs)))
        count = sum(int(np.prod(leaf.shape)) for name, leaf in leaves.items() if name.startswith("layers."))
        assert network_size(kind, layers, config.hidden_size, 6) == count
        assert 1800 < count < 2200


def test_policies_stand_alone_and_behind_the_look_ahead(config, monkeypatch):
    judge = AcceptanceFilter(FilterConfig(BLOCK), rngs=nnx.Rngs(0))
    monkeypatch.setattr(controller_recipe, "learn_filter", lambda recipe, traces: (judge, {}))
    ce = ConfidenceExtrapolation(z=1.5)
    found = controller_ablations._policies(config, config.controller, {}, ce)
    assert [(method.label, method.ahead) for method in found] == [
        (name + look, ahead) for name in POLICIES for look, ahead in (("", None), ("+ce", ce))
    ]
    assert found[0].policy.threshold == found[-1].policy.threshold == 0.9  # pyright: ignore
