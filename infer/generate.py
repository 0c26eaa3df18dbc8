"""`generate`, `speculate`: prompts in, tokens out, at once or as they come. All are the loop of `dflax.infer.speculative`."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dflax import text
from dflax.errors import DflaxError
from dflax.infer.blocksize import Scheduler
from dflax.infer.fit import check_block_size, check_pair, check_target
from dflax.infer.sampling import SamplingParams
from dflax.infer.session import EVERY_ROUND, Progress, Session
from dflax.model import Model

AUTO_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Block sizes that "auto" chooses among: of those up to the trained size, five at most. 1 drafts nothing: where drafts cost more than they
gain it is the fastest."""

AUTO_ROUNDS = 16
"""Rounds between two choices of the block size; an untried size runs for `AUTO_TRIAL`."""

AUTO_TRIAL = 3


@dataclass(frozen=True)
class Stats:
    """What a call took. Times include compilation where `compiled` is not 0: call twice to measure."""

    rounds: list[int]
    """Verify rounds of each prompt."""
    prefill_seconds: float
    """Reading the prompts, up to the first token of every response."""
    decode_seconds: float
    """All rounds of the batch."""
    tokens_per_second: float
    """New tokens of the whole batch without the first ones, per decode second."""
    acceptance_by_slot: list[float]
    """Share of rounds whose drafts 1 .. i were all accepted, i = 1 .. block size - 1; over the rounds of all prompts."""
    acceptance_by_slot_per_prompt: list[list[float]]
    """The same of each prompt's own rounds."""
    drafter_bytes: int
    """Memory the drafter adds: weights, cache, and its rows of the head."""
    block_sizes: dict[int, int]
    """Block size -> rounds of the batch that ran with it."""
    compiled: int
    """Programs compiled in this call."""
    acceptance_length: float
    """Tokens per verify round, over all rounds of all prompts, before the cut to budget and stop tokens; 1 without any round."""


@dataclass(frozen=True)
class Output:
    """Responses, one per prompt."""

    tokens: list[list[int]]
    """New tokens only, cut after the first stop token (kept) and at max_new_tokens."""
    texts: list[str] | None
    """Without special tokens; None if the target has no tokenizer."""
    acceptance_lengths: list[list[int]]
    """Tokens committed per verify round; the first token comes from prefill and belongs to none."""
    stats: Stats


@dataclass(frozen=True)
class Piece:
    """Tokens of one response that were committed together."""

    row: int
    """Which prompt."""
    tokens: list[int]
    text: str
    """Text that is certain now (may lag behind the tokens by part of a character); "" without a tokenizer."""
    accepted: int
    """How many of the tokens, from the first, were drafted; the one after them is the target's own."""
    done: bool
    """This is the row's last piece."""


def generate(
    target: Model,
    prompts: Sequence[Any],
    max_new_tokens: int | Sequence[int] = 256,
    temperature: Any = 0.0,
    top_k: Any = None,
    top_p: Any = None,
    seed: Any = 0,
    stop_token_ids: Sequence[Any] | None = None,
    enable_thinking: bool | None = None,
    index: Sequence[int] | None = None,
) -> Output:
    """Plain autoregressive decoding of a batch.

    Prompts of any lengths go through one compiled program; a prompt's tokens depend on its own text, settings, seed and number
    only. max_new_tokens, temperature, top_k, top_p and seed may be one value or one per prompt.

    Args:
      target: the model.
      prompts: a list of texts, lists of token ids, or chats (lists of {"role", "content"}).
      max_new_tokens: tokens to write at most.
      temperature: 0 takes the most probable token.
      top_k: draw among the k most probable only; None: off.
      top_p: draw among the most probable that make up this mass; None: off.
      seed: noise is keyed by (seed, prompt number, position).
      stop_token_ids: a response ends after any of these; None: the model's own, []: none; or one list per prompt.
      enable_thinking: passed to the chat template; None: its default.
      index: number of each prompt; None: from 0. Whoever cuts a list into batches gives those of the list, and gets its samples.

    Raises:
      DflaxError: an impossible value, an empty prompt, ids outside the vocabulary, or too many tokens for the model.
    """
    session = _session(
        target, None, prompts, max_new_tokens, temperature, top_k, top_p, seed, stop_token_ids, enable_thinking, index
    )
    session.prefill()
    session.advance(1)
    return _output(session)


