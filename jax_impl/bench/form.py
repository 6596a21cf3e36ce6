"""The form of a results file: which fields are read of it, and in words what a file has that bench does not write."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax_impl.layout import AXIS_ORDERS, ConvCacheSpec

OPERATIONS = ("commit", "verify", "step", "rollback", "prefill", "drafts", "compile", "scaling")
MESH = "mesh"  # a whole step on several devices: measured where it is asked for, with bench --mesh
# Kinds; a row's names may go on, such as copy_driver, pallas_scan.
SUBJECTS = ("pallas", "launch_per_group", "lists_per_layer", "xla", "triton", "copy")

ON_MESH = ("one", "all")  # likewise, of a step on a mesh

# What a field holds, in words, and whether a value is that. Larger numbers are none of bench's and cannot be drawn.
Kind = tuple[str, Callable[[Any], bool]]
OBJECT: Kind = ("an object", lambda value: isinstance(value, dict))
LIST: Kind = ("a list", lambda value: isinstance(value, list))
TEXT: Kind = ("text", lambda value: isinstance(value, str))
PRINTABLE: Kind = ("printable text", lambda value: isinstance(value, str) and value.isprintable())
FLAG: Kind = ("true or false", lambda value: isinstance(value, bool))
NUMBER: Kind = ("a number", lambda value: type(value) in (int, float) and abs(value) < 1e15)  # so is no NaN
COUNT: Kind = ("a whole number", lambda value: type(value) is int and 0 <= value < 2**53)


def _one_of(values: tuple[str, ...]) -> Kind:
    return f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values


_SIZES = dict.fromkeys(("num_layers", "conv_dim", "width", "num_slots"), COUNT) | {"dtype": PRINTABLE}
_ROW = {
    "operation": _one_of((*OPERATIONS, MESH)),
    "axis_order": _one_of(AXIS_ORDERS),
    "num_draft_tokens": COUNT,
    "batch": COUNT,
    **_SIZES,
}
_MORE_OF_ROW = {
    **dict.fromkeys(("of", "design", "form", "model", "over"), PRINTABLE),
    **dict.fromkeys(("recurrent", "track", "command_buffers"), FLAG),
    **dict.fromkeys(("data", "tensor", "groups", "tokens", "columns", "temp_bytes", "state_bytes"), COUNT),
    **dict.fromkeys(("trace_s", "compile_s", "launches", "sliding_ratio"), NUMBER),
    **dict.fromkeys(("state", "pool_copies"), LIST),
    **dict.fromkeys(("step_ratio", "throughput", "errors"), OBJECT),
}
# A row with the first field has the others.
_TOGETHER = {"recurrent": ("track",), "design": ("of",), "over": ("of",), "model": ("groups", "state")}
_ELEMENTS = {"state": COUNT, "pool_copies": PRINTABLE, "step_ratio": NUMBER, "throughput": NUMBER, "errors": TEXT}
_TIMES: dict[str, Kind] = dict.fromkeys(("median_us", "launches"), NUMBER)
_MORE_TIMES = ("wall", "latency", "kernel")


def load(text: str) -> Any:
    """What JSON says.

    Raises:
      ValueError: it is none; the message is the words after "got".
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: line {error.lineno}, column {error.colno}") from error
    except ValueError as error:  # Python's limit for integers
        raise ValueError("no JSON: a number of too many digits") from error
    except RecursionError as error:
        raise ValueError("lists or objects nested too deep") from error


def is_of(name: str, kinds: Iterable[str]) -> bool:
    """Whether a subject's name is one of the kinds or begins with one.

    >>> is_of("copy_driver", SUBJECTS), is_of("copyright", SUBJECTS)
    (True, False)
    """
    return any(name == kind or name.startswith(f"{kind}_") for kind in kinds)


