"""The one training loop: drafters, small language models, diffusion models and controllers all go through `fit`.

What makes a resumed run equal an uninterrupted one, bit for bit on one device:
the batch of a step is a pure function of the step (`batches.batch_at(step)`), the random key of a step is `fold_in(key(seed), step)`,
and everything else is in the checkpoint (parameters, optimizer state, step; metrics that wait for their next log line).
"""

import contextlib
import dataclasses
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from dflax import sharding
from dflax.checkpoint.orbax import TrainingCheckpoints
from dflax.errors import DflaxError
from dflax.train import metrics as metrics_module

PyTree = Any
Metrics = dict[str, Any]


@runtime_checkable
class Batches(Protocol):
    """Where batches come from. A batch is a pytree of numpy arrays with the batch axis first, the same shapes at every step."""

    @property
    def steps_per_epoch(self) -> int: ...

    def batch_at(self, step: int) -> PyTree:
        """The batch of `step` (0, 1, 2, ...): a pure function of the step, called from a background thread."""
        ...


@dataclass(frozen=True)
class TrainConfig:
    """How to train. The fields after `accumulation` do not change the result and may differ when a run is resumed."""

    steps: int = 0
    """Optimizer steps; 0: as many as `epochs` needs."""
    epochs: int = 0
    """Passes over the data, when `steps` is 0."""
    learning_rate: float = 6e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """What follows the warm-up: down to `final_fraction` of the learning rate by cosine or a line, or constant (may be prolonged later)."""
    warmup_fraction: float = 0.04
    final_fraction: float = 0.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    """"muon": matrices follow Muon with updates of AdamW's size (arXiv 2502.16982), so its learning rates carry over; the rest AdamW."""
    weight_decay: float = 0.0
    """On arrays of two axes and more: norms and biases are spared."""
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: no clipping."""
    accumulation: int = 1
    """A batch is cut into this many parts that run one after the other; gradients and metrics are the mean over the parts."""
    seed: int = 0
    log_every: int = 10
    eval_every: int = 0
    """Steps between calls of `evaluate`; 0: only at the end."""
    checkpoint_every: int = 500
    keep: int = 2
    """Checkpoints kept."""
    best: str = ""
    """Also keep the checkpoint where this figure of the evaluations was highest ("-NAME": lowest), such as acceptance_length."""
    out: str = "run"
    """Folder of checkpoints/, metrics.jsonl, metrics.png and config.json."""
    mesh: str = ""
    """Such as "data=2,fsdp=4"; "": one device."""
    distributed: str = ""
    """Several processes: "auto" (TPU slices, Slurm and Open MPI know), or HOST:PORT,COUNT,INDEX (`dflax.processes`)."""

    def __post_init__(self) -> None:
        for name in ("log_every", "checkpoint_every", "keep", "accumulation"):
            if getattr(self, name) < 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("steps", "epochs", "eval_every", "learning_rate", "weight_decay", "clip_norm"):
            if getattr(self, name) < 0:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must not be negative")
        if bool(self.steps) == bool(self.epochs):
            raise DflaxError(f"steps is {self.steps} and epochs is {self.epochs}; set exactly one of them")
        if self.optimizer not in ("adamw", "muon"):
            raise DflaxError(f"optimizer is {self.optimizer!r}; it is one of adamw, muon")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise DflaxError(f"schedule is {self.schedule!r}; it is one of cosine, linear, constant")
        for name in ("warmup_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must lie between 0 and 1")

    def total_steps(self, steps_per_epoch: int) -> int:
        return self.steps or self.epochs * steps_per_epoch

    def warmup_steps(self, total: int) -> int:
        return round(self.warmup_fraction * total)


class Stopped(DflaxError):
    """Training was told to stop (SIGTERM, Ctrl-C) and has written its checkpoint."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step reads and replaces; donated to it."""

    step: PyTree  # int32 []: steps done
    params: PyTree  # float32 masters
    opt_state: PyTree


def learning_rate_schedule(config: TrainConfig, total: int) -> optax.Schedule:
    """Linear warm-up from 0 over the first steps, then the configured decay to the last of `total` steps."""
    warmup, peak = config.warmup_steps(total), config.learning_rate
    decay_steps = max(1, total - warmup)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, decay_steps, alpha=config.final_fraction)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, peak * config.final_fraction, decay_steps)
    else:
        after = optax.constant_schedule(peak)
    if warmup == 0:
        return after
    # The first step already moves: (step + 1) / warmup of the peak, not 0.
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1)), after], [warmup])


