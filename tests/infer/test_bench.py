"""The bench: what it computes from samples by hand-counted examples, and whole runs on a tiny recorded pair."""

import json
import math
from dataclasses import replace

import pytest

from dflax.errors import DflaxError
from dflax.infer import bench, prompts, summary
from dflax.infer.bench import BenchConfig
from golden import load_case


def sample(index, plain_seconds, block_seconds, tokens=(1, 2, 3, 4, 5), lengths=(2, 2), name="a"):
    plain = {"method": "plain", "block_size": 1, "tokens": list(tokens), "lengths": [1] * 4, "prefill_seconds": 1.0}
    block = {
        "method": "block 4",
        "block_size": 4,
        "tokens": [1, 2, 3, 4, 5],
        "lengths": list(lengths),
        "prefill_seconds": 3.0,
    }
    runs = [plain | {"decode_seconds": s} for s in plain_seconds] + [
        block | {"decode_seconds": s} for s in block_seconds
    ]
    return {"dtype": "float32", "temperature": 0.0, "set": name, "index": index, "commit": None, "runs": runs}


def test_figures_of_two_prompts():
    found = summary.summarise([sample(0, [4.0], [2.0]), sample(1, [8.0], [2.0], tokens=[1, 2, 3, 4, 9], lengths=(4,))])
    plain, block = found.rows
    assert (plain.method, plain.speedup, plain.identical, plain.tokens) == ("plain", 1.0, 2, 10)
    assert plain.tokens_per_second == pytest.approx(8 / 12)
    assert math.isnan(plain.acceptance_length)
    assert block.tokens_per_second == pytest.approx(8 / 4)
    assert block.speedup == pytest.approx(3.0)
    assert block.speedup_median == pytest.approx((2 + 4) / 2)
    assert block.acceptance_length == pytest.approx((2 + 4) / 2)
    assert block.efficiency == pytest.approx(1.0)
    assert block.identical == 1
    assert block.acceptance_by_slot == pytest.approx([1, 1 / 3, 1 / 3])
    assert block.prefill_seconds == 3.0


def test_repeats_count_by_their_median():
    found = summary.summarise([sample(0, [4.0, 400.0, 5.0], [1.0, 2.0, 3.0])])
    assert found.rows[1].speedup == pytest.approx(5 / 2)


def test_sets_apart_and_pooled():
    found = summary.summarise([sample(0, [4.0], [2.0]), sample(0, [4.0], [4.0], name="b")])
    assert [(row.set, row.method, row.speedup) for row in found.rows if row.method != "plain"] == [
        ("a", "block 4", 2.0),
        ("b", "block 4", 1.0),
        ("all sets", "block 4", pytest.approx(8 / 6)),
    ]


def test_a_response_of_one_token_has_no_speed():
    one = sample(0, [0.0], [0.0])
    for run in one["runs"]:
        run.update(tokens=[7], lengths=[])
    alone = summary.summarise([one]).rows[1]
    assert math.isnan(alone.speedup)
    assert alone.identical == 1
    assert summary.summarise([one, sample(1, [4.0], [2.0])]).rows[1].speedup == pytest.approx(2.0)


def test_a_baseline_stands_beside_its_own_prompts(tmp_path):
    path = tmp_path / "hf.json"
    row = {"set": "a", "index": 1, "tokens": [1, 2, 3, 4, 5], "prefill_seconds": 1.0, "decode_seconds": 16.0}
    path.write_text(json.dumps({"name": "other", "rows": [row]}))
    found = summary.summarise([sample(0, [4.0], [2.0]), sample(1, [8.0], [2.0])], summary.read_baseline(path))
    assert found.rows[0].prompts == 1
    assert found.rows[0].speedup == pytest.approx(0.5)
    assert "other" in found.table(markdown=True)
    path.write_text("{}")
    with pytest.raises(DflaxError, match=r"hf\.json is no baseline"):
        summary.read_baseline(path)


# --- prompt sets


class Words:
    """A tokenizer without a chat template: a token is a character."""

    chat_template = None
    eos_token_id = 0

    def encode(self, text, **_):
        return [ord(c) for c in text]

    def decode(self, token_ids, **_):
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation, **_):
        raise AssertionError("it has none")


ROWS = {
    "gsm8k": {"question": "Q", "answer": "A"},
    "math-500": {"problem": "Q", "solution": "A"},
    "aime25": {"problem": "Q", "answer": "1"},
    "humaneval": {"prompt": "Q", "test": "t", "canonical_solution": "c"},
    "mbpp": {"text": "Q", "task_id": 11, "code": "c"},
    "livecodebench": {"question_content": "Q", "starter_code": ""},
    "mt-bench": {"turns": ["Q", "second"], "category": "writing"},
}


