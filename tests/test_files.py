"""Files are whole or as they were, and a folder is never continued with other settings."""

import pytest

from dflax import files
from dflax.errors import DflaxError


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with files.whole(path) as beside:
        beside.write_text("first")
        assert not path.exists()
    with pytest.raises(UnicodeEncodeError), files.whole(path) as beside:
        beside.write_text("half \udc80", encoding="utf-8")
    assert path.read_text() == "first"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_a_folder_is_for_one_process_at_a_time(tmp_path):
    with (
        files.alone(tmp_path / "run"),
        pytest.raises(DflaxError, match="another process works in"),
        files.alone(tmp_path / "run"),
    ):
        pytest.fail("both work there")
    with files.alone(tmp_path / "run"):
        pass  # it is free again


def test_a_folder_is_bound_to_its_settings(tmp_path):
    path = tmp_path / "run" / "settings.json"
    files.bind(path, {"a": 1, "b": (1, 2)})
    files.bind(path, {"b": [1, 2], "a": 1})
    for other, says in (
        ({"a": 1, "b": (1, 3)}, r"run was begun with b = \[1, 2\], now it is \[1, 3\]; give another folder"),
        ({"a": 1}, r"b = \[1, 2\], now it is None"),
        ({"a": 1, "b": (1, 2), "c": 0}, "c = None, now it is 0"),
    ):
        with pytest.raises(DflaxError, match=says):
            files.bind(path, other)
    path.write_text("{")
    with pytest.raises(DflaxError, match="is damaged; remove the folder to start over"):
        files.bind(path, {"a": 1})
