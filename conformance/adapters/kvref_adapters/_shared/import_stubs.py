"""Empty modules in place of imports that the judged code never uses.

Serving libraries import their GPU tools at the top of every file. On a CPU an empty module in their place lets the import
succeed. Every attribute of a stand-in is a `Nothing`, which also works as a decorator that returns its argument unchanged.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import MutableSequence, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class Stub:
    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else Stub()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __getitem__(self, item: Any) -> Any:
        return Stub()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: Any) -> Any:
        return Stub()

    __ror__ = __or__


class StubModule(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that replaces modules by stand-ins.

    absent: modules to replace, with all modules below them. bare: packages whose modules are imported normally, but whose
    `__init__` does not run, because it would import the whole library.
    """

    def __init__(self, absent: Sequence[str], bare: Sequence[str] = ()) -> None:
        self._absent, self._bare = tuple(absent), tuple(bare)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in self._bare:
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(_folder_of(name))]
            return spec
        if any(name == each or name.startswith(f"{each}.") for each in self._absent):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return (ModuleType if spec.name in self._bare else StubModule)(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install_stubs(absent: Sequence[str], bare: Sequence[str] = ()) -> None:
    sys.meta_path.insert(0, StubFinder(absent, bare))


def _folder_of(package: str) -> Path:
    """Return the folder of a package without running any of its code."""
    project, *below = package.split(".")
    found = importlib.machinery.PathFinder.find_spec(project)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {project!r}", name=project)
    return Path(found.submodule_search_locations[0]).joinpath(*below)
