"""`dflax bench kernels`: the attention op against this machine's own limits and against other ways to compute it.

Programs are compiled many at a time, and every call is timed in turns with its rivals as soon as all of them are there. Bytes and FLOPs
are the least that a call needs (`kernel_cases.Case`), so what is reported as achieved is useful work only.
"""

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal, get_args

import jax

from dflax import configs
from dflax.errors import DflaxError
from dflax.infer import kernel_cases, report, round_times, stopwatch
from dflax.infer.kernel_cases import Case, Kind

KINDS = get_args(Kind)

HEAD_START = 1 / 3
"""Of the time: how long compiling may keep calls on an accelerator from being timed. Compilers try kernels out on it."""

LAST = 1 / 8
"""Of the time: when so much is left, calls are timed without the rivals that are still being compiled."""

NO_TIME = "no time was left"

TRACING = Lock()
"""Whoever traces a program has it, and whoever times calls: Python does one at a time, and calls would wait to be enqueued."""


@dataclass(frozen=True)
class Sizes:
    """What the bench measures when it is not told otherwise."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: tuple[int, ...]
    tree: int
    prefill: tuple[tuple[int, int, int], ...]
    """(batch, context, chunk)."""
    canvas: tuple[tuple[int, int], ...]
    """This and the next: (batch, length)."""
    packed: tuple[tuple[int, int], ...]
    train: tuple[tuple[int, int, int, int], ...]
    """(batch, context, block size, anchors)."""
    heads: tuple[int, int, int]
    """Query heads, key/value heads, head dimension."""
    copied: int
    side: int
    """Of the ceilings: bytes that are copied, rows of a square matrix."""
    at_least: float
    """Seconds that a turn takes."""
    layers: int
    """Attended one after the other in a call, at most."""


FULL = Sizes(
    batches=(1, 8, 64), contexts=(8192, 32768, 1024, 131072), tokens=(16, 1, 8, 64), tree=512,
    prefill=((1, 8192, 256), (1, 32768, 256), (8, 8192, 256)), canvas=((1, 4096), (1, 1024), (8, 1024)), packed=((2, 3072),),
    train=((2, 3072, 16, 512), (1, 4096, 8, 512)), heads=(32, 8, 128), copied=2**30, side=8192, at_least=0.01, layers=16,
)  # fmt: skip
"""The most telling first."""

TOY = Sizes(
    batches=(1, 2), contexts=(128,), tokens=(1, 4), tree=7, prefill=((1, 64, 8),), canvas=((1, 48),), packed=((2, 24),),
    train=((1, 64, 4, 6),), heads=(4, 2, 16), copied=2**22, side=256, at_least=0.001, layers=2,
)  # fmt: skip


@dataclass(frozen=True)
class KernelBenchConfig:
    """Time the attention op: bytes and FLOPs a second against this machine's own limits, plain XLA and jax.nn.dot_product_attention.

    Decode (a block over a long context), tree verify, prefill, whole canvases, packed rows, and training (forward and backward);
    numerics against float64; what a round of speculation takes beside a plain step on random weights. After --seconds nothing is begun and
    no compiler is waited for; what was left out is named. Results are written after every call.
    """

    kinds: tuple[Kind, ...] = KINDS
    size: Literal["auto", "full", "toy"] = "auto"
    """toy: seconds on a CPU; auto: toy there, full elsewhere."""
    batches: tuple[int, ...] = ()
    """This and the next two: of decode; none: those of the size."""
    contexts: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    pair: str = ""
    """Preset whose pair the rounds are shaped like, or "none"; default: qwen3-8b-dflash, on a CPU none."""
    pair_context: int = 4096
    reduced: int = 32768
    """Draft vocabulary of the round with a reduced one."""
    repeats: int = 7
    """Turns of every call; medians are reported."""
    seconds: float = 400.0
    """When to stop. Compilers that still run then keep the process alive until they are done, after everything was written."""
    out: str = "bench-kernels"
    """Folder of kernels.json, kernels.md and kernels.png."""

    def __post_init__(self) -> None:
        for name in ("batches", "contexts", "tokens"):
            if any(value < 1 for value in getattr(self, name)):
                raise DflaxError(f"{name} is {getattr(self, name)}; every value must be at least 1")
        if self.repeats < 1 or not self.kinds:
            raise DflaxError(f"repeats is {self.repeats} and kinds is {self.kinds}; there must be at least one of both")


@dataclass(frozen=True)
class Timing:
    """A call by one way. seconds: of a layer, None where it was not measured; why tells."""

    case: Case
    way: str
    seconds: float | None
    why: str = ""

    @property
    def bandwidth(self) -> float | None:
        """Achieved: bytes a second that had to move."""
        return None if self.seconds is None else self.case.bytes / self.seconds

    @property
    def speed(self) -> float | None:
        """Achieved: FLOPs a second that had to be done."""
        return None if self.seconds is None else self.case.flops / self.seconds

    def record(self) -> dict[str, Any]:
        achieved = {"bytes_per_second": self.bandwidth, "flops_per_second": self.speed}
        return dataclasses.asdict(self) | {"bytes": self.case.bytes, "flops": self.case.flops} | achieved


@dataclass(frozen=True)
class Result:
    """Grows while calls are measured."""

    ceilings: dict[str, float]
    timings: list[Timing] = field(default_factory=list)
    numerics: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Call -> way -> array -> relative error."""
    rounds: list[round_times.RoundTime] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What else was not measured, and why."""

    def table(self, markdown: bool = False) -> str:
        """A line per call."""
        rows = []
        place = lambda timing: (KINDS.index(timing.case.kind), dataclasses.astuple(timing.case))
        for case, found in itertools.groupby(sorted(self.timings, key=place), key=lambda timing: timing.case):
            ours, *others = found
            share = lambda rate, ceiling: None if rate is None else 100 * rate / self.ceilings[ceiling]
            scaled = lambda value, unit: None if value is None else value / unit
            ratio = lambda other, ours=ours: (
                None if ours.seconds is None or other.seconds is None else other.seconds / ours.seconds
            )
            rows.append([
                case.name, case.bytes / 2**20, scaled(ours.seconds, 1e-6), scaled(ours.bandwidth, 1e9), share(ours.bandwidth, "bytes"),
                scaled(ours.speed, 1e12), share(ours.speed, "flops"), *map(ratio, others),
            ])  # fmt: skip
        ways = list(dict.fromkeys(timing.way for timing in self.timings))
        headers = ["call", "MiB", "us", "GB/s", "% of copy", "TFLOP/s", "% of matmul"]
        return report.table([*headers, *(f"{way} / ours" for way in ways[1:])], rows, markdown)

    def numerics_table(self, markdown: bool = False) -> str:
        ways = list(dict.fromkeys(way for found in self.numerics.values() for way in found))
        rows = [
            [call, array, *(found.get(way, {}).get(array) for way in ways)]
            for call, found in self.numerics.items()
            for array in dict.fromkeys(array for of in found.values() for array in of)
        ]
        return report.table(["relative error", "of", *ways], rows, markdown)

    def rounds_table(self, markdown: bool = False) -> str:
        rows = [[one.name, 1e3 * one.seconds, one.ratio, one.floor] for one in self.rounds]
        return report.table(["batch 1", "ms", "times a plain step", "least by bytes"], rows, markdown)

    def left_out(self) -> list[str]:
        timings = [f"{one.case.name} by {one.way}: {one.why}" for one in self.timings if one.seconds is None]
        return timings + self.missing

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Of decode by our op, a curve per block size: bytes a call reads, share of the copy's bytes a second."""
        found: dict[str, list[tuple[float, float]]] = {}
        for one in self.timings:
            if one.way == "block_attention" and one.case.kind == "decode" and one.bandwidth is not None:
                share = one.bandwidth / self.ceilings["bytes"]
                found.setdefault(f"T = {one.case.block}", []).append((one.case.bytes, share))
        return {name: sorted(points) for name, points in found.items()}


