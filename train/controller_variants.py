"""What the ablations of adaptive denoising compare: variants of a controller's recipe, and tables with what is published of each."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from dflax.config import CONTROLLER_FEATURES, ControllerKind
from dflax.models.controller import LAYERS
from dflax.train.controller_recipe import ControllerRecipe


@dataclass(frozen=True)
class Variant:
    """What a run changes in the base recipe, its objective and its data."""

    changes: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    without: str = ""
    """A feature left out."""
    net: tuple[ControllerKind, int, int] | None = None
    """Kind, layers, and about how many parameters these may have; the hidden size follows."""
    share: float = 1.0
    """Of the recorded prompts."""


NETS: tuple[tuple[ControllerKind, int], ...] = (
    ("mlp", 1), ("mlp", 2), ("mlp", 4), ("lstm", 1), ("lstm", 4), ("gru", 1), ("gru", 2), ("gru", 4),
)  # fmt: skip

VARIANTS = {
    "base": Variant(),
    **{f"without-{name}": Variant(without=name) for name in CONTROLLER_FEATURES},
    **{f"{kind}-{layers}": Variant(net=(kind, layers, 2000)) for kind, layers in NETS},
    **{f"size-{count}k": Variant(net=("lstm", 2, 1000 * count)) for count in (1, 4, 8)},
    "traces-standard": Variant({"rule": "standard"}),
    "traces-mixed": Variant({"rule": "mixed"}),
    "straight-through": Variant(objective={"straight_through": True}),
    **{f"share-{round(100 * share)}": Variant(share=share) for share in (0.125, 0.25, 0.5)},
    "own-rounds": Variant({"own_rounds": 2}),
    "neighbours": Variant({"neighbours": 4}),
    "wrong-weight": Variant(objective={"wrong_weight": 9.0}),
    "ours": Variant({"own_rounds": 2, "neighbours": 4, "slots": 131072}, {"wrong_weight": 9.0}),
}
"""Controllers to train, in the order in which they tell most."""

RUNS = ("policies", *VARIANTS, "horizon", "coverage", "lengths")
"""policies: CE in front of policies that need no controller. horizon, coverage, lengths: of the base controller."""

# (heading, what is published, rows of (text, family of methods, published)). Published figures are of LLaDA-8B-Instruct on GSM8K, tokens/s
# of one A100 without cache and accuracy: orders, not sizes, can be compared with ours.
TABLES = (
    ("The parts", "tokens/s, speed-up over plain decoding, accuracy", (
        ("plain decoding", "plain", "6.9, 1x, 79.3"),
        ("a threshold alone", "threshold", None),
        ("without TSPD: CE in front of a threshold", "threshold+ce", "20.0, 2.9x, 79.1"),
        ("without CE: TSPD alone", "base", "30.3, 4.4x, 79.5"),
        ("TSPD + CE", "base+ce", "34.2, 5.0x, 79.4"),
    )),
    ("Features", "tokens/s, accuracy; TSPD alone, with four features", (
        ("all", "base", "30.3, 79.5"),
        ("without the confidence", "without-confidence", "19.3, 78.8"),
        ("without the entropy", "without-entropy", "28.3, 79.0"),
        ("without the moving average", "without-average", None),
        ("without the momentum", "without-momentum", "29.7, 79.2"),
        ("without the position", "without-position", "31.1, 78.5"),
        ("without the uncertainty", "without-uncertainty", None),
    )),
    ("Networks, of about 2,000 parameters each", "tokens/s, accuracy; TSPD alone", (
        ("MLP, 1 layer", "mlp-1", "29.7, 78.7"),
        ("MLP, 2 layers", "mlp-2", "30.4, 78.8"),
        ("MLP, 4 layers", "mlp-4", "26.8, 79.0"),
        ("LSTM, 1 layer", "lstm-1", "29.0, 79.2"),
        ("LSTM, 2 layers", "base", "30.3, 79.5"),
        ("LSTM, 4 layers", "lstm-4", "28.3, 79.5"),
        ("GRU, 1 layer", "gru-1", None),
        ("GRU, 2 layers", "gru-2", None),
        ("GRU, 4 layers", "gru-4", None),
    )),
    ("Sizes of the two-layer LSTM", "tokens/s, accuracy; TSPD alone", (
        ("1K parameters", "size-1k", "30.9, 79.2"),
        ("2K parameters", "base", "30.3, 79.5"),
        ("4K parameters", "size-4k", "29.8, 79.5"),
        ("8K parameters", "size-8k", "26.8, 79.7"),
    )),
    ("Traces to learn from", "tokens/s, accuracy; TSPD alone", (
        ("extremely greedy", "base", "30.3, 79.5"),
        ("plain decoding", "traces-standard", "7.5, 79.6"),
        ("mixed", "traces-mixed", "16.1, 79.5"),
    )),
    ("Beside the paper's recipe", "", (
        ("as published", "base", None),
        ("two rounds of its own", "own-rounds", None),
        ("four neighbours on either side", "neighbours", None),
        ("wrong commits weigh 9 times", "wrong-weight", None),
        ("all three: what ships", "ours", None),
    )),
    ("Straight-through estimator", "used, but without effect on a loss over recorded traces", (
        ("off", "base", None),
        ("on: the hard gate drives the replayed trace", "straight-through", None),
    )),
    ("Share of the recorded prompts", "330, 660, 1,320 and 2,640 prompts: tokens/s, accuracy; TSPD alone", (
        ("12.5 %", "share-12", "27.1, 78.8"),
        ("25 %", "share-25", "28.7, 79.1"),
        ("50 %", "share-50", "30.0, 79.4"),
        ("all", "base", "30.3, 79.5"),
    )),
    ("CE in front of other policies", "tokens/s (accuracy with CE)", (
        ("threshold", "threshold", "52.8, with cache"),
        ("threshold, CE", "threshold+ce", "64.2 (78.8), with cache"),
        ("factor", "factor", None),
        ("factor, CE", "factor+ce", None),
        ("Fréchet bounds", "frechet", None),
        ("Fréchet bounds, CE", "frechet+ce", None),
        ("Learn2PD", "learn2pd", "29.0"),
        ("Learn2PD, CE", "learn2pd+ce", "32.4 (79.3)"),
        ("CreditDecoding", "credit", "54.5, with cache"),
        ("CreditDecoding, CE", "credit+ce", "58.0 (78.7), with cache"),
        ("TSPD", "base", "30.3"),
        ("TSPD, CE", "base+ce", "34.2 (79.4)"),
    )),
)  # fmt: skip

HORIZONS: dict[float, str] = {10: "70.1, 79.0", 15: "72.4, 78.8", 20: "77.3, 78.8", 25: "78.0, 78.2", 30: "78.2, 77.9"}
COVERAGES: dict[float, str] = {
    0.4: "79.2, 78.2",
    0.5: "77.0, 78.7",
    0.6: "77.3, 78.8",
    0.7: "75.2, 78.8",
    0.8: "74.9, 78.9",
}
"""Published tokens/s with a dual cache, and accuracy."""


def changed(base: ControllerRecipe, name: str, out: str) -> ControllerRecipe:
    """The base recipe with the changes of one variant."""
    variant = VARIANTS[name]
    changes = dict(variant.changes)
    if variant.without:
        changes["features"] = tuple(feature for feature in base.features if feature != variant.without)
    if variant.net is not None:
        kind, layers, count = variant.net
        width = hidden_size(kind, layers, count, base.controller.inputs)
        changes |= {"kind": kind, "layers": layers, "hidden_size": width}
    objective = dataclasses.replace(base.objective, **variant.objective)
    return dataclasses.replace(base, **changes, objective=objective, out=out)


def hidden_size(kind: ControllerKind, layers: int, count: int, inputs: int) -> int:
    """The one with which the layers (without the head) come closest to `count` parameters; 12 for the published 2,112."""
    distance = lambda size: abs(network_size(kind, layers, size, inputs) - count)
    size = 1
    while distance(size + 1) < distance(size):
        size += 1
    return size


def network_size(kind: ControllerKind, layers: int, size: int, inputs: int) -> int:
    """Parameters of a controller's layers."""
    layer = LAYERS[kind]
    kept = size if layer.memory else 0
    return sum(layer.gates * size * (width + kept + 1) for width in [inputs] + [size] * (layers - 1))
