"""Structs are ready before threads decode them."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import subprocess
import sys

import evalstop_service
import msgspec
import pytest
from evalstop_service.store.tables.columns import iterate_structs, prepare_structs

PRINT_UNPREPARED = """
import evalstop_service.app
from tests.service.store.test_structs import import_all_modules, list_unprepared_structs
import_all_modules()
print(*list_unprepared_structs())
"""


def list_unprepared_structs() -> list[str]:
    """The names of the structs that msgspec has not built a decoder for; tests' own structs do not count."""
    return [
        struct.__name__
        for struct in iterate_structs()
        if struct.__module__.startswith("evalstop")
        and not any(type(referent).__name__ == "StructInfo" for referent in gc.get_referents(struct))
    ]


def import_all_modules() -> None:
    """Import all modules of the service but those that run a command."""
    for module in pkgutil.walk_packages(evalstop_service.__path__, "evalstop_service."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


@pytest.mark.nightly
def test_the_application_prepares_each_struct_that_can_be_decoded() -> None:
    """Two threads that decode an unprepared struct at the same time can end the process with a segmentation fault."""
    result = subprocess.run([sys.executable, "-c", PRINT_UNPREPARED], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["Message", "Changes"]  # have unions that msgspec does not decode


def test_a_struct_is_prepared_once_it_is_defined() -> None:
    """`prepare_structs` prepares structs of any depth of inheritance."""

    class Parent(msgspec.Struct):
        value: int

    class Child(Parent):
        name: str

    names = {Parent, Child}
    assert names <= set(iterate_structs())
    prepare_structs()
    for struct in names:
        assert any(type(referent).__name__ == "StructInfo" for referent in gc.get_referents(struct))
