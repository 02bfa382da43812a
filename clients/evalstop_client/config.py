"""Converts a trainer's configuration to the params of its run, flat and text, and fits texts to the API. Pure."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from evalstop_client.errors import ConfigurationError

MOST_PARAMS, MOST_PARAM_BYTES = 1000, 4 * 2**20
LONGEST_NAME, LONGEST_VALUE = 256, 2000
UNREADABLE = "?"
DIGEST_CHARACTERS = 12

LabelValue = str | int | float | bool
"""The types of a label's value; it is stored as text."""


def format_value(value: object) -> str:
    """The text of a label or a param.

    >>> format_value(True), format_value(1e-6)
    ('true', '1e-06')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


def flatten_config(config: object) -> dict[str, str]:
    """Flatten a mapping, or an object with attributes such as argparse's, into params with dotted names; None has none.

    Long values are truncated, params beyond `MOST_PARAMS`, or `MOST_PARAM_BYTES` as they are sent, are left out, and a
    value that cannot be read is `?`: a run is watched whatever its configuration. Raises ConfigurationError for other
    types.

    >>> flatten_config({"lr": 1e-6, "ppo": {"clip": 0.2, "epochs": [1, 2]}})
    {'lr': '1e-06', 'ppo.clip': '0.2', 'ppo.epochs': '[1, 2]'}
    """
    if config is None:
        return {}
    params: dict[str, str] = {}
    sent_bytes = 0
    for path, leaf in _leaves("", _attributes_of(config), ()):
        name, value = fit_line(path), replace_controls(_describe(leaf)[:LONGEST_VALUE])
        sent_bytes += len(json.dumps({name: value}))  # in ASCII, where an emoji takes twelve bytes
        if len(params) == MOST_PARAMS or sent_bytes > MOST_PARAM_BYTES:
            break
        if name:
            params[name] = value
    return params


def fit_line(text: str, most: int = LONGEST_NAME) -> str:
    """The text as a name of at most `most` characters; a longer one is cut and gets a digest, so that names that begin
    alike still differ.

    >>> fit_line("lr=" + "0" * 30, most=20)
    'lr=0000-89646f2038d3'
    """
    line = replace_controls(text)
    if len(line) <= most:
        return line
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]
    return f"{line[: most - len(digest) - 1]}-{digest}"


def replace_controls(text: str, keeping: str = "") -> str:
    """The text with spaces in place of control characters and unpaired surrogates, which the service refuses."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter in keeping or unicodedata.category(letter) not in ("Cc", "Cs") else " " for letter in text
    )


def _attributes_of(config: object) -> Mapping[Any, Any]:
    if isinstance(config, Mapping):
        return config
    if is_dataclass(config):  # also one with slots
        return {field.name: getattr(config, field.name, UNREADABLE) for field in fields(config)}
    if not hasattr(config, "__dict__"):
        raise ConfigurationError(f"config {type(config).__name__}: give a mapping, or an object with attributes.")
    return vars(config)


def _describe(value: object) -> str:
    try:
        return format_value(value)
    except Exception:  # whatever a foreign type raises
        return UNREADABLE


def _item(items: Mapping[Any, Any], name: Any) -> object:
    try:
        return items[name]
    except Exception:  # OmegaConf raises for a value that is missing or refers to one
        return UNREADABLE


def _leaves(prefix: str, items: Mapping[Any, Any], above: tuple[int, ...]) -> Iterator[tuple[str, object]]:
    for name in items:
        path, value = f"{prefix}{_describe(name)}", _item(items, name)
        if isinstance(value, Mapping) and id(value) not in above:
            yield from _leaves(f"{path}.", value, (*above, id(value)))
        else:
            yield path, value
