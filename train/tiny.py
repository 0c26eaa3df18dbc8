"""`dflax train tiny`: the tiny pair from nothing but the package, by one command: a target, its answers, a drafter trained on them, and
what the two do on problems that neither has seen.

Every part is resumable and skipped when it is there already.
"""

import dataclasses
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dflax import configs
from dflax.errors import DflaxError
from dflax.infer import report
from dflax.infer.generate import generate, speculate
from dflax.model import Model, load
from dflax.models import params
from dflax.train import data, finished, metrics, stories
from dflax.train.language import BUDGET, LanguageRecipe, answer, exact_match, train_language
from dflax.train.problems import Problem
from dflax.train.recipe import DrafterRecipe, train_drafter


def language_preset() -> LanguageRecipe:
    return configs.build(LanguageRecipe, configs.load("arith"), "preset arith")


def drafter_preset() -> DrafterRecipe:
    return configs.build(DrafterRecipe, configs.load("arith-dflash"), "preset arith-dflash")


@dataclass(frozen=True)
class TinyRecipe:
    """Train the tiny pair: a target on arithmetic word problems and a DFlash drafter for it, then measure both on unseen problems."""

    out: str = "runs/tiny"
    """Folder of all parts; the models end up in OUT/arith and OUT/arith-dflash."""
    responses: int = 12000
    """Training problems that the target answers for the drafter to learn from."""
    batch: int = 500
    """Answers written at a time."""
    test_problems: int = 256
    """Problems with unseen numbers and unseen orders of events in the final figures."""
    timed_problems: int = 32
    """How many of them are also decoded one by one, plainly and by speculation in turn, for the speed-up."""
    language: LanguageRecipe = field(default_factory=language_preset)
    drafter: DrafterRecipe = field(default_factory=drafter_preset)

    def __post_init__(self) -> None:
        for name in ("responses", "batch", "test_problems", "timed_problems"):
            if getattr(self, name) < 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must be at least 1")


def train_tiny(recipe: TinyRecipe) -> Path:
    """Trains and measures the pair; returns the folder with arith/, arith-dflash/ and result.json."""
    out = Path(recipe.out)
    runs = {"target": out / "target-run", "drafter": out / "drafter-run"}
    language = dataclasses.replace(
        recipe.language, train=dataclasses.replace(recipe.language.train, out=str(runs["target"]))
    )
    target_folder = train_language(language)
    target = load(target_folder)

    responses = out / "responses.jsonl.gz"
    answering = write_responses(target, responses, recipe.responses, recipe.batch, language.train.seed)

    drafter_recipe = dataclasses.replace(
        recipe.drafter, target=str(target_folder), data=(str(responses),),
        train=dataclasses.replace(recipe.drafter.train, out=str(runs["drafter"])),
    )  # fmt: skip
    drafter_folder = train_drafter(drafter_recipe)
    drafter = load(drafter_folder)

    began = time.perf_counter()
    drawn = list(stories.stories(language.train.seed, "test", recipe.test_problems))
    result = {
        **exact_match(target, recipe.test_problems, language.train.seed),
        **measure(target, drafter, drawn, recipe.timed_problems),
        "parameters": {"arith": params.count(target.module), "arith-dflash": params.count(drafter.module)},
        "curve": {name: curve(run) for name, run in runs.items()},
    }
    result["minutes"] = {
        "target": metrics.minutes(runs["target"]),
        "responses": answering,
        "drafter": metrics.minutes(runs["drafter"]),
        "evaluation": round((time.perf_counter() - began) / 60, 2),
    }
    for name, folder in (("arith", target_folder), ("arith-dflash", drafter_folder)):
        shutil.copytree(folder, out / name, dirs_exist_ok=True)
        (out / name / "README.md").write_text(card(name, language, drafter_recipe, recipe.responses, result))
    report.write_json(out / "result.json", result)
    print(report.table(["figure", "value"], [[k, v] for k, v in result.items() if isinstance(v, int | float | bool)]))
    return out


def write_responses(target: Model, path: Path, count: int, batch: int, seed: int) -> float:
    """Greedy answers of the target to the first `count` training problems, as JSON lines {prompt, response_tokens}; how many minutes
    it took to write them.

    A file that is there is kept; DflaxError if it was made with other settings or weights, which stand beside it.
    """
    settings = {"responses": count, "seed": seed, "target_weights": target.fingerprint}
    beside = path.with_name("responses.json")
    if (before := finished.read(beside, settings)) is not None and path.exists():
        return before.get("minutes", 0.0)
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for start in tqdm(range(0, count, batch), desc="responses", unit="batch"):
        # Full batches throughout: one compiled program.
        drawn = [stories.generate(seed, start + i, "train") for i in range(batch)]
        tokens = answer(target, drawn).tokens
        rows += [
            {"prompt": p.prompt, "response_tokens": t, "temperature": 0.0} for p, t in zip(drawn, tokens, strict=True)
        ]
    data.write_rows(path, rows[:count])
    minutes = round((time.perf_counter() - began) / 60, 2)
    report.write_json(beside, {"settings": settings, "minutes": minutes})
    return minutes


