"""The reference of what a trainer or a script calls in Python, from signatures and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import evalstop
from evalstop_client import errors
from evalstop_client.reading.records import DecisionRecord, ObservationRecord, RunRecord, Table
from evalstop_client.settings import RunArguments

LINE = 100
"""The longest signature on one line."""

OWN = {"from_json"}
"""Methods by which the client builds its records and tables."""

REPORTING: tuple[type, ...] = (
    evalstop.Run,
    evalstop.Decision,
    evalstop.Verdict,
    evalstop.EvalRequest,
    evalstop.Exploit,
    evalstop.Summary,
    evalstop.Limits,
)
READING: tuple[type, ...] = (Table, RunRecord, DecisionRecord, ObservationRecord)


def render_python_reference() -> str:
    """Reporting, reading and errors: each class with its signature, its properties and its methods."""
    parts = ["## Reporting\n", *_render_callable("evalstop.init", evalstop.init)]
    for cls in REPORTING:
        parts += _render_class(f"evalstop.{cls.__name__}", cls)
    parts += ["## Reading\n", *_render_class("evalstop.Api", evalstop.Api)]
    for cls in READING:
        parts += _render_class(cls.__name__, cls)
    return "\n".join([*parts, "## Errors\n", _render_errors()])


def _render_class(title: str, cls: type) -> Iterator[str]:
    yield from _render_callable(title, cls)
    members = [(name, member) for name, member in vars(cls).items() if not name.startswith("_") and name not in OWN]
    rows = [f"| `{name}` | {_inline(member)} |" for name, member in members if isinstance(member, property)]
    if rows:
        yield "\n".join(["| property | what it is |", "|---|---|", *rows, ""])
    for name, member in members:
        if inspect.isfunction(member):
            yield f"#### `{name}`\n\n{_fence(_describe_signature(name, member))}\n{_document(member)}\n"


def _render_callable(title: str, target: Callable[..., Any]) -> Iterator[str]:
    yield f"### `{title}`\n\n{_fence(_describe_signature(title, target))}\n{_document(target)}\n"


def _render_errors() -> str:
    shown = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.EvalStopError)]
    rows = [f"| `{cls.__name__}` | `{cls.__base__.__name__}` | {_inline(cls)} |" for cls in shown if cls.__base__]
    return "\n".join(["| error | is a | message |", "|---|---|---|", *rows, ""])


def _describe_signature(name: str, target: Callable[..., Any]) -> str:
    signature = inspect.signature(target)
    parts, keywords = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self" or parameter.name.startswith("_"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            parts.append("*")
            keywords = True
        if parameter.kind is parameter.VAR_KEYWORD and target is evalstop.Run:
            optional = RunArguments.__annotations__.items()
            parts += ["*", *(f"{name}: {hint.__forward_arg__} = ..." for name, hint in optional)]
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            parts.append(f"**{parameter.name}")
            continue
        default = "" if parameter.default is parameter.empty else f" = {_describe_default(parameter.default)}"
        annotation = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)
        parts.append(f"{parameter.name}: {annotation}{default}")
    returned = signature.return_annotation
    end = ")" if inspect.isclass(target) or returned in ("None", signature.empty) else f") -> {returned}"
    line = f"{name}({', '.join(parts)}{end}"
    return line if len(line) <= LINE else "\n".join([f"{name}(", *(f"    {part}," for part in parts), end])


def _describe_default(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float | tuple | None) else "..."


def _fence(code: str) -> str:
    return f"```py\n{code}\n```\n"


def _document(target: object) -> str:
    return inspect.getdoc(target) or ""


def _inline(target: object) -> str:
    return " ".join(_document(target).split()).replace("|", "\\|")
