"""How TSPD's controller and Learn2PD's filter learn from traces: features, the weighted loss, validation, the best weights kept.

The label of a step is whether its top-1 token is the final one (`dflax.train.traces`). Two things the paper leaves open are ours:
class weights are w1 = n / 2 n1 and w0 = n / 2 n0, so that both classes weigh the same and the mean weight is 1; and a dropped channel
is set to its mean (0 after standardisation) without rescaling the others, for the whole sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from dflax import files
from dflax.config import CONTROLLER_FEATURES, ControllerConfig, FilterConfig
from dflax.errors import DflaxError
from dflax.infer.extrapolation import ConfidenceExtrapolation, Trend
from dflax.models import params
from dflax.models.controller import AcceptanceFilter, Controller, Trail
from dflax.train import trainer
from dflax.train.data import fingerprint
from dflax.train.traces import UNREADABLE, Sequences, Traces

PyTree = Any
NOISY = ("confidence", "average", "momentum")  # the features that come from the confidence
CHUNK = 8192  # sequences whose features are made at once


@dataclass(frozen=True)
class ControllerObjective:
    """What the controller's loss is made of."""

    balanced: bool = True
    """Weigh the two classes inversely to their frequency (published); False: plain cross entropy."""
    wrong_weight: float = 1.0
    """Further weight of steps whose token is wrong: above 1 the gate opens later, for fewer mistakes and more passes. 1: as published."""
    channel_dropout: float = 0.1
    """Probability that one of the six features is hidden for a sequence; what is around a slot never is. Published."""
    noise: float = 0.01
    """Deviation of the Gaussian noise on the confidence, its average and its momentum. Published."""
    straight_through: bool = False
    """Replay each trace under the hard gate: a slot that the gate fixes leaves, and its later steps no longer count; the gate's step is
    passed straight through to sigmoid(z) in the gradient. Without it the estimator that the paper names has no effect, because the loss
    reads z and the traces are recorded."""
    extrapolated: bool = False
    """Let the controller train on the extrapolated confidence; published (False): on the raw one, and only inference replaces it."""

    def __post_init__(self) -> None:
        if not 0 <= self.channel_dropout < 1:
            raise DflaxError(f"channel_dropout is {self.channel_dropout}; it must be from 0 to below 1")
        for name in ("wrong_weight", "noise"):
            if getattr(self, name) < 0:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must not be negative")


# --- features ---


def features(
    slots: Sequences, ce: ConfidenceExtrapolation, smoothing: float, extrapolated: bool = False
) -> Float[np.ndarray, "R S all"]:
    """The six features of every step of every sequence and what is around, before standardisation, as the controller will see them: the
    look-ahead's filter runs along, so that the weight of its uncertainty is trained."""
    make = jax.jit(_features, static_argnames=("smoothing", "extrapolated"))
    out = []
    for start in range(0, len(slots), CHUNK):
        part = slots.pick(np.arange(start, min(start + CHUNK, len(slots))))
        short = CHUNK - len(part)
        padded = {
            name: np.pad(array, [(0, short)] + [(0, 0)] * (array.ndim - 1))
            for name, array in vars(part).items()
            if name not in ("agrees", "around")
        }
        own = np.asarray(make(padded, ce, smoothing=smoothing, extrapolated=extrapolated))[: len(part)]
        out.append(np.concatenate([own, part.around], axis=2))
    return np.concatenate(out)


def _features(slots: dict[str, Array], ce: ConfidenceExtrapolation, smoothing: float, extrapolated: bool) -> Array:
    """[R, S, 6] of arrays [R, S] by their names in `Sequences`."""

    def step(state, now):
        trail, trend = state
        trend, raised, uncertainty = ce.observe(
            trend, now["confidence"], now["token"], now["observed"], now["coverage"], now["margin"]
        )
        confidence = raised if extrapolated else now["confidence"]
        trail, row = trail.features(
            smoothing, confidence, now["confidence"], now["entropy"], slots["position"], uncertainty
        )
        return (trail, trend), row

    shape = slots["position"].shape
    steps = {name: array.T for name, array in slots.items() if name != "position"}
    rows = jax.lax.scan(step, (Trail.empty(shape), Trend.empty(shape)), steps)[1]
    return rows.swapaxes(0, 1)


