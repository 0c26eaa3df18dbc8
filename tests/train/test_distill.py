"""Distillation: answers are those of plain decoding whatever is answered beside them, and survive kills."""

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

import datasets
import pytest

import dflax
from dflax.errors import DflaxError
from dflax.infer.refill import Request, Slots
from dflax.train import data, distill
from dflax.train.distill import DistillConfig
from golden import load_case

NEW = 10
PROMPTS = 11


@pytest.fixture(scope="module")
def case():
    return load_case("dflash_generate")


@pytest.fixture(scope="module")
def target(case):
    return dflax.load(case.folder / "target")


@pytest.fixture
def config(case, tmp_path):
    """Prompts of 3 to 13 tokens."""
    ids = case.expected["prompts"].reshape(-1).tolist()
    rows = [{"prompt_tokens": ids[i : i + 3 + i]} for i in range(PROMPTS)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DistillConfig(
        target=str(case.folder / "target"), data=(str(tmp_path / "mine.jsonl"),), out=str(tmp_path / "out"),
        max_new_tokens=NEW, slots=3,
    )  # fmt: skip


def rows_of(folder):
    return [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]


def answers(rows):
    return [row["response_tokens"] for row in rows]


def test_answers_are_those_of_plain_decoding(config, target, case, tmp_path):
    """Three slots for eleven prompts: every slot is refilled, in the middle of the others' responses."""
    folder = distill.run(config)
    rows = rows_of(folder)
    assert [row["index"] for row in rows] == list(range(PROMPTS))
    given = [item.row["prompt_tokens"] for item in data.read(config.data[0])]
    assert answers(rows) == [dflax.generate(target, [prompt], NEW).tokens[0] for prompt in given]
    assert {key: rows[0][key] for key in ("source", "temperature", "seed", "model", "thinking")} == {
        "source": "mine", "temperature": 0.0, "seed": 0, "model": config.target, "thinking": None
    }  # fmt: skip
    assert [row["prompt_tokens"] for row in rows] == given
    # A drafter, other slots: the same answers. And the trainer reads them.
    fast = replace(config, drafter=str(case.folder / "drafter_fitted"), slots=4, out=str(tmp_path / "fast"))
    assert rows_of(distill.run(fast)) == rows
    item = data.conversation(next(data.read(folder)))
    assert (item.prompt_tokens, item.response_tokens) == (given[0], rows[0]["response_tokens"])


def test_sampled_answers_do_not_depend_on_the_batch(config, tmp_path):
    config = replace(config, temperature=1.0, top_p=0.9, greedy_fraction=0.4, samples=2, limit=4)
    rows = rows_of(distill.run(config))
    assert len(rows) == 8
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    alone = distill.run(replace(config, slots=1, out=str(tmp_path / "alone")))
    assert rows_of(alone) == rows
    other = distill.run(replace(config, seed=1, greedy_fraction=0.0, out=str(tmp_path / "other")))
    assert answers(rows_of(other)) != answers(rows)


def test_a_stopped_run_goes_on(config, tmp_path):
    whole = (distill.run(config) / "responses.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    path = tmp_path / "out/responses.jsonl"
    path.write_bytes(b"".join([lines[7], lines[2], lines[4][:20]]))  # as rows finish, the last one half-written
    distill.run(config)
    assert path.read_bytes() == whole
    with pytest.raises(DflaxError, match="was begun with seed = 0, now it is 1"):
        distill.run(replace(config, seed=1))


def test_refill_compiles_nothing_and_says_what_does_not_fit(target):
    slots = Slots(target, None, 2, 128)

    def answer(prompt):
        slots.admit(Request(prompt, 0, 4))
        while slots.busy:
            slots.step(3)

    answer((1, 2, 3))
    compiled = slots._program.compiled()
    answer((4, 5, 6, 7))
    assert slots._program.compiled() == compiled
    assert slots.free == 2
    with pytest.raises(DflaxError, match="a slot holds 128"):
        slots.admit(Request((1, 2, 3), 0, 126))
    most = target.config.max_positions
    with pytest.raises(DflaxError, match=f"a slot holds {most}"):
        Slots(target, None, 2, most + 512).admit(Request((1, 2, 3), 0, most - 2))


def test_answers_that_would_pass_the_last_position(config, target, tmp_path):
    with pytest.raises(DflaxError, match=r"the longest prompt has 13 tokens .* has \d+ positions"):
        distill.run(replace(config, max_new_tokens=target.config.max_positions - 12))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "q", "answer": "a"}, "q"),
        ({"text": "q", "code": "c", "task_id": 1}, "q"),
        ({"instruction": "do", "input": "this"}, "do\n\nthis"),
        ({"instruction": "do", "input": ""}, "do"),
        ({"instruction": "do", "instances": []}, "do"),
        ({"instruction": "do", "instances": [{"input": "this", "output": "o"}, {"input": "that"}]}, "do\n\nthis"),
        ({"instruction": "do", "instances": [{"input": ""}]}, "do"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, [{"role": "user", "content": "q"}]),
        ({"prompt_tokens": [1, 2]}, [1, 2]),
    ],
)  # fmt: skip
def test_prompts_of_usual_datasets(row, prompt):
    assert distill._prompt(data.Located("f:1", row), None) == prompt


