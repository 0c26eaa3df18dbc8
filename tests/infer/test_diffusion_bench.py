"""The bench of denoising: figures against hand-counted calls, and whole runs on a model of a few thousand random weights."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import dflax
from dflax import cli, configs, controllers
from dflax.config import ControllerConfig
from dflax.errors import DflaxError
from dflax.infer import diffusion_bench, diffusion_summary, report, tasks
from dflax.infer.diffusion_bench import DiffusionBenchConfig
from dflax.infer.methods import parse
from dflax.infer.policies import Threshold
from dflax.models.controller import Controller
from dflax.train import stories
from dflax.train.controller_recipe import ControllerRecipe
from tests.infer.tiny_diffusion import counting_model

# --- figures


def call(method, cache="none", batch=0, session=1, seconds=1.0, correct=(1, 0), nfe=(8, 8), counted=(4, 4), repeat=0):
    return {
        "model": "m", "gen_length": 4, "method": method, "family": method.split(":")[0], "cache": cache, "batch": batch,
        "repeat": repeat, "session": session, "seconds": seconds, "share": 1.0, "passes": max(nfe),
        "set": ["s", "s"], "index": [2 * batch, 2 * batch + 1],
        "correct": list(correct), "nfe": list(nfe), "counted": list(counted), "commit_steps": [[0, 1, 2, -1], [2, 1, 0, -1]],
    }  # fmt: skip


CALLS = [
    call("plain", seconds=4.0),
    call("plain", batch=1, seconds=8.0, correct=(1, 1)),
    call("fast:1", seconds=1.0, nfe=(2, 4)),
    call("fast:1", batch=1, seconds=1.0, correct=(0, 1), nfe=(2, 2), counted=(4, 2)),
    call("fast:2", seconds=2.0, nfe=(4, 4)),
    call("fast:2", batch=1, seconds=2.0, correct=(1, 1), nfe=(4, 4)),
]


def test_time_per_pass_is_of_the_passes_that_the_batch_made():
    """Rows that wait for each other take part in fewer passes than their batch; of a batch filled up only its own share counts."""
    waiting = call("plain", seconds=4.0, nfe=(8, 8)) | {"passes": 16}
    part = call("plain", batch=1, seconds=1.0, nfe=(8, 8)) | {"passes": 8, "share": 0.5}
    row = diffusion_summary.summarise([waiting, part]).rows[0]
    assert row.seconds_per_pass == pytest.approx(5 / (16 + 4))


def test_figures_of_four_problems():
    found = diffusion_summary.summarise(CALLS, margin=0.1, reference="fast")
    plain, fast, _ = found.rows
    assert [row.method for row in found.rows] == ["plain", "fast:1", "fast:2"]
    assert (plain.problems, plain.accuracy, plain.passes, plain.fewer_passes) == (4, 0.75, 8, 1)
    assert plain.accuracy_error == pytest.approx(0.25)  # deviations 1/4 and 3/4, n - 1 = 3, sqrt(n) = 2
    assert (plain.difference.value, plain.difference.low, plain.speedup) == (0, 0, 1)
    assert plain.tokens_per_second == pytest.approx(16 / 12)
    assert fast.accuracy == 0.5
    assert fast.difference.value == -0.25  # differences 0 0 -1 0: deviation 1/2
    assert fast.difference.low == pytest.approx(-0.25 - 1.96 * 0.25)
    assert fast.difference.high == pytest.approx(-0.25 + 1.96 * 0.25)
    assert fast.passes == 2.5
    assert fast.fewer_passes == pytest.approx(8 / 2.5)
    assert fast.tokens_per_pass == pytest.approx(14 / 10)
    assert (plain.seconds_per_pass, fast.seconds_per_pass) == pytest.approx(
        (12 / 16, 2 / 6)
    )  # 4 and 2 passes in a second each
    assert fast.tokens_per_second == pytest.approx(14 / 2)
    assert fast.speedup == pytest.approx(7 / (16 / 12))
    assert fast.speedup_median == pytest.approx((8 / 1 / (8 / 4) + 6 / 1 / (8 / 8)) / 2)
    # At 0.65 between (2.5, 0.5) and (4, 0.75)
    ((setting, cache), (equal,)) = next(iter(found.equal.items()))
    assert (setting.model, setting.gen_length, cache) == ("m", 4, "none")
    assert equal.passes.value == pytest.approx(2.5 + 1.5 * 0.15 / 0.25)
    assert (equal.below, equal.above, equal.points, equal.ratio.value) == ("fast:1", "fast:2", 2, 1)
    table = found.table(markdown=True)
    assert "| fast:1 | none | 4 | 50.0 ± 28.9 | -25.00 [-74.00, +24.00] |" in re.sub(" +", " ", table)
    assert "read off" in table


def test_speed_is_compared_within_a_process_only():
    other_day = [dict(row, session=2) if row["method"] == "fast:2" else row for row in CALLS]
    rows = diffusion_summary.summarise(other_day).rows
    assert rows[1].speedup == pytest.approx(5.25)
    assert math.isnan(rows[2].speedup)
    assert rows[2].fewer_passes == 2
    half = [dict(row, session=2) if (row["method"], row["batch"]) == ("fast:2", 1) else row for row in CALLS]
    assert diffusion_summary.summarise(half).rows[2].speedup == pytest.approx(2)  # 8 tokens in 2 seconds, against 4


def test_repeats_count_by_their_median():
    again = [call("fast:1", seconds=s, nfe=(2, 4), repeat=i) for i, s in enumerate((1.0, 100.0, 4.0))]
    row = diffusion_summary.summarise([CALLS[0], *again]).rows[1]
    assert row.speedup == pytest.approx(1.0)
    assert (row.problems, row.passes) == (2, 3)


def test_problems_that_cannot_be_checked():
    unknown = [dict(row, correct=[None, None]) for row in CALLS]
    found = diffusion_summary.summarise(unknown)
    assert not found.equal
    assert [row.checked for row in found.rows] == [0, 0, 0]
    assert found.rows[1].fewer_passes == pytest.approx(3.2)
    assert "nan" not in found.table()


def test_maps_show_the_cheapest_that_is_good_enough(tmp_path):
    found = diffusion_summary.summarise(CALLS, margin=0.1)
    assert diffusion_summary.worth_a_map(found.rows, 0.65) == ["plain", "fast:2"]
    assert diffusion_summary.mean_steps([[0, 1, -1, -1], [2, 1, 3, -1]])[:3] == [2, 2, 4]
    assert math.isnan(diffusion_summary.mean_steps([[0, -1], [0, -1]])[1])
    found.plot(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "accuracy-none.png", "commits-first-none.png", "commits-mean-none.png"
    ]  # fmt: skip


def test_pictures_compare_with_plain_decoding_without_cache(tmp_path, monkeypatch):
    dual = [dict(row, cache="dual", correct=[0, 0]) for row in CALLS]
    targets = {}
    monkeypatch.setattr(
        report, "plot_accuracy", lambda path, curves, target, title: targets.update({path.name: target})
    )
    diffusion_summary.summarise(CALLS + dual, margin=0.1).plot(tmp_path, 2, maps=["none"])
    assert targets == pytest.approx({"accuracy-none.png": 65, "accuracy-dual.png": 65})


def test_a_cache_whose_run_was_cut_short_has_no_curve():
    dual = [dict(row, cache="dual") for row in CALLS if (row["method"], row["batch"]) != ("plain", 1)]
    found = diffusion_summary.summarise(CALLS + dual)
    assert [cache for _, cache in found.equal] == ["none"]
    assert next(row for row in found.rows if (row.method, row.cache) == ("plain", "dual")).problems == 2


# --- problems


def test_answers_that_are_numbers():
    assert tasks.known_number("Ann has 3 + 4 = 7.\n#### 1,234") == 1234
    assert tasks.known_number("-2.5") == -2.5
    assert tasks.known_number(18) == 18
    assert tasks.known_number("x = 3") is None
    assert tasks.known_number("#### none") is None
    for text, number in [("so 7-3 is 4.", 4), ("$1,000.", 1000), ("\\boxed{-3}", -3), ("no", None), ("v2", None)]:
        assert tasks.final_number(text) == number


def test_stories_are_checked_by_their_value():
    (task, *_) = found = tasks.load_stories(stories.tokenizer(), 3)
    story = stories.generate(0, 0, "test")
    assert [task.index for task in found] == [0, 1, 2]
    assert task.check(story.answer_text)
    assert not task.check(story.answer_text[:-1] + "x")
    room = len(task.tokens) + 64
    assert tasks.with_room(found, 64, room)[0] == task
    assert task not in tasks.with_room(found, 65, room)
    with pytest.raises(DflaxError, match="no tokenizer to read stories"):
        tasks.load_stories(None, 1)


# --- whole runs

GEN, BLOCK, PROMPTS = 16, 8, [[5, 6, 7], [8, 9], [10, 5, 14, 12], [6, 6], [11]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random model, its controller and constants; and problems of which plain decoding solves the first three."""
    folder = tmp_path_factory.mktemp("model")
    counting_model(folder, PROMPTS, GEN, BLOCK, right=3)
    save_controller(folder, BLOCK)
    return folder


