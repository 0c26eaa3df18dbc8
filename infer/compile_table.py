"""What `dflax compile --table` compiles, and the page that it writes."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflax.infer.report import table, write_text

if TYPE_CHECKING:
    from dflax.infer.compile_command import CompileConfig, Report

CASES: tuple[dict[str, str], ...] = (
    {"preset": "qwen3-8b-dflash", "topology": "h100"},
    {"preset": "llada-8b-sft", "topology": "h100", "what": "denoise"},
    {"preset": "qwen3-8b-dflash", "topology": "v5e:4x4", "what": "train"},
    {"preset": "qwen3-8b-dflash", "topology": "v5p:4x4x4", "what": "train"},
    {"preset": "qwen3-8b-dflash", "topology": "h100:8", "what": "train"},
    {"preset": "qwen3-8b-dflash", "topology": "v6e:2x2", "mesh": "tensor=4"},
)
"""Decoding loops on a chip or a small slice, drafter training on pods and a server; everything else as `dflax compile` has it."""

HEAD = """# What the compilers say

The decoding loops and training steps of dflax, in real shapes, through the compilers of chips that were not there: {commands}.
Written by `dflax compile --quick --table docs/compile.md` (`make compile-table` sets up the compilers), at the compilers' least effort.

**Nothing here ran on a chip.** Bytes are per device, from the compiler's own analysis: arguments (weights and state), what of them is
updated in place, temporaries, and their sum against the chip's memory. FLOPs of a step are computed from shapes, over all chips. FLOPs and
bytes moved on a device are the compiler's count, every loop once and kernels not counted (XLA for GPU counts nothing). Collectives in a
loop are listed as often as it turns, those of loops whose length is not known before, such as the decoding loop itself, once; what only
sampling with top-k or top-p needs is among them. Compile seconds are wall clock on two cores that did other work too. "Step at least" is
a bound from the chip's published peaks (`kernels_pallas/chips.py` names the sources): what must be read and multiplied, and what the
collectives send. The speed-up is that bound's ratio to plain decoding, collectives left out, at the acceptance length {acceptance:g} that
was published for Qwen3-8B (arXiv 2602.06036).

"""


def rows(base: "CompileConfig") -> list["CompileConfig"]:
    """The cases, with the other settings of `base`."""
    return [dataclasses.replace(base, **case, table="", out="") for case in CASES]


def kept(path: Path, config: "CompileConfig", fields: Collection[str]) -> dict[str, Any] | None:
    """A report that an earlier run has written for these settings, if it has these fields."""
    found = json.loads(path.read_text()) if path.exists() else None
    same = found is not None and found["config"] == dataclasses.asdict(config) and found["report"].keys() == set(fields)
    return found if same else None


def write(
    path: str | Path, reports: "list[tuple[Report, dict[str, Any]]]", refused: list[str], acceptance: float
) -> str:
    """The page, from reports and what made each, and what could not be compiled; its table is returned."""
    gib = lambda n: f"{n / 2**30:.2f}"
    counted = lambda n: f"{n:.3g}" if n else None
    lines = []
    for report, made in reports:
        sent = ", ".join(f"{n} {kind} ({size / 2**20:.3g} MiB)" for kind, (n, size) in report.collectives.items())
        settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report.settings.items())
        fits = f"{gib(report.peak_bytes)} of {gib(report.memory)}: {'yes' if report.fits else 'NO'}"
        lines.append([
            f"{report.what} {report.preset}", f"{report.topology}, {report.mesh}", settings, gib(report.argument_bytes),
            gib(report.alias_bytes), gib(report.temp_bytes), fits, f"{report.step_flops:.3g}",
            counted(report.flops), counted(report.bytes_moved), sent or "none", f"{report.step_seconds * 1e3:.3g}",
            None if report.speedup is None else f"{report.speedup:.2f}", f"{report.compile_seconds:.0f}",
            f"{made['versions']['jax']}, {made['date']}",
        ])  # fmt: skip
    headers = [
        "what", "chips, mesh", "settings", "arguments GiB", "in place GiB", "temporaries GiB", "peak GiB, fits", "FLOPs of a step",
        "FLOPs, a device", "bytes moved", "collectives", "step at least, ms", "speed-up", "compiled in, s", "jax, date",
    ]  # fmt: skip
    made_table = table(headers, lines, markdown=True)
    commands = ", ".join(sorted({report.topology for report, _ in reports}))
    left = "".join(f"\nNot compiled: {line}\n" for line in refused)
    write_text(path, HEAD.format(commands=commands, acceptance=acceptance) + made_table + "\n" + left)
    return made_table
