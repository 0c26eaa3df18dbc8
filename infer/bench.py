"""`dflax bench`: plain and speculative decoding side by side, in one process, on named prompt sets.

Prompts are decoded one at a time (batch 1). For every prompt all methods run one after another, in an order that turns round from prompt
to prompt, so that whatever else the machine does falls on all of them alike; a call that had to compile something is repeated. Results
are kept prompt by prompt, and a killed run goes on where it was.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from dflax.errors import DflaxError
from dflax.infer import report, summary
from dflax.infer.fit import check_block_size, check_pair
from dflax.infer.generate import Output, generate, speculate
from dflax.infer.journal import Journal, line
from dflax.infer.prompts import Prompt, load_file, load_set
from dflax.model import Model, load

BlockSize = int | Literal["auto"]

COMPILE_TRIES = 8
"""How often a call is repeated because it compiled something; "auto" may come upon a new block size late."""


@dataclass(frozen=True)
class BenchConfig:
    """What to measure."""

    target: str
    """A folder, a .gguf file, a hub id or a built-in name."""
    drafter: str | None = None
    """None measures plain decoding alone."""
    sets: tuple[str, ...] = ()
    """Prompt sets from the hub: gsm8k math-500 aime25 humaneval mbpp livecodebench mt-bench."""
    data: tuple[str, ...] = ()
    """The same from local files: NAME=FILE.jsonl, with the columns of the original."""
    prompts: str | None = None
    """A file of your own prompts: .jsonl (prompt, messages or prompt_tokens), or text with one prompt a line."""
    limit: int | None = 64
    """Prompts per set, the first ones; None: all."""
    bare: bool = False
    """Ask mathematical problems without "Please reason step by step, and put your final answer within \\boxed{}."."""
    enable_thinking: bool | None = None
    """Passed to the chat template; None: its default."""
    block_sizes: tuple[BlockSize, ...] = ()
    """Block sizes to speculate with, or "auto"; none: the one the drafter was trained with."""
    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 128
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32",)
    batch: int = 1
    """Prompts of a set decoded together. Above 1 the time of a batch is shared among its responses by their tokens."""
    repeats: int = 1
    """Every prompt is decoded this often by every method; its time is the median."""
    seed: int = 0
    out: str = "bench"
    """Folder for what was measured; the same folder again goes on, or only writes the tables anew."""
    baseline: str | None = None
    """A JSON written by tools/hf_baseline.py, put beside our figures."""
    dump_prompts: str | None = None
    """Only write the prompts to this .jsonl file, for the baseline; nothing is measured."""


@dataclass(frozen=True)
class Method:
    """A way to decode; block_size None is plain decoding."""

    name: str
    block_size: BlockSize | None = None


def run(config: BenchConfig) -> summary.Summary | None:
    """Measures, writes samples.jsonl, bench.json, bench.md and pictures to `config.out`, and prints the table.

    Raises DflaxError for impossible settings, prompts that cannot be read, and a folder begun with other settings.
    """
    _check(config)
    target = load(config.target, dtype=config.dtypes[0])
    prompts = _prompts(config, target)
    if config.dump_prompts is not None:
        return _dump(config, target, prompts)
    baseline = summary.read_baseline(config.baseline)
    drafter = None if config.drafter is None else load(config.drafter, dtype=config.dtypes[0])
    methods = _methods(config, target, drafter)
    settings = _settings(config, prompts) | {
        "target_weights": target.fingerprint,
        "drafter_weights": None if drafter is None else drafter.fingerprint,
    }
    with Journal(Path(config.out) / "samples.jsonl", settings) as journal:
        for dtype in config.dtypes:
            if dtype != config.dtypes[0]:
                target = load(config.target, dtype=dtype)
                drafter = None if config.drafter is None else load(config.drafter, dtype=dtype)
            measure(config, methods, target, drafter, prompts, journal, dtype)
    result = summary.summarise(journal.rows, baseline)
    return _publish(config, result, journal.rows)


def _methods(config: BenchConfig, target: Model, drafter: Model | None) -> list[Method]:
    """Plain decoding, and every block size; refused if one cannot be."""
    methods = [Method("plain")]
    if drafter is not None:
        check_pair(target, drafter)
        for size in config.block_sizes or (drafter.config.block_size,):
            if size != "auto":
                check_block_size(drafter, size, allow_larger=False)
            methods.append(Method(f"block {size}", size))
    return methods


def measure(
    config: BenchConfig, methods: Sequence[Method], target: Model, drafter: Model | None, prompts: Sequence[Prompt],
    journal: Journal, dtype: str,
) -> None:  # fmt: skip
    """Decodes every prompt at every temperature that the journal lacks, and appends it."""
    known = {(row["dtype"], row["temperature"], row["set"], row["index"]) for row in journal.rows}
    commit = report.commit()
    todo = [
        (temperature, prompt)
        for temperature in config.temperatures
        for prompt in prompts
        if (dtype, temperature, prompt.set, prompt.index) not in known
    ]
    with tqdm(total=len(todo), desc=f"bench {dtype}", unit="prompt", disable=None) as progress:
        for number, (temperature, together) in enumerate(_batches(todo, config.batch)):
            by_prompt = zip(*_decode(config, target, drafter, together, number, temperature, methods), strict=True)
            for prompt, runs in zip(together, by_prompt, strict=True):
                found = {"dtype": dtype, "temperature": temperature, "set": prompt.set, "index": prompt.index}
                journal.append({**found, "commit": commit, "runs": list(runs)})
            progress.update(len(together))
            speeds = ", ".join(f"{run['method']} {_speed(run):.1f} tok/s" for run in runs[: len(methods)])
            progress.set_postfix_str(speeds)


def _batches(todo: Sequence[tuple[float, Prompt]], size: int) -> Iterator[tuple[float, list[Prompt]]]:
    """Neighbours of one temperature and set, `size` at most."""
    for (temperature, _), group in itertools.groupby(todo, key=lambda item: (item[0], item[1].set)):
        prompts = [prompt for _, prompt in group]
        for start in range(0, len(prompts), size):
            yield temperature, prompts[start : start + size]


def _decode(
    config: BenchConfig, target: Model, drafter: Model | None, prompts: Sequence[Prompt], number: int, temperature: float,
    methods: Sequence[Method],
) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
    """A batch of prompts by all methods, `repeats` times: what each prompt got."""
    for repeat in range(config.repeats):
        for method in methods if (number + repeat) % 2 == 0 else methods[::-1]:
            try:
                out = _warm(config, target, drafter, prompts, temperature, method)
            except DflaxError as error:
                raise DflaxError(
                    f"prompt {prompts[0].index} of {prompts[0].set} and those after it: {error}"
                ) from error
            steps = max(1, sum(len(tokens) - 1 for tokens in out.tokens))
            yield [
                {
                    "method": method.name,
                    "repeat": repeat,
                    "block_size": max(out.stats.block_sizes, default=1),
                    "tokens": tokens,
                    "lengths": lengths,
                    "prefill_seconds": out.stats.prefill_seconds / len(prompts),
                    "decode_seconds": out.stats.decode_seconds * (len(tokens) - 1) / steps,
                    "drafter_bytes": out.stats.drafter_bytes,
                }
                for tokens, lengths in zip(out.tokens, out.acceptance_lengths, strict=True)
            ]


def _warm(
    config: BenchConfig,
    target: Model,
    drafter: Model | None,
    prompts: Sequence[Prompt],
    temperature: float,
    method: Method,
) -> Output:
    """The responses, timed without compilation. All methods draw their noise with the same keys."""
    tokens = [list(prompt.tokens) for prompt in prompts]
    options: dict[str, Any] = {
        "temperature": temperature,
        "seed": config.seed,
        "index": [prompt.index for prompt in prompts],
    }
    for _ in range(COMPILE_TRIES):
        if method.block_size is None:
            out = generate(target, tokens, config.max_new_tokens, **options)
        else:
            assert drafter is not None
            out = speculate(target, drafter, tokens, config.max_new_tokens, block_size=method.block_size, **options)
        if out.stats.compiled == 0:
            return out
    raise DflaxError(
        f"{method.name} compiled something in each of {COMPILE_TRIES} calls; its time would be no measurement"
    )


def _speed(run: dict[str, Any]) -> float:
    return (len(run["tokens"]) - 1) / run["decode_seconds"] if run["decode_seconds"] else 0.0


def _check(config: BenchConfig) -> None:
    for name in ("limit", "max_new_tokens", "repeats", "batch"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise DflaxError(f"{name} is {value}; it must be at least 1")
    if not (config.sets or config.data or config.prompts):
        raise DflaxError("nothing to measure on: give sets, data (NAME=FILE.jsonl) or prompts")
    if not config.dtypes or not config.temperatures:
        raise DflaxError("give at least one dtype and one temperature")


def _prompts(config: BenchConfig, target: Model) -> list[Prompt]:
    options: dict[str, Any] = {"limit": config.limit, "enable_thinking": config.enable_thinking}
    named: list[tuple[str, str | None]] = [(name, None) for name in config.sets]
    for entry in config.data:
        name, equals, path = entry.partition("=")
        if not equals:
            raise DflaxError(f"data is {entry!r}; it must be NAME=FILE.jsonl, such as gsm8k=gsm8k_test.jsonl")
        named.append((name, path))
    prompts: list[Prompt] = []
    for name, path in named:
        prompts += load_set(name, target.tokenizer, source=path, bare=config.bare, **options)
    if config.prompts is not None:
        prompts += load_file(config.prompts, target.tokenizer, **options)
    twice = [
        prompt
        for prompt in prompts
        if prompt.index == 0 and sum(p.set == prompt.set and p.index == 0 for p in prompts) > 1
    ]
    if twice:
        raise DflaxError(f"the prompt set {twice[0].set} is given twice")
    return prompts


def _settings(config: BenchConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What every row of one folder must agree on."""
    settings = asdict(config)
    for name in ("out", "baseline", "dump_prompts", "sets", "data", "prompts", "limit", "bare", "enable_thinking"):
        del settings[name]
    digest = hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts]).encode()).hexdigest()
    return settings | {"prompts": len(prompts), "prompts_sha256": digest}


