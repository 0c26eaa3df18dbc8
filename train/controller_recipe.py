"""`dflax train controller`: from a diffusion model and prompts to a TSPD controller, a Learn2PD filter and fitted look-ahead constants."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dflax import controllers
from dflax.config import CONTROLLER_FEATURES, ControllerConfig, ControllerKind
from dflax.errors import DflaxError
from dflax.infer import prompts as prompt_files
from dflax.infer import report
from dflax.infer.extrapolation import ConfidenceExtrapolation
from dflax.infer.fit import check_diffusion
from dflax.infer.learned import TSPD
from dflax.model import Model, load
from dflax.models import params
from dflax.models.controller import AcceptanceFilter, Controller, build
from dflax.train import extrapolation, stories
from dflax.train.controller import ControllerObjective, train_controller, train_filter
from dflax.train.data import fingerprint
from dflax.train.recorder import Forced, of_record, record, record_batch
from dflax.train.traces import Sequences, Traces, concatenate, recorded, sequences
from dflax.train.trainer import TrainConfig

VALIDATION = 10  # every tenth prompt
UNSEEN = 10_000_000  # first story of the traces: far behind those that the model was trained on


@dataclass(frozen=True)
class ControllerRecipe:
    """Train what decides in adaptive denoising on traces of a diffusion model's own decoding; minutes for a small model.

    OUT gets controller/ (with the look-ahead's constants), filter/, result.json, and traces/ and runs/ from which a killed run goes on.
    """

    model: str = ""
    """Folder, hub id or built-in name of a diffusion language model."""
    data: tuple[str, ...] = ()
    """Prompts: .jsonl(.gz) files with `prompt`, `messages` or `prompt_tokens`, or text files with one a line."""
    stories: int = 0
    """Instead of `data`: this many problems of the training split that the shipped model was made for, which it has not seen."""
    prompts: int = 0
    """Prompts used at most; 0: all."""
    mask_token_id: int = -1
    """Of a model whose config.json lacks it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    gen_length: int = 256
    block_length: int = 32
    batch: int = 16
    """Prompts that are recorded together."""
    out: str = "run"

    rule: Literal["greedy", "standard", "mixed"] = "greedy"
    """Whose traces the controller learns from: the extremely greedy policy's (published), plain decoding's, or of even and odd prompts
    the one and the other."""
    own_rounds: int = 0
    """Ours: after training, record this many times under the controller's own gate, with the right tokens written, and train again on
    all traces together: it then knows the states that it brings about. 0: as published."""
    kind: ControllerKind = "lstm"
    layers: int = 2
    hidden_size: int = 12
    features: tuple[str, ...] = CONTROLLER_FEATURES
    smoothing: float = 0.25
    """alpha of the moving average. Published."""
    neighbours: int = 0
    """Ours: slots on either side whose confidence and entropy the controller reads too; 0: as published."""
    objective: ControllerObjective = field(default_factory=ControllerObjective)
    slots: int = 65536
    """Recorded positions used at most, drawn at random."""
    slots_per_step: int = 4096
    patience: int = 10
    """Evaluations without a better validation loss before training stops; 0: never."""
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            steps=3000, learning_rate=1e-3, weight_decay=1e-2, log_every=100, eval_every=200, checkpoint_every=1000
        )
    )
    """`out` in here is not used."""

    fit: bool = True
    """Fit the look-ahead's noises to the confidences of plain decoding, before the controller is trained with it."""
    horizon: int = 20
    coverage: float = 0.6
    z: float = 1.28
    min_confidence: float = 0.9
    """These four: of the look-ahead (`dflax.ConfidenceExtrapolation`)."""

    filter: bool = True
    """Train a Learn2PD filter on the greedy traces too."""
    filter_train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            steps=5000, learning_rate=1e-3, log_every=100, eval_every=200, checkpoint_every=1000
        )
    )
    """`out` in here is not used."""

    def __post_init__(self) -> None:
        if not self.model:
            raise DflaxError("model is empty; name the diffusion model whose decoding is to be learned")
        if bool(self.data) == bool(self.stories):
            raise DflaxError("give prompts by data, or a number of stories, and not both")
        if self.block_length < 1 or self.gen_length < 1 or self.gen_length % self.block_length:
            raise DflaxError(f"gen_length {self.gen_length} is no multiple of block_length {self.block_length}")
        for name in ("batch", "slots", "slots_per_step"):
            if getattr(self, name) < 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.own_rounds < 0:
            raise DflaxError(f"own_rounds is {self.own_rounds}; it must not be negative")
        self.look_ahead.check()
        params.abstract(lambda rngs: build(self.controller, rngs))  # refuses what no controller can have

    @property
    def look_ahead(self) -> ConfidenceExtrapolation:
        """The constants before the fit."""
        return ConfidenceExtrapolation(
            horizon=self.horizon, coverage=self.coverage, z=self.z, min_confidence=self.min_confidence
        )

    @property
    def controller(self) -> ControllerConfig:
        return ControllerConfig(
            self.block_length, self.kind, self.layers, self.hidden_size, self.features, self.smoothing, self.neighbours
        )