def standardisation(
    rows: Float[np.ndarray, "R S all"], observed: Bool[np.ndarray, "R S"]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of the features over the observed steps; a feature that never varies gets deviation 1."""
    seen = rows[observed].astype(np.float64)
    std = seen.std(axis=0)
    return seen.mean(axis=0).astype(np.float32), np.where(std > 1e-6, std, 1).astype(np.float32)


# --- the controller's loss ---


def class_weights(agrees: np.ndarray, observed: np.ndarray, objective: ControllerObjective) -> tuple[float, float]:
    """(w0, w1): weights of steps whose token is wrong and right."""
    right = int(np.sum(agrees & observed))
    wrong = int(np.sum(observed)) - right
    if not right or not wrong:
        kind = "right" if not wrong else "wrong"
        raise DflaxError(f"every token of the traces is {kind}: there is nothing to tell apart; record more prompts")
    if not objective.balanced:
        return objective.wrong_weight, 1.0
    return objective.wrong_weight * (right + wrong) / (2 * wrong), (right + wrong) / (2 * right)


def make_loss(
    merge: Callable[[PyTree], Controller], objective: ControllerObjective, weights: tuple[float, float]
) -> Callable[..., tuple[Array, dict[str, Array]]]:
    """The loss of the trainer's `fit`: (leaves, batch, key) -> (weighted cross entropy per observed step, metrics).

    A batch has features [R, S, all] (the six and what is around; not standardised), agrees, observed [R, S]. key=None switches dropout and
    noise off.
    """

    def loss(leaves: PyTree, batch: dict[str, Array], key: Array | None) -> tuple[Array, dict[str, Array]]:
        controller = merge(leaves)
        x, agrees, observed = batch["features"], batch["agrees"], batch["observed"]
        if key is not None:
            noise_key, drop_key = jax.random.split(key)
            noisy = np.isin(np.arange(x.shape[2]), [CONTROLLER_FEATURES.index(name) for name in NOISY])
            x = x + objective.noise * noisy * jax.random.normal(noise_key, x.shape)
        x = controller.standardise(x)
        if key is not None:
            kept = jax.random.bernoulli(drop_key, 1 - objective.channel_dropout, (x.shape[0], 1, x.shape[2]))
            own = jnp.arange(x.shape[2]) < len(controller.config.features)
            x = jnp.where(kept | ~own, x, 0.0)
        z = run(controller, x)
        nll = jnp.where(agrees, weights[1] * jax.nn.softplus(-z), weights[0] * jax.nn.softplus(z))
        share = alive(z, observed) if objective.straight_through else observed.astype(jnp.float32)
        steps = jnp.maximum(jnp.sum(observed), 1)
        fixes = observed & (z >= 0)
        return jnp.sum(share * nll) / steps, {
            "precision": jnp.sum(fixes & agrees) / jnp.maximum(jnp.sum(fixes), 1),
            "recall": jnp.sum(fixes & agrees) / jnp.maximum(jnp.sum(observed & agrees), 1),
        }

    return loss


def run(controller: Controller, x: Float[Array, "R S F"]) -> Float[Array, "R S"]:
    """Logits of whole sequences of standardised features."""

    def step(memory, row):
        z, memory = controller(row, memory)
        return memory, z

    return jax.lax.scan(step, controller.empty_memory(x.shape[:1]), x.swapaxes(0, 1))[1].T


def alive(z: Float[Array, "R S"], observed: Bool[Array, "R S"]) -> Float[Array, "R S"]:
    """Which steps a replay under the hard gate z >= 0 still reaches, 1 or 0, with the gradient of prod (1 - sigmoid(z)) before them."""
    soft = jax.nn.sigmoid(z)
    action = soft + jax.lax.stop_gradient((z >= 0) - soft)
    stays = jnp.where(observed, 1 - action, 1.0)
    before = jnp.concatenate([jnp.ones_like(stays[:, :1]), jnp.cumprod(stays, axis=1)[:, :-1]], axis=1)
    return before * observed


# --- training ---


class Epochs:
    """The trainer's batches: one permutation of the rows an epoch, its remainder dropped. (`data.Shuffled` orders row by row, which for
    thousands of small rows a step takes longer than the step.)"""

    def __init__(self, arrays: dict[str, np.ndarray], batch: int, seed: int):
        self._arrays, self._seed = arrays, seed
        self._rows = len(next(iter(arrays.values())))
        self._batch = min(batch, self._rows)
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    @property
    def steps_per_epoch(self) -> int:
        return self._rows // self._batch

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        epoch, i = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self._rows)
        chosen = self._order[i * self._batch : (i + 1) * self._batch]
        return {name: array[chosen] for name, array in self._arrays.items()}


class _Best:
    """The weights with the lowest validation loss, kept in a file: a resumed run finds what the killed one had."""

    def __init__(self, path: Path, patience: int):
        self.path, self.patience = path, patience

    def offer(self, leaves: PyTree, step: int, loss: float, every: int) -> bool:
        """Keeps the leaves if they are the best so far (up to this step); returns whether `patience` evaluations brought none."""
        step_best, best = self._read()
        if step_best is None or step_best > step or loss < best:
            kept: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in leaves.items()}
            with files.whole(self.path) as beside, open(beside, "wb") as file:
                np.savez(file, step=step, loss=loss, **kept)
            return False
        return self.patience > 0 and step - step_best >= self.patience * max(every, 1)

    def _read(self) -> tuple[int | None, float]:
        if not self.path.exists():
            return None, float("inf")
        kept = self._load()
        return int(kept["step"]), float(kept["loss"])

    def leaves(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in self._load().items() if name not in ("step", "loss")}

    def _load(self) -> dict[str, np.ndarray]:
        try:
            with self.path.open("rb") as file, np.load(file) as kept:
                return {name: kept[name] for name in kept.files}
        except UNREADABLE as error:
            raise DflaxError(f"{self.path} is damaged ({error}); delete its folder to train again") from error


def train_controller(
    config: ControllerConfig,
    train: Sequences,
    validation: Sequences,
    ce: ConfidenceExtrapolation,
    objective: ControllerObjective,
    settings: trainer.TrainConfig,
    batch: int = 4096,
    patience: int = 10,
    identity: dict[str, Any] | None = None,
) -> tuple[Controller, dict[str, float]]:
    """Trains on sequences and returns the controller of the lowest validation loss, with its figures.

    Figures: validation loss, precision and recall of the hard gate, and `constant_loss`, the loss of the best constant answer.
    """
    made = [features(part, ce, config.smoothing, objective.extrapolated) for part in (train, validation)]
    mean, std = standardisation(made[0], train.observed)
    module = Controller(config, rngs=nnx.Rngs(settings.seed))
    columns = np.array(module.columns)
    module.scale.mean[...], module.scale.std[...] = jnp.asarray(mean[columns]), jnp.asarray(std[columns])
    weights = class_weights(train.agrees, train.observed, objective)

    leaves = params.flatten(module)
    measured = {name: leaf for name, leaf in leaves.items() if name.startswith("scale.")}
    trained = {name: leaf for name, leaf in leaves.items() if name not in measured}
    merge = lambda moving: params.fill(module, {**moving, **measured})
    rows = lambda part, x: {"features": x, "agrees": part.agrees, "observed": part.observed}
    order = Epochs(rows(train, made[0]), batch, settings.seed)
    plain = replace(objective, straight_through=False)
    judge = jax.jit(lambda moving, held: make_loss(merge, plain, weights)(moving, held, None))
    held_out = jax.device_put(rows(validation, made[1]))
    best = _Best(Path(settings.out) / "best.npz", patience)

    def evaluate(moving: PyTree, step: int) -> dict[str, Any]:
        loss, figures = judge(moving, held_out)
        enough = best.offer(moving, step, float(loss), settings.eval_every)
        return {"loss": float(loss), **{name: float(value) for name, value in figures.items()}, "stop": enough}

    trainer.fit(
        trained, make_loss(merge, objective, weights), order, settings, evaluate=evaluate,
        identity={
            **(identity or {}), "config": vars(config), "objective": vars(objective), "rows": len(train),
            "traces": fingerprint(train.token, train.observed, train.agrees),
        },
    )  # fmt: skip
    moving = best.leaves()
    loss, figures = judge(jax.device_put(moving), held_out)
    return merge(jax.tree.map(jnp.asarray, moving)), {
        "loss": float(loss),
        "constant_loss": constant_loss(validation, weights),
        **{name: float(value) for name, value in figures.items()},
    }


def constant_loss(slots: Sequences, weights: tuple[float, float]) -> float:
    """The weighted cross entropy per observed step of the best answer that looks at nothing."""
    right = float(np.sum(slots.agrees & slots.observed)) * weights[1]
    wrong = float(np.sum(~slots.agrees & slots.observed)) * weights[0]
    p = right / (right + wrong)
    entropy = -sum(q * np.log(q) for q in (p, 1 - p) if q > 0)
    return float((right + wrong) * entropy / np.sum(slots.observed))


# --- Learn2PD's filter ---


def filter_rows(traces: Traces) -> dict[str, np.ndarray]:
    """Every step that some slot of its block was masked in: {"confidence", "agrees"} [rows, T], committed slots included."""
    taken = traces.masked.any(axis=3)
    return {"confidence": traces.confidence[taken], "agrees": traces.agrees[taken]}


def train_filter(
    train: Traces, validation: Traces, settings: trainer.TrainConfig, batch: int = 1024, patience: int = 10,
    identity: dict[str, Any] | None = None,
) -> tuple[AcceptanceFilter, dict[str, float]]:  # fmt: skip
    """Trains a filter by plain cross entropy over all positions of the block, as published; the lowest validation loss wins."""
    config = FilterConfig(train.confidence.shape[-1])
    module = AcceptanceFilter(config, rngs=nnx.Rngs(settings.seed))
    rows, held_out = filter_rows(train), jax.device_put(filter_rows(validation))

    def loss(leaves: PyTree, batch: dict[str, Array], key: Array | None) -> tuple[Array, dict[str, Array]]:
        z = params.fill(module, leaves)(batch["confidence"])
        return jnp.mean(jax.nn.softplus(jnp.where(batch["agrees"], -z, z))), {
            "accuracy": jnp.mean((z >= 0) == batch["agrees"])
        }

    judge = jax.jit(lambda leaves: loss(leaves, held_out, None))
    best = _Best(Path(settings.out) / "best.npz", patience)

    def evaluate(leaves: PyTree, step: int) -> dict[str, Any]:
        value, figures = judge(leaves)
        enough = best.offer(leaves, step, float(value), settings.eval_every)
        return {"loss": float(value), "accuracy": float(figures["accuracy"]), "stop": enough}

    order = Epochs(rows, batch, settings.seed)
    trainer.fit(
        params.flatten(module), loss, order, settings, evaluate=evaluate,
        identity={
            **(identity or {}), "config": vars(config), "rows": len(rows["agrees"]), "traces": fingerprint(*rows.values()),
        },
    )  # fmt: skip
    leaves = jax.tree.map(jnp.asarray, best.leaves())
    value, figures = judge(leaves)
    return params.fill(module, leaves), {"loss": float(value), "accuracy": float(figures["accuracy"])}
