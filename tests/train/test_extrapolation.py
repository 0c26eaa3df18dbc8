"""The fit finds the noises that a series was made with."""

from dataclasses import replace

import numpy as np
import pytest

from dflax.errors import DflaxError
from dflax.infer.extrapolation import ConfidenceExtrapolation
from dflax.train.extrapolation import fit
from dflax.train.traces import Sequences

TRUTH = {"level_noise": 0.05, "velocity_noise": 0.01, "observation_noise": 0.1, "initial_velocity_variance": 0.2}


def simulated(rows=3000, steps=12, seed=0):
    """Series of the filter's own model."""
    rng = np.random.default_rng(seed)
    draw = lambda name: rng.normal(0, np.sqrt(TRUTH[name]), rows)
    level, velocity = rng.normal(-1, 1, rows), draw("initial_velocity_variance")
    ys = []
    for _ in range(steps):
        ys.append(level + draw("observation_noise"))
        level, velocity = level + velocity + draw("level_noise"), velocity + draw("velocity_noise")
    y = np.stack(ys, axis=1).astype(np.float32)
    confidence = (1 / (1 + np.exp(-np.clip(y, -9, 9)))).astype(np.float32)
    flat = np.ones_like(y)
    return Sequences(
        confidence, flat, y, flat.astype(np.int32), flat, flat > 0, flat > 0, flat[:, 0], flat[..., None][..., :0]
    )


def test_fit_recovers_the_noises():
    start = ConfidenceExtrapolation(signal="margin", horizon=7)
    found = fit(simulated(), start)
    for name, value in TRUTH.items():
        assert getattr(found.constants, name) == pytest.approx(value, rel=0.35), name
    assert found.figures["nll_after"] < found.figures["nll_before"] - 0.02
    assert found.figures["variance"] == pytest.approx(1, abs=0.03)
    assert found.figures["innovations"] == 3000 * 11
    for h in (1, 2, 4):
        assert found.figures["below_bound"][h] == pytest.approx(0.1, abs=0.02)  # z = 1.28
    assert (found.constants.horizon, found.constants.z) == (7, 1.28)


def test_nothing_to_fit():
    series = simulated(rows=4)
    with pytest.raises(DflaxError, match="no slot was observed twice"):
        fit(replace(series, observed=series.observed & (np.arange(12) == 0)), ConfidenceExtrapolation())
    with pytest.raises(DflaxError, match="adaptive_noise"):
        fit(series, ConfidenceExtrapolation(adaptive_noise=True))