def run(recipe: ControllerRecipe) -> Path:
    """Records, fits, trains, and writes the folders of `ControllerRecipe`; returns OUT.

    A run that was killed goes on when called again with the same recipe.
    """
    out = Path(recipe.out)
    model, prompts = start(recipe)
    traces = record_traces(recipe, model, prompts)
    result: dict[str, Any] = {
        "prompts": len(prompts),
        "steps_per_block": {kind: part.passes() for kind, part in traces.items()},
        "right_at_first_sight": float(traces["standard"].agrees[:, :, 0].mean()),
    }
    ce, result["extrapolation"] = fit_look_ahead(recipe, traces)
    result["constants"] = dataclasses.asdict(ce)
    controller, figures = learn(recipe, model, prompts, traces, ce)
    result |= figures
    save(out / "controller", controller, ce)
    if recipe.filter:
        learned, result["filter"] = learn_filter(recipe, traces)
        save(out / "filter", learned, ce)
    report.write_json(out / "result.json", result)
    return out


def start(recipe: ControllerRecipe) -> tuple[Model, list[list[int]]]:
    """The model and the prompts to record."""
    given = None if recipe.mask_token_id < 0 else recipe.mask_token_id
    model = load(recipe.model, dtype=recipe.dtype, mask_token_id=given)
    check_diffusion(model)
    prompts = _prompts(recipe, model)
    if len(prompts) < VALIDATION:
        raise DflaxError(
            f"there are {len(prompts)} prompts; a tenth is for validation, so at least {VALIDATION} are needed"
        )
    return model, prompts


def record_traces(recipe: ControllerRecipe, model: Model, prompts: Sequence[Sequence[int]]) -> dict[str, Traces]:
    """Of plain decoding ("standard") and the extremely greedy policy ("greedy"), kept in OUT/traces."""
    identity = {name: getattr(recipe, name) for name in ("model", "dtype", "gen_length", "block_length")}
    identity["weights"] = model.fingerprint
    return recorded(
        Path(recipe.out) / "traces", prompts, recipe.batch,
        lambda part, number: record_batch(model, part, recipe.batch, recipe.gen_length, recipe.block_length),
        identity,
    )  # fmt: skip


def fit_look_ahead(
    recipe: ControllerRecipe, traces: dict[str, Traces]
) -> tuple[ConfidenceExtrapolation, dict[str, Any] | None]:
    """The constants, with the figures of the fit if the recipe asks for one."""
    if not recipe.fit:
        return recipe.look_ahead, None
    found = extrapolation.fit(sequences(traces["standard"]), recipe.look_ahead)
    return found.constants, found.figures


def learn(
    recipe: ControllerRecipe, model: Model, prompts: Sequence[Sequence[int]], traces: dict[str, Traces],
    ce: ConfidenceExtrapolation,
) -> tuple[Controller, dict[str, Any]]:  # fmt: skip
    """The controller of these traces, after as many rounds of its own as the recipe says, and the figures of every training."""
    runs, figures = Path(recipe.out) / "runs", {}
    chosen = [_of_rule(part, recipe.rule) for part in _split(traces)]
    controller, figures["controller"] = _train(recipe, chosen, ce, runs / "controller")
    for number in range(1, recipe.own_rounds + 1):
        own = _own(recipe, model, prompts, traces["standard"], controller, ce, number)
        chosen = [concatenate([part, more["own"]]) for part, more in zip(chosen, _split({"own": own}), strict=True)]
        name = f"controller-{number}"
        controller, found = _train(recipe, chosen, ce, runs / name)
        figures[name] = {**found, "steps_per_block": own.passes()}
    return controller, figures