def require(record: Any) -> None:
    """Refuses what has not the form of a results file.

    Raises:
      ValueError: the message is the words after "got".
    """
    if not isinstance(record, dict):
        raise ValueError(_shown(record))
    _fields(record, "", {"points": LIST})
    if not record["points"]:
        raise ValueError("no points")
    _fields(record, "", {"environment": OBJECT, "preset": PRINTABLE, "tp": COUNT}, {"command_buffers": FLAG})
    environment = record["environment"]
    texts = dict.fromkeys(("device", "driver", "date"), PRINTABLE)
    _fields(environment, "environment.", texts | {"versions": OBJECT}, {"time": PRINTABLE})
    _fields(environment["versions"], "environment.versions.", {"jax": PRINTABLE}, {"triton": PRINTABLE})
    for i, row in enumerate(record["points"]):
        _expect(row, f"points[{i}]", OBJECT)
        _require_row(row, f"points[{i}]")
    of = record["points"][0]
    if record.get("geometry"):
        _fields(record, "", {"geometry": OBJECT})
        of = record["geometry"]
        _fields(of, "geometry.", _SIZES)
    try:
        ConvCacheSpec(of["num_layers"], of["num_slots"], 1, of["conv_dim"], of["width"], 1, of["dtype"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"sizes that no cache has: {'; '.join(str(error).splitlines()).rstrip('.')}") from error


def _require_row(row: Mapping[str, Any], where: str) -> None:
    """Refuses a row that does not say what it is about, or holds no time, compiled program or error."""
    _fields(row, f"{where}.", _ROW, _MORE_OF_ROW)
    together = _TOGETHER | ({"operation": ("data", "tensor")} if row["operation"] == MESH else {})
    for first, others in together.items():
        if first in row:
            _fields(row, f"{where}.", {name: _MORE_OF_ROW[name] for name in others})
    if "groups" in row and row["groups"] < 1:
        raise ValueError(f"{_shown(row['groups'])} as `{where}.groups`, not 1 or more")
    for name, kind in _ELEMENTS.items():
        for key, value in _items(row.get(name, {})):
            _expect(key, f"{where}.{name}", PRINTABLE)
            _expect(value, f"{where}.{name}.{key}", kind)
    timed = "compile_s" in row or "errors" in row
    for name, value in row.items():
        if is_of(name, (*ON_MESH, *SUBJECTS)):
            _expect(value, f"{where}.{name}", OBJECT)
            timed |= _has_times(value, f"{where}.{name}.")
    if not timed:
        raise ValueError(f"no time in `{where}`")


def _items(of: Any) -> Iterable[tuple[str, Any]]:
    return of.items() if isinstance(of, dict) else [(str(i), value) for i, value in enumerate(of)]


def _has_times(subject: Mapping[str, Any], where: str) -> bool:
    """Whether a subject has a time, on the device or by the wall; each is null where it could not be taken."""
    given = {name: OBJECT for name in _MORE_TIMES if subject.get(name) is not None}
    _fields(subject, where, given, _TIMES)
    for name in given:
        _fields(subject[name], f"{where}{name}.", {"median_us": NUMBER})
    return "median_us" in subject or "wall" in given


def _fields(of: Mapping[str, Any], where: str, needed: Mapping[str, Kind], more: Mapping[str, Kind] = {}) -> None:
    """Refuses an object without the fields `needed`, or with one, also of `more`, that holds something else."""
    for name, kind in needed.items():
        if name not in of:
            raise ValueError(f"no `{where}{name}`")
        _expect(of[name], f"{where}{name}", kind)
    for name in more.keys() & of.keys():
        _expect(of[name], f"{where}{name}", more[name])


def _expect(value: Any, where: str, kind: Kind) -> None:
    words, fits = kind
    if not fits(value):
        raise ValueError(f"{_shown(value)} as `{where}`, not {words}")


def _shown(value: Any) -> str:
    """A value of JSON in words, cut short."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"the text {value[:40]!r}" if isinstance(value, str) else f"the number {str(value)[:40]}"
