"""The comparison every golden test relies on must be able to fail."""

import pytest

from golden import GOLDENS, load_case

CASES = sorted(path.parent.name for path in GOLDENS.glob("*/case.json"))


@pytest.mark.parametrize("name", CASES)
def test_arrays_are_the_ones_described(name: str) -> None:
    case = load_case(name)
    assert set(case.expected) == set(case.info["arrays"])
    for array, told in case.info["arrays"].items():
        assert list(case.expected[array].shape) == told["shape"]


def test_check_accepts_what_is_within_tolerance() -> None:
    case = load_case("target_qwen3")
    case.check("logits", case.expected["logits"] + 0.5 * case.atol)
    case.check("input_ids", case.expected["input_ids"])


@pytest.mark.parametrize("array", ["logits", "input_ids"])
def test_check_rejects_a_changed_value_and_shape(array: str) -> None:
    case = load_case("target_qwen3")
    changed = case.expected[array].copy()
    changed[0, -1] += 1
    with pytest.raises(AssertionError, match=array):
        case.check(array, changed)
    with pytest.raises(AssertionError, match="shape"):
        case.check(array, case.expected[array][None])