def learn_filter(recipe: ControllerRecipe, traces: dict[str, Traces]) -> tuple[AcceptanceFilter, dict[str, float]]:
    """Learn2PD's filter of the greedy traces, and its figures."""
    train, held = (part["greedy"] for part in _split(traces))
    settings = dataclasses.replace(recipe.filter_train, out=str(Path(recipe.out) / "runs" / "filter"))
    identity = {"prompts": len(traces["greedy"].final), "patience": recipe.patience}
    return train_filter(train, held, settings, patience=recipe.patience, identity=identity)


def _prompts(recipe: ControllerRecipe, model: Model) -> list[list[int]]:
    if recipe.stories:
        if model.tokenizer is None:
            raise DflaxError(f"{recipe.model} has no tokenizer to read stories with")
        drawn = stories.stories(recipe.train.seed, "train", recipe.stories, UNSEEN)
        ids = [list(prompt_files.tokenize(story.prompt, model.tokenizer, "a story")) for story in drawn]
    else:
        ids = [list(prompt.tokens) for path in recipe.data for prompt in prompt_files.load_file(path, model.tokenizer)]
    ids = ids[: recipe.prompts or None]
    longest = max(map(len, ids), default=0)
    if longest + recipe.gen_length > model.config.max_positions:
        raise DflaxError(
            f"the longest prompt has {longest} tokens and gen_length is {recipe.gen_length}; the model has "
            f"{model.config.max_positions} positions"
        )
    return ids


def _split(traces: dict[str, Traces]) -> tuple[dict[str, Traces], dict[str, Traces]]:
    """Training and validation, by prompt: the same prompts for every kind."""
    held = np.arange(len(next(iter(traces.values())).final)) % VALIDATION == VALIDATION - 1
    return tuple({kind: part.pick(rows) for kind, part in traces.items()} for rows in (~held, held))  # pyright: ignore[reportReturnType]


def _of_rule(traces: dict[str, Traces], rule: str) -> Traces:
    if rule != "mixed":
        return traces[rule]
    first = np.arange(len(traces["greedy"].final)) % 2 == 0
    return concatenate([traces["greedy"].pick(first), traces["standard"].pick(~first)])


def _own(
    recipe: ControllerRecipe, model: Model, prompts: Sequence[Sequence[int]], plain: Traces, controller: Controller,
    ce: ConfidenceExtrapolation, number: int,
) -> Traces:  # fmt: skip
    """Traces at the controller's own pace, with the final tokens of plain decoding written."""
    policy, size = TSPD.of(controller), recipe.batch

    def make(part: Sequence[Sequence[int]], batch: int) -> dict[str, Traces]:
        final = plain.final[batch * size : batch * size + len(part)]
        final = np.concatenate([final, np.repeat(final[-1:], size - len(part), axis=0)])
        full = [*part, *[part[-1]] * (size - len(part))]
        seen = record(model, full, recipe.gen_length, recipe.block_length, Forced(policy, final), ce)[1]
        return {"own": of_record(seen, final, len(part))}

    folder = Path(recipe.out) / f"traces-{number}"
    weights = fingerprint(*map(np.asarray, policy.weights.values()))
    identity = {"controller": weights, "constants": dataclasses.asdict(ce)}
    return recorded(folder, prompts, size, make, identity)["own"]


def _train(
    recipe: ControllerRecipe, chosen: Sequence[Traces], ce: ConfidenceExtrapolation, folder: Path
) -> tuple[Controller, dict[str, Any]]:
    """chosen: traces to train on, and to validate with."""
    rng = np.random.default_rng(recipe.train.seed)
    most = (recipe.slots, -(-recipe.slots // (VALIDATION - 1)))
    train, held = (_some(sequences(part, recipe.neighbours), n, rng) for part, n in zip(chosen, most, strict=True))
    settings = dataclasses.replace(recipe.train, out=str(folder))
    controller, figures = train_controller(
        recipe.controller, train, held, ce, recipe.objective, settings, recipe.slots_per_step, recipe.patience,
        {"constants": dataclasses.asdict(ce), "slots_per_step": recipe.slots_per_step, "patience": recipe.patience},
    )  # fmt: skip
    return controller, {**figures, "slots": len(train)}


def _some(slots: Sequences, most: int, rng: np.random.Generator) -> Sequences:
    """At most so many slots, drawn at random among those that were looked at."""
    seen = np.flatnonzero(slots.observed.any(axis=1))
    return slots.pick(seen if len(seen) <= most else np.sort(rng.choice(seen, most, replace=False)))


def save(folder: Path, module: Controller | AcceptanceFilter, ce: ConfidenceExtrapolation) -> None:
    """A controller or filter with the constants of the same traces."""
    controllers.save(folder, module)
    controllers.save_extrapolation(folder, ce)
