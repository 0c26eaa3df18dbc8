"""Traces: labels and coverage of the right step, files that survive a kill."""

from dataclasses import fields

import numpy as np
import pytest

from dflax.errors import DflaxError
from dflax.train.traces import Traces, concatenate, recorded, sequences
from tests.train.synthetic import traces


def by_hand():
    """One prompt, one block of three slots, two steps of three used. The end is [7, 8, 9]."""
    step = lambda *rows: np.array([[rows]])
    confidence = step([0.5, 0.6, 0.7], [0.8, 0.9, 0.95], [0.1, 0.1, 0.1]).astype(np.float32)
    return Traces(
        confidence=confidence,
        entropy=1 - confidence,
        margin=4 * confidence,
        token=step([7, 1, 2], [3, 8, 9], [7, 7, 7]).astype(np.int32),
        masked=step([True, True, True], [False, True, True], [False, False, False]),
        final=np.array([[[7, 8, 9]]], np.int32),
    )


def test_labels_and_coverage_belong_to_their_step():
    slots = sequences(by_hand())
    np.testing.assert_array_equal(slots.agrees, [[True, False], [False, True], [False, True]])
    np.testing.assert_array_equal(slots.observed, [[True, False], [True, True], [True, True]])
    np.testing.assert_allclose(slots.confidence, [[0.5, 0.8], [0.6, 0.9], [0.7, 0.95]], rtol=1e-6)
    np.testing.assert_allclose(slots.coverage, [[1, 1], [0, 1], [0, 0.5]])
    np.testing.assert_allclose(slots.position, [0, 0.5, 1])
    assert by_hand().passes() == 2


def test_concatenation_pads_steps_that_nobody_took():
    one, two = by_hand(), by_hand().trimmed()
    both = concatenate([two, one])
    assert both.confidence.shape == (2, 1, 3, 3)
    np.testing.assert_array_equal(both.masked[0], one.masked[0])
    np.testing.assert_array_equal(both.agrees[:, :, :2], concatenate([one, one]).agrees[:, :, :2])


class Killed(Exception):
    pass


def test_recordings_are_kept_and_go_on(tmp_path):
    whole, asked = traces(prompts=6), []
    prompts = [[i, i + 1] for i in range(6)]

    def record(batch, number):
        asked.append(number)
        if len(asked) == 3:
            raise Killed
        rows = [prompts.index(list(prompt)) for prompt in batch]
        return {"greedy": Traces(*(getattr(whole, f.name)[rows] for f in fields(Traces)))}

    with pytest.raises(Killed):
        recorded(tmp_path, prompts, 2, record, {"model": "tiny"})
    found = recorded(tmp_path, prompts, 2, record, {"model": "tiny"})["greedy"]
    assert asked == [0, 1, 2, 2]
    for f in fields(Traces):
        tolerance = 1e-3 if f.name in ("entropy", "margin") else 0
        np.testing.assert_allclose(getattr(found, f.name), getattr(whole.trimmed(), f.name), tolerance, tolerance)
    with pytest.raises(DflaxError, match="was begun with model = 'tiny', now it is 'other'"):
        recorded(tmp_path, prompts, 2, record, {"model": "other"})
    path = tmp_path / "traces-00001.npz"
    good = path.read_bytes()
    for damaged in (b"half", b"", good[: len(good) // 2], good[:100] + b"0000" + good[104:]):
        path.write_bytes(damaged)
        with pytest.raises(DflaxError, match=r"traces-00001\.npz is damaged"):
            recorded(tmp_path, prompts, 2, record, {"model": "tiny"})
