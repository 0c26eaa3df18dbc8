"""Folders of results: a killed run goes on, another experiment is refused, a failed start leaves nothing that binds."""

import pytest

from dflax.errors import DflaxError
from dflax.infer.journal import Journal


def test_rows_come_back_and_a_torn_line_is_cut(tmp_path):
    path = tmp_path / "out" / "rows.jsonl"
    with Journal(path, {"a": 1}) as journal:
        journal.append({"n": 0})
        journal.append({"n": 1})
    path.write_bytes(path.read_bytes()[:-3])
    with Journal(path, {"a": 1}) as journal:
        assert journal.rows == [{"n": 0}]
        journal.append({"n": 2})
    assert path.read_text() == '{"n": 0}\n{"n": 2}\n'


def test_rows_bind_the_folder_to_their_settings(tmp_path):
    with Journal(tmp_path / "rows.jsonl", {"a": 1}) as journal:
        journal.append({"n": 0})
    with pytest.raises(DflaxError, match="was begun with a = 1, now it is 2"):
        Journal(tmp_path / "rows.jsonl", {"a": 2})


def test_a_folder_without_rows_takes_other_settings(tmp_path):
    Journal(tmp_path / "rows.jsonl", {"a": 1}).close()
    with Journal(tmp_path / "rows.jsonl", {"a": 2}) as journal:
        journal.append({"n": 0})
    with Journal(tmp_path / "rows.jsonl", {"a": 2}) as journal:
        assert journal.rows == [{"n": 0}]