@dataclass(frozen=True)
class _Job:
    """Programs that belong together, by way, and what to do with those that are ready and with why the others are not."""

    programs: dict[str, Future[Any]]
    take: Callable[[dict[str, Any], dict[str, str]], None]

    def ready(self, late: bool) -> bool:
        """All are compiled; late: the first, which the others are compared with, and one more."""
        done = [future.done() for future in self.programs.values()]
        return all(done) or (late and done[0] and sum(done) > 1)

    def run(self) -> None:
        made, why = {}, {}
        for way, future in self.programs.items():
            if not future.done():
                why[way] = NO_TIME
            elif error := future.exception():  # of many types: no room, or a shape that a library does not take
                why[way] = _line(error)
            else:
                made[way] = future.result()
        self.take(made, why)

    def leave(self) -> None:
        self.take({}, dict.fromkeys(self.programs, NO_TIME))


def run(config: KernelBenchConfig) -> Result:
    """Measures, writes the folder `config.out` and prints the tables."""
    begin = time.monotonic()
    left = lambda: config.seconds - (time.monotonic() - begin)
    platform = jax.default_backend()
    size = TOY if config.size == "toy" or (config.size == "auto" and platform == "cpu") else FULL
    pair = _pair(config, platform)
    ceilings = lambda: stopwatch.ceilings(config.dtype, size.copied, size.side, config.repeats, size.at_least)
    result = Result(ceilings())
    pool = ThreadPoolExecutor((os.cpu_count() or 1) + 2)  # whole rounds take minutes: they must not keep calls waiting
    submit = lambda lower: pool.submit(_compile, lower)
    try:
        rounds = [] if pair is None else [_rounds(pair, config, size, result, submit)]
        calls = [*_calls(config, size, platform, result, submit)]
        # A CPU compiles and computes with the same cores.
        first, patience = (rounds + calls, 1.0) if platform == "cpu" else (calls, HEAD_START)
        wait([future for job in first for future in job.programs.values()], max(0.0, left() * patience))
        for job in _as_ready(rounds + calls, left, config.seconds):
            job.run()
            _publish(config, result, time.monotonic() - begin)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    with TRACING:
        again = ceilings()
    result.ceilings.update({name: max(value, again[name]) for name, value in result.ceilings.items()})
    _publish(config, result, time.monotonic() - begin)
    report.plot_bandwidth(Path(config.out) / "kernels.png", result.curves())
    print(f"{_text(config, result)}\n{time.monotonic() - begin:.0f} s; everything in {config.out}/")
    return result


