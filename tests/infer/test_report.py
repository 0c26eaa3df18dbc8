"""The report: its definitions by hand-counted examples, and files that are whole or absent."""

import json
import math
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread

from dflax.infer import report
from golden import load_case

LENGTHS = [[4, 1, 2], [1]]


def test_acceptance_by_slot():
    np.testing.assert_allclose(report.acceptance_by_slot(LENGTHS, 4), [0.5, 0.25, 0.25])
    assert np.isnan(report.acceptance_by_slot([[]], 4)).tolist() == [True] * 3


def test_mean_acceptance_length_weighs_responses_alike():
    assert report.mean_acceptance_length(LENGTHS) == pytest.approx((7 / 3 + 1) / 2)
    assert report.mean_acceptance_length([*LENGTHS, []]) == pytest.approx((7 / 3 + 1) / 2)
    assert math.isnan(report.mean_acceptance_length([]))


def test_mean_is_one_plus_the_sum_over_slots():
    lengths = np.random.default_rng(0).integers(1, 9, size=(1, 50)).tolist()
    assert report.mean_acceptance_length(lengths) == pytest.approx(1 + report.acceptance_by_slot(lengths, 8).sum())


def test_plain_table():
    assert report.table(["run", "tok/s"], [["plain", 12.345678], ["dflash", 101]]) == (
        "run     tok/s\n"
        "------  -----\n"
        "plain   12.35\n"
        "dflash    101"
    )  # fmt: skip


def test_markdown_table():
    assert report.table(["run", "tau"], [["a|b", 2.0], ["c", float("nan")]], markdown=True) == (
        "| run  | tau |\n"
        "| ---- | --: |\n"
        "| a\\|b |   2 |\n"
        "| c    |   - |"
    )  # fmt: skip


def test_an_empty_table_and_a_short_row():
    assert report.table(["run"], []) == "run\n---"
    with pytest.raises(ValueError, match="2 cells"):
        report.table(["run", "tau"], [["plain"]])


def test_figures_are_pictures(tmp_path):
    runs = {"greedy": LENGTHS, "sampled": [[1, 1]]}
    report.plot_acceptance_by_slot(tmp_path / "new" / "slots.png", runs, 4)
    report.plot_acceptance_lengths(tmp_path / "lengths.png", runs, 4)
    report.plot_speeds(tmp_path / "speeds.png", {"plain": 10.0, "dflash": 42.0}, baseline="plain")
    for name in ("new/slots.png", "lengths.png", "speeds.png"):
        assert np.ptp(imread(tmp_path / name)) > 0, f"{name} is blank"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lengths.png", "new", "speeds.png"]


def test_json_record(tmp_path):
    path = tmp_path / "run.json"
    report.write_json(path, {"tau": np.float32(2.5), "slots": np.array([1.0, np.nan]), "lengths": LENGTHS})
    record = json.loads(path.read_text())
    assert record["tau"] == 2.5
    assert record["slots"] == [1.0, None]
    assert record["lengths"] == LENGTHS
    facts = record["provenance"]
    assert facts["versions"]["jax"]
    assert facts["machine"]["cpus"] >= 1
    assert facts["devices"]["backend"] == "cpu"
    assert "commit" in facts


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        report.write_json(path, {"what": object()})
    with pytest.raises(KeyError):
        report.plot_speeds(tmp_path / "speeds.png", {"plain": 1.0}, baseline="absent")

    def half(file):
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        report._write(path, half)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    report.write_text(path, "né\n")
    assert path.read_bytes() == b"n\xc3\xa9\n"


def test_commit_of_a_tracked_folder_only(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    assert report.commit(tmp_path) is None
    git("init")
    (tmp_path / "installed").mkdir()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.py").write_text("1")
    git("add", "source")
    git("commit", "-m", "first")
    clean = report.commit(tmp_path / "source")
    assert clean is not None
    assert len(clean) == 40
    assert report.commit(tmp_path / "installed") is None
    (tmp_path / "source" / "a.py").write_text("2")
    assert report.commit(tmp_path / "source") == f"{clean}-dirty"


def test_the_mean_equals_the_recorded_one():
    case = load_case("dflash_generate")
    for name, summary in case.info["summary"].items():
        lengths = case.expected[f"{name}_acceptance_lengths"].tolist()
        assert report.mean_acceptance_length([lengths]) == pytest.approx(summary["mean_acceptance"])
