"""`denoise` and `stream_denoise`: prompts in, answers of a diffusion language model out. Both are the loop of `dflax.infer.denoise`."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from dflax import processes, text
from dflax.errors import DflaxError
from dflax.infer.canvas import Cache, CanvasState, columns
from dflax.infer.denoise import DenoisePlan, DenoiseRequest, program
from dflax.infer.endings import EndOfText, text_length
from dflax.infer.extrapolation import ConfidenceExtrapolation
from dflax.infer.fit import check_diffusion
from dflax.infer.policies import Policy, Schedule, with_floats
from dflax.infer.sampling import SamplingParams
from dflax.model import Model
from dflax.sharding import report_rows

EVERY_PASS = 2**30


@dataclass(frozen=True)
class DenoiseStats:
    """What a call took. Times include compilation where `compiled` is not 0: call twice to measure."""

    seconds: float
    """All passes of the batch."""
    tokens_per_second: float
    """Tokens before the first end token of every answer, per second: padding is not counted."""
    tokens_per_forward: float
    """The same tokens per forward pass, over all prompts."""
    full_passes: int
    """Passes of the batch over whole canvases."""
    short_passes: int
    """Passes over a cache."""
    compiled: int
    """Programs compiled in this call."""


@dataclass(frozen=True)
class DenoiseOutput:
    """Answers, one per prompt."""

    tokens: list[list[int]]
    """The generated region, gen_length tokens. What lies behind a cut (`EndOfText`) is filled with the end token."""
    texts: list[str] | None
    """Cut at the first end token, without special tokens; None if the model has no tokenizer."""
    nfe: list[int]
    """Forward passes of each prompt."""
    commit_steps: list[list[int]]
    """Pass (from 0) in which each token was written; -1 for what was filled in."""
    stats: DenoiseStats


@dataclass(frozen=True)
class DenoisePiece:
    """Tokens of one answer that were written together."""

    row: int
    """Which prompt."""
    positions: list[int]
    """Their places in the answer, from 0, in ascending order."""
    tokens: list[int]
    length: int
    """Tokens of the answer that count: gen_length, less after a cut (`EndOfText`), which drops what was written behind it too."""
    nfe: int
    """Forward passes of the row so far."""
    done: bool
    """This is the row's last piece."""


@dataclass(frozen=True)
class Written:
    """What has been written so far, on the host; fields as in `CanvasState`."""

    tokens: Int32[np.ndarray, "B S"]
    commit_step: Int32[np.ndarray, "B S"]
    length: Int32[np.ndarray, "B"]
    nfe: Int32[np.ndarray, "B"]
    done: np.ndarray
    passes: Int32[np.ndarray, "2"]