def _as_ready(jobs: list[_Job], left: Callable[[], float], seconds: float) -> Iterator[_Job]:
    """The jobs, each as soon as it is ready, the first of several; what is not by the end is left."""
    jobs = list(jobs)
    while jobs and left() > 0:
        late = left() < LAST * seconds
        ready = next((job for job in jobs if job.ready(late)), None)
        if ready is not None:
            jobs.remove(ready)
            yield ready
            continue
        waiting = [future for job in jobs for future in job.programs.values() if not future.done()]
        wait(waiting, max(0.0, left() - (0.0 if late else LAST * seconds)), FIRST_COMPLETED)
    for job in jobs:
        job.leave()


def _calls(
    config: KernelBenchConfig, size: Sizes, platform: str, result: Result, submit: Callable[..., Any]
) -> Iterator[_Job]:
    """Numerics of every kind, then the calls."""
    cases, ways = _cases(config, size), kernel_cases.ways(platform)
    for case in {one.kind: kernel_cases.small(one) for one in cases}.values():
        exact = dict(list(ways.items())[:3])
        yield _job(case, exact, submit, lambda made, why, case=case: _compare(case, ways, made, why, result))
    for case in cases:
        yield _job(case, ways, submit, lambda made, why, case=case: result.timings.extend(
            _time(case, ways, made, why, config.repeats, size.at_least)
        ))  # fmt: skip


def _job(case: Case, ways: Mapping[str, kernel_cases.Attend], submit: Callable[..., Any], take: Any) -> _Job:
    lower = lambda attend: lambda: kernel_cases.lowered(case, attend)
    return _Job({way: submit(lower(attend)) for way, attend in ways.items()}, take)


def _compile(lower: Callable[[], jax.stages.Lowered]) -> Any:
    with TRACING:
        program = lower()
    return program.compile()


def _cases(config: KernelBenchConfig, size: Sizes) -> list[Case]:
    """One of every kind, then another of every kind, ..."""
    heads, kv_heads, head_dim = size.heads
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": config.dtype}
    shape["most_layers"] = size.layers
    batches, contexts, tokens = (
        config.batches or size.batches,
        config.contexts or size.contexts,
        config.tokens or size.tokens,
    )
    of = {
        "decode": [Case("decode", B, S, T, **shape) for T in tokens for B in batches for S in contexts],
        "tree": [Case("tree", B, max(contexts[:2]), size.tree, **shape) for B in batches[:2]],
        "prefill": [Case("prefill", B, S, T, **shape) for B, S, T in size.prefill],
        "canvas": [Case("canvas", B, 0, T, **shape) for B, T in size.canvas],
        "packed": [Case("packed", B, 0, T, **shape) for B, T in size.packed],
        "train": [Case("train", B, S, T, N, **shape) for B, S, T, N in size.train],
    }
    turns = itertools.zip_longest(*(of[kind] for kind in config.kinds))
    return [case for turn in turns for case in turn if case is not None]


