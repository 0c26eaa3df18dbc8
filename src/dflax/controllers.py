"""Controllers and filters as folders: config.json, model.safetensors, and the look-ahead's constants of the same traces."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from dflax import configs, files
from dflax.checkpoint import fill, huggingface
from dflax.config import ControllerConfig, FilterConfig
from dflax.errors import DflaxError
from dflax.hf_keys import TensorRule
from dflax.infer.extrapolation import ConfidenceExtrapolation
from dflax.model import locate
from dflax.models import params
from dflax.models.controller import AcceptanceFilter, Controller, build

KINDS = {"tspd_controller": ControllerConfig, "learn2pd_filter": FilterConfig}
"""model_type in config.json -> what the other keys are the fields of."""

FOLDERS = {"tspd_controller": "controller", "learn2pd_filter": "filter"}
"""Where they lie inside the folder of the model that they were trained for, and of the run that trained them."""

EXTRAPOLATION = "extrapolation.json"


def save(folder: str | os.PathLike[str], module: Controller | AcceptanceFilter) -> None:
    """Writes config.json and model.safetensors."""
    kind = next(name for name, config in KINDS.items() if isinstance(module.config, config))
    huggingface.save(folder, params.flatten(module), {"model_type": kind, **dataclasses.asdict(module.config)})


def load(name: str | os.PathLike[str], kind: str) -> Any:
    """A Controller (kind "tspd_controller") or an AcceptanceFilter ("learn2pd_filter").

    name: a folder, a hub id or a built-in name, of its own or of the model that it comes with.
    """
    path = _home(name, FOLDERS[kind], "config.json")
    raw = huggingface.config(path)
    if raw.get("model_type") != kind:
        raise DflaxError(f"{name} is {raw.get('model_type')!r} by its config.json, not {kind!r}")
    fields = {key: value for key, value in raw.items() if key != "model_type"}
    config = configs.build(KINDS[kind], fields, f"{path / 'config.json'}")
    abstract = params.abstract(lambda rngs: build(config, rngs))
    shapes = {key: leaf.shape for key, leaf in params.flatten(abstract).items()}
    source = huggingface.SafetensorsSource(path)
    try:
        leaves = fill(shapes, {key: TensorRule((key,)) for key in shapes}, source)
    finally:
        source.close()
    return params.fill(abstract, leaves)


def save_extrapolation(folder: str | os.PathLike[str], constants: ConfidenceExtrapolation) -> None:
    """Writes look-ahead constants beside a controller."""
    files.write_json(Path(folder) / EXTRAPOLATION, dataclasses.asdict(constants))


def load_extrapolation(name: str | os.PathLike[str]) -> ConfidenceExtrapolation:
    """The constants fitted with a controller, from its folder or name."""
    path = _home(name, FOLDERS["tspd_controller"], EXTRAPOLATION) / EXTRAPOLATION
    constants = configs.build(ConfidenceExtrapolation, huggingface.read_json(path), f"{path}")
    constants.check()
    return constants


def _home(name: str | os.PathLike[str], inner: str, file: str) -> Path:
    """The folder of this name, or the one inside it that has the file."""
    path = locate(os.fspath(name))
    return path / inner if (path / inner / file).is_file() else path
