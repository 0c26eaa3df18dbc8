"""The command line: dispatch, help, presets, errors as one line; and `generate` and `export` on a tiny pair."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dflax
from dflax import configs
from dflax.cli import COMMANDS, Command, main
from dflax.errors import DflaxError
from tests.golden import load_case


@dataclass(frozen=True)
class Config:
    """A command for tests."""

    target: str = ""
    """Which target."""
    layers: int = 1

    def __post_init__(self):
        if not self.target:
            raise DflaxError("target is\n  empty")


@pytest.fixture
def command(monkeypatch):
    """Registers `dflax train test` around a function."""

    def register(run):
        monkeypatch.setitem(COMMANDS, "train test", Command("a test", "dflax.of_a_test", "Config", presets=True))
        monkeypatch.setitem(sys.modules, "dflax.of_a_test", SimpleNamespace(Config=Config, run=run))

    return register


@pytest.mark.smoke
def test_overview_is_quick():
    code = "import sys; from dflax.cli import main; main(['--help']); assert not {'jax', 'tyro'} & set(sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, cwd="/", capture_output=True, text=True)
    assert all(name in run.stdout for name in COMMANDS)


def test_version_and_group_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dflax {dflax.__version__}\n"
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "train drafter" in out
    assert "inspect" not in out


@pytest.mark.parametrize("arguments", [["nonsense"], ["train", "nonsense"]])
def test_unknown_command(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"dflax: there is no command '{' '.join(arguments)}'; commands are demo,")


def test_flags_reach_the_command(command):
    seen = []
    command(seen.append)
    assert main(["train", "test", "--target", "t", "--layers", "3"]) == 0
    assert seen == [Config("t", 3)]
    assert main(["train", "test", "--target", "t", "--layers", "three"]) == 2
    assert len(seen) == 1


def test_flags_override_a_preset(command, monkeypatch, capsys):
    seen = []
    command(seen.append)
    monkeypatch.setattr(configs, "names", lambda: ["small"])
    monkeypatch.setattr(configs, "load", lambda name: {"layers": 5})
    assert main(["train", "test", "--preset", "small", "--target", "t"]) == 0
    assert main(["train", "test", "--target", "t", "--preset=small", "--layers", "7"]) == 0
    assert seen == [Config("t", 5), Config("t", 7)]
    monkeypatch.setattr(configs, "load", lambda name: {"layer": 5})
    assert main(["train", "test", "--preset", "small"]) == 2
    assert capsys.readouterr().err == "dflax: preset small: unknown key 'layer'; keys are target, layers\n"


def test_help_tells_all(command, capsys):
    command(print)
    assert main(["train", "test", "--help"]) == 0
    out = capsys.readouterr().out
    assert "A command for tests." in out
    assert "Which target." in out
    assert "--preset NAME" in out


def test_what_a_user_can_mend_is_one_line(command, capsys):
    command(print)
    assert main(["train", "test"]) == 2
    assert capsys.readouterr().err == "dflax: target is empty\n"
    with pytest.raises(DflaxError):
        main(["train", "test", "--debug"])

    def missing_file(config):
        Path("/nonsense/file").read_text()

    command(missing_file)
    assert main(["train", "test", "--target", "t"]) == 2
    assert capsys.readouterr().err == "dflax: /nonsense/file: No such file or directory\n"


def test_our_own_value_errors_are_a_users_those_of_libraries_are_not(command, capsys):
    from dflax.infer.report import table

    command(lambda config: table(["one"], [[1, 2]]))
    assert main(["train", "test", "--target", "t"]) == 2
    assert "needs 1 cells" in capsys.readouterr().err
    command(lambda config: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["train", "test", "--target", "t"])


def test_interrupted(command, capsys):
    def interrupt(config):
        raise KeyboardInterrupt

    command(interrupt)
    assert main(["train", "test", "--target", "t"]) == 130
    assert capsys.readouterr().err == "dflax: interrupted\n"


def test_reader_that_goes_away():
    code = "import sys; from dflax.cli import main; sys.exit(main(['--help']))"
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, cwd="/")
    os.close(write)
    assert run.stderr == ""


@pytest.fixture(scope="module")
def case():
    return load_case("dflash_generate")


def test_generate_writes_the_same_with_a_drafter_and_without(case, tmp_path, capsys):
    prompts = case.expected["prompts"].tolist()
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_tokens": prompt}) + "\n" for prompt in prompts))
    target, drafter = str(case.folder / "target"), str(case.folder / "drafter_fitted")
    common = [target, "--file", str(file), "--max-new-tokens", "12", "--batch-size", "1"]
    assert main(["generate", *common]) == 0
    plain = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main(["generate", *common, "--drafter", drafter]) == 0
    blocks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in plain] == [0, 1, 2]
    assert [row["tokens"] for row in plain] == [row["tokens"] for row in blocks]
    for row, prompt in zip(plain, range(3), strict=True):
        greedy = case.expected[f"p{prompt}_greedy_ids"][len(prompts[0]) :][:12].tolist()
        assert row["tokens"] == greedy[: len(row["tokens"])]
    assert sum(row["rounds"] for row in blocks) < sum(row["rounds"] for row in plain)


def test_export_writes_what_loads_again(case, tmp_path, capsys):
    source, out = case.folder / "drafter_fitted", tmp_path / "out"
    assert main(["export", str(source), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    from dflax.models import params

    before, after = dflax.load(source), dflax.load(out)
    assert after.config == before.config
    for (path, a), (_, b) in zip(
        params.flatten(before.module).items(), params.flatten(after.module).items(), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=path)


def test_export_takes_the_result_of_a_training_run(case, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(case.folder / "drafter_fitted")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert main([*name.split(), "--help"]) == 0
    assert f"usage: dflax {name}" in capsys.readouterr().out
    command = COMMANDS[name]
    assert callable(getattr(sys.modules[command.module], command.run))
