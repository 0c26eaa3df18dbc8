"""`dflax bench kernels`: the least work of its calls by hand, its ways against exact results, and a whole run in a toy size."""

import dataclasses
import itertools
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
    prefill = dataclasses.replace(decode, kind="prefill")
    assert prefill.flops == 2 * 4 * 8 * 16 * (3 * 100 + 1 + 2 + 3)
    canvas = Case("canvas", 2, 0, 5, heads=8, kv_heads=2, head_dim=16)
    assert canvas.flops == 2 * 4 * 8 * 16 * 25
    assert canvas.bytes == 2 * (2 * 2 * 16 * 5 * 2 + 2 * 8 * 16 * 5 * 2)
    packed = dataclasses.replace(canvas, kind="packed", block=6)  # three documents of two tokens
    assert packed.flops == 2 * 4 * 8 * 16 * 3 * (1 + 2)
    train = Case("train", 1, 10, 2, anchors=5, heads=8, kv_heads=2, head_dim=16)
    assert train.lengths().tolist() == [[0, 2, 4, 6, 8]]
    assert train.flops == 14 * 8 * 16 * (2 * 20 + 5 * 4)


def test_layers_are_more_than_a_chip_keeps():
    small = Case("decode", 1, 8192, 1)
    assert small.context_bytes == 2**25
    assert small.layers == 4
    assert dataclasses.replace(small, context=1024).layers == 16
    assert dataclasses.replace(small, batch=64).layers == 1
    assert Case("canvas", 1, 0, 4096).layers == 1


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
    kinds = [timing.case.kind for timing in result.timings[::3]]
    assert kinds == ["decode", "tree", "prefill", "canvas", "packed", "train", "decode"]
    assert all(timing.seconds > 0 for timing in result.timings), result.left_out()
    assert result.left_out() == []
    assert result.ceilings["bytes"] > 1e8
    assert {name: len(points) for name, points in result.curves().items()} == {"T = 1": 1, "T = 4": 1}
    assert (out / "kernels.png").stat().st_size > 1000


def test_what_is_achieved_is_written_and_not_only_its_share(run):
    result, out = run
    text = (out / "kernels.md").read_text()
    assert "Not measured" not in text
    row = next(line for line in text.splitlines() if line.startswith("| decode: batch 1, context 128, T 4 "))
    cells = [float(cell) for cell in row.split("|")[2:-1]]
    mebibytes, microseconds, bandwidth, of_copy, speed, of_matmul, *ratios = cells
    assert bandwidth == pytest.approx(mebibytes * 2**20 / microseconds / 1e3, rel=0.01)
    assert of_copy == pytest.approx(100 * bandwidth * 1e9 / result.ceilings["bytes"], rel=0.01)
    assert of_matmul == pytest.approx(100 * speed * 1e12 / result.ceilings["flops"], rel=0.01)
    assert len(ratios) == 2
    written = json.loads((out / "kernels.json").read_text())["timings"]
    assert len(written) == 21
    for one, timing in zip(written, result.timings, strict=True):
        assert one["bytes"] == timing.case.bytes
        assert one["bytes_per_second"] == one["bytes"] / one["seconds"]
        assert one["flops_per_second"] == one["flops"] / one["seconds"]


def test_all_ways_give_what_float64_gives(run):
    numerics = run[0].numerics
    assert [list(call["block_attention"]) for call in numerics.values()] == [
        *[["out"]] * 5, ["out", "q", "k_ctx", "v_ctx", "k_blk", "v_blk"],
    ]  # fmt: skip
    for call in numerics.values():
        assert len(call) == 3
        assert all(error < 2e-6 for way in call.values() for error in way.values())


def test_what_no_time_was_left_for_is_named(run):
    result = K.run(
        K.KernelBenchConfig(("tree",), batches=(1,), dtype="float32", seconds=-1.0, repeats=1, out=str(run[1]))
    )
    assert [timing.seconds for timing in result.timings] == [None] * 3
    assert result.left_out()[0] == "tree: batch 1, context 128, T 7 by block_attention: no time was left"
    assert "block_attention: no time was left" in (run[1] / "kernels.md").read_text()
    assert "numerics, tree: batch 1, context 128, T 7 by XLA reference: no time was left" in result.left_out()


def done(value=None, error=None):
    future = K.Future()
    future.set_result(value) if error is None else future.set_exception(error)
    return future


def job(name, taken, **programs):
    return K._Job(programs, lambda made, why: taken.append((name, made, why)))


def test_jobs_are_taken_as_they_get_ready_and_those_that_do_not_are_left():
    """Time passes with every question; the compiler of `slow` never ends, and `late`'s rival neither."""
    clock, taken, never = itertools.count(9, -1), [], K.Future()
    jobs = [
        job("slow", taken, ours=never), job("late", taken, ours=done(1), other=done(2), third=never),
        job("fine", taken, ours=done(1), other=done(error=RuntimeError("no\nroom"))),
    ]  # fmt: skip
    for one in K._as_ready(jobs, lambda: next(clock) / 1e3, 0.04):
        one.run()
    assert taken == [
        ("fine", {"ours": 1}, {"other": "no room"}),
        ("late", {"ours": 1, "other": 2}, {"third": K.NO_TIME}),
        ("slow", {}, {"ours": K.NO_TIME}),
    ]


def test_a_killed_run_leaves_what_was_measured(monkeypatch, tmp_path):
    seen = []

    def killed(case, *_):
        if seen:
            raise KeyboardInterrupt
        seen.append(case)
        return [K.Timing(case, "block_attention", 1.0)]

    monkeypatch.setattr(kernel_cases, "ways", lambda platform: {"block_attention": kernel_cases.op})
    monkeypatch.setattr(K, "_time", killed)
    monkeypatch.setattr(K, "_compile", lambda lower: None)
    monkeypatch.setattr(K, "_compare", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        K.run(K.KernelBenchConfig(("decode",), batches=(1,), repeats=1, out=str(tmp_path)))
    assert [one["seconds"] for one in json.loads((tmp_path / "kernels.json").read_text())["timings"]] == [1.0]
    assert "| decode: batch 1, context 128, T 1 " in (tmp_path / "kernels.md").read_text()


def test_a_way_that_fails_is_named_and_the_others_are_timed():
    case = Case("tree", 1, 128, 7, heads=4, kv_heads=2, head_dim=16, dtype="float32", most_layers=2)
    ways = dict.fromkeys(("block_attention", "other", "third"), kernel_cases.op)
    programs = {"block_attention": jax.jit(lambda *_: np.float32(0)), "other": lambda *_: 1 / 0}
    ours, other, third = K._time(case, ways, programs, {"third": "no room"}, 1, 0.0)
    assert ours.seconds > 0
    assert (other.seconds, other.why) == (None, "division by zero")
    assert (third.seconds, third.why) == (None, "no room")


@pytest.mark.slow  # three loops are compiled
def test_rounds_beside_plain_steps():
    target = target_config()
    pair = round_times.Pair(target, drafter_config(target), "float32", 128, 5)
    compiled = {name: pair.lowered(who).compile() for name, who in pair.ways().items()}
    plain, whole, part = pair.measure(compiled, 1, 0.0)
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
    monkeypatch.setattr(K, "_calls", lambda *_: pytest.fail("compiled"))
    assert cli.main(["bench", "kernels", *arguments]) == 2
    assert says in capsys.readouterr().err
