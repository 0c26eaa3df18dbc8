"""Where every named set comes from: what `datasets` is asked for it, and what is asked of the model for a row as the hub has it."""

import datasets
import pytest

from dflax.infer import prompts

TASK = "What is it?"
HUB = {
    "gsm8k": ({"path": "openai/gsm8k", "name": "main", "split": "test"}, {"question": TASK, "answer": "#### 1"}),
    "math-500": ({"path": "HuggingFaceH4/MATH-500", "name": None, "split": "test"}, {"problem": TASK, "answer": "1"}),
    "aime25": ({"path": "MathArena/aime_2025", "name": None, "split": "train"}, {"problem": TASK, "answer": 1}),
    "humaneval": ({"path": "openai/openai_humaneval", "name": None, "split": "test"}, {"prompt": TASK, "test": "t"}),
    "mbpp": (
        {"path": "google-research-datasets/mbpp", "name": "full", "split": "test"},
        {"task_id": 11, "text": TASK, "code": "c"},
    ),
    "livecodebench": (
        {
            "path": "json",
            "data_files": "hf://datasets/livecodebench/code_generation_lite/test*.jsonl",
            "split": "train",
        },
        {"question_content": TASK, "starter_code": "def f():", "private_test_cases": "x"},
    ),
    "mt-bench": (
        {"path": "HuggingFaceH4/mt_bench_prompts", "name": None, "split": "train"},
        {"prompt": [TASK, "second"], "category": "writing"},
    ),
}


class Letters:
    """A token a character."""

    def encode(self, text):
        return [ord(c) for c in text]


@pytest.mark.parametrize("name", prompts.SETS)
def test_a_set_from_the_hub(name, monkeypatch):
    wanted, row = HUB[name]
    calls = []

    def load_dataset(**asked):
        calls.append(asked)
        return [row, row]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (prompt,) = prompts.load_set(name, Letters(), limit=1)
    assert calls == [wanted]
    text = "".join(map(chr, prompt.tokens))
    assert TASK in text
    assert "second" not in text
    assert ("def f():" in text) == (name == "livecodebench")
    assert text.endswith(prompts.MATH) == (name in ("gsm8k", "math-500", "aime25"))
