"""`dflax bench kernels`: the attention op against this machine's own limits and against other ways to compute it.

All programs are compiled first, then every call is timed in turns with its rivals. Bytes and FLOPs are the least that a call needs
(`kernel_cases.Case`), so what is reported as achieved is useful work only.
"""

import dataclasses
import itertools
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from dflax import configs
from dflax.errors import DflaxError
from dflax.infer import kernel_cases, report, round_times, stopwatch
from dflax.infer.kernel_cases import Case

Kind = Literal["decode", "tree", "train"]


@dataclass(frozen=True)
class Sizes:
    """What the bench measures when it is not told otherwise."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: tuple[int, ...]
    tree: int
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
    (1, 8, 64), (1024, 8192, 32768, 131072), (1, 8, 16, 64), 512, ((2, 3072, 16, 512), (1, 4096, 8, 512)), (32, 8, 128), 2**30, 8192,
    0.01, 16,
)  # fmt: skip
TOY = Sizes((1, 2), (128,), (1, 4), 7, ((1, 64, 4, 6),), (4, 2, 16), 2**22, 256, 0.001, 2)


@dataclass(frozen=True)
class KernelBenchConfig:
    """Time the attention op: bytes and FLOPs a second against this machine's own limits, plain XLA and jax.nn.dot_product_attention.

    Decode (a block over a long context), tree verify, and training (forward and backward). Then numerics against float64, and what a
    round of speculation takes beside a plain step on random weights. The defaults take under eight minutes on one GPU.
    """

    kinds: tuple[Kind, ...] = ("decode", "tree", "train")
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
    """Calls that have not begun by then are left out and named."""
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


@dataclass(frozen=True)
class Result:
    ceilings: dict[str, float]
    timings: list[Timing]
    numerics: dict[str, dict[str, dict[str, float]]]
    """Call -> way -> array -> relative error."""
    rounds: list[round_times.RoundTime]

    def table(self, markdown: bool = False) -> str:
        """A line per call."""
        rows = []
        for case, found in itertools.groupby(self.timings, key=lambda timing: timing.case):
            by_way = {timing.way: timing.seconds for timing in found}
            ours, *others = by_way.values()
            share = lambda work, ceiling, ours=ours: (
                None if ours is None else 100 * work / ours / self.ceilings[ceiling]
            )
            rows.append([
                case.name, case.bytes / 2**20, None if ours is None else 1e6 * ours, share(case.bytes, "bytes"), share(case.flops, "flops"),
                *(None if ours is None or other is None else other / ours for other in others),
            ])  # fmt: skip
        ways = list(dict.fromkeys(timing.way for timing in self.timings))
        headers = ["call", "MiB", "us", "% of copy", "% of matmul", *(f"{way} / ours" for way in ways[1:])]
        return report.table(headers, rows, markdown)

    def numerics_table(self, markdown: bool = False) -> str:
        rows = [
            [call, array, *(way.get(array) for way in ways.values())]
            for call, ways in self.numerics.items()
            for array in next(iter(ways.values()))
        ]
        ways = next(iter(self.numerics.values()), {})
        return report.table(["relative error", "of", *ways], rows, markdown)

    def rounds_table(self, markdown: bool = False) -> str:
        rows = [[one.name, 1e3 * one.seconds, one.ratio, one.floor] for one in self.rounds]
        return report.table(["batch 1", "ms", "times a plain step", "least by bytes"], rows, markdown)

    def left_out(self) -> list[str]:
        return [f"{one.case.name} by {one.way}: {one.why}" for one in self.timings if one.seconds is None]

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Of decode by our op, a curve per block size: bytes a call reads, share of the copy's bytes a second."""
        found: dict[str, list[tuple[float, float]]] = {}
        for one in self.timings:
            if one.way == "block_attention" and one.case.kind == "decode" and one.seconds is not None:
                share = one.case.bytes / one.seconds / self.ceilings["bytes"]
                found.setdefault(f"T = {one.case.block}", []).append((one.case.bytes, share))
        return {name: sorted(points) for name, points in found.items()}