def test_rows_of_the_hub(config, monkeypatch):
    """A config and a slice together; the source is the dataset's name."""
    rows = [{"question": str(i)} for i in range(6)]
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split: rows if name == "main" else [])
    located = list(distill._located(replace(config, data=("openai/gsm8k:main[1:3]", "openai/gsm8k:main:test[5:]"))))
    assert [(source, prompt) for _, source, prompt in located] == [("gsm8k", "1"), ("gsm8k", "2"), ("gsm8k", "5")]


def test_rows_of_a_file(config, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(6)))
    located = list(distill._located(replace(config, data=(f"{path}[1:3]", f"{path}[5:]"))))
    assert [(source, prompt) for _, source, prompt in located] == [("rows", "1"), ("rows", "2"), ("rows", "5")]
    path.write_text('{"x": 1}\n')
    with pytest.raises(DflaxError, match=r"rows\.jsonl:1: no column holds a prompt; the row has x"):
        list(distill._located(replace(config, data=(str(path),))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": ""}, "target is empty"),
        ({"data": ()}, "data is empty"),
        ({"slots": 0}, "slots is 0"),
        ({"greedy_fraction": 2.0}, "greedy_fraction is 2"),
    ],
)
def test_impossible_settings(config, changes, message):
    with pytest.raises(DflaxError, match=message):
        replace(config, **changes)


# --- kills

# A real process: it loads, compiles, answers, and prints when it begins to answer.
SCRIPT = """
import sys
from dflax.train import distill
from dflax.train.distill import DistillConfig

respond = distill.respond
def announced(*arguments):
    print("ready", flush=True)
    respond(*arguments)
distill.respond = announced
target, prompts, out = sys.argv[1:]
distill.run(DistillConfig(target=target, data=(prompts,), out=out, max_new_tokens=48, samples=4, temperature=0.8, slots=2))
"""


def once(config, out, kill_after=None):
    """Whether the process ended by itself, and the seconds it answered: it is killed `kill_after` seconds after it began to.

    What the first process compiled is kept for the others, so that kills strike answers rather than compilation.
    """
    command = [sys.executable, "-c", SCRIPT, config.target, config.data[0], str(out)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(out.parent / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | cache
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    began = time.perf_counter()
    timer = None if kill_after is None else threading.Timer(kill_after, process.kill)
    if timer:
        timer.start()
    errors = process.communicate()[1]
    if timer:
        timer.cancel()
    assert process.returncode in (0, -9), errors
    return process.returncode == 0, time.perf_counter() - began


def survive(config, folder, wanted):
    """Kills until `wanted` have struck; every run that ends must leave the very file of the undisturbed one."""
    once(config, folder / "first")  # compiles
    _, seconds = once(config, folder / "whole")
    whole = (folder / "whole/responses.jsonl").read_bytes()
    chance = random.Random(hashlib.sha256(str(wanted).encode()).digest())
    kills = ended = partial = 0
    while kills < wanted or partial:
        out = folder / f"killed{ended}"
        if once(config, out, chance.uniform(0, seconds) if kills < wanted else None)[0]:
            assert (out / "responses.jsonl").read_bytes() == whole
            ended, partial = ended + 1, 0
        else:
            kills, partial = kills + 1, 1
            found = [row["index"] for row in map(json.loads, (out / "responses.jsonl").read_text().splitlines()[:-1])]
            assert len(found) == len(set(found))
    assert ended


def test_three_kills(config, tmp_path):
    survive(config, tmp_path, wanted=3)


@pytest.mark.slow
def test_twenty_kills(config, tmp_path):
    survive(config, tmp_path, wanted=22)