def speculate(
    target: Model,
    drafter: Model,
    prompts: Sequence[Any],
    max_new_tokens: int | Sequence[int] = 256,
    temperature: Any = 0.0,
    top_k: Any = None,
    top_p: Any = None,
    seed: Any = 0,
    block_size: int | Literal["auto"] | None = None,
    stop_token_ids: Sequence[Any] | None = None,
    drafts: str = "argmax",
    allow_larger_blocks: bool = False,
    enable_thinking: bool | None = None,
    index: Sequence[int] | None = None,
) -> Output:
    """What `generate` gives, written in blocks: a drafter proposes, the target verifies a block in one pass.

    With argmax drafts the tokens are those of `generate` with the same arguments, at any temperature. With sampled drafts
    (rejection sampling) they have the same distribution.

    Args:
      drafter: a drafter made for this target.
      block_size: anchor and drafts per round; None: as trained; "auto": the fastest by measured time and acceptance, chosen
        anew as decoding goes on.
      drafts: what the drafter proposes at temperatures above 0: its most probable tokens ("argmax"), or draws ("sampled").
      allow_larger_blocks: permit a block size above the trained one.
      The others are those of `generate`.

    Raises:
      DflaxError: as `generate`, or the drafter does not fit the target.
    """
    session = _session(
        target,
        drafter,
        prompts,
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        seed,
        stop_token_ids,
        enable_thinking,
        index,
        drafts,
    )
    calls = _calls(session, drafter, block_size, allow_larger_blocks, EVERY_ROUND)
    session.prefill()
    for _ in calls:
        pass
    return _output(session)


def stream_generate(*arguments: Any, rounds_per_call: int = 1, **options: Any) -> Iterator[Piece]:
    """What `generate` gives, as it is written (`dflax.stream`); takes what it takes."""
    _check_rounds(rounds_per_call)
    session = _session(drafter=None, **_asked(generate, arguments, options))
    return _pieces(session, _advance(session, 1, rounds_per_call))


def stream_speculate(*arguments: Any, rounds_per_call: int = 1, **options: Any) -> Iterator[Piece]:
    """What `speculate` gives, as it is written (`dflax.stream`); takes what it takes."""
    _check_rounds(rounds_per_call)
    asked = _asked(speculate, arguments, options)
    size, larger = asked.pop("block_size"), asked.pop("allow_larger_blocks")
    session = _session(**asked)
    return _pieces(session, _calls(session, asked["drafter"], size, larger, rounds_per_call))