def _time(
    case: Case, ways: Mapping[str, kernel_cases.Attend], programs: Mapping[str, Any], why: Mapping[str, str], repeats: int,
    at_least: float,
) -> list[Timing]:  # fmt: skip
    """All programs that find room, in turns; `why`: of the other ways."""
    calls: dict[str, Callable[[], Any]] = {}
    failed = dict(why)
    made: dict[bool, Any] = {}  # those of the library's ways, and those of the others
    for way, program in programs.items():
        try:
            own = kernel_cases.is_ours(ways[way])
            arguments = made[own] if own in made else made.setdefault(own, kernel_cases.arguments(case, ways[way]))
            jax.block_until_ready(program(*arguments))
        except Exception as error:  # as of compiling
            failed[way] = _line(error)
            continue
        calls[way] = lambda program=program, arguments=arguments: program(*arguments)
    with TRACING:
        taken = stopwatch.seconds(calls, repeats, at_least)
    return [
        Timing(case, way, taken[way] / case.layers) if way in taken else Timing(case, way, None, failed[way])
        for way in ways
    ]


def _compare(
    case: Case, ways: Mapping[str, kernel_cases.Attend], programs: Mapping[str, Any], why: Mapping[str, str], result: Result
) -> None:  # fmt: skip
    """Every program against float64."""
    failed, wanted = dict(why), kernel_cases.exact(case, case.arrays(1)) if programs else {}
    for way, program in programs.items():
        try:
            result.numerics.setdefault(case.name, {})[way] = kernel_cases.errors(case, ways[way], program, wanted)
        except Exception as error:  # as above
            failed[way] = _line(error)
    result.missing.extend(f"numerics, {case.name} by {way}: {text}" for way, text in failed.items())


def _rounds(
    pair: round_times.Pair, config: KernelBenchConfig, size: Sizes, result: Result, submit: Callable[..., Any]
) -> _Job:  # fmt: skip
    ways = pair.ways()

    def take(made, why):
        why = dict(why)
        try:
            if next(iter(ways)) in made:
                with TRACING:
                    result.rounds.extend(pair.measure(made, config.repeats, size.at_least))
        except Exception as error:  # no room, say
            why |= dict.fromkeys(made, _line(error))
        result.missing.extend(f"{name}: {text}" for name, text in why.items())

    return _Job({name: submit(lambda who=who: pair.lowered(who)) for name, who in ways.items()}, take)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _pair(config: KernelBenchConfig, platform: str) -> round_times.Pair | None:
    from dflax.train.aot import configs_of
    from dflax.train.recipe import DrafterRecipe

    preset = config.pair or ("none" if platform == "cpu" else "qwen3-8b-dflash")
    if preset == "none":
        return None
    recipe = configs.build(DrafterRecipe, {"data": ["-"], **configs.load(preset)}, f"preset {preset}")
    target, drafter, _ = configs_of(recipe)
    return round_times.Pair(target, drafter, config.dtype, config.pair_context, config.reduced)


def _text(config: KernelBenchConfig, result: Result, markdown: bool = False) -> str:
    limits = (
        f"{result.ceilings['bytes'] / 1e9:.4g} GB/s copied, {result.ceilings['flops'] / 1e12:.4g} TFLOP/s in a matmul"
    )
    parts = [f"{jax.devices()[0].device_kind}, {config.dtype}: {limits}."]
    parts += [result.table(markdown), result.numerics_table(markdown)]
    parts += [result.rounds_table(markdown)] if result.rounds else []
    left = result.left_out()
    parts += ["Not measured:\n" + "\n".join(f"- {line}" for line in left)] if left else []
    return "\n\n".join(parts) + "\n"


def _publish(config: KernelBenchConfig, result: Result, seconds: float) -> None:
    """What is known so far, so that a run that is killed leaves it."""
    timings = {"timings": [one.record() for one in result.timings], "seconds": seconds}
    report.write_json(
        Path(config.out) / "kernels.json", dataclasses.asdict(config) | dataclasses.asdict(result) | timings
    )
    report.write_text(Path(config.out) / "kernels.md", _text(config, result, markdown=True))