def save_controller(folder, block_length, seed=0):
    controller = Controller(ControllerConfig(block_length, layers=1, hidden_size=2), rngs=nnx.Rngs(seed))
    controllers.save(folder / "controller", controller)
    controllers.save_extrapolation(folder / "controller", dflax.ConfidenceExtrapolation(min_observations=1))


@pytest.fixture(scope="module")
def config(model, tmp_path_factory):
    return DiffusionBenchConfig(
        models=(str(model),), methods=("threshold:0.2,0.3", "tspd@0.45+ce"), data=(str(model / "problems.jsonl"),),
        gen_lengths=(GEN,), block_length=BLOCK, batch=2, reference="threshold", out=str(tmp_path_factory.mktemp("out")),
    )  # fmt: skip


def calls_of(config):
    return [json.loads(line) for line in (Path(config.out) / "calls.jsonl").read_text().splitlines()]


def timeless(calls):
    return [{name: value for name, value in row.items() if name not in ("seconds", "session")} for row in calls]


@pytest.fixture(scope="module")
def ran(config):
    return diffusion_bench.run(config)


def test_a_whole_run(config, model, ran):
    plain = ran.rows[0]
    assert (plain.method, plain.passes, plain.accuracy, plain.checked) == ("plain", GEN, 0.6, 5)
    calls = calls_of(config)
    assert [row["method"] for row in calls[:8]] == [
        "plain", "threshold:0.2", "threshold:0.3", "tspd@0.45+ce", "tspd@0.45+ce", "threshold:0.3", "threshold:0.2", "plain"
    ]  # fmt: skip
    assert all(len(row["nfe"]) == len(row["tokens"]) == (1 if row["batch"] == 2 else 2) for row in calls)
    loose = [row for row in calls if row["method"] == "threshold:0.2"]
    alone = dflax.denoise(dflax.load(model), PROMPTS, GEN, BLOCK, policy=Threshold(0.2))
    joined = lambda name: [value for row in sorted(loose, key=lambda row: row["batch"]) for value in row[name]]
    assert joined("tokens") == alone.tokens
    assert joined("nfe") == alone.nfe
    assert joined("commit_steps") == alone.commit_steps
    assert joined("counted") == [[*tokens, 2].index(2) for tokens in alone.tokens]
    row = next(row for row in ran.rows if row.method == "threshold:0.2")
    assert row.passes == np.mean(alone.nfe) < GEN
    assert row.fewer_passes == pytest.approx(GEN / np.mean(alone.nfe))
    assert row.speedup > 0
    assert next(row for row in ran.rows if row.family == "tspd+ce").passes < GEN
    out = Path(config.out)
    data = json.loads((out / "bench.json").read_text())
    assert data["results"][0]["difference"] == {"value": 0, "low": 0, "high": 0}
    assert {one["family"] for one in data["equal_accuracy"]["policies"]} == {"threshold", "tspd+ce"}
    assert {"accuracy-none.png", "commits-mean-none.png", "commits-first-none.png"} <= {p.name for p in out.iterdir()}
    assert "threshold:0.3" in (out / "bench.md").read_text()