def measure(
    target: Model,
    drafter: Model,
    drawn: Sequence[Problem],
    timed: int,
    block_size: int | None = None,
    allow_larger_blocks: bool = False,
) -> dict[str, Any]:
    """What a drafter gains on problems, greedily.

    acceptance_length: tau, its last rounds cut at the end token; acceptance_length_uncut: as a round would go on behind it. speed_up:
    plain seconds per token over speculative ones, `timed` problems one by one, the two taking turns, compilation excluded.
    """
    options = {"block_size": block_size, "allow_larger_blocks": allow_larger_blocks}
    prompts = [problem.prompt for problem in drawn]
    out = speculate(target, drafter, prompts, max_new_tokens=BUDGET, **options)
    plain = generate(target, prompts, max_new_tokens=BUDGET)
    seconds, tokens = np.zeros(2), np.zeros(2)
    for prompt in [prompts[0], *prompts[:timed]]:
        one = (
            generate(target, [prompt], max_new_tokens=BUDGET),
            speculate(target, drafter, [prompt], max_new_tokens=BUDGET, **options),
        )
        if any(o.stats.compiled for o in one):
            continue
        seconds += [o.stats.decode_seconds for o in one]
        tokens += [len(o.tokens[0]) - 1 for o in one]
    per_second = tokens / seconds
    return {
        "acceptance_length": report.mean_acceptance_length(out.acceptance_lengths),
        "acceptance_length_uncut": out.stats.acceptance_length,
        "acceptance_by_slot": out.stats.acceptance_by_slot,
        "identical_to_plain": out.tokens == plain.tokens,
        "plain_tokens_per_second": float(per_second[0]),
        "speculative_tokens_per_second": float(per_second[1]),
        "speed_up": float(per_second[1] / per_second[0]),
    }


def curve(run: Path) -> list[dict[str, float]]:
    """The evaluations of a run: step, minutes of training, figures."""
    minutes, points = 0.0, []
    for row in metrics.read(run / "metrics.jsonl"):
        minutes = row.get("seconds", minutes * 60) / 60
        found = {k.removeprefix("eval/"): v for k, v in row.items() if k.startswith("eval/")}
        if found:
            points.append({"step": row["step"], "minutes": round(minutes, 1), **found})
    return points


def card(name: str, language: LanguageRecipe, drafter: DrafterRecipe, responses: int, result: dict[str, Any]) -> str:
    """The model card of one of the two."""
    points = result["curve"]["target" if name == "arith" else "drafter"]
    headers = list(points[0]) if points else []
    shown = report.table(headers, [[point[h] for h in headers] for point in points], markdown=True) if points else ""
    versions = report.provenance()["versions"]
    minutes = ", ".join(f"{part} {value:g}" for part, value in result["minutes"].items())
    cpus = report.provenance()["machine"]["cpus"]
    train = language.train if name == "arith" else drafter.train
    count = result["parameters"][name]
    optimizer = f"{train.optimizer}, learning rate {train.learning_rate:g}, cosine, {train.steps} steps"
    if name == "arith":
        what = "A tiny autoregressive language model that answers arithmetic word problems with worked steps."
        source = (
            f"The generator `dflax.train.stories`: {train.steps * language.problems_per_step:,} problems of the training split, each "
            "seen once. Held out: one in eight tuples of numbers, and one in eight orders of events."
        )
        how = (
            f"{count:,} parameters ({language.family} layout, {language.layers} layers, width {language.hidden_size}); next-token loss, "
            f"weight {language.question_weight:g} on questions; {optimizer}; {language.problems_per_step} problems a step."
        )
        figures = (
            f"Right final value, greedy: {result['validation_exact_match']:.1%} with unseen numbers, {result['test_exact_match']:.1%} with "
            "unseen numbers and orders of events."
        )
    else:
        what = "A DFlash drafter (arXiv 2602.06036) for the tiny target `arith`."
        source = f"Greedy answers of `arith` to {responses:,} problems of the training split."
        how = (
            f"{count:,} parameters ({drafter.layers} layers, taps {list(drafter.target_layer_ids)}, block size {drafter.block_size}); "
            f"random anchors, {drafter.objective.weights} weights with gamma {drafter.objective.gamma:g}; {optimizer}."
        )
        figures = (
            f"Acceptance length {result['acceptance_length']:.2f} at block {drafter.block_size} on problems with unseen numbers and orders "
            f"of events ({result['acceptance_length_uncut']:.2f} when the last round is not cut at the end token); one prompt at a time "
            f"{result['speed_up']:.2f} times as fast as plain decoding "
            f"({result['plain_tokens_per_second']:.0f} to {result['speculative_tokens_per_second']:.0f} tokens/s); "
            f"same tokens as plain decoding: {'yes' if result['identical_to_plain'] else 'no'}."
        )
    return f"""---
license: apache-2.0
library_name: dflax
---
# {name}

{what}

- **Data.** {source}
- **Recipe.** {how}
- **Time.** Minutes on {cpus} CPUs ({platform.machine()}): {minutes}.
- **Figures.** {figures}
- **Command.** `python -m dflax train tiny` (jax {versions["jax"]}, flax {versions["flax"]}).

## Learning curve

{shown}
"""
