"""Traces with a rule in them: a right token's confidence rises, a wrong one's goes up and down, until it turns right and rises."""

import numpy as np

from dflax.train.traces import Traces

T = 8


def traces(prompts=64, blocks=2, steps=8, seed=0, turning=True):
    """Every slot leaves two or more steps after its token became right; one that never does is masked to the end."""
    rng = np.random.default_rng(seed)
    shape = (prompts, blocks, T)
    turn = rng.integers(0, steps + 3, shape) if turning else np.zeros(shape, int)
    step = np.arange(steps)[:, None]
    since = step - turn[:, :, None]
    right = since >= 0
    rise = 0.3 + 0.8 * np.maximum(since, 0) + rng.normal(0, 0.15, right.shape)
    wave = 0.9 * np.where(step % 2, 1, -1) + rng.normal(0, 0.15, right.shape) + 0.4
    confidence = 1 / (1 + np.exp(-np.where(right, rise, wave)))
    final = rng.integers(5, 9, shape).astype(np.int32)
    leaves = turn[:, :, None] + rng.integers(2, 4, shape)[:, :, None]
    margin = np.log(confidence / (1 - confidence))
    return Traces(
        confidence=confidence.astype(np.float32),
        entropy=(0.5 * (1 - confidence)).astype(np.float32),
        margin=margin.astype(np.float32),
        token=np.where(right, final[:, :, None], final[:, :, None] - 4).astype(np.int32),
        masked=step < leaves,
        final=final,
    )
