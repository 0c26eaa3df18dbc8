"""A batch of responses seen from the host: arrays go in, the compiled programs run, small arrays come out.

`generate`, `speculate` and `stream` differ only in how many rounds they ask for at a time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jaxtyping import Int32

from dflax import processes
from dflax.errors import DflaxError
from dflax.infer.sampling import SamplingParams
from dflax.infer.speculative import program
from dflax.infer.state import LoopState, capacity, chunks
from dflax.model import Model
from dflax.sharding import report_rows

EVERY_ROUND = 2**31 - 1


@dataclass(frozen=True)
class Progress:
    """What has been written so far, on the host; fields as in `LoopState`."""

    tokens: Int32[np.ndarray, "B S"]
    cursor: Int32[np.ndarray, "B"]
    rounds: Int32[np.ndarray, "B"]
    acceptance: Int32[np.ndarray, "B S"]
    done: np.ndarray


class Session:
    """Prompts being answered by a target, with a drafter or without.

    prompts: token ids, none empty. budgets: new tokens at most, per prompt. params: of as many rows.
    """

    def __init__(
        self,
        target: Model,
        drafter: Model | None,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        params: SamplingParams,
        sampled: bool = False,
    ):
        self._put = partial(processes.everywhere, mesh=target.mesh)
        self.target, self.drafter, self.params, self.sampled = target, drafter, self._put(params), sampled
        self.lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        self.end = self.lengths + np.asarray(budgets, np.int32)
        self.history: list[tuple[int, np.ndarray, np.ndarray]] = []  # block size, each row's first and last round + 1
        self.prefill_seconds = self.decode_seconds = 0.0
        limit = target.config.max_positions
        for row, end in enumerate(self.end):
            if end > limit:
                raise DflaxError(
                    f"prompt {row} has {self.lengths[row]} tokens and a budget of {end - self.lengths[row]} more; the model "
                    f"has {limit} positions: shorten the prompt or lower max_new_tokens"
                )
        report_rows(len(prompts), target.mesh)
        self._program = program(target.config, None if drafter is None else drafter.config)
        self._already_compiled = self._program.compiled()
        tokens = np.zeros((len(prompts), capacity(int(self.end.max()))), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.state: LoopState
        self.state, self._hidden = self._program.start(
            *self._put((tokens, self.end)), dtype=target.dtype, mesh=target.mesh
        )
        self._weights = (target.leaves, None if drafter is None else drafter.leaves, None)
        if drafter is not None and drafter.draft_ids is not None:
            vocabulary = self._program.vocabulary(self._weights, self._put(drafter.draft_ids))
            self._weights = (*self._weights[:2], vocabulary)

    @property
    def compiled(self) -> int:
        """Programs that had to be compiled for this session; timings include that."""
        return self._program.compiled() - self._already_compiled

    def prefill(self) -> None:
        """Reads the prompts and writes the first token of each response."""
        begin = time.perf_counter()
        length, hidden = self._put(self.lengths), self._hidden
        for start, size in chunks(int(self.lengths.max())):
            start = self._put(np.int32(start))
            self.state, hidden = self._program.prefill(self._weights, self.state, hidden, length, start, size=size)
        self.state = self._program.first(self._weights, self.state, hidden, self.params)
        jax.block_until_ready(self.state.done)
        self.prefill_seconds = time.perf_counter() - begin

    def compile(self, block_size: int) -> None:
        """Makes the program of a block size ready, so that the next `advance` is timed without it."""
        self._run(block_size, 0)

    def advance(self, block_size: int, rounds: int = EVERY_ROUND) -> Progress:
        """Up to `rounds` rounds; fewer if every row is done before."""
        begin, before = time.perf_counter(), self.history[-1][2] if self.history else np.zeros_like(self.lengths)
        self._run(block_size, rounds)
        jax.block_until_ready(self.state.done)
        self.decode_seconds += time.perf_counter() - begin
        progress = self.progress()
        self.history.append((block_size, before, progress.rounds))
        return progress

    def progress(self) -> Progress:
        """Fetches what has been written."""
        s = self.state
        return Progress(*processes.fetch((s.tokens, s.cursor, s.rounds, s.acceptance, s.done)))

    def drafter_bytes(self) -> int:
        """What the drafter adds: weights, cache, and its rows of the head where it has a vocabulary of its own."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self._weights[1:], self.state.draft_cache)))

    def _run(self, block_size: int, rounds: int) -> None:
        self.state = self._program.run(
            self._weights,
            self.state,
            self.params,
            self._put(np.int32(rounds)),
            block_size=block_size,
            sampled=self.sampled,
        )
