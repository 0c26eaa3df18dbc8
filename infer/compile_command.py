"""`dflax compile`: a loop or a training step compiled for chips that are not there, and what the compiler says of it."""

import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tyro.conf import Positional

from dflax import abstract, configs
from dflax.config import ControllerConfig, DrafterConfig, ModelConfig
from dflax.errors import DflaxError
from dflax.infer import aot, compile_table, roofline
from dflax.infer.canvas import Cache
from dflax.infer.collectives import collectives
from dflax.infer.denoise import DenoisePlan
from dflax.infer.report import table, write_json
from dflax.kernels_pallas.chips import Topology, topology
from dflax.sharding import make_mesh, not_cut, spec

Models = dict[str, ModelConfig | DrafterConfig]
"""By what a report calls them."""


@dataclass(frozen=True)
class CompileConfig:
    """Compile a preset's loop or training step for a TPU slice or GPUs, with no such hardware and no weights.

    Tells bytes per device, FLOPs and bytes as the compiler counts them, collectives, whether it fits, and a lower bound of a step's time
    from the chip's published peaks. A TPU needs the extra aot-tpu, a GPU aot-gpu and the CUDA toolkit's ptxas.
    """

    preset: Positional[str] = ""
    """A preset of `dflax train drafter` or `dflax train diffusion`: its models and settings."""
    topology: str = "v5e:4x4"
    """CHIP:SHAPE: v5e:4x4, v5p:4x4x4, v6e:8x8, h100, h100:8, h200, b200, ..."""
    mesh: str = ""
    """Such as "data=4,tensor=4"; default: decoding cuts heads as far as key/value heads go, training cuts parameters (fsdp)."""
    what: Literal["auto", "speculate", "denoise", "train"] = "auto"
    """auto: the decoding loop that the preset's model is for."""
    batch: int = 0
    """Rows decoded together, or rows of a training step; 0: one row, or the preset's (at least one a chip)."""
    context: int = 4096
    """Columns of the cache: prompt, answer and a block. The estimate of speculation takes them as half full."""
    block_size: int = 0
    """Of speculation; 0: the preset's."""
    acceptance_length: float = 6.5
    """Tokens per round that the predicted speed-up assumes. Published for Qwen3-8B: 6.5."""
    gen_length: int = 256
    """This and the next two: of denoising."""
    block_length: int = 32
    cache: Literal["none", "prefix", "dual"] = "dual"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights, activations and caches when decoding."""
    quick: bool = False
    """The compiler's least effort: a minute or two in place of many. Temporaries may differ (8.9 GiB against 9.4 where both were tried)."""
    out: str = ""
    """Also write the report to this JSON file; with --table: the folder of the reports (runs/compile)."""
    table: str = ""
    """In place of a preset: compile all that docs/compile.md shows, and write that page to this file. A run that was stopped goes on where
    its folder of reports ends."""

    def __post_init__(self) -> None:
        for name in ("context", "gen_length", "block_length"):
            if getattr(self, name) < 1:
                raise DflaxError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.batch < 0 or self.block_size < 0 or self.acceptance_length < 1:
            raise DflaxError("batch and block_size must not be negative, acceptance_length at least 1")
        if bool(self.preset) == bool(self.table):
            raise DflaxError(
                "name a preset, or give --table a file for the page of all presets that are compiled for docs"
            )