def test_a_killed_run_goes_on_and_a_folder_grows(config, ran, monkeypatch, capsys):
    """Cut in the middle of a line: what is whole stays, the rest is measured again. A cache and a method more: only they are."""
    path = Path(config.out) / "calls.jsonl"
    before = calls_of(config)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:10]) + lines[10][:40])
    diffusion_bench.run(config)
    assert path.read_bytes().splitlines(keepends=True)[:10] == lines[:10]
    assert timeless(calls_of(config)) == timeless(before)
    more = dataclasses.replace(config, methods=("threshold:0.2,0.25",), maps=("threshold:0.25",))
    found = diffusion_bench.run(more)
    assert len(calls_of(config)) == 12 + 3
    assert math.isnan(next(row for row in found.rows if row.method == "threshold:0.25").speedup)
    assert "threshold:0.25" in capsys.readouterr().out
    cached = diffusion_bench.run(dataclasses.replace(config, methods=(), caches=("dual",)))
    assert len(calls_of(config)) == 12 + 3 + 3
    assert [(row.method, row.cache, row.passes) for row in cached.rows[:2]] == [
        ("plain", "none", GEN),
        ("plain", "dual", GEN),
    ]
    assert (Path(config.out) / "accuracy-dual.png").exists()
    with pytest.raises(DflaxError, match="maps names nothing, which are not measured"):
        diffusion_bench.run(dataclasses.replace(config, maps=("nothing",)))
    monkeypatch.setattr(diffusion_bench, "_warm", None)  # everything is there
    diffusion_bench.run(more)


