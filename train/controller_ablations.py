"""`dflax train controller-ablations`: what the parts of TSPD and CE (arXiv 2605.30753) are worth on one diffusion model, by one command.

Traces are recorded once. Every variant changes one thing of the base recipe, trains on the same traces, and answers the same problems as
plain decoding, through the bench of denoising (`dflax.infer.diffusion_bench`). A trained variant leaves OUT/NAME, every call to the model
a line of OUT/calls; a killed command goes on from there. Tables and picture are written anew after every variant.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dflax import configs, controllers
from dflax.errors import DflaxError
from dflax.infer import diffusion_summary, report
from dflax.infer.diffusion_bench import Conditions, measure
from dflax.infer.diffusion_summary import Row, Summary
from dflax.infer.extrapolation import ConfidenceExtrapolation
from dflax.infer.frontier import Interval
from dflax.infer.journal import Journal
from dflax.infer.learned import TSPD, Learn2PD
from dflax.infer.methods import PLAIN, Method
from dflax.infer.policies import Credit, Factor, Frechet, Policy, Threshold
from dflax.infer.tasks import Task, load_file, load_stories, with_room
from dflax.model import Model
from dflax.models.controller import Controller
from dflax.train import controller_recipe, finished
from dflax.train.controller_recipe import ControllerRecipe
from dflax.train.controller_variants import COVERAGES, HORIZONS, RUNS, TABLES, VARIANTS, changed, network_size
from dflax.train.traces import Traces

PRESET = "arith-llada-ablations"


def base_recipe() -> ControllerRecipe:
    return configs.build(ControllerRecipe, configs.load(PRESET)["controller"], f"preset {PRESET}")


@dataclass(frozen=True)
class ControllerAblationConfig:
    """Train and compare the controllers and look-aheads of the paper's ablations; --preset arith-llada-ablations holds the settings.

    OUT gets ablations.md, ablations.json and ablations.png.
    """

    stories: int = 500
    """Arithmetic stories of the test split to answer, where no data are given."""
    data: tuple[str, ...] = ()
    """Files of problems, as `dflax bench diffusion` takes them."""
    batch: int = 32
    """Problems answered together."""
    gates: tuple[float, ...] = (0.5,)
    """Thresholds of the gate that every controller is measured at. With several, controllers are also compared at equal accuracy."""
    threshold: float = 0.9
    """Of the threshold and credit policies."""
    horizons: tuple[int, ...] = (10, 15, 20, 25, 30)
    coverages: tuple[float, ...] = (0.4, 0.5, 0.6, 0.7, 0.8)
    """These two: of the look-ahead in front of the base controller."""
    gen_lengths: tuple[int, ...] = ()
    """Answer lengths to decode at besides the one that the traces have; of the problems, those whose prompts leave room."""
    margin: float = 0.5
    """Percentage points below plain decoding for the comparison at equal accuracy."""
    out: str = "runs/controller-ablations"
    only: tuple[str, ...] = ()
    """Names of runs (see the table of runs); none: all."""
    controller: ControllerRecipe = field(default_factory=base_recipe)
    """The base that each variant changes in one thing; its `out` is not used."""

    def __post_init__(self) -> None:
        unknown = set(self.only) - set(RUNS)
        if unknown:
            raise DflaxError(f"only names unknown runs ({', '.join(sorted(unknown))}); runs are {', '.join(RUNS)}")
        for name in ("stories", "batch"):
            if getattr(self, name) < 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.gates:
            raise DflaxError("gates is empty; give at least one, 0.5 as published")
        for length in self.gen_lengths:
            if length < 1 or length % self.controller.block_length:
                raise DflaxError(f"gen_length {length} is no multiple of block_length {self.controller.block_length}")
            if length == self.controller.gen_length:
                raise DflaxError(f"gen_lengths names {length}, at which everything is measured anyway; leave it out")


# --- the command ---


def run(config: ControllerAblationConfig) -> Path:
    """Trains and measures what is not there yet; returns the path of the tables."""
    out = Path(config.out)
    base = dataclasses.replace(config.controller, out=str(out))
    model, prompts = controller_recipe.start(base)
    traces = controller_recipe.record_traces(base, model, prompts)
    ce, fitted = controller_recipe.fit_look_ahead(base, traces)
    tasks = _tasks(config, model)
    conditions = Conditions(base.block_length, config.batch, dtype=base.dtype)
    with Journal(out / "calls" / "calls.jsonl", asdict(conditions)) as journal:

        def answer(methods: Sequence[Method], gen_length: int, tasks: Sequence[Task]) -> None:
            measure(model, tasks, [(method, "none") for method in methods], gen_length, conditions, journal)

        answer([PLAIN], base.gen_length, tasks)
        bar = tqdm(config.only or RUNS, desc="ablations", unit="run", disable=None)
        for name in bar:
            bar.set_postfix_str(name)
            learned = lambda name: _learn(config, name, model, prompts, traces, ce)
            if name == "lengths":
                for gen_length in config.gen_lengths:
                    room = with_room(tasks, gen_length, model.config.max_positions)
                    if room:
                        answer([PLAIN, *_gated(config, "base", learned("base"), ce)], gen_length, room)
            elif name == "policies":
                answer(_policies(config, base, traces, ce), base.gen_length, tasks)
            elif name in VARIANTS:
                answer(_gated(config, name, learned(name), ce), base.gen_length, tasks)
            else:
                answer(_look_aheads(config, name, learned("base"), ce), base.gen_length, tasks)
            publish(config, journal.rows, ce, fitted)
    return out / "ablations.md"


def _tasks(config: ControllerAblationConfig, model: Model) -> list[Task]:
    tasks = [task for path in config.data for task in load_file(path, model.tokenizer)]
    tasks = tasks or load_stories(model.tokenizer, config.stories)
    if any(task.check is None for task in tasks):
        raise DflaxError("some of the data have no answer that can be checked; ablations compare accuracies")
    return tasks


def _gated(
    config: ControllerAblationConfig, name: str, controller: Controller, ce: ConfidenceExtrapolation
) -> list[Method]:
    """A controller at every gate, alone and with the look-ahead."""
    return [
        Method(f"{name}{look}@{gate:g}", name + look, TSPD.of(controller, gate), ahead)
        for look, ahead in (("", None), ("+ce", ce))
        for gate in config.gates
    ]


def _policies(
    config: ControllerAblationConfig, base: ControllerRecipe, traces: dict[str, Traces], ce: ConfidenceExtrapolation
) -> list[Method]:
    """The other policies, alone and behind the look-ahead."""
    learned, _ = controller_recipe.learn_filter(base, traces)
    others: dict[str, Policy] = {
        "threshold": Threshold(config.threshold),
        "factor": Factor(),
        "frechet": Frechet(),
        "learn2pd": Learn2PD.of(learned),
        "credit": Credit(config.threshold),
    }
    return [
        Method(name + look, name + look, policy, ahead)
        for name, policy in others.items()
        for look, ahead in (("", None), ("+ce", ce))
    ]


def _look_aheads(
    config: ControllerAblationConfig, name: str, controller: Controller, ce: ConfidenceExtrapolation
) -> list[Method]:
    """The base controller behind look-aheads of other horizons or coverages; the controller stays the one that was trained."""
    values = config.horizons if name == "horizon" else config.coverages
    found = []
    for value in values:
        ahead = dataclasses.replace(ce, **{name: value})
        ahead.check()
        family = f"base+ce:{name}={value:g}"
        found += [Method(f"{family}@{gate:g}", family, TSPD.of(controller, gate), ahead) for gate in config.gates]
    return found


# --- training ---


def _learn(
    config: ControllerAblationConfig, name: str, model: Model, prompts: Sequence[Sequence[int]], traces: dict[str, Traces],
    ce: ConfidenceExtrapolation,
) -> Controller:  # fmt: skip
    """The controller of a variant: the one that is there, or a new one."""
    folder = Path(config.out) / name
    wanted = changed(config.controller, name, str(folder))
    settings = _settings(wanted, VARIANTS[name].share, ce)
    if finished.read(folder / "result.json", settings) is not None:
        return controllers.load(str(folder), "tspd_controller")
    count = max(controller_recipe.VALIDATION, round(VARIANTS[name].share * len(prompts)))
    part = {kind: recorded.pick(np.arange(count)) for kind, recorded in traces.items()}
    began = time.perf_counter()
    controller, figures = controller_recipe.learn(wanted, model, prompts[:count], part, ce)
    controller_recipe.save(folder / "controller", controller, ce)
    found = {
        "settings": settings,
        "parameters": network_size(wanted.kind, wanted.layers, wanted.hidden_size, wanted.controller.inputs),
        "minutes": (time.perf_counter() - began) / 60,
        **figures,
    }
    report.write_json(folder / "result.json", found)
    return controller


def _settings(wanted: ControllerRecipe, share: float, ce: ConfidenceExtrapolation) -> dict[str, Any]:
    """What a trained controller depends on."""
    fields = asdict(wanted)
    for name in ("out", "batch", "filter", "filter_train"):
        del fields[name]
    fields["train"].pop("out")
    return json.loads(json.dumps({**fields, "share": share, "constants": asdict(ce)}))


# --- tables ---


def publish(
    config: ControllerAblationConfig,
    calls: Sequence[dict[str, Any]],
    ce: ConfidenceExtrapolation,
    fitted: dict[str, Any] | None,
) -> None:
    """Writes ablations.md, ablations.json and ablations.png from what is there."""
    out = Path(config.out)
    summary = diffusion_summary.summarise(calls, config.margin / 100, "base+ce")
    runs = {name: found for name in VARIANTS if (found := finished.read(out / name / "result.json")) is not None}
    report.write_text(out / "ablations.md", _page(config, summary, runs))
    data = {"config": asdict(config), "constants": asdict(ce), "fit": fitted, "runs": runs}
    report.write_json(out / "ablations.json", {**data, **diffusion_summary.plain_data(summary)})
    rows = [
        row for row in summary.rows if row.gen_length == config.controller.gen_length and row.family != PLAIN.family
    ]
    at_first = (None, float(f"{config.gates[0]:g}"))
    compared = {row.family: (row.passes, row.difference) for row in rows if _gate(row) in at_first}
    if compared:
        report.plot_comparison(out / "ablations.png", compared)


def _page(config: ControllerAblationConfig, summary: Summary, runs: dict[str, dict[str, Any]]) -> str:
    base = config.controller
    mine = [row for row in summary.rows if row.gen_length == base.gen_length]
    problems = max((row.problems for row in mine), default=0)
    equal = {
        one.family: one.passes
        for (setting, _), found in summary.equal.items()
        for one in found
        if setting.gen_length == base.gen_length and len(config.gates) > 1
    }
    tables = _Tables(mine, equal)
    gates = ", ".join(f"{gate:g}" for gate in config.gates)
    lines = [
        "# Ablations of adaptive denoising",
        "",
        "What the parts of TSPD and CE (arXiv 2605.30753) are worth, beside what the paper published. Written by `dflax train",
        "controller-ablations`; each run changes one thing of the base recipe.",
        "",
        f"Ours: `{base.model}`, {problems} problems, answers of {base.gen_length} tokens in blocks of {base.block_length}, no cache,",
        f"gate at {gates}. Accuracy with its standard error; the difference to plain decoding is paired on the same problems, in",
        "percentage points with its 95 % interval; `fewer` are plain decoding's passes over these. A controller has a row alone and",
        "one behind the look-ahead (CE). tokens/s are of different moments: read them as an order only.",
    ]
    if equal:
        lines.append(
            f"`at equal accuracy`: passes where accuracy is plain decoding's less {config.margin:g} points, interpolated over the gates."
        )
    published = "Published are figures of LLaDA-8B-Instruct on GSM8K (256 tokens, one A100)"
    lines += ["", f"{published}: compare orders, not sizes.", ""]
    missing = [name for name in RUNS if name in VARIANTS and name not in runs]
    if missing:
        lines += [f"Not trained yet: {', '.join(missing)}.", ""]
    for heading, what, rows in TABLES:
        both = [(text, family, theirs) for text, family, theirs in rows]
        for text, family, _ in rows:
            if family in VARIANTS and heading not in ("The parts", "CE in front of other policies"):
                both.append((f"{text}, CE", f"{family}+ce", None))
        lines += tables.section(heading, what, both)
    with_cache = "tokens/s with a dual cache, accuracy"
    for name, values, theirs in (("horizon", config.horizons, HORIZONS), ("coverage", config.coverages, COVERAGES)):
        rows = [(f"{name} {value:g}", f"base+ce:{name}={value:g}", theirs.get(value)) for value in values]
        lines += tables.section(f"CE's {name}", with_cache, rows)
    for length in config.gen_lengths:
        others = [row for row in summary.rows if row.gen_length == length]
        heading = f"Answers of {length} tokens"
        if others:
            parts = [("plain decoding", "plain", None), ("TSPD", "base", None), ("TSPD + CE", "base+ce", None)]
            lines += _Tables(others, {}).section(f"{heading}, {others[0].problems} problems", "", parts)
        elif "lengths" in (config.only or RUNS):
            lines += [f"## {heading}", "", "Not run, or no problem's prompt leaves room for them.", ""]
    if runs:
        headers = ["run", "parameters", "minutes", "loss", "of a constant", "precision", "recall"]
        cells = [[name, found["parameters"], found["minutes"], *_last(found)] for name, found in runs.items()]
        lines += ["## Runs", "", report.table(headers, cells, markdown=True), ""]
    return "\n".join(lines)


def _last(found: dict[str, Any]) -> list[float]:
    """Validation figures of a run's last controller."""
    name = max((key for key in found if key.startswith("controller")), key=lambda key: (len(key), key))
    return [found[name][key] for key in ("loss", "constant_loss", "precision", "recall")]