def make_optimizer(config: TrainConfig, total: int) -> optax.GradientTransformation:
    """AdamW or Muon, with global-norm clipping, warm-up and decay."""
    rate = learning_rate_schedule(config, total)
    is_matrix = lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
    if config.optimizer == "muon":
        update = optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            consistent_rms=0.2,
        )
    else:
        update = optax.adamw(
            rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=is_matrix
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update) if config.clip_norm else update


def fit(
    params: PyTree,
    loss_fn: Callable[..., tuple[jax.Array, Metrics]],
    batches: Batches,
    config: TrainConfig,
    *,
    evaluate: Callable[[PyTree, int], Metrics] | None = None,
    frozen: PyTree = None,
    mesh: Mesh | None = None,
    axes: dict[str, tuple[str | None, ...]] | None = None,
    identity: dict[str, Any] | None = None,
) -> PyTree:
    """Train `params` and return the trained ones; goes on from the newest checkpoint in `config.out` if there is one.

    Args:
      params: pytree of arrays, kept as float32 masters. The caller's arrays are not touched.
      loss_fn: `(params, batch, key) -> (scalar loss, dict of scalar metrics)`, jitted here; with `frozen` a fourth argument follows.
        A metric named "tokens" is counted (tokens/s), every other is averaged between two log lines.
      evaluate: `(params, step) -> dict of numbers`, written as "eval/NAME"; must not keep the arrays (they are donated afterwards).
        A true "stop" among them ends the training there. Left out where several processes train.
      frozen: arrays the loss needs and must not train (a target, an embedding): an argument, never a constant of the compiled step.
      mesh: instead of `config.mesh`.
      axes: logical axes by key path of a parameter (`sharding.tree_shardings`).
      identity: JSON of whatever else fixes the result (model, data): a resume with another identity is refused.

    Raises DflaxError: config or identity differ from the run in `config.out`, a loss that is not finite, an unwritable folder.
    """
    run = _Run(params, loss_fn, batches, config, evaluate, frozen, mesh, axes, identity or {})
    with contextlib.closing(run):
        return run.train()


