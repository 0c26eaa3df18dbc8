"""The `dflax` command: a table of subcommands, each a frozen dataclass (its flags and help) and a function that takes one.

A subcommand's module is imported when it is called, so `dflax --help` answers at once. What a user did wrong is one line on
stderr and exit code 2.
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dflax
from dflax.errors import DflaxError

WRONG, INTERRUPTED = 2, 130  # exit codes


@dataclass(frozen=True)
class Command:
    """help: its line in the overview. module: where `config` (a dataclass) and `run` are. presets: it takes --preset."""

    help: str
    module: str
    config: str
    run: str = "run"
    presets: bool = False


COMMANDS = {
    "demo": Command("watch a model write in blocks, and what that gains", "dflax.infer.demo", "DemoConfig"),
    "generate": Command(
        "continue prompts, with a drafter or without", "dflax.infer.generate_command", "GenerateConfig"
    ),
    "denoise": Command(
        "answer prompts with a diffusion language model", "dflax.infer.denoise_command", "DenoiseConfig"
    ),
    "bench": Command("measure speed and acceptance on sets of prompts", "dflax.infer.bench", "BenchConfig"),
    "bench diffusion": Command(
        "measure accuracy, passes and speed of ways to denoise",
        "dflax.infer.diffusion_bench",
        "DiffusionBenchConfig",
        presets=True,
    ),
    "bench kernels": Command(
        "time the attention op against this machine's limits", "dflax.infer.kernel_bench", "KernelBenchConfig"
    ),
    "compile": Command(
        "compile a loop or a training step for a TPU slice or GPUs that need not be there",
        "dflax.infer.compile_command",
        "CompileConfig",
    ),
    "inspect": Command("say what a checkpoint is and which of its keys matter", "dflax.inspection", "InspectConfig"),
    "distill": Command(
        "let a target write responses to train a drafter on", "dflax.train.distill", "DistillConfig", presets=True
    ),
    "train drafter": Command(
        "train a drafter for a target", "dflax.train.recipe", "DrafterRecipe", "train_drafter", presets=True
    ),
    "train tiny": Command(
        "train both models of the tiny pair and measure them",
        "dflax.train.tiny",
        "TinyRecipe",
        "train_tiny",
        presets=True,
    ),
    "train language": Command(
        "train a tiny target on arithmetic word problems",
        "dflax.train.language",
        "LanguageRecipe",
        "train_language",
        presets=True,
    ),
    "train controller": Command(
        "train what decides in adaptive denoising (TSPD, Learn2PD) and fit its look-ahead",
        "dflax.train.controller_recipe",
        "ControllerRecipe",
        presets=True,
    ),
    "train diffusion": Command(
        "train a diffusion language model, or fine-tune one on prompts and answers",
        "dflax.train.diffusion_recipe",
        "DiffusionRecipe",
        "train_diffusion",
        presets=True,
    ),
    "train ablations": Command(
        "train and compare the drafters of the paper's ablations",
        "dflax.train.ablations",
        "AblationConfig",
        presets=True,
    ),
    "train controller-ablations": Command(
        "train and compare controllers and look-aheads of adaptive denoising",
        "dflax.train.controller_ablations",
        "ControllerAblationConfig",
        presets=True,
    ),
    "export": Command("write a model or a trained drafter as a Hugging Face folder", "dflax.export", "ExportConfig"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (sys.argv if None) and returns its exit code: 0, 2 for what a user can mend, 130 interrupted.

    What is neither is a fault of dflax and is raised, as everything is with --debug.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # here, where a reader that went away can be told from a fault
        return code
    except KeyboardInterrupt:
        if debug:
            raise
        print("dflax: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader went away (`dflax inspect ... | head`); nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        line = _one_line(error)
        if debug or line is None:
            raise
        print(f"dflax: {line}", file=sys.stderr)
        return WRONG


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview(""))
        return 0
    if arguments[0] == "--version":
        print(f"dflax {dflax.__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if any(known.startswith(f"{name} ") for known in COMMANDS):
        itself = name in COMMANDS and (not rest or rest[0].startswith("-"))  # `dflax bench` is a command and a group
        if not itself and (not rest or rest[0] in ("-h", "--help")):
            print(_overview(f"{name} "))
            return 0
        if not itself:
            name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        raise DflaxError(f"there is no command {name!r}; commands are {', '.join(COMMANDS)} (dflax --help)")
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    parsed = _parse(getattr(module, command.config), name, rest, command.presets)
    if isinstance(parsed, int):
        return parsed
    result = getattr(module, command.run)(parsed)
    if isinstance(result, Path):
        print(result)
    return 0


def _parse(kind: type, name: str, arguments: list[str], presets: bool) -> Any:
    """The command's dataclass from its arguments; an exit code where tyro printed help or what is wrong with a flag."""
    import tyro

    options: dict[str, Any] = {"description": inspect.cleandoc(kind.__doc__ or "")}
    for other, command in COMMANDS.items():
        if other.startswith(f"{name} "):
            options["description"] += f"\n\nSee also dflax {other}: {command.help}."
    if presets:
        from dflax import configs

        preset, arguments = _take(arguments, "--preset")
        options["description"] += (
            f"\n\n--preset NAME starts from a preset, which flags override: {', '.join(configs.names())}."
        )
        if preset is not None:
            options["default"] = configs.build(kind, configs.load(preset), f"preset {preset}", missing=tyro.MISSING)
    try:
        return tyro.cli(kind, prog=f"dflax {name}", args=arguments, config=(tyro.conf.FlagCreatePairsOff,), **options)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0


def _take(arguments: list[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of `flag` and the other arguments."""
    for i, argument in enumerate(arguments):
        if argument == flag:
            if i + 1 == len(arguments):
                raise DflaxError(f"{flag} needs a name")
            return arguments[i + 1], arguments[:i] + arguments[i + 2 :]
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}="), arguments[:i] + arguments[i + 1 :]
    return None, arguments


def _overview(prefix: str) -> str:
    """Help that names the commands; prefix "train ": only those of `dflax train`."""
    commands = {name: command.help for name, command in COMMANDS.items() if name.startswith(prefix)}
    width = max(map(len, commands))
    return "\n".join(
        [
            f"usage: dflax {prefix}COMMAND ...",
            "",
            "Language models that emit whole blocks of tokens per step, in JAX.",
            "",
            "commands (dflax COMMAND --help tells all about one):",
            *(f"  {name.ljust(width)}  {text}" for name, text in commands.items()),
            "",
            "options:",
            "  --version  print the version",
            "  --debug    show the traceback of an error",
        ]
    )


def _one_line(error: Exception) -> str | None:
    """What to tell a user; None for a fault that only a traceback explains."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, DflaxError) or (isinstance(error, ValueError) and _raised_by_dflax(error)):
        return " ".join(str(error).split())
    return None


def _raised_by_dflax(error: Exception) -> bool:
    """Whether dflax itself raised it (a checked argument), not a library that it called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("dflax.")
