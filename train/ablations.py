"""`dflax train ablations`: the ablations of the DFlash paper (arXiv 2602.06036) on the tiny target, by one command.

Every drafter gets the same budget of steps and the same data. A run leaves OUT/NAME.json and is skipped when that is there; a killed one
goes on from its checkpoint. The table is written anew after every run, with the published figures beside ours.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflax import configs
from dflax.errors import DflaxError
from dflax.infer import report
from dflax.model import load
from dflax.models import params
from dflax.train import finished, metrics, stories
from dflax.train.recipe import DrafterRecipe, train_drafter
from dflax.train.tiny import measure, write_responses


def drafter_preset() -> DrafterRecipe:
    return configs.build(DrafterRecipe, configs.load("arith-ablations")["drafter"], "preset arith-ablations")


@dataclass(frozen=True)
class AblationConfig:
    """Train and compare the drafters of the paper's ablations; --preset arith-ablations holds the settings."""

    target: str = "arith"
    """The tiny target: a built-in name or a folder."""
    responses: int = 8000
    """Training problems that the target answers for the drafters to learn from."""
    batch: int = 500
    """Answers written at a time."""
    test_problems: int = 256
    """Problems with unseen numbers and orders of events that every drafter is measured on."""
    timed_problems: int = 32
    """How many of them are also decoded one by one, plainly and by speculation in turn, for the speed-up."""
    out: str = "runs/ablations"
    table: str = "docs/ablations.md"
    only: tuple[str, ...] = ()
    """Names of runs (see the table); none: all."""
    drafter: DrafterRecipe = field(default_factory=drafter_preset)
    """The base that each run changes in one thing; its target and data are set by this command."""

    def __post_init__(self) -> None:
        unknown = set(self.only) - set(RUNS)
        if unknown:
            raise DflaxError(f"only names unknown runs ({', '.join(sorted(unknown))}); runs are {', '.join(RUNS)}")
        for name in ("responses", "batch", "test_problems", "timed_problems"):
            if getattr(self, name) < 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class Ablation:
    """changes, objective: what a run sets in the base recipe and in its objective. sizes: block sizes it is measured at (0: its own)."""

    changes: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (0,)


# In the order in which they tell most.
RUNS = {
    "base": Ablation(sizes=(0, 16)),
    "fused": Ablation({"kind": "dflash_fused"}),
    "autoregressive": Ablation({"kind": "autoregressive"}),
    "autoregressive-fused": Ablation({"kind": "autoregressive_fused"}),
    "no-decay": Ablation(objective={"weights": "none"}),
    "uniform-blocks": Ablation(objective={"anchor_choice": "uniform"}),
    "layers-1": Ablation({"layers": 1}),
    "layers-5": Ablation({"layers": 5}),
    "taps-1": Ablation({"target_layer_ids": (3,)}),
    "taps-5": Ablation({"target_layer_ids": (1, 2, 3, 4, 5)}),
    "block-16": Ablation({"block_size": 16}, sizes=(0, 8)),
}

# (heading, what is published there, rows of (label, run, block size measured, published)); published: speed-up / acceptance length.
TABLE = (
    ("How features enter, and how a block is drafted", "Qwen3-4B, 5 layers, block 8, GSM8K", (
        ("autoregressive, input fusion (EAGLE-3 with 5 layers)", "autoregressive-fused", 8, "2.1x / 4.2"),
        ("autoregressive, KV injection", "autoregressive", 8, "2.4x / 4.8"),
        ("block diffusion, input fusion", "fused", 8, "2.9x / 3.5"),
        ("block diffusion, KV injection (DFlash)", "base", 8, "3.3x / 4.2"),
    )),
    ("Loss decay", "by epoch, off a figure: 4.4, 5.3, 5.8, 6.1, 6.2 with decay, 4.2, 5.2, 5.6, 6.0, 6.2 without", (
        ("with decay", "base", 8, "helps early and late"),
        ("without", "no-decay", 8, ""),
    )),
    ("Anchors", "3 layers, block 16, MATH-500", (
        ("random anchors", "base", 8, "4.69x / 5.64"),
        ("uniform blocks", "uniform-blocks", 8, "4.13x / 4.94"),
    )),
    ("Depth", "block 16, MATH-500; theirs are 3, 5 and 8 layers", (
        ("1 layer", "layers-1", 8, ""),
        ("3 layers", "base", 8, "4.69x / 5.64"),
        ("5 layers", "layers-5", 8, "4.71x / 5.99"),
        ("8 layers", "", 8, "4.64x / 6.33"),
    )),
    ("Tapped target layers", "3 layers, block 16, MATH-500", (
        ("1 tap", "taps-1", 8, ""),
        ("3 taps", "base", 8, "4.49x / 5.38"),
        ("5 taps", "taps-5", 8, "4.69x / 5.64"),
    )),
    ("Block size: trained at, used at", "8 layers, MATH-500", (
        ("16, 16", "block-16", 16, "4.64x / 6.33"),
        ("16, 8", "block-16", 8, "3.87x / 5.09"),
        ("8, 16", "base", 16, "3.78x / 5.02"),
        ("8, 8", "base", 8, "3.97x / 5.21"),
    )),
)  # fmt: skip


