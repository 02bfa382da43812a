"""Loads a policy by name, or from a JSON or YAML file, with line and column in errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from evalstop_detectors import POLICIES, InvalidPolicy, Policy, policy_from_document

from evalstop_lab.errors import UnusableArguments
from evalstop_lab.replay.rows import format_cell

LARGEST = 4 << 20


def load_policy(name_or_file: str) -> Policy:
    """Load the shipped policy with this name, else the one in this file; raises UnusableArguments."""
    if name_or_file in POLICIES:
        return POLICIES[name_or_file]
    path = Path(name_or_file)
    if not path.is_file():
        raise UnusableArguments(
            f"There is no policy and no file {name_or_file!r}; give one of {', '.join(POLICIES)}, or a file with a"
            " policy in JSON or YAML."
        )
    return policy_from_file(path)


def policy_from_file(path: Path) -> Policy:
    """Read a policy; raises UnusableArguments with file, line, column, the key and its valid values."""
    try:
        if path.stat().st_size > LARGEST:
            raise UnusableArguments(f"{path}: it is larger than {LARGEST:,} bytes; give a policy.")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableArguments(f"{path}: {error}; give a policy in JSON or YAML.") from error
    node = None
    try:
        if path.suffix == ".json":
            document = json.loads(text, object_pairs_hook=_refuse_repeated_keys)
        else:
            node = yaml.compose(text, yaml.SafeLoader)
            _check_node(node)
            document = yaml.safe_load(text)
        return policy_from_document(document)
    except InvalidPolicy as error:
        raise UnusableArguments(f"{path}{_format_position(node, error.path)}: {error}.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UnusableArguments(
            f"{path}{position}: {error.problem or error.context}; give a policy in YAML."
        ) from error
    except json.JSONDecodeError as error:
        raise UnusableArguments(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}; give a policy in JSON."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnusableArguments(f"{path}: {error}; give a policy in JSON or YAML.") from error


def _format_position(node: yaml.Node | None, path: tuple[str | int, ...]) -> str:
    """The line and column of the deepest existing part of the path."""
    if node is None:
        return ""
    for step in path:
        inner = _get_inner(node, step)
        if inner is None:
            break
        node = inner
    return f", line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"


def _get_inner(node: yaml.Node, step: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        item: yaml.Node = node.value[step]
        return item
    if isinstance(node, yaml.MappingNode):
        # A scalar is located by its key, so that a value on the next line is not shown without its name.
        return next(
            (key if isinstance(value, yaml.ScalarNode) else value for key, value in node.value if key.value == step),
            None,
        )
    return None


def _check_node(node: yaml.Node | None) -> None:
    """Refuse repeated keys, which YAML silently accepts, and aliases, which can expand without bound."""
    seen_keys: set[int] = set()
    waiting = [] if node is None else [node]
    while waiting:
        here = waiting.pop()
        if id(here) in seen_keys:
            raise yaml.MarkedYAMLError(problem="a policy must not have aliases", problem_mark=here.start_mark)
        seen_keys.add(id(here))
        if isinstance(here, yaml.SequenceNode):
            waiting.extend(here.value)
        elif isinstance(here, yaml.MappingNode):
            keys = set()
            for key, value in here.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.MarkedYAMLError(problem="a key must be a string", problem_mark=key.start_mark)
                if key.value in keys:
                    problem = f"the key {format_cell(key.value)} occurs twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                keys.add(key.value)
                waiting.append(value)


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {format_cell(repeated)} occurs twice")
    return document
