"""What a round of speculation takes beside a plain step, on random weights: how fast a pair can be, without the pair.

Tokens mean nothing, but every shape is that of the real models, and half of the context is live.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflax import abstract
from dflax.config import DrafterConfig, ModelConfig
from dflax.errors import DflaxError
from dflax.infer import roofline, stopwatch
from dflax.infer.sampling import SamplingParams
from dflax.infer.speculative import DraftVocabulary, Program, program
from dflax.infer.state import LoopState
from dflax.sharding import make_mesh

ROUNDS = 8
"""In one call of the loop."""


@dataclass(frozen=True)
class RoundTime:
    """A way to decode. floor: the least that the ratio can be where memory is all that counts, from the bytes that must be read."""

    name: str
    seconds: float
    ratio: float
    floor: float


@dataclass
class _Run:
    """A loop that is called again and again from the same columns on."""

    program: Program
    weights: Any
    params: SamplingParams
    state: LoopState
    block: int

    def __call__(self) -> Any:
        begin = jnp.full_like(self.state.cursor, self.state.tokens.shape[1] // 2)
        at = lambda cache: None if cache is None else replace(cache, length=begin.copy())
        state = replace(
            self.state, cache=at(self.state.cache), draft_cache=at(self.state.draft_cache), rounds=jnp.zeros_like(begin),
            done=jnp.zeros_like(begin, bool),
        )  # fmt: skip
        self.state = self.program.run(self.weights, state, self.params, np.int32(ROUNDS), block_size=self.block)
        return self.state.rounds


def measure(
    target: ModelConfig, drafter: DrafterConfig, dtype: str, context: int, reduced: int, repeats: int, at_least: float
) -> list[RoundTime]:
    """A plain step, a round, and a round whose drafter scores `reduced` tokens only, all at batch 1, in turns."""
    if context // 2 <= (ROUNDS + 1) * drafter.block_size:
        raise DflaxError(f"a context of {context} holds no {ROUNDS} rounds of {drafter.block_size} tokens in its half")
    part = replace(drafter, draft_vocab_size=min(reduced, target.vocab_size))
    leaves, own = _random(target, dtype), _random(drafter, dtype)
    ways: dict[str, tuple[DrafterConfig | None, int]] = {
        "plain step": (None, 1),
        "round, full head": (drafter, drafter.block_size),
        f"round, {part.draft_vocab_size} draft tokens": (part, drafter.block_size),
    }
    calls: dict[str, Callable[[], Any]] = {}
    for name, (who, block) in ways.items():
        made = program(target, who)
        params = SamplingParams.build(1, target.vocab_size)
        end = jnp.full((1,), context, jnp.int32)
        state, _ = made.start(jnp.zeros((1, context), jnp.int32), end, dtype=jnp.dtype(dtype))
        weights: Any = (leaves, None if who is None else own, None)
        if who is part:
            ids = jnp.arange(part.draft_vocab_size, dtype=jnp.int32)
            weights = (*weights[:2], made.vocabulary(weights, ids))
            assert isinstance(weights[2], DraftVocabulary)
        calls[name] = _Run(made, weights, params, state, block)
    times = stopwatch.seconds(calls, repeats, at_least)
    width = jnp.dtype(dtype).itemsize
    least = [
        roofline.speculative_round(target, who, 1, block, context // 2, width).bytes for who, block in ways.values()
    ]
    plain = next(iter(times.values()))
    return [
        RoundTime(name, taken / ROUNDS, taken / plain, bytes_ / least[0])
        for (name, taken), bytes_ in zip(times.items(), least, strict=True)
    ]


def _random(config: ModelConfig | DrafterConfig, dtype: str) -> tuple[jax.Array, ...]:
    """Leaves of a model as nobody trained it."""
    draw = jax.jit(lambda key, shape: (0.02 * jax.random.normal(key, shape)).astype(dtype), static_argnums=1)
    shapes = abstract.leaves(config, make_mesh(""), dtype)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(draw(key, leaf.shape) for key, leaf in zip(keys, shapes, strict=True))