def run(config: AblationConfig) -> Path:
    """Trains and measures what is not there yet; returns the path of the table."""
    out = Path(config.out)
    target = load(config.target)
    responses = out / "responses.jsonl.gz"
    write_responses(target, responses, config.responses, config.batch, seed=0)
    for name in config.only or RUNS:
        settings = _settings(config, name)
        if finished.read(out / f"{name}.json", settings) is None:
            report.write_json(out / f"{name}.json", {"settings": settings, **_one(config, name, target, responses)})
        write_table(config)
    write_table(config)
    return Path(config.table)


def _one(config: AblationConfig, name: str, target: Any, responses: Path) -> dict[str, Any]:
    trained = recipe(config, name)
    trained = dataclasses.replace(trained, data=(str(responses),))
    drafter = load(train_drafter(trained))
    drawn = list(stories.stories(0, "test", config.test_problems))
    measured = {
        str(size or trained.block_size): measure(
            target, drafter, drawn, config.timed_problems, size or trained.block_size, allow_larger_blocks=True
        )
        for size in RUNS[name].sizes
    }
    return {
        "parameters": params.count(drafter.module),
        "minutes": metrics.minutes(trained.train.out),
        "measured": measured,
    }


def recipe(config: AblationConfig, name: str) -> DrafterRecipe:
    """The base with the changes of one run."""
    base, ablation = config.drafter, RUNS[name]
    return dataclasses.replace(
        base,
        target=config.target,
        objective=dataclasses.replace(base.objective, **ablation.objective),
        train=dataclasses.replace(base.train, out=str(Path(config.out) / name)),
        **ablation.changes,
    )


def _settings(config: AblationConfig, name: str) -> dict[str, Any]:
    """What a result depends on."""
    fields = dataclasses.asdict(recipe(config, name))
    fields["train"].pop("out")
    fields.pop("data")
    counts = {key: getattr(config, key) for key in ("responses", "test_problems", "timed_problems")}
    return json.loads(json.dumps({**fields, **counts}))


def write_table(config: AblationConfig) -> None:
    """The Markdown page, from the results that are there."""
    out = Path(config.out)
    results = {name: found for name in RUNS if (found := finished.read(out / f"{name}.json")) is not None}
    base = config.drafter
    train = base.train
    lines = [
        "# Ablations",
        "",
        "What the parts of DFlash (arXiv 2602.06036) are worth on the tiny target, beside what the paper published for",
        "Qwen3-4B. Written by `python -m dflax train ablations --preset arith-ablations`; each run changes one thing of the base.",
        "",
        f"Ours: target `{config.target}`, {config.responses} answers of it, {train.steps} steps of {base.rows_per_step} rows of",
        f"{base.length} tokens, {train.optimizer}, learning rate {train.learning_rate:g}; greedy, {config.test_problems} problems with",
        "unseen numbers and orders of events. A cell is speed-up / acceptance length: the speed-up over plain decoding in the same",
        f"process, one problem at a time, of {config.timed_problems} problems; the acceptance length with last rounds cut at the",
        'end token. "-": not run, or not published. Half a million parameters on a CPU spend much of a step on overhead, so read',
        "our speed-ups against each other only.",
        "",
    ]
    missing = [name for name in RUNS if name not in results]
    if missing:
        lines += [f"Not run yet: {', '.join(missing)}.", ""]
    for heading, published, rows in TABLE:
        cells = [[label, _cell(results, name, size), theirs or None] for label, name, size, theirs in rows]
        lines += [
            f"## {heading}",
            "",
            f"Published: {published}.",
            "",
            report.table(["", "ours", "published"], cells, markdown=True),
            "",
        ]
    details = [
        [name, found["parameters"], found["minutes"], all(m["identical_to_plain"] for m in found["measured"].values())]
        for name, found in results.items()
    ]
    if details:
        headers = ["run", "parameters", "minutes", "same tokens as plain decoding"]
        lines += ["## Runs", "", report.table(headers, details, markdown=True), ""]
    report.write_text(config.table, "\n".join(lines))


def _cell(results: dict[str, Any], name: str, size: int) -> str | None:
    found = results.get(name, {}).get("measured", {}).get(str(size))
    return None if found is None else f"{found['speed_up']:.2f}x / {found['acceptance_length']:.2f}"