class _Run:
    """One call of `fit`: the state on device, the files, and the loop."""

    def __init__(self, params, loss_fn, batches, config, evaluate, frozen, mesh, axes, identity):
        self.config, self.batches, self.evaluate = config, batches, evaluate
        if evaluate is not None and jax.process_count() > 1:
            self.evaluate = (
                None  # it decodes on the host's side, with arrays that a process of several has only a part of
            )
        self.total = config.total_steps(batches.steps_per_epoch)
        if self.total < 1:
            raise DflaxError("there is nothing to train on: 0 steps")
        self.main = jax.process_index() == 0
        self.mesh = sharding.make_mesh(config.mesh) if mesh is None else mesh
        self.frozen = None if frozen is None else _place_frozen(frozen, self.mesh)
        optimizer = make_optimizer(config, self.total)
        self.schedule = learning_rate_schedule(config, self.total)
        self.train_step, abstract = jitted_step(params, loss_fn, config, self.total, self.mesh, axes, self._say)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

        out = Path(config.out)
        self.checkpoints = TrainingCheckpoints(out / "checkpoints", config.keep, config.best)
        start = self.checkpoints.latest()
        _check_same_run(out / "config.json", config, self.total, identity, resuming=start is not None)
        self.waiting: list[Metrics] = []
        self.seconds = 0.0
        if start is None:
            self.step, self.enough = 0, False
            init = jax.jit(lambda p: _first_state(p, optimizer), out_shardings=shardings)
            self.state = init(params)
        else:
            self.step = start
            named, saved = self.checkpoints.restore(start, _named(abstract))
            self.state = jax.tree.unflatten(jax.tree.structure(abstract), [named[name] for name in _named(abstract)])
            self.waiting, self.seconds, self.enough = saved["waiting"], saved["seconds"], saved.get("enough", False)
            self._say(f"resuming {out} at step {start} of {self.total}")
        self.saved_at = start
        self.found: tuple[int, dict[str, float]] | None = None  # step and figures of the last evaluation
        self.out = out
        self.log = metrics_module.MetricsFile(out / "metrics.jsonl", self.step) if self.main else None

    def close(self) -> None:
        self.checkpoints.close()
        if self.log is not None:
            self.log.close()

    def _say(self, line: str) -> None:
        if self.main:
            tqdm.write(line, file=sys.stderr)

    def train(self) -> PyTree:
        config = self.config
        if self.enough:
            return self._trained()
        source = _prefetch(lambda step: _place_batch(self.batches.batch_at(step), self.mesh), self.step, self.total)
        hidden = not (self.main and sys.stderr.isatty())
        bar = tqdm(total=self.total, initial=self.step, disable=hidden, dynamic_ncols=True, unit="step")
        clock = time.perf_counter()
        self.logged_at = self.step, self.seconds
        in_flight: Metrics | None = None
        with contextlib.closing(source), contextlib.closing(bar), _StopSignals() as stop:
            for batch in source:
                self.state, measured = self.train_step(self.state, batch, self.frozen)
                self._collect(in_flight)  # of the step before: the device is never left waiting for the host
                in_flight = measured
                self.step += 1
                bar.update()
                last = self.step == self.total
                logs = self.step % config.log_every == 0 or last
                evaluates = last or (config.eval_every > 0 and self.step % config.eval_every == 0)
                saves = last or stop.requested or self.step % config.checkpoint_every == 0
                if logs or evaluates or saves:
                    self._collect(in_flight)
                    in_flight = None
                    now = time.perf_counter()
                    self.seconds, clock = self.seconds + now - clock, now
                if logs:
                    bar.set_postfix(loss=f"{self._log_line():.4f}")
                if evaluates and self.evaluate is not None:
                    self.enough = self._evaluate()
                    now = time.perf_counter()
                    self.seconds, clock = self.seconds + now - clock, now
                    self.logged_at = self.logged_at[0], self.seconds if logs else self.logged_at[1]
                if saves or self.enough or (evaluates and config.best):
                    self._save()
                if self.enough:
                    break
                if stop.requested and not last:
                    self.checkpoints.wait()
                    raise Stopped(
                        f"stopped by {stop.name} at step {self.step} of {self.total}; the checkpoint is in "
                        f"{self.checkpoints.folder}, the same command goes on from it"
                    )
        if self.main:
            metrics_module.plot(self.out / "metrics.jsonl", self.out / "metrics.png")
        return self._trained()

    def _trained(self) -> PyTree:
        """The parameters; with several processes whole in each, so that any can write them."""
        if jax.process_count() == 1:
            return self.state.params
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(lambda params: params, out_shardings=everywhere)(self.state.params)

    def _collect(self, measured: Metrics | None) -> None:
        if measured is None:
            return
        values = {name: value.item() for name, value in jax.device_get(measured).items()}
        step = values.pop("step")
        for name in ("loss", "grad_norm"):
            if not math.isfinite(values[name]):
                kept = (
                    "there is no checkpoint yet"
                    if self.saved_at is None
                    else f"step {self.saved_at} is the last checkpoint"
                )
                raise DflaxError(
                    f"{name} is {values[name]} at step {step}; {kept} ({self.checkpoints.folder}). "
                    "Try a lower learning_rate, a longer warm-up or a smaller clip_norm"
                )
        self.waiting.append(values)

    def _log_line(self) -> float:
        """Write the mean of the steps since the last line; returns the mean loss."""
        rows, self.waiting = self.waiting, []
        line = {name: float(np.mean([row[name] for row in rows])) for name in rows[0] if name != "tokens"}
        line["learning_rate"] = float(np.asarray(self.schedule(self.step - 1)))
        line["epoch"] = self.step / self.batches.steps_per_epoch
        logged_step, logged_seconds = self.logged_at
        took = max(self.seconds - logged_seconds, 1e-9)
        line["seconds"] = round(self.seconds, 3)
        line["steps_per_second"] = round((self.step - logged_step) / took, 3)
        if "tokens" in rows[0]:
            fresh = rows[
                -(self.step - logged_step) :
            ]  # after a resume the first line also averages steps of the run before
            line["tokens_per_second"] = round(sum(row["tokens"] for row in fresh) / took, 1)
        self.logged_at = self.step, self.seconds
        if self.log is not None:
            self.log.write(self.step, line)
        return line["loss"]

    def _evaluate(self) -> bool:
        """Writes what `evaluate` finds; returns whether it says stop."""
        assert self.evaluate is not None
        values = dict(self.evaluate(self.state.params, self.step))
        enough = bool(values.pop("stop", False))
        best = self.config.best.removeprefix("-")
        if best and best not in values:
            raise DflaxError(f"best is {self.config.best!r}; the evaluation finds {', '.join(values) or 'nothing'}")
        self.found = self.step, {name: float(value) for name, value in values.items()}
        found = {f"eval/{name}": float(value) for name, value in values.items()}
        if self.log is not None:
            self.log.write(self.step, found)
            metrics_module.plot(self.out / "metrics.jsonl", self.out / "metrics.png")
        self._say(f"step {self.step}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
        return enough

    def _save(self) -> None:
        if self.saved_at == self.step:
            return
        metadata = {"waiting": [*self.waiting], "seconds": self.seconds, "enough": self.enough}
        measured = self.found[1] if self.found is not None and self.found[0] == self.step else None
        self.checkpoints.save(self.step, _named(self.state), metadata, measured)
        self.saved_at = self.step


def jitted_step(
    params: PyTree, loss_fn: Any, config: TrainConfig, total: int, mesh: Mesh, axes: Any = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Any, TrainState]:  # fmt: skip
    """The step of `fit`, (state, batch, frozen) -> (state, metrics), jitted with the state donated; and that state as shapes with places.

    params: arrays or shapes. total: steps of the schedule. say: told what a mesh replicates for want of a divisor.
    """
    optimizer = make_optimizer(config, total)
    abstract = _abstract_state(params, optimizer, mesh, axes, say)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step = jax.jit(_make_step(loss_fn, optimizer, config), donate_argnums=0, out_shardings=(shardings, None))
    return step, abstract


def _first_state(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    masters = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    return TrainState(jnp.zeros((), jnp.int32), masters, optimizer.init(masters))


def _abstract_state(params, optimizer, mesh, axes, say) -> TrainState:
    """Shapes, dtypes and shardings of the state; optimizer moments lie where their parameters lie."""
    abstract = jax.eval_shape(lambda p: _first_state(p, optimizer), params)
    shardings, report = sharding.tree_shardings(abstract.params, mesh, axes)
    for line in report:
        say(f"mesh: {line}")
    whole = NamedSharding(mesh, PartitionSpec())
    leaves = jax.tree_util.tree_leaves_with_path(abstract.params)
    own_by_path = {
        (path, leaf.shape): own for (path, leaf), own in zip(leaves, jax.tree.leaves(shardings), strict=True)
    }

    def beside(path, leaf):
        """A moment is stored under its parameter's path, behind the optimizer's own keys."""
        tails = (tuple(path[i:]) for i in range(len(path)))
        return next((own_by_path[tail, leaf.shape] for tail in tails if (tail, leaf.shape) in own_by_path), whole)

    opt_shardings = jax.tree_util.tree_map_with_path(beside, abstract.opt_state)
    return jax.tree.map(
        lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own),
        abstract,
        TrainState(whole, shardings, opt_shardings),
    )


def _named(state: TrainState) -> dict[str, Any]:
    """The state as a flat dict by key path: what is stored, so that a stored array is found by its name."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _make_step(loss_fn, optimizer: optax.GradientTransformation, config: TrainConfig):
    """The jitted function: (state, batch, frozen) -> (state, metrics of this step)."""

    def loss_and_grads(params, batch, key, frozen):
        arguments = (batch, key) if frozen is None else (batch, key, frozen)
        (loss, measured), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, *arguments)
        return grads, {"loss": loss, **measured}

    def accumulated(params, batch, key, frozen):
        parts = config.accumulation
        if parts == 1:
            return loss_and_grads(params, batch, key, frozen)
        # Part i takes rows i, i + parts, ...: on a mesh every device keeps the rows it has.
        pieces = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
        keys = jax.random.split(key, parts)
        shapes = jax.eval_shape(loss_and_grads, params, jax.tree.map(lambda x: x[0], pieces), keys[0], frozen)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def add(total, piece):
            part, part_key = piece
            return jax.tree.map(jnp.add, total, loss_and_grads(params, part, part_key, frozen)), None

        (grads, measured), _ = jax.lax.scan(add, zeros, (pieces, keys))
        mean = {name: value if name == "tokens" else value / parts for name, value in measured.items()}
        return jax.tree.map(lambda leaf: leaf / parts, grads), mean

    def step(state: TrainState, batch, frozen) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        grads, measured = accumulated(state.params, batch, key, frozen)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        measured = {**measured, "grad_norm": optax.tree_utils.tree_norm(grads), "step": state.step + 1}
        return TrainState(state.step + 1, params, opt_state), measured

    return step


def _place_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """Numpy arrays onto the mesh; every process computes the whole batch and uploads only its own rows."""

    def put(array):
        array = np.asarray(array)
        return jax.make_array_from_callback(
            array.shape, sharding.batch_sharding(array.shape, mesh), lambda at: array[at]
        )

    return jax.tree.map(put, batch)


def _place_frozen(frozen: PyTree, mesh: Mesh) -> PyTree:
    """Arrays that already lie on the mesh's devices stay; others follow the same default as parameters."""
    devices = set(mesh.devices.flat)

    def put(leaf):
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices:
            return leaf
        leaf = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        return jax.device_put(leaf, NamedSharding(mesh, sharding.fsdp_spec(leaf.shape, mesh)[0]))

    return jax.tree.map(put, frozen)


def _prefetch(make: Callable[[int], Any], start: int, stop: int, ahead: int = 2) -> Generator[Any, None, None]:
    """make(start), make(start + 1), ... computed by a background thread, `ahead` at most waiting; its exceptions are raised here."""
    ready: queue.Queue = queue.Queue(maxsize=ahead)
    leave = threading.Event()

    def put(item) -> None:
        while not leave.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return

    def work() -> None:
        for step in range(start, stop):
            if leave.is_set():
                return
            try:
                put((make(step), None))
            except BaseException as error:  # handed to the training thread, which raises it
                put((None, error))
                return

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        for _ in range(start, stop):
            item, error = ready.get()
            if error is not None:
                raise error
            yield item
    finally:
        leave.set()
        thread.join()


class _StopSignals:
    """While active, SIGTERM and SIGINT only set `requested`: the loop ends the step it is in. A second one acts at once.

    In the main thread of a single process only: several processes would have to agree on the step.
    """

    def __init__(self) -> None:
        self.requested = False
        self.name = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_StopSignals":
        if threading.current_thread() is threading.main_thread() and jax.process_count() == 1:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        self.requested, self.name = True, signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def __exit__(self, *exception: Any) -> None:
        self._restore()


FREE_FIELDS = (
    "best",
    "distributed",
    "steps",
    "epochs",
    "warmup_fraction",
    "log_every",
    "eval_every",
    "checkpoint_every",
    "keep",
    "out",
    "mesh",
)


def _check_same_run(path: Path, config: TrainConfig, total: int, identity: dict[str, Any], resuming: bool) -> None:
    """Refuse to go on with a config that would give another result than the run in the folder; then write the config there.

    The number of steps may change only if nothing done so far depends on it: a constant schedule with the same warm-up.
    """
    fields = dataclasses.asdict(config)
    fixed = {name: value for name, value in fields.items() if name not in FREE_FIELDS}
    fixed["warmup_steps"] = config.warmup_steps(total)
    if config.schedule != "constant":
        fixed["total_steps"] = total
    new = json.loads(json.dumps({"fixed": fixed, "identity": identity, "config": fields}))
    if resuming:
        try:
            old = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DflaxError(
                f"{path.parent} has checkpoints but no readable {path.name}: {error}; use another folder"
            ) from error
        for part in ("fixed", "identity"):
            for name in {**old[part], **new[part]}:
                before, now = old[part].get(name), new[part].get(name)
                if before != now:
                    raise DflaxError(
                        f"{path.parent} holds a run with {name} = {before!r}, this one has {now!r}; "
                        "set it back to resume, or use another folder"
                    )
    if jax.process_index() == 0:
        beside = path.with_suffix(".partial")
        beside.write_text(json.dumps(new, indent=1) + "\n")
        os.replace(beside, path)
