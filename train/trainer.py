"""The one training loop: drafters, small language models, diffusion models and controllers all go through `fit`.

What makes a resumed run equal an uninterrupted one, bit for bit on one device:
the batch of a step is a pure function of the step (`batches.batch_at(step)`), the random key of a step is `fold_in(key(seed), step)`,
and everything else is in the checkpoint (parameters, optimizer state, step; metrics that wait for their next log line).
"""

import contextlib
import dataclasses
import json
import math
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from dflax import files, processes, sharding
from dflax.checkpoint.orbax import TrainingCheckpoints
from dflax.errors import DflaxError
from dflax.train import metrics as metrics_module
from dflax.train.step import (
    Metrics,
    PyTree,
    TrainConfig,
    TrainState,
    learning_rate_schedule,
    train_step,
)


@runtime_checkable
class Batches(Protocol):
    """Where batches come from. A batch is a pytree of numpy arrays, batch axis first (or scalars), of the same shapes at every step."""

    @property
    def steps_per_epoch(self) -> int: ...

    def batch_at(self, step: int) -> PyTree:
        """The batch of `step` (0, 1, 2, ...): a pure function of the step, called from a background thread."""
        ...


class Stopped(DflaxError):
    """Training was told to stop (SIGTERM, Ctrl-C) and has written its checkpoint."""


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
        A true "stop" among them ends the training there. Several processes call it together, and the first one's numbers count.
      frozen: arrays the loss needs and must not train (a target, an embedding): an argument, never a constant of the compiled step.
      mesh: instead of `config.mesh`.
      axes: logical axes by key path of a parameter (`sharding.tree_shardings`).
      identity: JSON of whatever else fixes the result (model, data): a resume with another identity is refused.

    Raises DflaxError: config or identity differ from the run in `config.out`, a loss that is not finite, an unwritable folder.
    """
    with files.alone(config.out) if jax.process_index() == 0 else contextlib.nullcontext():
        run = _Run(params, loss_fn, batches, config, evaluate, frozen, mesh, axes, identity or {})
        with contextlib.closing(run):
            return run.train()


class _Run:
    """One call of `fit`: the state on device, the files, and the loop."""

    def __init__(self, params, loss_fn, batches, config, evaluate, frozen, mesh, axes, identity):
        self.config, self.batches, self.evaluate = config, batches, evaluate
        self.said: set[str] = set()
        self.main = jax.process_index() == 0
        if config.distributed and not jax.distributed.is_initialized():
            raise DflaxError(
                f"distributed is {config.distributed!r}, but this command trains in one process; leave it out"
            )
        if config.best and evaluate is None:
            raise DflaxError(f"best is {config.best!r}, but nothing is held out to evaluate on")
        self.total = config.total_steps(batches.steps_per_epoch)
        if self.total < 1:
            raise DflaxError("there is nothing to train on: 0 steps")
        self.mesh = sharding.make_mesh(config.mesh) if mesh is None else mesh
        self.frozen = None if frozen is None else _place_frozen(frozen, self.mesh)
        self.schedule = learning_rate_schedule(config, self.total)
        step = train_step(params, loss_fn, config, self.total, self.mesh, axes, self._say)
        self.run_step, self.abstract = step.run, step.state

        out = Path(config.out)
        self.checkpoints = TrainingCheckpoints(out / "checkpoints", config.keep, config.best)
        start = self._start()
        _check_same_run(out / "config.json", config, self.total, identity, resuming=start is not None)
        self.waiting: list[Metrics] = []
        self.seconds = 0.0
        if start is None:
            self.step, self.enough, self.best = 0, False, None
            self.state = step.begin(params)
        else:
            self.step = start
            self.state, saved = self._restore(start)
            self.waiting, self.seconds, self.enough = saved["waiting"], saved["seconds"], saved.get("enough", False)
            self.best = saved.get("best")
            self._say(f"resuming {out} at step {start} of {self.total}")
        self.saved_at = start
        self.found: tuple[int, dict[str, float]] | None = None  # step and figures of the last evaluation
        # self.best: [step, figure] of the best evaluation, where `config.best` names one
        self.out = out
        self.log = metrics_module.MetricsFile(out / "metrics.jsonl", self.step) if self.main else None

    def _start(self) -> int | None:
        """The step to go on from, the same in all processes."""
        start = self.checkpoints.latest()
        if jax.process_count() > 1:
            seen = multihost_utils.process_allgather(np.int32(-1 if start is None else start)).ravel()
            if len(set(seen.tolist())) > 1:
                raise DflaxError(
                    f"processes find different checkpoints in {self.config.out} (steps {sorted(set(seen.tolist()))}, -1 for none); "
                    "it must lie on storage that they share"
                )
        return start

    def _restore(self, step: int) -> tuple[TrainState, dict[str, Any]]:
        named, saved = self.checkpoints.restore(step, _named(self.abstract))
        leaves = [named[name] for name in _named(self.abstract)]
        return jax.tree.unflatten(jax.tree.structure(self.abstract), leaves), saved

    def close(self) -> None:
        self.checkpoints.close()
        if self.log is not None:
            self.log.close()

    def _say(self, line: str) -> None:
        if self.main:
            tqdm.write(line, file=sys.stderr)

    def _say_once(self, *lines: str) -> None:
        for line in lines:
            if line not in self.said:
                self.said.add(line)
                self._say(f"mesh: {line}")

    def train(self) -> PyTree:
        config = self.config
        if self.enough:
            return self._trained()
        source = _prefetch(lambda step: self._place_batch(self.batches.batch_at(step)), self.step, self.total)
        hidden = not (self.main and sys.stderr.isatty())
        bar = tqdm(total=self.total, initial=self.step, disable=hidden, dynamic_ncols=True, unit="step")
        clock = time.perf_counter()
        self.logged_at = self.step, self.seconds
        in_flight: Metrics | None = None
        with contextlib.closing(source), contextlib.closing(bar), _StopSignals() as stop:
            for batch in source:
                self.state, measured = self.run_step(self.state, batch, self.frozen)
                self._collect(in_flight)  # of the step before: the device is never left waiting for the host
                in_flight = measured
                self.step += 1
                bar.update()
                last = self.step == self.total
                stopping = stop.reached(self.step)
                logs = self.step % config.log_every == 0 or last
                evaluates = last or (config.eval_every > 0 and self.step % config.eval_every == 0)
                saves = last or stopping or self.step % config.checkpoint_every == 0
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
                if stopping and not last:
                    self.checkpoints.wait()
                    raise Stopped(
                        f"stopped by {stop.name} at step {self.step} of {self.total}; the checkpoint is in "
                        f"{self.checkpoints.folder}, the same command goes on from it"
                    )
        if self.main:
            metrics_module.plot(self.out / "metrics.jsonl", self.out / "metrics.png")
        return self._trained()

    def _place_batch(self, batch: PyTree) -> PyTree:
        """Arrays of the whole batch onto the mesh (`sharding.place_batch`); what that does not cut is said."""
        parts = self.config.accumulation
        for array in jax.tree.leaves(batch):
            shape = getattr(array, "shape", ())
            if shape and shape[0] % parts:
                raise DflaxError(f"a batch of {shape[0]} rows cannot be cut into {parts} equal parts (accumulation)")
            part = (shape[0] // parts, *shape[1:]) if shape else ()
            self._say_once(*sharding.batch_spec(part, self.mesh)[1])
        return sharding.place_batch(batch, self.mesh)

    def _trained(self) -> PyTree:
        """The last parameters, or those of the best evaluation; with several processes whole on each host, so that any can write them."""
        params = self.state.params
        if self.best is not None and self.best[0] != self.step:
            self.checkpoints.wait()
            params = self._restore(self.best[0])[0].params
            self._say(
                f"the weights are those of step {self.best[0]}, where {self.config.best} was best: {self.best[1]:.4g}"
            )
        # One leaf after the other: a device never holds more than one of them whole.
        return params if jax.process_count() == 1 else jax.tree.map(processes.fetch, params)

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
        values = processes.agreed(dict(self.evaluate(self.state.params, self.step)))
        enough = bool(values.pop("stop", False))
        best = self.config.best.removeprefix("-")
        if best and best not in values:
            raise DflaxError(f"best is {self.config.best!r}; the evaluation finds {', '.join(values) or 'nothing'}")
        if best:
            sign, now = -1 if self.config.best.startswith("-") else 1, float(values[best])
            if (
                self.best is None or sign * now >= sign * self.best[1]
            ):  # of equals the newest, which is what Orbax keeps
                self.best = [self.step, now]
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
        metadata = {"waiting": [*self.waiting], "seconds": self.seconds, "enough": self.enough, "best": self.best}
        measured = self.found[1] if self.found is not None and self.found[0] == self.step else None
        self.checkpoints.save(self.step, _named(self.state), metadata, measured)
        self.saved_at = self.step


def _named(state: TrainState) -> dict[str, Any]:
    """The state as a flat dict by key path: what is stored, so that a stored array is found by its name."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


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

    In the main thread of a single process. Several agree on a step through JAX's preemption service, which takes SIGTERM itself.
    """

    def __init__(self) -> None:
        self.requested = False
        self.name = "SIGTERM"
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_StopSignals":
        if threading.current_thread() is threading.main_thread() and jax.process_count() == 1:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def reached(self, step: int) -> bool:
        """Whether training ends with this step, in all processes alike."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self.requested

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
            for name, (before, now) in files.differences(old[part], new[part]).items():
                raise DflaxError(
                    f"{path.parent} holds a run with {name} = {before!r}, this one has {now!r}; "
                    "set it back to resume, or use another folder"
                )
    if jax.process_index() == 0:
        files.write_json(path, new)