@dataclass(frozen=True)
class Report:
    """What came out. Bytes, flops and bytes_moved are per device and of the whole program; the latter two, which the compiler counts, take
    every loop as if it turned once."""

    what: str
    preset: str
    topology: str
    mesh: str
    chips: int
    settings: dict[str, Any]
    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    memory: float
    flops: float
    bytes_moved: float
    collectives: dict[str, tuple[int, int]]
    """Kind -> how many run in a step, bytes of their results (`collectives`)."""
    step_flops: float
    """Of a step, over all chips, computed from shapes."""
    step_seconds: float
    plain_seconds: float | None
    """Of a step without speculation, collectives left out."""
    speedup: float | None
    """Predicted, collectives left out of both."""
    source: str
    replicated: list[str] = field(default_factory=list)
    """Rows, kinds of parameters and caches that the mesh does not divide, so that every chip holds or computes all of them."""
    deciding: tuple[float, float] | None = None
    """Denoising: FLOPs over all chips with which TSPD and the look-ahead decide beyond what a threshold needs, and those of the pass."""

    @property
    def peak_bytes(self) -> int:
        """Arguments, temporaries and what is not written in place."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.memory

    def _sent(self) -> str:
        found = ", ".join(f"{n} {kind} ({size / 2**20:.1f} MiB)" for kind, (n, size) in self.collectives.items())
        return f"{found}; loops of unknown length once" if found else "none"

    def lines(self) -> str:
        gib = lambda n: f"{n / 2**30:.2f} GiB"
        named = {
            "program": f"{self.what} of preset {self.preset}, {json.dumps(self.settings)}",
            "devices": f"{self.chips} x {self.topology.partition(':')[0]} ({self.topology}), mesh {self.mesh}",
            "compiled in": f"{self.compile_seconds:.1f} s",
            "arguments": gib(self.argument_bytes),
            "of these in place": gib(self.alias_bytes),
            "temporaries": gib(self.temp_bytes),
            "peak": f"{gib(self.peak_bytes)} of {gib(self.memory)}: {'fits' if self.fits else 'DOES NOT FIT'}",
            "FLOPs of a step": f"{self.step_flops:.3g} over all chips, from shapes",
            "FLOPs, bytes moved": f"{self.flops:.3g}, {self.bytes_moved:.3g} (the compiler's count: without kernels, every loop once)"
            if self.flops
            else "not counted by this compiler",
            "collectives": self._sent(),
            "not cut": "; ".join(self.replicated) or "nothing",
            "a step takes at least": f"{self.step_seconds * 1e3:.3g} ms by published peaks ({self.source})",
        }
        if self.plain_seconds is not None:
            named["a plain step"] = f"{self.plain_seconds * 1e3:.3g} ms by the same bound, collectives left out"
            named["predicted speed-up"] = (
                f"{self.speedup:.2f} at acceptance length {self.settings['acceptance_length']:g}, collectives left out"
            )
        if self.deciding is not None:
            added, whole = self.deciding
            named["TSPD and CE add"] = f"{added:.3g} FLOPs a step, {100 * added / whole:.2g} % of the pass"
        return table(["per device", ""], [[k, v] for k, v in named.items()])


def run(config: CompileConfig) -> Report | None:
    """Compiles and prints the report; with `table` a page of several."""
    if (
        "JAX_PLATFORMS" not in os.environ
    ):  # no device is needed, and JAX would look for those of every compiler that is installed
        jax.config.update("jax_platforms", "cpu")
    if config.table:
        return _table(config)
    made = compiled(config)
    print(made.lines())
    if config.out:
        write_json(config.out, _record(config, made))
    return made


def effort(least: bool) -> None:
    """Of the compilers in this process: the least or the usual one. JAX 0.10 has a scale, later ones have only levels."""
    if hasattr(jax.config, "jax_exec_time_optimization_effort"):
        jax.config.update("jax_exec_time_optimization_effort", -1.0 if least else 0.0)
    else:
        jax.config.update("jax_optimization_level", "O1" if least else "UNKNOWN")


def compiled(config: CompileConfig) -> Report:
    effort(least=config.quick)
    values = configs.load(config.preset)
    what = _what(config, values)
    found = topology(config.topology)
    return {"speculate": _speculate, "denoise": _denoise, "train": _train}[what](config, values, found)


def _record(config: CompileConfig, made: Report) -> dict[str, Any]:
    today = time.strftime("%Y-%m-%d")
    return {
        "config": dataclasses.asdict(config),
        "report": dataclasses.asdict(made),
        "peak_bytes": made.peak_bytes,
        "fits": made.fits,
        "date": today,
    }


def _table(config: CompileConfig) -> None:
    folder = Path(config.out or "runs/compile")
    done: list[tuple[Report, dict[str, Any]]] = []
    refused: list[str] = []
    fields = [one.name for one in dataclasses.fields(Report)]
    text = "nothing was compiled"
    for one in compile_table.rows(config):
        path = folder / f"{one.preset}-{one.what}-{one.topology.replace(':', '-')}.json"
        if compile_table.kept(path, one, fields) is None:
            try:
                made = compiled(one)
            except DflaxError as error:  # the others are worth a page all the same
                refused.append(f"{one.what} {one.preset}, {one.topology}: {error}")
                continue
            write_json(path, _record(one, made))
        record = json.loads(path.read_text())
        done.append((Report(**record["report"]), record["provenance"] | {"date": record["date"]}))
        text = compile_table.write(config.table, done, refused, config.acceptance_length)
    print(text, *refused, sep="\n")


def _what(config: CompileConfig, values: dict[str, Any]) -> str:
    known = ("speculate", "train") if "target" in values else ("denoise", "train") if "model" in values else ()
    if not known:
        raise DflaxError(f"preset {config.preset} names neither a target nor a model; nothing can be compiled from it")
    what = known[0] if config.what == "auto" else config.what
    if what not in known:
        raise DflaxError(f"preset {config.preset} is for {' or '.join(known)}, not {what}")
    return what


def _mesh(config: CompileConfig, found: Topology, model: ModelConfig | None) -> Mesh:
    """model None: for training."""
    text, count = config.mesh, len(found.devices)
    if not text:
        text = f"fsdp={count}"
        if model is not None:
            tensor = math.gcd(count, model.num_kv_heads)
            text = f"data={count // tensor},tensor={tensor}"
    return make_mesh(text, found.devices)


def _speculate(config: CompileConfig, values: dict[str, Any], found: Topology) -> Report:
    from dflax.train.aot import configs_of

    target, drafter, _ = configs_of(_recipe(config, values))
    mesh, rows = _mesh(config, found, target), config.batch or 1
    block = config.block_size or drafter.block_size
    compile_ = lambda: aot.speculative_loop(target, drafter, mesh, rows, config.context, block, config.dtype)
    live, width = config.context // 2, np.dtype(jax.numpy.dtype(config.dtype)).itemsize
    work = [
        roofline.speculative_round(target, who, rows, size, live, width) for who, size in ((drafter, block), (None, 1))
    ]
    settings = {"batch": rows, "context": config.context, "block_size": block, "dtype": config.dtype}
    settings["acceptance_length"] = config.acceptance_length
    models = {"target": target, "drafter": drafter}
    return _report("speculate", config, found, mesh, models, settings, compile_, *work)


def _denoise(config: CompileConfig, values: dict[str, Any], found: Topology) -> Report:
    from dflax.infer.extrapolation import ConfidenceExtrapolation
    from dflax.infer.learned import TSPD
    from dflax.infer.policies import Threshold
    from dflax.models.controller import Controller

    if config.gen_length % config.block_length:
        raise DflaxError(f"gen_length {config.gen_length} is no multiple of block_length {config.block_length}")
    if config.gen_length >= config.context:
        raise DflaxError(f"gen_length {config.gen_length} leaves no room for a prompt in a context of {config.context}")
    model = abstract.config_of(values["model"])
    assert isinstance(model, ModelConfig)
    if values.get("mask_token_id", -1) >= 0:
        model = dataclasses.replace(model, mask_token_id=values["mask_token_id"])
    mesh, rows = _mesh(config, found, model), config.batch or 1
    compile_ = lambda: aot.denoising_loop(
        model, mesh, rows, config.context, config.gen_length, config.block_length, config.cache, Threshold(), None,
        config.dtype,
    )  # fmt: skip
    width = np.dtype(jax.numpy.dtype(config.dtype)).itemsize
    suffix = _mean_suffix(config.gen_length, config.block_length)
    full = roofline.forward(model, rows, config.context, 0, width, config.block_length, model.vocab_size)
    around = config.context - config.block_length  # the block's own columns are a hole in the cache
    short = roofline.forward(model, rows, config.block_length, around, width, config.block_length, model.vocab_size)
    settings = {"batch": rows, "context": config.context, "cache": config.cache, "dtype": config.dtype}
    settings |= {"gen_length": config.gen_length, "block_length": config.block_length}
    long = roofline.forward(model, rows, suffix, config.context - suffix, width, config.block_length, model.vocab_size)
    work = {"none": full, "prefix": long, "dual": short}[config.cache]
    report = _report("denoise", config, found, mesh, {"model": model}, settings, compile_, work)
    learned = (
        TSPD.of(Controller(ControllerConfig(block_length=config.block_length), rngs=nnx.Rngs(0))),
        ConfidenceExtrapolation(),
    )
    count = partial(aot.deciding, model, rows, config.gen_length, config.block_length)
    return dataclasses.replace(report, deciding=(count(*learned) - count(Threshold()), work.flops))


def _mean_suffix(gen_length: int, block_length: int) -> int:
    """Columns of block and suffix, as short passes over a prefix come in, averaged over the blocks."""
    plan = DenoisePlan(block_length, gen_length, Cache("prefix"), guided=False, sampled=False)
    wanted = range(gen_length, 0, -block_length)
    return round(sum(min(n for n in plan.suffixes if n >= columns) for columns in wanted) / len(wanted))


def _train(config: CompileConfig, values: dict[str, Any], found: Topology) -> Report:
    return (_train_drafter if "target" in values else _train_diffusion)(config, values, found)


def _train_drafter(config: CompileConfig, values: dict[str, Any], found: Topology) -> Report:
    from dflax.train.aot import configs_of, drafter_step

    mesh = _mesh(config, found, None)
    recipe = _with_rows(config, _recipe(config, values), mesh)
    target, drafter, _ = configs_of(recipe)
    rows, anchors = recipe.rows_per_step, recipe.objective.anchors
    width = np.dtype(jax.numpy.dtype(recipe.dtype)).itemsize
    work = roofline.drafter_training(target, drafter, rows, recipe.length, anchors, width)
    settings = {"rows": rows, "length": recipe.length, "anchors": anchors, "block_size": recipe.block_size}
    settings |= {"target": recipe.dtype, "accumulation": recipe.train.accumulation}
    models = {"target": target, "drafter": drafter}
    return _report("train", config, found, mesh, models, settings, lambda: drafter_step(recipe, mesh), work)


def _train_diffusion(config: CompileConfig, values: dict[str, Any], found: Topology) -> Report:
    from dflax.train.aot import diffusion_config, diffusion_step
    from dflax.train.diffusion_recipe import DiffusionRecipe

    recipe = configs.build(DiffusionRecipe, {"data": ["-"], **values}, f"preset {config.preset}")
    mesh = _mesh(config, found, None)
    recipe = _with_rows(config, recipe, mesh)
    rows = recipe.rows_per_step
    model = diffusion_config(recipe)
    work = roofline.diffusion_training(model, rows, recipe.length, recipe.answer_columns)
    settings = {
        "rows": rows,
        "length": recipe.length,
        "compute": recipe.compute,
        "accumulation": recipe.train.accumulation,
    }
    return _report("train", config, found, mesh, {"model": model}, settings, lambda: diffusion_step(recipe, mesh), work)


def _with_rows(config: CompileConfig, recipe: Any, mesh: Mesh) -> Any:
    """The rows that are asked for, or the preset's, made so many that the mesh cuts those of every part of an accumulated step."""
    least = mesh.shape["data"] * mesh.shape["fsdp"] * recipe.train.accumulation
    return dataclasses.replace(recipe, rows_per_step=config.batch or -(-recipe.rows_per_step // least) * least)


def _recipe(config: CompileConfig, values: dict[str, Any]) -> Any:
    from dflax.train.recipe import DrafterRecipe

    return configs.build(DrafterRecipe, {"data": ["-"], **values}, f"preset {config.preset}")


def _report(
    what: str, config: CompileConfig, found: Topology, mesh: Mesh, models: Models, settings: dict[str, Any], compile_: Any,
    work: roofline.Work, plain: roofline.Work | None = None,
) -> Report:  # fmt: skip
    begin = time.perf_counter()
    try:
        compiled: jax.stages.Compiled = compile_()
    except jax.errors.JaxRuntimeError as error:
        raise DflaxError(f"the compiler refuses: {' '.join(str(error).split())[:400]}") from error
    seconds = time.perf_counter() - begin
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    assert memory is not None
    moved = collectives(compiled.as_text() or "")
    sent = float(sum(size for _, size in moved.values()))
    chip, part = found.chip, settings.get("rows", settings.get("batch")) // settings.get("accumulation", 1)
    uncut_rows = spec(("batch",), (part,), mesh)[1]
    axes = dict(mesh.shape)
    rows = 1 if uncut_rows else axes["data"] * axes["fsdp"]
    ways = roofline.Ways(axes["fsdp"] * axes["tensor"], rows, axes["tensor"])
    plain_seconds = None if plain is None else plain.seconds(chip, ways)
    speedup = None if plain_seconds is None else config.acceptance_length * plain_seconds / work.seconds(chip, ways)
    return Report(
        what=what,
        preset=config.preset,
        topology=config.topology,
        mesh=",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1) or "one device",
        chips=len(found.devices),
        settings=settings,
        compile_seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        memory=chip.memory,
        flops=float(cost.get("flops", 0.0)),
        bytes_moved=float(cost.get("bytes accessed", 0.0)),
        collectives=moved,
        step_flops=work.flops,
        step_seconds=work.seconds(chip, ways, sent),
        plain_seconds=plain_seconds,
        speedup=speedup,
        source=chip.source,
        replicated=uncut_rows + _not_cut(mesh, models),
    )


def _not_cut(mesh: Mesh, models: Models) -> list[str]:
    """Kinds of parameters, and caches, that are whole on every chip, with the names of the models that have them."""
    named: dict[str, list[str]] = {}
    for name, config in models.items():
        shapes = {path: leaf.shape for path, leaf in abstract.parameters(config, mesh, "float32").items()}
        for line in not_cut(mesh, shapes, config.num_kv_heads):
            named.setdefault(line, []).append(name)
    return [f"{' and '.join(names)}: {line}" for line, names in named.items()]
