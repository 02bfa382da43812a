"""Tells long requests that the server shuts down."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Shutdown:
    """`has_begun` is set when the server accepts no more requests; those that wait or last long then end soon."""

    has_begun: bool = False
