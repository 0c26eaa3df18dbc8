"""Continuous batching over the one decoding loop: rows that are done make room for new prompts while the others go on.

A prompt is read alone, in a state of one row, which then takes the place of a finished row of the batch. So what a row writes does not
depend on what is read beside it, and the compiled programs are those of `dflax.infer.session`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from dflax.cache import KVCache
from dflax.errors import DflaxError
from dflax.infer.fit import check_block_size, check_pair, check_target
from dflax.infer.sampling import SamplingParams
from dflax.infer.speculative import program
from dflax.infer.state import LoopState, chunks
from dflax.model import Model


@dataclass(frozen=True)
class Request:
    """A prompt and how to answer it. Noise is keyed by (seed, index, position), whatever row answers."""

    prompt: tuple[int, ...]
    index: int
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Finished:
    """An answered request."""

    request: Request
    tokens: list[int]
    """New tokens, the stop token kept."""
    rounds: int


class Slots:
    """A batch of `slots` rows with `capacity` columns each, prompt and response together.

    admit(request) fills a free row; step(rounds) runs rounds and hands back what was finished. Argmax drafts.
    """

    def __init__(self, target: Model, drafter: Model | None, slots: int, capacity: int, block_size: int | None = None):
        if slots < 1:
            raise DflaxError(f"slots is {slots}; it must be at least 1")
        check_target(target)
        if drafter is not None:
            check_pair(target, drafter)
        self.target, self.drafter, self.capacity = target, drafter, capacity
        self._block_size = 1 if drafter is None else check_block_size(drafter, block_size, allow_larger=False)
        self._requests: list[Request | None] = [None] * slots
        self._program = program(target.config, None if drafter is None else drafter.config)
        self._weights = (target.leaves, None if drafter is None else drafter.leaves, None)
        if drafter is not None and drafter.draft_ids is not None:
            vocabulary = self._program.vocabulary(self._weights, jax.device_put(drafter.draft_ids))
            self._weights = (*self._weights[:2], vocabulary)
        empty = np.zeros((slots, capacity), np.int32), np.zeros((slots,), np.int32), np.ones((slots,), bool)
        tokens, end, done = jax.device_put(empty)
        self._state = replace(self._program.start(tokens, end, dtype=target.dtype)[0], done=done)
        self._params: SamplingParams | None = None

    @property
    def free(self) -> int:
        """Rows without a request."""
        return self._requests.count(None)

    @property
    def busy(self) -> bool:
        return any(request is not None for request in self._requests)

    def admit(self, request: Request) -> None:
        """Reads the prompt and writes the first token of its response, in a free row.

        Raises DflaxError if the request does not fit the capacity; ValueError if no row is free.
        """
        row, length = self._requests.index(None), len(request.prompt)
        end, most = length + request.max_new_tokens, min(self.capacity, self.target.config.max_positions)
        if end > most or not length:
            raise DflaxError(
                f"prompt {request.index} has {length} tokens and a budget of {request.max_new_tokens}; a slot holds {most}"
            )
        tokens = np.zeros((1, self.capacity), np.int32)
        tokens[0, :length] = request.prompt
        columns = jax.device_put((tokens, np.array([end], np.int32), np.array([length], np.int32)))
        one, hidden = self._program.start(*columns[:2], dtype=self.target.dtype)
        for start, size in chunks(length):
            at = jax.device_put(np.int32(start))
            one, hidden = self._program.prefill(self._weights, one, hidden, columns[2], at, size=size)
        one = self._program.first(self._weights, one, hidden, self._sampling([request]))
        self._state = insert(self._state, one, jax.device_put(np.int32(row)))
        self._requests[row], self._params = request, None

    def step(self, rounds: int) -> list[Finished]:
        """Up to `rounds` rounds; fewer if every row is done before."""
        if self._params is None:
            self._params = self._sampling(self._requests)
        count = jax.device_put(np.int32(rounds))
        self._state = self._program.run(self._weights, self._state, self._params, count, block_size=self._block_size)
        done = jax.device_get(self._state.done)
        rows = [row for row, request in enumerate(self._requests) if request is not None and done[row]]
        if not rows:
            return []
        tokens, cursor, taken = jax.device_get((self._state.tokens, self._state.cursor, self._state.rounds))
        finished = []
        for row in rows:
            request = self._requests[row]
            assert request is not None
            new = tokens[row, len(request.prompt) : cursor[row] + 1].tolist()
            finished.append(Finished(request, new, int(taken[row])))
            self._requests[row] = None
        return finished

    def _sampling(self, requests: Sequence[Request | None]) -> SamplingParams:
        """Rows without a request are done already; what they are given does not matter."""
        rows = [request or Request((), 0, 0) for request in requests]
        return SamplingParams.build(
            len(rows),
            self.target.config.vocab_size,
            temperature=[row.temperature for row in rows],
            top_k=[row.top_k for row in rows],
            top_p=[row.top_p for row in rows],
            stop_ids=[list(row.stop_ids) for row in rows],
            seed=[row.seed for row in rows],
            index=[row.index for row in rows],
        )


@partial(jax.jit, donate_argnames="state")
def insert(state: LoopState, one: LoopState, row: Int32[Array, ""]) -> LoopState:
    """`state` with its row `row` replaced by the only row of `one`; other rows stay as they are, bit for bit."""

    def put(whole: Array, part: Array, axis: int = 0) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part, row, axis)

    def put_cache(whole: KVCache, part: KVCache) -> KVCache:
        return KVCache(put(whole.k, part.k, 1), put(whole.v, part.v, 1), put(whole.length, part.length))

    def maybe(put: Any, whole: Any, part: Any) -> Any:
        return None if whole is None else put(whole, part)

    return LoopState(
        cache=put_cache(state.cache, one.cache),
        draft_cache=maybe(put_cache, state.draft_cache, one.draft_cache),
        last_fused=maybe(put, state.last_fused, one.last_fused),
        tokens=put(state.tokens, one.tokens),
        end=put(state.end, one.end),
        done=put(state.done, one.done),
        rounds=put(state.rounds, one.rounds),
        acceptance=put(state.acceptance, one.acceptance),
    )