class Denoising:
    """Prompts being answered, seen from the host: arrays go in, the compiled programs run, small arrays come out.

    ends: the end tokens; the first fills what is cut.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        plan: DenoisePlan,
        request: DenoiseRequest,
        ends: Sequence[int] = (),
    ):
        self.model, self.plan, self.ends = model, plan, ends
        self._put = partial(processes.everywhere, mesh=model.mesh)
        self.lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((len(prompts), columns(int(self.lengths.max()) + plan.gen_length)), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        report_rows(len(prompts), model.mesh)
        self._program = program(model.config)
        self._already_compiled = self._program.compiled()
        self.request: DenoiseRequest = self._put(request)
        self.seconds = 0.0
        self.state: CanvasState = self._program.start(
            *self._put((tokens, self.lengths)), self.request, plan=plan, dtype=model.dtype, mesh=model.mesh
        )

    @property
    def compiled(self) -> int:
        """Programs that had to be compiled for this; timings include that."""
        return self._program.compiled() - self._already_compiled

    def advance(self, passes: int = EVERY_PASS) -> Written:
        """Up to `passes` passes; fewer if every row is done before."""
        begin = time.perf_counter()
        self.state = self._program.run(
            self.model.leaves, self.state, self.request, self._put(np.int32(passes)), plan=self.plan
        )
        jax.block_until_ready(self.state.done)
        self.seconds += time.perf_counter() - begin
        s = self.state
        nfe = s.nfe + s.empty
        return Written(*processes.fetch((s.tokens, s.commit_step, s.length, nfe, s.done, s.passes)))


def denoise(
    model: Model,
    prompts: Sequence[Any],
    gen_length: int = 256,
    block_length: int = 32,
    steps: int | None = None,
    policy: Policy | None = None,
    cache: Cache | str = "none",
    extrapolation: ConfidenceExtrapolation | None = None,
    end_of_text: EndOfText | None = None,
    temperature: Any = 0.0,
    top_k: Any = None,
    top_p: Any = None,
    cfg_scale: Any = 0.0,
    seed: Any = 0,
    enable_thinking: bool | None = None,
    index: Sequence[int] | None = None,
) -> DenoiseOutput:
    """Answers of a diffusion language model, denoised block by block.

    Prompts of any lengths go through one compiled program; an answer depends on its own prompt, settings, seed and number only.
    temperature, top_k, top_p, cfg_scale and seed may be one value or one per prompt.

    Args:
      model: LLaDA, Dream or LLaDA-MoE.
      prompts: a list of texts, lists of token ids, or chats (lists of {"role", "content"}).
      gen_length: tokens of an answer, a multiple of block_length.
      block_length: tokens that are denoised together; blocks follow each other from left to right.
      steps: of the schedule, a multiple of the number of blocks; None: gen_length, one token per step. Policies that decide by
        confidence take as many as they need.
      policy: who gets committed (`dflax.policies`); None: the schedule, the official sampler.
      cache: "none", "prefix", "dual", or a `dflax.Cache` with more to say.
      extrapolation: a look-ahead in front of the policy (`dflax.ConfidenceExtrapolation`).
      end_of_text: what end tokens do (`dflax.EndOfText`); None: nothing, the whole region is denoised as published.
      temperature: 0 takes the most probable token.
      top_k, top_p: draw among the most probable only; None: off.
      cfg_scale: w of logits = u + (w + 1)(l - u), u without the prompt; 0: off, one pass for both.
      seed: noise is keyed by (seed, prompt number, position, step).
      enable_thinking: passed to the chat template; None: its default.
      index: number of each prompt; None: from 0. Whoever cuts a list into batches gives those of the list, and gets its samples.

    Raises:
      DflaxError: an impossible value, an empty prompt, ids outside the vocabulary, a model that is none of diffusion or whose mask
        token is not known, or too many tokens for the model.
    """
    session = prepare(
        model, prompts, gen_length, block_length, steps, policy, cache, extrapolation, end_of_text, temperature, top_k, top_p,
        cfg_scale, seed, enable_thinking, index,
    )  # fmt: skip
    return _output(session, session.advance())


def stream_denoise(
    model: Model, prompts: Sequence[Any], *arguments: Any, passes_per_call: int = 1, **options: Any
) -> Iterator[DenoisePiece]:
    """Tokens as they are committed (`dflax.stream`), in whatever order: arguments of `denoise`, checked at once, not at the first piece.

    passes_per_call: passes between two looks at the device; what they wrote into an answer is one piece.
    """
    if isinstance(passes_per_call, bool) or not isinstance(passes_per_call, int) or passes_per_call < 1:
        raise DflaxError(f"passes_per_call is {passes_per_call!r}; it must be a whole number of at least 1")
    return _pieces(prepare(model, prompts, *arguments, **options), passes_per_call)


def prepare(
    model: Model,
    prompts: Sequence[Any],
    gen_length: int = 256,
    block_length: int = 32,
    steps: int | None = None,
    policy: Policy | None = None,
    cache: Cache | str = "none",
    extrapolation: Any = None,
    end_of_text: Any = None,
    temperature: Any = 0.0,
    top_k: Any = None,
    top_p: Any = None,
    cfg_scale: Any = 0.0,
    seed: Any = 0,
    enable_thinking: bool | None = None,
    index: Sequence[int] | None = None,
) -> Denoising:
    """What `denoise` is asked, checked and ready to advance; nothing is computed yet."""
    config, mask = check_diffusion(model)
    steps = gen_length if steps is None else steps
    for name, value in {"gen_length": gen_length, "block_length": block_length, "steps": steps}.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or not 1 <= value < 2**20:
            raise DflaxError(f"{name} is {value!r}; it must be a whole number of at least 1")
    if gen_length % block_length:
        raise DflaxError(f"gen_length {gen_length} is no multiple of block_length {block_length}")
    blocks = gen_length // block_length
    if steps % blocks:
        raise DflaxError(f"steps {steps} is no multiple of the {blocks} blocks (gen_length / block_length)")
    cache = Cache.of(cache)
    if cache.unconditional_first and not config.shifted_logits:
        raise DflaxError(f"unconditional_first is for models with shifted logits (Dream); {config.family} has none")
    if cache.unconditional_first and cache.kind == "none":
        raise DflaxError(
            "unconditional_first is a way of the published caches; without cache there is nothing to switch"
        )
    policy = Schedule() if policy is None else policy
    kinds = {
        "policy": (policy, Policy, "dflax.policies"),
        "extrapolation": (extrapolation, ConfidenceExtrapolation, "dflax"),
    }
    for name, (value, kind, where) in (kinds | {"end_of_text": (end_of_text, EndOfText, "dflax")}).items():
        if value is not None:
            if not isinstance(value, kind):
                raise DflaxError(f"{name} is {value!r}; it must be a {kind.__name__} ({where})")
            value.check()
    policy = with_floats(policy)
    extrapolation = None if extrapolation is None else with_floats(extrapolation)

    if not policy.reads_confidence and (extrapolation is not None or (end_of_text is not None and end_of_text.delay)):
        what = "a look-ahead" if extrapolation is not None else "EndOfText(delay=True)"
        raise DflaxError(f"{what} acts by the confidence, which {policy!r} does not read; use another policy")

    ids = text.encode_all(model.tokenizer, prompts, config.vocab_size, enable_thinking)
    for row, prompt in enumerate(ids):
        if mask in prompt:
            raise DflaxError(
                f"prompt {row} holds the mask token {mask}; a prompt is written text, and the answer is masked anyway"
            )
        if len(prompt) + gen_length > config.max_positions:
            raise DflaxError(
                f"prompt {row} has {len(prompt)} tokens and gen_length is {gen_length}; the model has {config.max_positions} "
                f"positions: shorten the prompt or lower gen_length"
            )
    ends = end_tokens(model, end_of_text)
    if end_of_text is not None and not ends:
        raise DflaxError("the model names no end token; give EndOfText(tokens=...)")
    params = SamplingParams.build(
        len(ids),
        config.vocab_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_ids=ends,
        seed=seed,
        index=index,
    )
    guidance = _guidance(cfg_scale, len(ids))
    if end_of_text is not None:  # its tokens travel in `params`, so that others compile nothing
        end_of_text = replace(end_of_text, tokens=None)
    sampled = bool(np.any(np.asarray(temperature, np.float64) > 0))
    plan = DenoisePlan(
        block_length=int(block_length),
        gen_length=int(gen_length),
        cache=replace(cache, count_empty_pass=False),
        guided=bool(np.any(guidance != 0)),
        sampled=sampled or (policy.tempered and not (top_k is None and top_p is None)),
    )
    count_empty = np.bool_(cache.count_empty_pass)
    request = DenoiseRequest(
        params, guidance, np.int32(steps // blocks), count_empty, policy, extrapolation, end_of_text
    )
    return Denoising(model, ids, plan, request, ends)


def end_tokens(model: Model, end_of_text: EndOfText | None) -> list[int]:
    """The tokens that end an answer, the one that padding is made of first."""
    if end_of_text is not None and end_of_text.tokens is not None:
        return list(end_of_text.tokens)
    first = [token for token in model.config.eos_token_ids if token < model.config.vocab_size]
    return list(dict.fromkeys([*first, *(token for token in model.stop_token_ids if token < model.config.vocab_size)]))


def _guidance(value: Any, batch: int) -> np.ndarray:
    values = list(value) if isinstance(value, Sequence | np.ndarray) else [value] * batch
    if len(values) != batch:
        raise DflaxError(f"cfg_scale has {len(values)} values for {batch} prompts: give one value, or one per prompt")
    for scale in values:
        if isinstance(scale, bool) or not isinstance(scale, int | float | np.number) or not 0 <= scale < 1e6:
            raise DflaxError(f"cfg_scale is {scale!r}; it must be a number of at least 0 (0 turns it off)")
    return np.array(values, np.float32)


def _answers(session: Denoising, written: Written) -> tuple[list[list[int]], list[list[int]]]:
    """The generated regions, filled up behind their cuts, and the pass that wrote each token."""
    G = session.plan.gen_length
    tokens, steps = [], []
    for row, start in enumerate(session.lengths):
        region = written.tokens[row, start : start + G].copy()
        when = written.commit_step[row, start : start + G].copy()
        if written.length[row] < start + G:
            region[written.length[row] - start :] = session.ends[0]
            when[written.length[row] - start :] = -1
        tokens.append(region.tolist())
        steps.append(when.tolist())
    return tokens, steps


def _output(session: Denoising, written: Written) -> DenoiseOutput:
    tokens, steps = _answers(session, written)
    said = [text_length(answer, session.ends) for answer in tokens]
    tokenizer = session.model.tokenizer
    full, short = written.passes.tolist()
    stats = DenoiseStats(
        seconds=session.seconds,
        tokens_per_second=sum(said) / session.seconds,
        tokens_per_forward=sum(said) / int(written.nfe.sum()),
        full_passes=full,
        short_passes=short,
        compiled=session.compiled,
    )
    texts = None
    if tokenizer is not None:
        texts = [text.decode(tokenizer, answer[:n]) for answer, n in zip(tokens, said, strict=True)]
    return DenoiseOutput(tokens, texts, written.nfe.tolist(), steps, stats)


def _pieces(session: Denoising, passes_per_call: int) -> Iterator[DenoisePiece]:
    known = [np.zeros((session.plan.gen_length,), bool) for _ in session.lengths]
    finished = np.zeros((len(session.lengths),), bool)
    while not finished.all():
        written = session.advance(passes_per_call)
        for row, (start, before) in enumerate(zip(session.lengths, known, strict=True)):
            if finished[row]:
                continue
            region = slice(start, start + session.plan.gen_length)
            there = (written.commit_step[row, region] >= 0) & (np.arange(start, region.stop) < written.length[row])
            new = np.flatnonzero(there & ~before)
            known[row] = there
            if len(new) or written.done[row]:
                tokens = written.tokens[row, start + new].tolist()
                length, nfe = int(written.length[row] - start), int(written.nfe[row])
                yield DenoisePiece(row, new.tolist(), tokens, length, nfe, bool(written.done[row]))
        finished = written.done
