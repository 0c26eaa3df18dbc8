"""From files to batches: every form of row, masks, packing, splits, and errors that name the line."""

import gzip
import json
from typing import Any, ClassVar

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflax.errors import DflaxError
from dflax.train import data, stories
from dflax.train.data import Conversation, Document, Located


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parse(row, **keys):
    return data.conversation(Located("f:1", row), **keys)


def test_files_and_folders_in_order(tmp_path):
    write(tmp_path / "b.jsonl", {"n": 2}, {"n": 3})
    data.write_rows(tmp_path / "a.jsonl.gz", [{"n": 0}, {"n": 1}])
    (tmp_path / "other.txt").write_text("no rows")
    found = list(data.read(tmp_path))
    assert [item.row["n"] for item in found] == [0, 1, 2, 3]
    assert found[3].where == f"{tmp_path / 'b.jsonl'}:2"


def test_written_rows_have_the_same_bytes(tmp_path):
    rows = [{"prompt": "é", "response_tokens": [1, 2]}]
    data.write_rows(tmp_path / "a.jsonl.gz", rows)
    data.write_rows(tmp_path / "b.jsonl.gz", rows)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert [item.row for item in data.read(tmp_path / "a.jsonl.gz")] == rows
    assert not list(tmp_path.glob("*.partial"))


def test_bad_files_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(DflaxError, match=r"x\.jsonl:3 is not JSON"):
        list(data.read(tmp_path / "x.jsonl"))
    (tmp_path / "y.jsonl").write_text("[1]\n")
    with pytest.raises(DflaxError, match=r"y\.jsonl:1 is a list"):
        list(data.read(tmp_path / "y.jsonl"))
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-20])
    with pytest.raises(DflaxError, match="cannot read"):
        list(data.read(tmp_path / "z.jsonl.gz"))
    with pytest.raises(DflaxError, match="no file or folder"):
        list(data.read(tmp_path / "missing.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DflaxError, match=r"no \.jsonl"):
        list(data.read(tmp_path / "empty"))


@pytest.fixture
def hub(monkeypatch):
    """What `datasets.load_dataset` is asked; it answers two rows."""
    calls: list[dict[str, Any]] = []

    def load_dataset(path, name=None, *, split=None, data_files=None):
        calls.append({"path": path, "name": name, "split": split, "data_files": data_files})
        return [{"n": 0}, {"n": 1}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


@pytest.mark.parametrize(
    ("source", "path", "name", "split", "files"),
    [
        ("openai/gsm8k", "openai/gsm8k", None, "train", None),
        ("openai/gsm8k:main", "openai/gsm8k", "main", "train", None),
        ("openai/gsm8k:main:test", "openai/gsm8k", "main", "test", None),
        ("HuggingFaceH4/MATH-500::test", "HuggingFaceH4/MATH-500", None, "test", None),
        ("squad", "squad", None, "train", None),
        ("hf://datasets/a/b/test*.jsonl", "json", None, "train", "hf://datasets/a/b/test*.jsonl"),
    ],
)
def test_what_the_hub_is_asked(hub, source, path, name, split, files):
    assert list(data.read(source)) == [Located(f"{source}[{n}]", {"n": n}) for n in (0, 1)]
    assert hub == [{"path": path, "name": name, "split": split, "data_files": files}]


@pytest.mark.parametrize("source", ["a/b:c:d:e", ":main", "a/b/c", "https://x.org/rows.json", "a b"])
def test_what_is_no_name_of_the_hub(hub, source):
    with pytest.raises(DflaxError, match=r"is no file or folder here, .* NAME, NAME:CONFIG, NAME:CONFIG:SPLIT or hf:"):
        list(data.read(source))
    assert not hub


def test_the_hubs_complaint_is_passed_on(monkeypatch):
    def load_dataset(*args, **options):
        raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['main', 'socratic']")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        DflaxError, match=r"'openai/gsm8k' .*missing\. Please pick .*'socratic'\]; NAME:CONFIG:SPLIT names"
    ):
        list(data.read("openai/gsm8k"))


def test_every_form_of_row():
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert parse({"messages": chat}) == Conversation(chat[:1], "yes", where="f:1")
    shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    assert parse({"conversations": shared}) == parse({"messages": chat})
    assert parse({"messages": chat[:1]}).response is None
    assert parse({"prompt": "p", "response": "r", "source": "s"}) == Conversation("p", "r", source="s", where="f:1")
    assert parse({"question": "q", "answer": "a"}) == Conversation("q", "a", where="f:1")
    tokens = parse({"prompt": "p", "response_tokens": [5, 6], "temperature": 0.7})
    assert (tokens.response_tokens, tokens.temperature) == ([5, 6], 0.7)
    assert parse({"prompt_tokens": [1], "response_tokens": [2]}).prompt_tokens == [1]
    assert parse({"text": "t", "code": "c"}, prompt_key="text", response_key="code") == Conversation(
        "t", "c", where="f:1"
    )


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"text": "x"}, {}, "f:1: key 'prompt' is missing; the row has text"),
        ({"prompt": ""}, {}, "'prompt' is empty"),
        ({"prompt": "p"}, {"prompt_key": "text"}, "'text' is missing"),
        ({"prompt": "p"}, {"prompt_key": "prompt", "response_key": "code"}, "'code' is missing"),
        ({"prompt": "p", "response_tokens": "12"}, {}, "no list of token ids"),
        ({"messages": [{"role": "robot", "content": "x"}]}, {}, "robot"),
        ({"messages": []}, {}, "no user message"),
    ],
)
def test_bad_rows_are_named(row, keys, message):
    with pytest.raises(DflaxError, match=message):
        parse(row, **keys)