@dataclass(frozen=True)
class _Tables:
    """Rows of one length by family of methods; passes at equal accuracy where there are several gates."""

    rows: Sequence[Row]
    equal: dict[str, Interval]

    def section(self, heading: str, what: str, asked: Sequence[tuple[str, str, str | None]]) -> list[str]:
        """Lines of a table, [] where nothing of it was measured."""
        headers = ["", "gate", "accuracy %", "- plain [95 %]", "passes", "fewer", "tokens/pass", "tok/s"]
        headers += (["at equal accuracy [95 %]"] if self.equal else []) + (["published"] if what else [])
        cells, most = [], max((row.problems for row in self.rows), default=0)
        for text, family, theirs in asked:
            for row in (row for row in self.rows if row.family == family):
                so_far = "" if row.problems == most else f" ({row.problems} problems so far)"
                accuracy = diffusion_summary.with_error(row.accuracy, row.accuracy_error)
                line = [
                    text + so_far,
                    _gate(row),
                    accuracy,
                    diffusion_summary.points(row.difference),
                    row.passes,
                    row.fewer_passes,
                ]
                line += [row.tokens_per_pass, row.tokens_per_second]
                if self.equal:
                    line.append(_interval(self.equal.get(family)))
                cells.append(line + ([theirs] if what else []))
        families = {family for _, family, _ in asked}
        others = families - {"base", "base+ce"}
        if not cells or (others and not others & {row.family for row in self.rows}):
            return []  # nothing, or the base with nothing beside it
        note = [f"Published: {what}.", ""] if what else []
        return [f"## {heading}", "", *note, report.table(headers, cells, markdown=True), ""]


def _gate(row: Row) -> float | None:
    """Of a controller's row."""
    _, at, gate = row.method.rpartition("@")
    return float(gate) if at else None


def _interval(value: Interval | None) -> str | None:
    if value is None or np.isnan(value.value):
        return None
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"