def test_another_experiment_in_the_same_folder_is_refused(config, ran, model, tmp_path):
    with pytest.raises(DflaxError, match="was begun with batch = 2, now it is 3"):
        diffusion_bench.run(dataclasses.replace(config, batch=3))
    with pytest.raises(DflaxError, match="calls of plain that were made with other weights, constants or problems"):
        diffusion_bench.run(dataclasses.replace(config, limit=4))
    other = tmp_path / "home"
    controllers.save(
        other / "controller", Controller(ControllerConfig(BLOCK, layers=1, hidden_size=2), rngs=nnx.Rngs(1))
    )
    controllers.save_extrapolation(other / "controller", dflax.ConfidenceExtrapolation())
    with pytest.raises(DflaxError, match=r"calls of tspd@0\.45"):
        diffusion_bench.run(dataclasses.replace(config, controllers=(str(other),)))
    save_controller(other, BLOCK, seed=1)
    with pytest.raises(DflaxError, match=r"calls of tspd@0\.45"):
        diffusion_bench.run(dataclasses.replace(config, controllers=(str(other),)))
    save_controller(other, 4)
    with pytest.raises(
        DflaxError, match="on problem 0 of problems and those after it: the controller was trained for blocks of 4"
    ):
        diffusion_bench.run(
            dataclasses.replace(config, controllers=(str(other),), methods=("tspd",), out=str(tmp_path / "new"))
        )
    with pytest.raises(DflaxError, match="maps names threshold:0, which are not measured"):
        diffusion_bench.run(dataclasses.replace(config, maps=("threshold:0",), out=str(tmp_path / "unmeasured")))
    assert not (tmp_path / "unmeasured" / "calls.jsonl").read_text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": ()}, "models is empty"),
        ({"controllers": ("a", "b")}, "controllers names 2 folders for 1 models"),
        ({"data": (), "stories": 0}, "nothing to measure on"),
        ({"limit": 0}, "limit is 0"),
        ({"margin": -1.0}, "margin is -1.0"),
        ({"gen_lengths": (12,)}, "gen_length 12 is no multiple of block_length 8"),
        ({"batch": 0}, "batch is 0"),
    ],
)
def test_impossible_settings(config, changes, words):
    with pytest.raises(DflaxError, match=words):
        dataclasses.replace(config, **changes)


@pytest.mark.parametrize("name", ["arith-llada", "llada-8b", "dream-7b", "llada-moe"])
def test_presets_are_whole(name):
    preset = configs.build(diffusion_bench.DiffusionBenchConfig, configs.load(f"{name}-bench"), name)
    given = {} if name == "arith-llada" else {"data": ["prompts.jsonl"]}  # what else a user has to name
    trained = configs.build(ControllerRecipe, configs.load(f"{name}-controller") | given, name)
    assert preset.models == (trained.model,)
    assert preset.block_length == trained.block_length
    assert trained.gen_length in preset.gen_lengths
    if preset.controllers:
        assert preset.controllers == (trained.out,)
    plain = [method for method in preset.methods if not method.startswith(("tspd", "learn2pd")) and "+ce" not in method]
    assert len(parse(plain, name)) > len(plain)  # all are known, and plain decoding is with them


def test_the_command(config, ran, model, tmp_path, capsys):
    """Beside `dflax bench`, whose flags stay; a bad method is one line."""
    arguments = ["bench", "diffusion", "--models", str(model), "--out", str(tmp_path / "out")]
    assert cli.main([*arguments, "--methods", "treshold:0.9"]) == 2
    assert "there is no policy 'treshold'" in capsys.readouterr().err
    assert cli.main(["bench", "--target", str(model), "--limit", "0"]) == 2
    assert capsys.readouterr().err == "dflax: limit is 0; it must be at least 1\n"
    assert cli.main(["bench", "nonsense"]) == 2
    assert "there is no command 'bench nonsense'" in capsys.readouterr().err
    assert cli.main(["bench", "--help"]) == 0
    assert "dflax bench diffusion" in capsys.readouterr().out