def _dump(config: BenchConfig, target: Model, prompts: Sequence[Prompt]) -> None:
    assert config.dump_prompts is not None
    stops = [token for token in target.stop_token_ids if token < target.config.vocab_size]
    rows = [
        {
            "set": prompt.set,
            "index": prompt.index,
            "prompt_tokens": prompt.tokens,
            "max_new_tokens": config.max_new_tokens,
            "stop_token_ids": stops,
        }
        for prompt in prompts
    ]
    path = Path(config.dump_prompts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(map(line, rows)))
    except OSError as error:
        raise DflaxError(f"cannot write {path}: {error.strerror}") from error
    print(f"{len(rows)} prompts written to {path}")


def _publish(config: BenchConfig, result: summary.Summary, samples: Sequence[dict[str, Any]]) -> summary.Summary:
    out = Path(config.out)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report.write_json(
        out / "bench.json",
        {
            "config": asdict(config),
            "threads": threads,
            "commits_measured": sorted({str(row["commit"]) for row in samples}),
            "results": [asdict(row) for row in result.rows],
            "baseline": result.baseline_name,
        },
    )
    report.write_text(out / "bench.md", result.table(markdown=True) + "\n")
    result.plot(out)
    print(result.table())
    print(f"{threads} threads, commit {report.commit() or 'unknown'}; everything in {out}/")
    return result
