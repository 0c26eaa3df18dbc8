"""`dflax bench kernels`: the least work of its calls by hand, its ways against exact results, and a whole run in a toy size."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from dflax import cli
from dflax.infer import kernel_bench as K
from dflax.infer import kernel_cases, round_times, stopwatch
from dflax.infer.kernel_cases import Case
from tests.infer.tiny import drafter_config, target_config


def test_least_work_by_hand():
    decode = Case("decode", 2, 100, 3, heads=8, kv_heads=2, head_dim=16)
    assert decode.bytes == 2 * (
        2 * 2 * 16 * (100 + 3) * 2 + 2 * 8 * 16 * 3 * 2
    )  # rows, keys and values, queries and output
    assert decode.flops == 2 * 4 * 8 * 16 * 3 * (100 + 3)
    tree = dataclasses.replace(decode, kind="tree", block=7)
    assert tree.flops == 2 * 4 * 8 * 16 * (7 * 100 + 1 + 2 * 2 + 4 * 3)  # a node sees its ancestors and itself
    train = Case("train", 1, 10, 2, anchors=5, heads=8, kv_heads=2, head_dim=16)
    assert train.lengths().tolist() == [[0, 2, 4, 6, 8]]
    assert train.flops == 14 * 8 * 16 * (2 * 20 + 5 * 4)


def test_layers_are_more_than_a_chip_keeps():
    small = Case("decode", 1, 8192, 1)
    assert small.context_bytes == 2**25
    assert small.layers == 4
    assert dataclasses.replace(small, context=1024).layers == 16
    assert dataclasses.replace(small, batch=64).layers == 1


def test_every_call_has_as_many_turns(monkeypatch):
    """By a clock that only calls move; a slow turn is not the median."""
    clock, calls = [0.0], {"a": 0, "b": 0}
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: clock[0])

    def call(name, seconds):
        calls[name] += 1
        clock[0] += seconds * (20 if calls[name] == 4 else 1)

    found = stopwatch.seconds({"a": lambda: call("a", 1.0), "b": lambda: call("b", 3.0)}, 3, 0.0)
    assert calls == {"a": 5, "b": 5}  # to compile, to see how long it takes, three turns
    assert found == {"a": 1.0, "b": 3.0}
    assert stopwatch.seconds({"a": lambda: call("a", 1.0)}, 1, 2.5) == {"a": 1.0}
    assert calls["a"] == 5 + 2 + 3  # a turn takes 2.5 s at least


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "kernels"
    return K.run(K.KernelBenchConfig(batches=(1,), dtype="float32", repeats=2, out=str(out))), out


def test_a_toy_run(run):
    result, out = run
    assert [timing.case.kind for timing in result.timings[::3]] == ["decode", "decode", "tree", "train"]
    assert all(timing.seconds > 0 for timing in result.timings), result.left_out()
    assert result.ceilings["bytes"] > 1e8
    assert {name: len(points) for name, points in result.curves().items()} == {"T = 1": 1, "T = 4": 1}
    assert (out / "kernels.png").stat().st_size > 1000
    text = (out / "kernels.md").read_text()
    assert "| decode: batch 1, context 128, T 4 " in text
    assert "Not measured" not in text
    assert len(json.loads((out / "kernels.json").read_text())["timings"]) == 12


def test_all_ways_give_what_float64_gives(run):
    numerics = run[0].numerics
    assert [list(call["block_attention"]) for call in numerics.values()] == [
        ["out"], ["out"], ["out", "q", "k_ctx", "v_ctx", "k_blk", "v_blk"],
    ]  # fmt: skip
    for call in numerics.values():
        assert len(call) == 3
        assert all(error < 2e-6 for way in call.values() for error in way.values())


def test_what_no_time_was_left_for_is_named(run, monkeypatch):
    monkeypatch.setattr(K, "_time", lambda *_: pytest.fail("measured"))
    result = K.run(
        K.KernelBenchConfig(("tree",), batches=(1,), dtype="float32", seconds=-1.0, repeats=1, out=str(run[1]))
    )
    assert result.left_out()[0] == "tree: batch 1, context 128, T 7 by block_attention: no time was left"
    assert "block_attention: no time was left" in (run[1] / "kernels.md").read_text()


def test_a_way_that_fails_is_named_and_the_others_are_timed(monkeypatch):
    case = Case("tree", 1, 128, 7, heads=4, kv_heads=2, head_dim=16, dtype="float32", most_layers=2)
    ways = {"block_attention": kernel_cases.op, "other": lambda *_: 1 / 0}
    monkeypatch.setattr(kernel_cases, "ways", lambda platform: ways)
    programs = dict.fromkeys(ways, jax.jit(lambda *_: np.float32(0)))
    broken = K.Future()
    broken.set_exception(RuntimeError("no\nroom"))
    fine = K.Future()
    fine.set_result(programs["block_attention"])
    ours, other = K._time(case, {"block_attention": fine, "other": broken}, 1, 0.0)
    assert ours.seconds > 0
    assert (other.seconds, other.why) == (None, "no room")


@pytest.mark.slow  # three loops are compiled
def test_rounds_beside_plain_steps():
    target = target_config()
    plain, whole, part = round_times.measure(target, drafter_config(target), "float32", 128, 5, 1, 0.0)
    assert plain.ratio == plain.floor == 1
    assert whole.ratio == whole.seconds / plain.seconds > 0
    assert whole.floor > part.floor > 1
    assert part.name == "round, 5 draft tokens"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batches", "0"], "batches is (0,)"),
        (["--repeats", "0"], "repeats is 0"),
        (["--kinds", "tree", "--batches", "1", "--pair", "arith-dflash", "--pair-context", "64"], "holds no 8 rounds"),
    ],
)
def test_what_is_refused(arguments, says, capsys, monkeypatch):
    monkeypatch.setattr(K, "_compile", lambda *_: None)
    assert cli.main(["bench", "kernels", *arguments]) == 2
    assert says in capsys.readouterr().err