def _asked(function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    bound = inspect.signature(function).bind(*arguments, **options)
    bound.apply_defaults()
    return dict(bound.arguments)


def _check_rounds(rounds_per_call: Any) -> None:
    if isinstance(rounds_per_call, bool) or not isinstance(rounds_per_call, int) or rounds_per_call < 1:
        raise DflaxError(f"rounds_per_call is {rounds_per_call!r}; it must be a whole number of at least 1")


def auto_sizes(trained: int) -> tuple[int, ...]:
    """Block sizes that "auto" compiles for a drafter trained with this one."""
    sizes = sorted({trained, *(size for size in AUTO_SIZES if size < trained)})
    picks = np.linspace(0, len(sizes) - 1, min(5, len(sizes))).round().astype(int)
    return tuple(sizes[i] for i in picks)


def _session(
    target: Model, drafter: Model | None, prompts: Sequence[Any], max_new_tokens: Any, temperature: Any, top_k: Any, top_p: Any,
    seed: Any, stop_token_ids: Any, enable_thinking: bool | None, index: Sequence[int] | None, drafts: str = "argmax",
) -> Session:  # fmt: skip
    """Everything a user gave, checked; nothing is computed yet."""
    if drafter is None:
        check_target(target)
    else:
        check_pair(target, drafter)
    if drafts not in ("argmax", "sampled"):
        raise DflaxError(f'drafts is {drafts!r}; it must be "argmax" or "sampled"')
    vocab = target.config.vocab_size
    ids = text.encode_all(target.tokenizer, prompts, vocab, enable_thinking)
    budgets = list(max_new_tokens) if isinstance(max_new_tokens, Sequence | np.ndarray) else [max_new_tokens] * len(ids)
    if len(budgets) != len(ids):
        raise DflaxError(
            f"max_new_tokens has {len(budgets)} values for {len(ids)} prompts: give one value, or one per prompt"
        )
    for budget in budgets:
        if isinstance(budget, bool) or not hasattr(budget, "__index__") or not 1 <= budget < 2**30:
            raise DflaxError(f"max_new_tokens is {budget!r}; it must be a whole number of at least 1")
    if stop_token_ids is None:
        stop_token_ids = [token for token in target.stop_token_ids if token < vocab]
    params = SamplingParams.build(
        len(ids),
        vocab,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_ids=stop_token_ids,
        seed=seed,
        index=index,
    )
    warm = np.any(np.asarray(temperature, np.float64) > 0)  # at temperature 0 a sampled draft is the argmax
    return Session(target, drafter, ids, budgets, params, sampled=bool(drafts == "sampled" and warm))


def _calls(
    session: Session, drafter: Model, block_size: Any, allow_larger: bool, rounds_per_call: int
) -> Iterator[Progress]:
    """After prefill: calls of the loop until every row is done, at the block size that was asked for."""
    if block_size == "auto":
        return _advance_auto(session, auto_sizes(drafter.config.block_size), rounds_per_call)
    return _advance(session, check_block_size(drafter, block_size, allow_larger), rounds_per_call)


def _advance(session: Session, block_size: int, rounds_per_call: int) -> Iterator[Progress]:
    progress = session.progress()
    while not progress.done.all():
        progress = session.advance(block_size, rounds_per_call)
        yield progress


def _advance_auto(session: Session, sizes: tuple[int, ...], rounds_per_call: int) -> Iterator[Progress]:
    """A size runs for some rounds, in as many calls as those take; then the next is chosen by all that was seen."""
    scheduler, known, progress = Scheduler(sizes), set(), session.progress()
    while not progress.done.all():
        size = scheduler.choose()
        if size not in known:
            session.compile(size)
        left = AUTO_ROUNDS if size in known else AUTO_TRIAL
        known.add(size)
        before, seconds = progress.rounds, session.decode_seconds
        while left > 0 and not progress.done.all():
            progress = session.advance(size, min(left, rounds_per_call))
            left -= rounds_per_call
            yield progress
        lengths = _rounds(progress, before, progress.rounds)
        seconds = (session.decode_seconds - seconds) / (progress.rounds - before).max()
        scheduler = scheduler.observe(size, lengths, seconds)


def _rounds(progress: Progress, first: np.ndarray, last: np.ndarray) -> list[int]:
    """Uncut acceptance lengths of rounds first[b] .. last[b] - 1 of every row."""
    return [n for row, lo, hi in zip(progress.acceptance, first, last, strict=True) for n in row[lo:hi].tolist()]


def _responses(session: Session, progress: Progress) -> tuple[list[list[int]], list[list[int]]]:
    """New tokens and acceptance lengths of every row; only a row's last round can have been cut."""
    tokens, lengths = [], []
    for row, start in enumerate(session.lengths):
        new = progress.tokens[row, start : progress.cursor[row] + 1].tolist()
        counts = progress.acceptance[row, : progress.rounds[row]].tolist()
        if counts:
            counts[-1] -= sum(counts) - (len(new) - 1)
        tokens.append(new)
        lengths.append(counts)
    return tokens, lengths


def _output(session: Session) -> Output:
    progress = session.progress()
    tokens, lengths = _responses(session, progress)
    sizes: dict[int, int] = {}
    by_prompt: list[list[tuple[int, int]]] = [[] for _ in tokens]
    for size, first, last in session.history:
        sizes[size] = sizes.get(size, 0) + int((last - first).max())
        for mine, lo, hi, row in zip(by_prompt, first, last, progress.acceptance, strict=True):
            mine += [(size, n) for n in row[lo:hi].tolist()]
    uncut = [one for mine in by_prompt for one in mine]
    decoded = sum(map(len, tokens)) - len(tokens)
    tokenizer = session.target.tokenizer
    stats = Stats(
        rounds=progress.rounds.tolist(),
        prefill_seconds=session.prefill_seconds,
        decode_seconds=session.decode_seconds,
        tokens_per_second=decoded / session.decode_seconds if session.decode_seconds else 0.0,
        acceptance_by_slot=_by_slot(uncut),
        acceptance_by_slot_per_prompt=[_by_slot(mine) for mine in by_prompt],
        drafter_bytes=session.drafter_bytes(),
        block_sizes=sizes,
        compiled=session.compiled,
        acceptance_length=sum(n for _, n in uncut) / len(uncut) if uncut else 1.0,
    )
    return Output(tokens, None if tokenizer is None else [text.decode(tokenizer, t) for t in tokens], lengths, stats)


def _by_slot(rounds: Sequence[tuple[int, int]]) -> list[float]:
    """Share of rounds, given as (block size, uncut acceptance length), that accepted slot 1, 2, ... of those whose block has the slot."""
    shares = []
    for slot in range(1, max((size for size, _ in rounds), default=1)):
        passed = [n > slot for size, n in rounds if size > slot]
        shares.append(sum(passed) / len(passed))
    return shares


def _pieces(session: Session, calls: Iterator[Progress]) -> Iterator[Piece]:
    """The first tokens, and what each of the calls commits."""
    tokenizer, batch = session.target.tokenizer, len(session.lengths)
    writers = [text.Detokenizer(tokenizer) if tokenizer is not None else None for _ in range(batch)]

    def piece(row: int, tokens: list[int], drafted: int, done: bool) -> Piece:
        writer = writers[row]
        written = "" if writer is None else writer.push(tokens) + (writer.flush() if done else "")
        return Piece(row, tokens, written, min(drafted, len(tokens)), done)

    session.prefill()
    before = session.progress()
    for row, start in enumerate(session.lengths):
        yield piece(row, [int(before.tokens[row, start])], 0, bool(before.done[row]))
    for progress in calls:
        for row in range(batch):
            at, end = int(before.cursor[row]) + 1, int(progress.cursor[row]) + 1
            for gained in progress.acceptance[row, before.rounds[row] : progress.rounds[row]].tolist():
                tokens = progress.tokens[row, at : min(at + gained, end)].tolist()
                at += len(tokens)
                yield piece(row, tokens, gained - 1, bool(progress.done[row]) and at == end)
        before = progress
