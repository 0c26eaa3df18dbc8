"""The feature cache: what an interrupted run leaves, and that the next one goes on from it to the very same files."""

import numpy as np
import pytest

from dflax.errors import DflaxError
from dflax.train import features
from dflax.train.data import Packed
from dflax.train.features import FeatureStore, cache_features
from tests.infer.tiny import random_model, target_config

R, S, BATCH = 71, 8, 2


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def target():
    return random_model(target_config(vocab_size=64, hidden_size=32))


@pytest.fixture(scope="module")
def packed():
    """Two documents a row, the second answered."""
    tokens = np.random.default_rng(0).integers(0, 64, (R, S)).astype(np.int32)
    start = np.tile(np.array([0, 0, 0, 3, 3, 3, 3, 3], np.int32), (R, 1))
    return Packed(tokens, start == 3, start)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_an_interrupted_cache_goes_on(target, packed, tmp_path, monkeypatch):
    """Killed in batch 20 of 36: the last progress on disk are the 32 rows of 16 batches, and what was written after them is lost."""
    make = lambda folder: cache_features(folder, target, packed, taps=(0, 1), soft=3, batch=BATCH)
    make(tmp_path / "whole")
    done = []

    def killed(batches, **options):
        for start in batches:
            if len(done) == 20:
                raise Killed
            done.append(start)
            yield start

    monkeypatch.setattr(features, "tqdm", killed)
    with pytest.raises(Killed):
        make(tmp_path / "killed")
    with pytest.raises(DflaxError, match=r"is unfinished: 32 of 71 rows; run the same command again"):
        FeatureStore(tmp_path / "killed")
    for name in ("features", "soft_ids"):  # what the disk had not got of the rows behind
        array = np.memmap(tmp_path / "killed" / f"{name}.bin", np.uint8, "r+").reshape(R, -1)
        array[32:] = 255
        array.flush()
    done.clear()
    done.extend([-1] * 21)  # never killed again
    store = make(tmp_path / "killed")
    assert done[21:] == list(range(32, R, BATCH))
    assert bytes_of(tmp_path / "killed") == bytes_of(tmp_path / "whole")
    assert len(store) == R
