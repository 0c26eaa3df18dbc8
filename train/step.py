"""What a training step is: how fast and by which rule parameters move, what the step carries, and the jitted function itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflax import sharding
from dflax.errors import DflaxError

PyTree = Any
Metrics = dict[str, Any]


@dataclass(frozen=True)
class TrainConfig:
    """How to train. The fields after `accumulation` do not change how weights move and may differ when a run is resumed; `best`, with
    `eval_every`, chooses whose step's weights are the result."""

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
    seed: int = 0
    accumulation: int = 1
    """A batch is cut into this many parts that run one after the other; gradients and metrics are the mean over the parts."""
    log_every: int = 10
    eval_every: int = 0
    """Steps between calls of `evaluate`; 0: only at the end."""
    checkpoint_every: int = 500
    keep: int = 2
    """Checkpoints kept."""
    best: str = ""
    """Keep the checkpoint where this figure of the evaluations was highest ("-NAME": lowest), such as acceptance_length: the run's result
    is its weights. "": the last ones."""
    out: str = "run"
    """Folder of checkpoints/, metrics.jsonl, metrics.png and config.json; of several hosts on storage that they share."""
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
        if "://" in self.out:
            raise DflaxError(
                f"out is {self.out!r}; it must be a folder: mount the bucket that it stands for, on every host"
            )
        if self.optimizer not in ("adamw", "muon"):
            raise DflaxError(f"optimizer is {self.optimizer!r}; it is one of adamw, muon")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise DflaxError(f"schedule is {self.schedule!r}; it is one of cosine, linear, constant")
        if self.distributed and not self.mesh:
            raise DflaxError(
                f"distributed is {self.distributed!r} and mesh is empty; name the axes that all devices make, such as fsdp=-1"
            )
        for name in ("warmup_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must lie between 0 and 1")

    def total_steps(self, steps_per_epoch: int) -> int:
        return self.steps or self.epochs * steps_per_epoch

    def warmup_steps(self, total: int) -> int:
        return round(self.warmup_fraction * total)


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


@dataclass(frozen=True)
class TrainStep:
    """begin(params) -> the first state, in its places. run(state, batch, frozen) -> (state, metrics), jitted; the state is donated.
    state: its shapes, dtypes and places."""

    begin: Any
    run: Any
    state: TrainState


def train_step(
    params: PyTree, loss_fn: Any, config: TrainConfig, total: int, mesh: Mesh, axes: Any = None,
    say: Callable[[str], None] = lambda line: None,
) -> TrainStep:  # fmt: skip
    """The step of `trainer.fit`.

    params: arrays or shapes. total: steps of the schedule. say: told what a mesh replicates for want of a divisor.
    """
    optimizer = make_optimizer(config, total)
    state = _abstract_state(params, optimizer, mesh, axes, say)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    begin = jax.jit(lambda params: _first_state(params, optimizer), out_shardings=places)
    run = jax.jit(_make_step(loss_fn, optimizer, config), donate_argnums=0, out_shardings=(places, None))
    return TrainStep(begin, run, state)


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
        cut = lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1) if x.ndim else jnp.broadcast_to(x, (parts,))
        pieces = jax.tree.map(cut, batch)
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