class ChatTokenizer:
    """A token a character; turns are <role:content> with a line break after."""

    chat_template: ClassVar[str] = "yes"
    eos_token_id: ClassVar[int] = ord(">")

    def encode(self, text, **options):
        return [ord(c) for c in text]

    def decode(self, token_ids, **options):
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation, tokenize=False, add_generation_prompt=False, **options):
        turns = "".join(f"<{m['role'][0]}:{m['content']}>\n" for m in conversation)
        return turns + ("<a:" if add_generation_prompt else "")


def shown(document):
    """The text, with responses in capitals."""
    return "".join(chr(t).upper() if m else chr(t) for t, m in zip(document.tokens, document.loss_mask, strict=True))


def test_chat_marks_every_assistant_turn():
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    found = data.tokenize(parse({"messages": messages}), ChatTokenizer())
    assert shown(found) == "<u:one>\n<a:TWO>\n<u:three>\n<a:FOUR>"


def test_text_prompt_is_a_user_message_where_there_is_a_template():
    item = Conversation("hi", response_tokens=[ord("o"), ord("k")])
    assert shown(data.tokenize(item, ChatTokenizer())) == "<u:hi>\n<a:OK"
    assert shown(data.tokenize(item, ChatTokenizer(), chat=False)) == "hiOK"
    given = Conversation("", prompt_tokens=[ord("x")], response_tokens=[ord("y")])
    assert shown(data.tokenize(given, None)) == "xY"
    with pytest.raises(DflaxError, match="no response"):
        data.tokenize(Conversation("hi", where="f:1"), ChatTokenizer())


def test_problems_become_documents():
    tokenizer = stories.tokenizer()
    problem = stories.generate(0, 0, "train")
    found = data.tokenize(Conversation(problem.prompt, problem.answer_text), tokenizer)
    assert found.tokens[0] == tokenizer.bos_token_id
    assert found.tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(found.tokens[found.loss_mask], skip_special_tokens=True) == problem.answer_text


def test_held_out_prompts_stay_held_out_when_data_grow():
    items = [Conversation(f"prompt {i}") for i in range(2000)]
    train, held = data.split_held_out(items, 0.1)
    assert 140 < len(held) < 260
    assert len(train) + len(held) == 2000
    few, held_few = data.split_held_out(items[:500], 0.1)
    assert held_few == [item for item in held if item in items[:500]]
    assert few == [item for item in train if item in items[:500]]
    assert data.split_held_out(items, 0.0)[1] == []


document = st.integers(1, 30).flatmap(
    lambda n: st.tuples(st.lists(st.integers(1, 99), min_size=n, max_size=n), st.integers(0, n - 1))
)


@settings(max_examples=60, deadline=None)
@given(st.lists(document, min_size=1, max_size=25), st.integers(4, 24))
def test_packing_keeps_every_document_whole(drawn, length):
    documents = [Document(np.asarray(tokens, np.int32), np.arange(len(tokens)) >= start) for tokens, start in drawn]
    wanted = sorted(
        (tuple(d.tokens[:length].tolist()), tuple(d.loss_mask[:length].tolist()))
        for d in documents
        if d.loss_mask[:length].any()
    )
    if not wanted:
        with pytest.raises(DflaxError, match="no document"):
            data.pack(documents, length)
        return
    packed = data.pack(documents, length)
    found = []
    for tokens, mask, start in zip(packed.tokens, packed.loss_mask, packed.ctx_start, strict=True):
        column = 0
        while column < length and tokens[column] != 0:
            span = np.flatnonzero((start == column) & (tokens != 0))
            assert (np.diff(span) == 1).all()
            assert span[0] == column
            found.append((tuple(tokens[span].tolist()), tuple(mask[span].tolist())))
            column = span[-1] + 1
        assert (tokens[column:] == 0).all()
        assert not mask[column:].any()
        assert (start[column:] == np.arange(column, length)).all()
    assert sorted(found) == wanted
    live = (packed.tokens != 0).sum(1)
    assert (live[:-1] + live[1:] > length).all()  # first fit: two neighbours never fit into one row


def test_batches_cover_every_epoch_in_a_new_order():
    rows = np.arange(10)
    source = data.Shuffled({"row": rows}, batch_size=4, seed=1)
    assert source.steps_per_epoch == 3
    seen = np.concatenate([source.batch_at(step)["row"] for step in range(10)])
    epochs = seen.reshape(4, 10)
    assert all(sorted(epoch) == list(rows) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = data.Shuffled({"row": rows}, batch_size=4, seed=1)
    np.testing.assert_array_equal(again.batch_at(7)["row"], source.batch_at(7)["row"])
    other = data.Shuffled({"row": rows}, batch_size=4, seed=2)
    assert any((other.batch_at(i)["row"] != source.batch_at(i)["row"]).any() for i in range(5))


def test_batches_refuse_what_cannot_be():
    with pytest.raises(DflaxError, match="equal"):
        data.Shuffled({"a": np.zeros(3), "b": np.zeros(4)}, 2, 0)
    with pytest.raises(DflaxError, match="batch_size"):
        data.Shuffled({"a": np.zeros(3)}, 0, 0)


def test_packed_batches_have_the_three_arrays():
    packed = data.pack([Document(np.arange(1, 5, dtype=np.int32), np.asarray([False, True, True, True]))] * 3, 8)
    batch = data.batches(packed, batch_size=2, seed=0).batch_at(0)
    assert {name: array.shape for name, array in batch.items()} == dict.fromkeys(
        ("tokens", "loss_mask", "ctx_start"), (2, 8)
    )
