"""Hugging Face folders: what is read equals what was written, sharded or not, and every damage is told in one line."""

import json
import os
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflax.checkpoint import huggingface
from dflax.errors import DflaxError
from golden import GOLDENS

SHARDED = GOLDENS / "sharded_bf16" / "model"


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {f"t{i}.weight": rng.standard_normal((5, 4)).astype(kind) for i, kind in enumerate(("f4", "f2", "bfloat16"))}


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_saved_folder_reads_back_bit_for_bit(tmp_path, tensors):
    folder = tmp_path / "deep" / "model"
    huggingface.save(folder, tensors, {"hidden_size": 4})
    assert huggingface.config(folder) == {"hidden_size": 4}
    assert huggingface.generation_config(folder) == {}
    source = huggingface.SafetensorsSource(folder)
    assert source.names() == sorted(tensors)
    for name, wanted in tensors.items():
        assert source.shape(name) == (5, 4)
        got = source.read(name)
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(source.read(name, (slice(1, 3), slice(2, 4))), wanted[1:3, 2:4])
    source.close()


def test_save_over_a_folder_keeps_its_other_files_and_leaves_nothing_beside(tmp_path, tensors):
    folder = tmp_path / "model"
    huggingface.save(folder, tensors, {"version": 1})
    (folder / "tokenizer.json").write_text("{}")
    more = lambda beside: (beside / "more.json").write_text("1")
    huggingface.save(folder, {"new": np.ones(3, np.float32)}, {"version": 2}, more)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "more.json", "tokenizer.json"]
    assert os.listdir(tmp_path) == ["model"]
    assert huggingface.config(folder) == {"version": 2}
    assert huggingface.SafetensorsSource(folder).names() == ["new"]


def test_failed_save_leaves_the_old_folder_whole(tmp_path, tensors):
    folder = tmp_path / "model"
    huggingface.save(folder, tensors, {"version": 1})
    with pytest.raises(TypeError):
        huggingface.save(folder, tensors, {"version": object()})
    with pytest.raises(ZeroDivisionError):
        huggingface.save(folder, tensors, {"version": 2}, lambda beside: 1 // 0)
    assert os.listdir(tmp_path) == ["model"]
    assert huggingface.config(folder) == {"version": 1}


def test_save_into_a_place_that_is_no_folder_is_refused(tmp_path, tensors):
    (tmp_path / "file").write_text("")
    with pytest.raises(DflaxError, match="cannot write the checkpoint"):
        huggingface.save(tmp_path / "file" / "model", tensors, {})


def test_sharded_bf16_is_the_union_of_its_files():
    wanted = {}
    for file in SHARDED.glob("*.safetensors"):
        wanted |= load_file(file)
    source = huggingface.SafetensorsSource(SHARDED)
    assert source.names() == sorted(wanted)
    for name in wanted:
        got = source.read(name)
        assert got.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(got, wanted[name])


def test_missing_shard_is_named(tmp_path):
    folder = copy_of(SHARDED, tmp_path / "m")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DflaxError, match=re.escape("model-00002-of-00003.safetensors, which is missing")):
        huggingface.SafetensorsSource(folder)


def test_tensor_promised_by_the_index_but_absent_is_named(tmp_path):
    folder = copy_of(SHARDED, tmp_path / "m")
    index = json.loads((folder / huggingface.INDEX).read_text())
    index["weight_map"]["ghost.weight"] = "model-00001-of-00003.safetensors"
    (folder / huggingface.INDEX).write_text(json.dumps(index))
    with pytest.raises(DflaxError, match=r"promises ghost\.weight"):
        huggingface.SafetensorsSource(folder)


def test_index_cannot_point_outside_the_folder(tmp_path):
    (tmp_path / huggingface.INDEX).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(DflaxError, match="shards lie in the folder itself"):
        huggingface.SafetensorsSource(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "huge header"])
def test_damaged_safetensors_is_named(tmp_path, tensors, damage):
    huggingface.save(tmp_path / "m", tensors, {})
    path = tmp_path / "m" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(
        {"truncated": whole[:-7], "garbage": whole[:8] + b"x" * 500, "empty": b"", "huge header": b"\xff" * 64}[damage]
    )
    with pytest.raises(DflaxError, match=r"model\.safetensors is truncated or no safetensors file"):
        huggingface.SafetensorsSource(tmp_path / "m")


def test_quantized_weights_are_refused(tmp_path):
    save_file({"w": np.zeros((2, 2), np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(DflaxError, match="w is stored as I8"):
        huggingface.SafetensorsSource(tmp_path)


def test_missing_and_malformed_files(tmp_path):
    with pytest.raises(DflaxError, match="is not a folder"):
        huggingface.config(tmp_path / "nowhere")
    with pytest.raises(DflaxError, match=r"no config\.json"):
        huggingface.config(tmp_path)
    with pytest.raises(DflaxError, match=r"neither model\.safetensors nor"):
        huggingface.SafetensorsSource(tmp_path)
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(DflaxError, match=r"config\.json is not valid JSON.*line 1"):
        huggingface.config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DflaxError, match="must hold a JSON object, not a list"):
        huggingface.config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DflaxError, match="cannot read"):
        huggingface.config(tmp_path)


def test_unknown_tensor_is_named(tmp_path, tensors):
    huggingface.save(tmp_path / "m", tensors, {})
    with pytest.raises(DflaxError, match="no tensor nobody"):
        huggingface.SafetensorsSource(tmp_path / "m").shape("nobody")


def test_integer_tables_are_read(tmp_path):
    """Drafters with a reduced vocabulary carry one."""
    huggingface.save(tmp_path / "m", {"d2t": np.arange(5)}, {})
    np.testing.assert_array_equal(huggingface.SafetensorsSource(tmp_path / "m").read("d2t"), np.arange(5))
