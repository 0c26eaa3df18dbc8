"""Loads a case of tests/goldens and compares against it.

case = load_case("target_qwen3")
case.check("logits", model.logits(case.expected["input_ids"]))
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parent / "goldens"


@dataclass(frozen=True)
class Case:
    """One case: `folder` holds the checkpoint folders, `expected` the recorded arrays, `info` the parsed case.json."""

    name: str
    folder: Path
    expected: dict[str, np.ndarray]
    info: dict[str, Any]

    @property
    def rtol(self) -> float:
        """Relative tolerance of the case's float arrays."""
        return self.info["tolerances"]["float_arrays"]["rtol"]

    @property
    def atol(self) -> float:
        """Absolute tolerance of the case's float arrays."""
        return self.info["tolerances"]["float_arrays"]["atol"]

    def check(self, array: str, got: Any) -> None:
        """Asserts that `got` has the shape and values of the recorded array: floats to tolerance, the rest exactly."""
        want, got = self.expected[array], np.asarray(got)
        where = f"{self.name}/{array}"
        assert got.shape == want.shape, f"{where}: shape {got.shape}, want {want.shape}"
        if np.issubdtype(want.dtype, np.floating):
            got = got.astype(np.float64)
            np.testing.assert_allclose(got, want.astype(np.float64), self.rtol, self.atol, err_msg=where)
        else:
            np.testing.assert_array_equal(got, want, err_msg=where)


def load_case(name: str) -> Case:
    """Reads tests/goldens/`name`; a missing case is an error, so a test cannot pass by finding nothing."""
    folder = GOLDENS / name
    with np.load(folder / "expected.npz") as arrays:
        expected = dict(arrays)
    return Case(name, folder, expected, json.loads((folder / "case.json").read_text()))
