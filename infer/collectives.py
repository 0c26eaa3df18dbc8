"""What a compiled program sends between chips, read from its text: every collective as often as the loops around it turn."""

import math
import re
from collections.abc import Mapping
from functools import cache

COLLECTIVE = re.compile(
    r"= (?P<shape>\S+|\(.*?\)) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}

COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(
    r"\b(?:body|calls|to_apply|branch_computations|true_computation|false_computation)=\{?((?:%[\w.-]+(?:, )?)+)"
)
KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CONDITION = re.compile(r"\bcondition=%([\w.-]+)")
BELOW = re.compile(r"ROOT .* compare\(%[\w.-]+, %([\w.-]+)\), direction=LT")


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """Kind -> (how many run, bytes of their results).

    A loop counts as often as it turns. One whose length the program does not know, such as the decoding loop itself, counts once, and so
    does every branch of a condition.
    """
    bodies, entry = _computations(text)

    @cache
    def inside(name: str) -> Mapping[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for line in bodies[name]:
            pieces = [_collective(line)] if _begins(line, bodies[name]) else []
            if "-done(" not in line and "-update(" not in line:  # they name what their start has called
                pieces += [inside(callee) for match in CALLED.finditer(line) for callee in _names(match[1])]
            turns = _turns(line, bodies)
            for kind, (count, size) in (item for piece in pieces for item in piece.items()):
                before = found.get(kind, (0, 0))
                found[kind] = (before[0] + turns * count, before[1] + turns * size)
        return found

    return dict(inside(entry))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of every computation by its name, and the name of the one that the program begins with."""
    bodies: dict[str, list[str]] = {"": []}
    entry, lines = "", bodies[""]
    for line in text.splitlines():
        if not line.startswith(" ") and (match := COMPUTATION.match(line)):
            lines = bodies.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        else:
            lines.append(line)
    return bodies, entry


def _names(listed: str) -> list[str]:
    return [name.strip("% ") for name in listed.split(",") if name.strip()]


def _turns(line: str, bodies: Mapping[str, list[str]]) -> int:
    """Of a loop, where its length stands in the program; of anything else 1.

    XLA for TPU does not note the length. There it is what the counter is compared with, if that is all that the condition asks: counters
    of `lax.scan` and `lax.fori_loop` begin at 0.
    """
    if " while(" not in line:
        return 1
    if known := KNOWN.search(line):
        return int(known[1])
    condition = CONDITION.search(line)
    asked = "\n".join(bodies[condition[1]]) if condition else ""
    end = BELOW.search(asked)
    length = end and re.search(rf"%{re.escape(end[1])} = \S+ constant\((\d+)\)", asked)
    return int(length[1]) if length else 1


def _begins(line: str, body: list[str]) -> bool:
    """Whether a collective begins here. XLA for TPU writes one that other work hides three times, under one chain_id: in the computation
    that starts it, in the one that is fused with it, and in the one that waits for it."""
    return 'chain_id="' not in line or any("AsyncCollectiveStart" in other for other in body)


def _collective(line: str) -> dict[str, tuple[int, int]]:
    match = COLLECTIVE.search(line)
    if match is None:
        return {}
    starts = match[0].endswith("-start(")
    sizes = [
        math.prod(int(n) for n in dims.split(",") if n) * WIDTHS.get(kind, 4)
        for kind, dims in ARRAY.findall(match["shape"])
        if dims or not starts  # scalars there are bookkeeping
    ]
    # What starts asynchronously has a tuple of operands and results, all-reduce one of results alone; several may be combined.
    pairs = starts and match["kind"] != "all-reduce" and len(sizes) % 2 == 0
    return {match["kind"]: (1, sum(sizes[len(sizes) // 2 :] if pairs else sizes))}