def run(config: KernelBenchConfig) -> Result:
    """Measures, writes the folder `config.out` and prints the tables."""
    begin = time.monotonic()
    platform = jax.default_backend()
    toy = config.size == "toy" or (config.size == "auto" and platform == "cpu")
    size = TOY if toy else FULL
    cases, ways = _cases(config, size), kernel_cases.ways(platform)
    ceiling = lambda: stopwatch.ceilings(config.dtype, size.copied, size.side, config.repeats, size.at_least)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = {(case, way): pool.submit(_compile, case, attend) for case in cases for way, attend in ways.items()}
    first = ceiling()
    timings: list[Timing] = []
    for case in cases:
        late = time.monotonic() - begin > config.seconds
        programs = {way: compiled.pop((case, way)) for way in ways}
        timings += [Timing(case, way, None, "no time was left") for way in ways] if late else _time(
            case, programs, config.repeats, size.at_least
        )  # fmt: skip
    last = ceiling()
    # Whole rounds come last: their programs take minutes to compile.
    late = time.monotonic() - begin > config.seconds
    rounds = [] if late else _rounds(config, size, platform)
    if late and _pair(config, platform) != "none":
        print("whole rounds: no time was left", file=sys.stderr)
    numerics = {
        case.name: {way: kernel_cases.errors(case, attend) for way, attend in list(ways.items())[:3]}
        for case in {one.kind: kernel_cases.small(one) for one in cases}.values()
    }
    result = Result({name: max(first[name], last[name]) for name in first}, timings, numerics, rounds)
    _publish(config, result, time.monotonic() - begin)
    return result


def _cases(config: KernelBenchConfig, size: Sizes) -> list[Case]:
    heads, kv_heads, head_dim = size.heads
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": config.dtype}
    shape["most_layers"] = size.layers
    batches, contexts, tokens = (
        config.batches or size.batches,
        config.contexts or size.contexts,
        config.tokens or size.tokens,
    )
    of = {
        "decode": [Case("decode", B, S, T, **shape) for B in batches for S in contexts for T in tokens],
        "tree": [Case("tree", B, max(contexts[:2]), size.tree, **shape) for B in batches[:2]],
        "train": [Case("train", B, S, T, N, **shape) for B, S, T, N in size.train],
    }
    return [case for kind in config.kinds for case in of[kind]]


def _compile(case: Case, attend: kernel_cases.Attend) -> Any:
    """The program of a call, from shapes alone."""
    arrays = jax.eval_shape(lambda: kernel_cases.arguments(case, attend))
    return jax.jit(kernel_cases.program(case, attend, case.layers)).lower(*arrays).compile()


def _time(case: Case, programs: dict[str, Future[Any]], repeats: int, at_least: float) -> list[Timing]:
    """All ways that could be compiled and find room, in turns."""
    ways, calls, why = kernel_cases.ways(jax.default_backend()), {}, {}
    made: dict[bool, Any] = {}  # those of the library's ways, and those of the others
    for way, future in programs.items():
        attend = ways[way]
        try:
            program, own = future.result(), kernel_cases.is_ours(attend)
            arguments = made[own] if own in made else made.setdefault(own, kernel_cases.arguments(case, attend))
            jax.block_until_ready(program(*arguments))
        except Exception as error:  # of many types: no room, or a shape that a library does not take
            why[way] = " ".join(str(error).split())[:120]
            continue
        calls[way] = lambda program=program, arguments=arguments: program(*arguments)
    taken = stopwatch.seconds(calls, repeats, at_least)
    return [
        Timing(case, way, taken[way] / case.layers) if way in taken else Timing(case, way, None, why[way])
        for way in programs
    ]


def _pair(config: KernelBenchConfig, platform: str) -> str:
    return config.pair or ("none" if platform == "cpu" else "qwen3-8b-dflash")


def _rounds(config: KernelBenchConfig, size: Sizes, platform: str) -> list[round_times.RoundTime]:
    from dflax.train.aot import configs_of
    from dflax.train.recipe import DrafterRecipe

    preset = _pair(config, platform)
    if preset == "none":
        return []
    recipe = configs.build(DrafterRecipe, {"data": ["-"], **configs.load(preset)}, f"preset {preset}")
    target, drafter, _ = configs_of(recipe)
    return round_times.measure(
        target, drafter, config.dtype, config.pair_context, config.reduced, config.repeats, size.at_least
    )


def _publish(config: KernelBenchConfig, result: Result, seconds: float) -> None:
    out, device = Path(config.out), jax.devices()[0].device_kind
    limits = (
        f"{result.ceilings['bytes'] / 1e9:.4g} GB/s copied, {result.ceilings['flops'] / 1e12:.4g} TFLOP/s in a matmul"
    )
    report.write_json(
        out / "kernels.json", dataclasses.asdict(config) | dataclasses.asdict(result) | {"seconds": seconds}
    )
    sections = [f"{device}, {config.dtype}: {limits}."]
    texts = []
    for markdown in (True, False):
        tables = [result.table(markdown), result.numerics_table(markdown)]
        tables += [result.rounds_table(markdown)] if result.rounds else []
        left = result.left_out()
        tables += ["Not measured:\n" + "\n".join(f"- {line}" for line in left)] if left else []
        texts.append("\n\n".join([*sections, *tables]) + "\n")
    report.write_text(out / "kernels.md", texts[0])
    report.plot_bandwidth(out / "kernels.png", result.curves())
    print(f"{texts[1]}\n{seconds:.0f} s; everything in {out}/")