@pytest.mark.parametrize("name", prompts.SETS)
def test_native_columns(tmp_path, name):
    path = tmp_path / "set.jsonl"
    path.write_text((json.dumps(ROWS[name]) + "\n") * 3)
    found = prompts.load_set(name.upper(), Words(), source=str(path), limit=2)
    assert [prompt.index for prompt in found] == [0, 1]
    asked = Words().decode(found[0].tokens)
    assert "Q" in asked
    assert "second" not in asked
    assert (asked == "Q") == (name in ("mbpp", "mt-bench"))
    bare = prompts.load_set(name, Words(), source=str(path), bare=True)[0]
    assert (len(bare.tokens) == 1) == (name not in ("humaneval", "livecodebench"))


def test_mbpp_keeps_its_test_ids(tmp_path):
    path = tmp_path / "mbpp.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i}", "task_id": i}) + "\n" for i in (10, 11, 510, 511)))
    assert [prompt.tokens for prompt in prompts.load_set("mbpp", Words(), source=str(path))] == [(49, 49), (53, 49, 48)]


def test_bad_prompt_files_are_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(DflaxError, match=r"p\.jsonl:1: GSM8K needs a column question; the row has text"):
        prompts.load_set("gsm8k", Words(), source=str(path))
    with pytest.raises(DflaxError, match="there is no prompt set 'nope'"):
        prompts.load_set("nope", Words(), source=str(path))
    path.write_text("\n")
    with pytest.raises(DflaxError, match="has no prompt"):
        prompts.load_file(path, Words())
    with pytest.raises(DflaxError, match="cannot read prompts"):
        prompts.load_file(tmp_path / "missing.txt", Words())


# --- whole runs


@pytest.fixture(scope="module")
def case():
    return load_case("dflash_generate")


@pytest.fixture
def config(case, tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt_tokens": ids, "set": f"set{i % 2}"} for i, ids in enumerate(case.expected["prompts"].tolist())]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return BenchConfig(
        target=str(case.folder / "target"), drafter=str(case.folder / "drafter_fitted"), prompts=str(path),
        max_new_tokens=12, temperatures=(0.0, 1.0), out=str(tmp_path / "out"),
    )  # fmt: skip


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(rows):
    return [[[run["method"], run["tokens"], run["lengths"]] for run in row["runs"]] for row in rows]


def test_a_whole_run_and_a_killed_one(case, config, tmp_path, capsys):
    found = bench.run(config)
    samples = rows_of(tmp_path / "out/samples.jsonl")
    assert len(samples) == 3 * 2
    assert {(row.method, row.identical == row.prompts) for row in found.rows} == {("plain", True), ("block 8", True)}
    first = {run["method"]: run for run in samples[0]["runs"]}
    prompt = case.expected["prompts"].shape[1]
    assert first["plain"]["tokens"] == case.expected["p0_greedy_ids"][prompt : prompt + 12].tolist()
    assert [run["method"] for run in samples[0]["runs"]] == ["plain", "block 8"]
    assert [run["method"] for run in samples[1]["runs"]] == ["block 8", "plain"]
    data = json.loads((tmp_path / "out/bench.json").read_text())
    assert "commit" in data["provenance"]
    assert len(data["results"]) == len(found.rows)
    pictures = {f"{kind}-float32-t{t}.png" for kind in ("speed", "slots", "lengths") for t in (0, 1)}
    assert pictures <= {path.name for path in (tmp_path / "out").iterdir()}
    assert "efficiency" in capsys.readouterr().out

    # A kill in the middle of a line: the run goes on after the last whole one, and measures nothing twice.
    path = tmp_path / "out/samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:50])
    bench.run(config)
    again = path.read_bytes().splitlines(keepends=True)
    assert again[:4] == lines[:4]
    assert timeless(rows_of(path)) == timeless(samples)


def test_another_experiment_in_the_same_folder_is_refused(config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/settings.json").write_text(json.dumps({"max_new_tokens": 99}))
    (tmp_path / "out/samples.jsonl").write_text("{}\n")
    with pytest.raises(DflaxError, match="was begun with"):
        bench.run(config)
    for changes, message in [
        ({"prompts": None}, "nothing to measure"),
        ({"limit": 0}, "limit is 0"),
        ({"data": ("gsm8k",)}, "NAME=FILE"),
        ({"block_sizes": (9,), "out": str(tmp_path / "other")}, "block_size is 9"),
        ({"baseline": str(tmp_path / "none.json"), "out": str(tmp_path / "other")}, "cannot read the baseline"),
    ]:
        with pytest.raises(DflaxError, match=message):
            bench.run(replace(config, **changes))
    assert not (tmp_path / "other").exists()


def test_prompts_for_the_baseline(config, tmp_path):
    assert bench.run(replace(config, dump_prompts=str(tmp_path / "dump.jsonl"))) is None
    dumped = rows_of(tmp_path / "dump.jsonl")
    assert [(row["set"], row["index"], row["max_new_tokens"]) for row in dumped] == [
        ("set0", 0, 12), ("set1", 0, 12), ("set0", 1, 12)
    ]  # fmt: skip
    assert not (tmp_path / "out").exists()
    again = prompts.load_file(tmp_path / "dump.jsonl", None)
    assert [list(prompt.tokens) for prompt in again] == [row["prompt_tokens"] for row in dumped]
