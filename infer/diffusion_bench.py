"""`dflax bench diffusion`: ways to denoise side by side, in one process, on the same problems.

Problems are answered a batch at a time. For every batch all methods run one after another with every cache, in an order that turns round
from batch to batch, so that whatever else the machine does falls on all of them alike; a call that had to compile something is
repeated. Calls are kept one by one, a killed run goes on where it was, and more methods, caches, lengths or models can be added to a
folder later.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from dflax.errors import DflaxError
from dflax.infer import diffusion_summary, report
from dflax.infer.diffuse import DenoiseOutput, denoise, end_tokens
from dflax.infer.endings import EndOfText, text_length
from dflax.infer.fit import check_diffusion
from dflax.infer.journal import Journal
from dflax.infer.methods import PLAIN, Method, parse
from dflax.infer.tasks import Task, load_file, load_stories
from dflax.model import Model, load

CacheKind = Literal["none", "prefix", "dual"]

ENDS = {"none": None, "stop": EndOfText(), "truncate": EndOfText(truncate=True)}


@dataclass(frozen=True)
class Conditions:
    """What is the same for every call of one folder."""

    block_length: int = 32
    batch: int = 16
    repeats: int = 1
    temperature: float = 0.0
    seed: int = 0
    dtype: str = "float32"
    end_of_text: str = "none"

    def __post_init__(self) -> None:
        for name in ("block_length", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class DiffusionBenchConfig:
    """Measure policies of adaptive denoising: accuracy, forward passes and speed, beside plain decoding of one token per step.

    Methods: plain, threshold:0.9, factor:1, frechet:0.25, credit:0.9, prophet:1, schedule:2 (tokens per step), learn2pd, tspd, and
    Dream's rules. Several values make a sweep (threshold:0.7,0.8,0.9), other knobs go by their names (credit:0.9:weight=0.5,0.7). Learned
    policies take a folder and values (tspd:FOLDER@0.3,0.5). "+ce" puts the look-ahead in front (tspd+ce:z=1,1.28), with the constants that
    were fitted, or "+ce:default" with those that were not. Plain decoding without cache always runs: the others are compared with it.
    """

    models: tuple[str, ...] = ("arith-llada",)
    """Diffusion language models: folders, hub ids or built-in names."""
    methods: tuple[str, ...] = ("threshold:0.9", "learn2pd", "tspd", "tspd+ce")
    """Ways to decode, as above."""
    caches: tuple[CacheKind, ...] = ("none",)
    """Every method runs with each."""
    gen_lengths: tuple[int, ...] = (64,)
    """Tokens of an answer."""
    controllers: tuple[str, ...] = ()
    """Per model the folder of its controller, filter and look-ahead constants; none: they come with the model."""
    stories: int = 2000
    """Arithmetic stories of the test split (unseen numbers and orders of events) to answer, where no data are given."""
    data: tuple[str, ...] = ()
    """Files of problems: .jsonl with question or prompt and a number as answer (GSM8K's own form), or without answers; text, one a line."""
    limit: int | None = None
    """Problems per file, the first ones."""
    block_length: int = 32
    batch: int = 16
    """Problems answered together; 1 measures latency."""
    repeats: int = 1
    """Every batch is answered this often by every method; its time is the median."""
    temperature: float = 0.0
    seed: int = 0
    """Noise at a temperature is keyed by this and the problem's number."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    end_of_text: Literal["none", "stop", "truncate"] = "none"
    """"none": the whole region is denoised, as published. "stop": up to a written end token. "truncate": or a surely predicted one."""
    mask_token_id: int | None = None
    """Of models whose config.json lacks it (LLaDA-MoE: 156895)."""
    margin: float = 0.5
    """Percentage points below plain decoding's accuracy at which the passes of all policies are compared."""
    reference: str = "tspd+ce"
    """The policy whose passes the others' are divided by."""
    maps: tuple[str, ...] = ()
    """Methods for the heat maps, by the names in the table; none: of each policy the cheapest within the margin."""
    out: str = "bench-diffusion"
    """Folder for what was measured; the same folder again goes on, or only writes the tables anew."""

    def __post_init__(self) -> None:
        for name in ("models", "caches", "gen_lengths"):
            if not getattr(self, name):
                raise DflaxError(f"{name} is empty; give at least one")
        if self.controllers and len(self.controllers) != len(self.models):
            raise DflaxError(
                f"controllers names {len(self.controllers)} folders for {len(self.models)} models; give one per model"
            )
        if not self.data and self.stories < 1:
            raise DflaxError(f"stories is {self.stories} and there are no data: there is nothing to measure on")
        if self.limit is not None and self.limit < 1:
            raise DflaxError(f"limit is {self.limit}; it must be at least 1")
        if not 0 <= self.margin <= 100:
            raise DflaxError(f"margin is {self.margin}; it is in percentage points, from 0 to 100")
        for length in self.gen_lengths:
            if length < 1 or length % self.conditions.block_length:
                raise DflaxError(f"gen_length {length} is no multiple of block_length {self.block_length}")

    @property
    def conditions(self) -> Conditions:
        return Conditions(**{field.name: getattr(self, field.name) for field in fields(Conditions)})


def run(config: DiffusionBenchConfig) -> diffusion_summary.Summary:
    """Measures, writes calls.jsonl, bench.json, bench.md and pictures to `config.out`, and prints the table.

    Raises DflaxError for impossible settings, methods and problems that cannot be read, and a folder begun with other settings.
    """
    conditions = config.conditions
    with Journal(Path(config.out) / "calls.jsonl", asdict(conditions)) as journal:
        for name, home in zip(config.models, config.controllers or config.models, strict=True):
            model = load(name, dtype=config.dtype, mask_token_id=config.mask_token_id)
            check_diffusion(model)
            methods = parse(config.methods, home)
            tasks = _tasks(config, model)
            _check_maps(config, methods, journal)
            runs = [(method, cache) for cache in config.caches for method in methods]
            if "none" not in config.caches:
                runs = [(PLAIN, "none"), *runs]
            for gen_length in config.gen_lengths:
                measure(model, tasks, runs, gen_length, conditions, journal)
        calls = journal.rows
    summary = diffusion_summary.summarise(calls, config.margin / 100, config.reference)
    return _publish(config, summary, calls)


def measure(
    model: Model,
    tasks: Sequence[Task],
    runs: Sequence[tuple[Method, str]],
    gen_length: int,
    conditions: Conditions,
    journal: Journal,
) -> None:
    """Answers all tasks by every method and cache of `runs`, where the journal lacks it, and appends the calls.

    A row of the journal is one call: what identifies it, its time, and per problem whether it is right (None: cannot be told), forward
    passes, tokens before the end token, the tokens and the pass that wrote each. The call's passes are the batch's, its time is that of
    its own places there, a share: a last batch is filled up with copies of its last problem, so that all calls are of one size.

    Raises DflaxError if the journal has calls of the same name that were made with other weights, constants or problems.
    """
    size = min(conditions.batch, len(tasks))
    ends = set(end_tokens(model, ENDS[conditions.end_of_text]))
    common = _digest(model, tasks)
    keys = {
        (method.label, cache): f"{common}-{method.identity}-{method.steps(gen_length, conditions.block_length)}"
        for method, cache in runs
    }
    known = set()
    for row in journal.rows:
        if (row["model"], row["gen_length"]) == (model.name, gen_length) and (
            name := (row["method"], row["cache"])
        ) in keys:
            if row["identity"] != keys[name]:
                raise DflaxError(
                    f"{journal.path} holds calls of {name[0]} that were made with other weights, constants or problems; "
                    "give another folder"
                )
            known.add((*name, row["batch"], row["repeat"]))
    todo = [
        (number, repeat, method, cache)
        for number, start in enumerate(range(0, len(tasks), size))
        for repeat in range(conditions.repeats)
        for method, cache in (runs if (number + repeat) % 2 == 0 else runs[::-1])
        if (method.label, cache, number, repeat) not in known
    ]
    session = 1 + max((row["session"] for row in journal.rows), default=0)
    commit = report.commit()
    with tqdm(todo, desc=f"{model.name} {gen_length}", unit="call", disable=None) as progress:
        for number, repeat, method, cache in progress:
            progress.set_postfix_str(f"{method.label} {cache}")
            part = tasks[number * size : (number + 1) * size]
            try:
                out = _warm(model, part, size, method, cache, gen_length, conditions)
            except DflaxError as error:
                raise DflaxError(
                    f"{method.label} on problem {part[0].index} of {part[0].set} and those after it: {error}"
                ) from error
            journal.append(
                {
                    "model": model.name,
                    "gen_length": gen_length,
                    "method": method.label,
                    "family": method.family,
                    "cache": cache,
                    "identity": keys[method.label, cache],
                    "batch": number,
                    "repeat": repeat,
                    "session": session,
                    "commit": commit,
                    "share": len(part) / size,
                    "seconds": out.stats.seconds * len(part) / size,
                    "passes": out.stats.full_passes + out.stats.short_passes,
                    "set": [task.set for task in part],
                    "index": [task.index for task in part],
                    **_answers(part, out, ends),
                }
            )


def _warm(
    model: Model, part: Sequence[Task], size: int, method: Method, cache: str, gen_length: int, conditions: Conditions
) -> DenoiseOutput:
    """The answers, timed without compilation."""
    full = [*part, *[part[-1]] * (size - len(part))]
    options: dict[str, Any] = {
        "gen_length": gen_length,
        "block_length": conditions.block_length,
        "steps": method.steps(gen_length, conditions.block_length),
        "policy": method.policy,
        "cache": cache,
        "extrapolation": method.ahead,
        "end_of_text": ENDS[conditions.end_of_text],
        "temperature": conditions.temperature,
        "seed": conditions.seed,
        "index": [task.index for task in full],
    }
    prompts = [list(task.tokens) for task in full]
    out = denoise(model, prompts, **options)
    return denoise(model, prompts, **options) if out.stats.compiled else out


def _answers(part: Sequence[Task], out: DenoiseOutput, ends: set[int]) -> dict[str, list[Any]]:
    texts = [None] * len(part) if out.texts is None else out.texts[: len(part)]
    tokens = out.tokens[: len(part)]
    return {
        "correct": [
            None if task.check is None or text is None else task.check(text)
            for task, text in zip(part, texts, strict=True)
        ],
        "nfe": out.nfe[: len(part)],
        "counted": [text_length(answer, ends) for answer in tokens],
        "tokens": tokens,
        "commit_steps": out.commit_steps[: len(part)],
    }


def _tasks(config: DiffusionBenchConfig, model: Model) -> list[Task]:
    if not config.data:
        return load_stories(model.tokenizer, config.stories)
    tasks = [task for path in config.data for task in load_file(path, model.tokenizer, config.limit)]
    if len({(task.set, task.index) for task in tasks}) < len(tasks):
        raise DflaxError(f"two files of the data have one name: {', '.join(config.data)}; rename one")
    return tasks


def _check_maps(config: DiffusionBenchConfig, methods: Sequence[Method], journal: Journal) -> None:
    unknown = set(config.maps) - {method.label for method in methods} - {call["method"] for call in journal.rows}
    if unknown:
        raise DflaxError(
            f"maps names {', '.join(sorted(unknown))}, which are not measured; names are those of the table, such as {methods[0].label}"
        )


def _digest(model: Model, tasks: Sequence[Task]) -> str:
    asked = [(task.set, task.index, task.tokens, task.value) for task in tasks]
    return hashlib.sha256(json.dumps([model.fingerprint, asdict(model.config), asked]).encode()).hexdigest()[:16]


def _publish(
    config: DiffusionBenchConfig, summary: diffusion_summary.Summary, calls: Sequence[dict[str, Any]]
) -> diffusion_summary.Summary:
    out = Path(config.out)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "config": asdict(config),
        "threads": threads,
        "commits_measured": sorted({str(call["commit"]) for call in calls}),
        **diffusion_summary.plain_data(summary),
    }
    report.write_json(out / "bench.json", found)
    report.write_text(out / "bench.md", summary.table(markdown=True) + "\n")
    summary.plot(out, config.block_length, config.maps)
    print(summary.table())
    print(f"{threads} threads, batch {config.batch}; everything in {out}/")
    return summary
