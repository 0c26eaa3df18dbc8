"""What a round of speculation takes beside a plain step, on random weights: how fast a pair can be, without the pair.

Tokens mean nothing, but every shape is that of the real models, and half of the context is live.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflax import abstract
from dflax.config import DrafterConfig, ModelConfig
from dflax.errors import DflaxError
from dflax.infer import roofline, stopwatch
from dflax.infer.sampling import SamplingParams
from dflax.infer.speculative import program
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

    compiled: Any
    weights: Any
    params: SamplingParams
    state: LoopState

    def __call__(self) -> Any:
        begin = jnp.full_like(self.state.cursor, self.state.tokens.shape[1] // 2)
        at = lambda cache: None if cache is None else replace(cache, length=begin.copy())
        state = replace(
            self.state, cache=at(self.state.cache), draft_cache=at(self.state.draft_cache), rounds=jnp.zeros_like(begin),
            done=jnp.zeros_like(begin, bool),
        )  # fmt: skip
        self.state = self.compiled(self.weights, state, self.params, np.int32(ROUNDS))
        return self.state.rounds


@dataclass(frozen=True)
class Pair:
    """What is decoded with, at batch 1: a plain step, a round, and a round whose drafter scores `reduced` tokens only."""

    target: ModelConfig
    drafter: DrafterConfig
    dtype: str
    context: int
    reduced: int

    def __post_init__(self) -> None:
        if self.context // 2 <= (ROUNDS + 1) * self.drafter.block_size:
            raise DflaxError(
                f"a context of {self.context} holds no {ROUNDS} rounds of {self.drafter.block_size} tokens in its half"
            )

    def ways(self) -> dict[str, DrafterConfig | None]:
        """Name -> who drafts."""
        part = replace(self.drafter, draft_vocab_size=min(self.reduced, self.target.vocab_size))
        return {
            "plain step": None,
            "round, full head": self.drafter,
            f"round, {part.draft_vocab_size} draft tokens": part,
        }

    def lowered(self, who: DrafterConfig | None) -> jax.stages.Lowered:
        """The loop of one way, from shapes alone."""
        made = program(self.target, who)
        shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        start = partial(made.start, dtype=jnp.dtype(self.dtype))
        state = jax.eval_shape(start, shape((1, self.context)), shape((1,)))[0]
        weights: Any = (self._shapes(self.target), None if who is None else self._shapes(who), None)
        if ids := _scored(who):
            weights = (*weights[:2], jax.eval_shape(made.vocabulary, weights, shape((ids,))))
        params = SamplingParams.build(1, self.target.vocab_size)
        return made.run.lower(weights, state, params, np.int32(ROUNDS), block_size=_block(who))

    def _shapes(self, config: ModelConfig | DrafterConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in abstract.leaves(config, make_mesh(""), self.dtype)
        )

    def measure(self, compiled: Mapping[str, Any], repeats: int, at_least: float) -> list[RoundTime]:
        """Those of the ways that are compiled, the plain step among them, in turns.

        compiled: `lowered` of each, by its name.
        """
        leaves, own = (_random(self._shapes(config), self.dtype) for config in (self.target, self.drafter))
        ways = {name: who for name, who in self.ways().items() if name in compiled}
        calls: dict[str, Callable[[], Any]] = {}
        for name, who in ways.items():
            made = program(self.target, who)
            params = SamplingParams.build(1, self.target.vocab_size)
            end = jnp.full((1,), self.context, jnp.int32)
            state, _ = made.start(jnp.zeros((1, self.context), jnp.int32), end, dtype=jnp.dtype(self.dtype))
            weights: Any = (leaves, None if who is None else own, None)
            if ids := _scored(who):
                weights = (*weights[:2], made.vocabulary(weights, jnp.arange(ids, dtype=jnp.int32)))
            calls[name] = _Run(compiled[name], weights, params, state)
        times = stopwatch.seconds(calls, repeats, at_least)
        width = jnp.dtype(self.dtype).itemsize
        least = {
            name: roofline.speculative_round(self.target, who, 1, _block(who), self.context // 2, width).bytes
            for name, who in ways.items()
        }
        plain = next(iter(ways))
        return [
            RoundTime(name, taken / ROUNDS, taken / times[plain], least[name] / least[plain])
            for name, taken in times.items()
        ]


def _block(who: DrafterConfig | None) -> int:
    return 1 if who is None else who.block_size


def _scored(who: DrafterConfig | None) -> int | None:
    """Tokens of a reduced draft vocabulary."""
    return None if who is None else who.draft_vocab_size


def _random(shapes: tuple[jax.ShapeDtypeStruct, ...], dtype: str) -> tuple[jax.Array, ...]:
    """Leaves of a model as nobody trained it."""
    draw = jax.jit(lambda key, shape: (0.02 * jax.random.normal(key, shape)).astype(dtype), static_argnums=1)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(draw(key, leaf.shape) for key, leaf in zip(keys, shapes, strict=True))
