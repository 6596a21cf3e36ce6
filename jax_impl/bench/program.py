"""What the optimized HLO text of a compiled program says about it: kernel launches, and copies of large arrays."""

import functools
import math
import re
from typing import Any

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z0-9-]*)\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BRANCHES = re.compile(r"(?:true|false)_computation=%?([\w.-]+)")

NO_LAUNCH = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "add-dependency",
    "opt-barrier",
    "partition-id",
    "replica-id",
}
# What moves a whole array where an update in place would not; also inside fusions.
COPIES = {"copy", "copy-start", "convert", "all-gather", "all-gather-start", "transpose", "concatenate", "pad", "slice"}


def _computations(text: str) -> tuple[dict[str, list[tuple[str, str, str]]], str]:
    """(result type, opcode, line) of every instruction by computation, and the name of the entry computation."""
    found, entry, name = {}, "", ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            found[name] = []
            entry = name if header[1] else entry
        elif name and (instruction := _INSTRUCTION.match(line)):
            found[name].append((instruction[1], instruction[2], line))
    if not found.get(entry):
        raise ValueError(f"`text`: expected the text of a compiled HLO module, got {text[:60]!r}.")
    return found, entry


def launches(text: str) -> int:
    """Kernels and device copies that one execution of a GPU program starts, counted from its optimized HLO.

    Fusions, custom calls, copies and every other instruction that stays outside a fusion count once; an asynchronous
    pair counts at its start. Calls are followed, the body of a loop counts as often as XLA knows that it runs, and of a
    conditional the longest branch counts. A loop whose trip count XLA does not know counts one pass of body and
    condition. What a custom call starts inside is not seen: those of Mosaic GPU start one kernel.

    Raises:
      ValueError: `text` is no HLO module.
    """
    computations, entry = _computations(text)

    @functools.cache
    def count(name: str) -> int:
        return sum(weight(op, line) for _, op, line in computations[name])

    def weight(op: str, line: str) -> int:
        if op == "while":
            passes, body = _TRIPS.search(line), count(_named(line, "body"))
            return int(passes[1]) * body if passes else body + count(_named(line, "condition"))
        if op == "call":
            return count(_named(line, "to_apply"))
        if op == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", line)
            names = re.findall(r"%?([\w.-]+)", listed[1]) if listed else _BRANCHES.findall(line)
            return max(count(name) for name in names)
        return int(op not in NO_LAUNCH and not op.endswith(("-done", "-update")))

    return count(entry)


def _named(line: str, attribute: str) -> str:
    found = re.search(rf"\b{attribute}=%?([\w.-]+)", line)
    if not found:
        raise ValueError(f"`text`: expected {attribute}= in an instruction of the HLO module, got {line[:60]!r}.")
    return found[1]


def large_copies(text: str, elements: int) -> list[str]:
    """Opcodes in `COPIES` with a result of at least `elements` elements, fused ones too: empty for a program in place.

    Raises:
      ValueError: `text` is no HLO module.
    """
    computations, _ = _computations(text)
    return [
        op
        for instructions in computations.values()
        for kind, op, _ in instructions
        if op in COPIES and max(map(_elements, _SHAPE.findall(kind)), default=0) >= elements
    ]


def _elements(dimensions: str) -> int:
    return math.prod(int(size) for size in dimensions.split(",") if size)


def facts(compiled: Any, calls: int) -> dict[str, Any]:
    """Temporary and aliased bytes of a compiled program, and its launches per call when it makes `calls` of them."""
    memory = compiled.memory_analysis()
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "launches": round(launches(compiled.as_text()) / calls, 2),
    }
