"""Writes an adapter project, in which the user writes the calls of a cache: `kvref init`.

The operations, with their arguments, results and errors, are those of the family's typed protocol. The files of the SDK are
copied into the project, so that it builds without kvref's repository.
"""

import inspect
import keyword
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from jinja2 import Environment, PackageLoader, StrictUndefined

import kvref_conformance
from kvref_conformance.calls.operation_table import Operation, factory_operation, operations, protocols, result_protocol
from kvref_conformance.families import Family, all_families
from kvref_conformance.generate_protocol import describe_type, error_kinds

# Language -> template -> file of the project. The first is the one in which the user writes the calls.
FILES = {
    "python": {"adapter.py": "adapter.py", "python.md": "README.md"},
    "cpp": {"adapter.cpp": "adapter.cpp", "CMakeLists.txt": "CMakeLists.txt", "kvref.toml": "kvref.toml", "cpp.md": "README.md"},
    "rust": {"main.rs": "src/main.rs", "Cargo.toml": "Cargo.toml", "kvref.toml": "kvref.toml", "rust.md": "README.md"},
    "javascript": {
        "adapter.mjs": "adapter.mjs", "package.json": "package.json", "kvref.toml": "kvref.toml", "javascript.md": "README.md",
    },
}  # fmt: skip
COMMANDS = {"cpp": '"./build/adapter"', "rust": '"./target/release/adapter"', "javascript": '"node", "adapter.mjs"'}
LAYOUTS = ("NHD", "HND")
TEMPLATES = Environment(
    loader=PackageLoader("kvref_conformance.adapter_project"), undefined=StrictUndefined, keep_trailing_newline=True,
    variable_start_string="«", variable_end_string="»", trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip

_CPP = {
    "integer": "std::int64_t", "number": "double", "boolean": "bool", "text": "std::string", "integers": "kvref::Integers",
    "numbers": "std::vector<double>", "array": "kvref::Array", "raw": "kvref::Raw", "table": "std::vector<kvref::Integers>",
    "json": "kvref::Json", "nothing": "void",
}  # fmt: skip
_RUST = {
    "integer": "i64", "number": "f64", "boolean": "bool", "text": "String", "integers": "Vec<i64>", "numbers": "Vec<f64>",
    "array": "Array", "raw": "Raw", "table": "Vec<Vec<i64>>", "json": "Json", "nothing": "()",
}  # fmt: skip
_RESERVED = {
    "python": frozenset(keyword.kwlist),
    "cpp": frozenset({"new", "delete", "register", "default", "union", "export"}),
    "rust": frozenset({"match", "move", "type", "ref", "final", "yield", "where"}),
    "javascript": frozenset({"new", "delete", "default", "export"}),
}
_INTEGER_TABLES = ("[sequences, max blocks]", "[num_queries, top_k]")


@dataclass(frozen=True)
class Value:
    """An argument or a result as a language declares it. kind: a key of _CPP, or the name of a class; several: of a result."""

    kind: str
    axes: str = ""
    optional: bool = False
    parts: tuple["Value", ...] = ()

    @property
    def has_token_axis(self) -> bool:
        """Whether it is, or contains, an array [tokens, heads, head_dim], with any further axes before."""
        names = [axis.strip() for axis in self.axes.strip("[]").split(",")]
        own = len(names) >= 3 and names[-3] in ("n", "sequences", "num_queries") and "heads" in names[-2]
        return own or any(part.has_token_axis for part in self.parts)

    def cpp(self) -> str:
        if self.parts:
            name = "std::pair" if len(self.parts) == 2 else "std::tuple"
            return f"{name}<{', '.join(part.cpp() for part in self.parts)}>"
        name = _CPP.get(self.kind, f"std::shared_ptr<{self.kind}>")
        return f"std::optional<{name}>" if self.optional else name

    def rust(self) -> str:
        if self.parts:
            return f"({', '.join(part.rust() for part in self.parts)})"
        name = _RUST.get(self.kind, self.kind)
        return f"Option<{name}>" if self.optional else name


@dataclass(frozen=True)
class Parameter:
    name: str  # in requests
    variable: str  # in the code: the name, unless the language reserves it
    value: Value
    default: str  # as Python writes it, or ""

    @property
    def declared(self) -> str:
        """The name with the shape that the SDK checks."""
        return f"{self.name} {self.value.axes}" if self.value.axes else self.name

    def cpp(self) -> str:
        name = self.value.cpp()
        plain = name in ("std::int64_t", "double", "bool")
        return f"{name} {self.variable}" if plain else f"const {name}& {self.variable}"

    def javascript(self) -> str:
        return f"raw {self.declared}" if self.value.kind == "raw" else self.declared

    def rust(self) -> str:
        """The expression that reads the argument."""
        kind = self.value.kind
        if kind == "json":
            return f'args.json("{self.name}").clone()'
        return f'args.optional("{self.declared}", Args::{kind})?' if self.value.optional else f'args.{kind}("{self.declared}")?'


@dataclass(frozen=True)
class Method:
    name: str
    variable: str
    attribute: bool
    parameters: tuple[Parameter, ...]
    result: Value
    about: tuple[str, ...]  # lines for its comment

    def is_object(self) -> bool:
        return not self.result.parts and self.result.kind not in _CPP


@dataclass(frozen=True)
class ObjectClass:
    """A class of the project: that of the family, or of objects that an operation returns."""

    name: str  # in requests: "buffer"
    methods: tuple[Method, ...]

    @property
    def title(self) -> str:
        return self.name.capitalize()


def check_layout(family: str, layout: str) -> str | None:
    """Return why a family cannot have this layout, or None."""
    parameters = (each for method in _class(family, "python").methods for each in method.parameters)
    if layout == "NHD" or any(each.value.has_token_axis for each in parameters):
        return None
    return f"--layout: the family {family} has no arrays [tokens, heads, head_dim], expected no layout"


def write_project(folder: Path, family: str, language: str, layout: str) -> Iterator[str]:
    """Write the files into a new folder. Yields their paths in it."""
    record = all_families()[family]
    made = _class(family, language)
    name = re.sub(r"[^A-Za-z0-9]+", "-", folder.resolve().name).strip("-").lower() or "adapter"
    values: dict[str, Any] = {
        "family": family,
        "name": name,
        "layout": layout,
        "main": made,
        "classes": [*(_class(other, language) for other in getattr(record.interface, "HANDED_OUT", {})), made],
        "sizes": list(_declared_sizes(record)),
        "factory": [*_parameters(f"{family}.new", factory_operation(family), language)],
        "formats": _formats(record),
        "about": " ".join((record.protocol.__doc__ or "").split()),
        "command": COMMANDS.get(language, ""),
        "swaps": layout == "HND",
        "first_size": next(iter(factory_operation(family).arguments), ""),
    }
    for template, path in FILES[language].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(TEMPLATES.get_template(f"{template}.jinja").render(values), encoding="utf-8")
        yield path
    if language != "python":
        shutil.copytree(
            sdk_folder(language), folder / "sdk", ignore=shutil.ignore_patterns("target", "Cargo.lock", "node_modules")
        )
        yield "sdk/"


def sdk_folder(language: str) -> Path:
    """The folder of the SDK: in the installed package, or in a checkout."""
    package = Path(kvref_conformance.__file__).parent
    installed = package / "adapter_project" / "sdk" / language
    return installed if installed.is_dir() else package.parent / "harnesses" / language / "sdk"


def _class(name: str, language: str) -> ObjectClass:
    return ObjectClass(name, tuple(_method(name, operation, language) for operation in operations(name).values()))


def _method(owner: str, operation: Operation, language: str) -> Method:
    op = f"{owner}.{operation.name}"
    hint = operation.range_text or operation.result
    result = _value(hint, op)
    parameters = tuple(_parameters(op, operation, language))
    about = [
        f"{name}: {describe_type(hint)}{_default(op, name)}"
        for name, hint in operation.arguments.items()
    ]  # fmt: skip
    about += [] if result.kind == "nothing" else [f"returns: {describe_type(hint)}"]
    about += [f"errors: {', '.join(kinds)}"] if (kinds := error_kinds(op)) else []
    return Method(operation.name, _variable(operation.name, language), operation.attribute, parameters, result, tuple(about))


def _parameters(op: str, operation: Operation, language: str) -> Iterator[Parameter]:
    for name, hint in operation.arguments.items():
        value = _value(hint, op, name)
        if name in operation.optional:
            value = Value(value.kind, value.axes, value.kind != "json", value.parts)
        default = repr(_signature(op).parameters[name].default) if name in operation.optional else ""
        yield Parameter(name, _variable(name, language), value, default)


def _default(op: str, name: str) -> str:
    default = _signature(op).parameters[name].default
    return "" if default is inspect.Parameter.empty else f" (default {'none' if default is None else default})"


def _signature(op: str) -> inspect.Signature:
    owner, _, name = op.partition(".")
    if name == "new":
        return inspect.signature(getattr(all_families()[owner].interface, f"{owner.capitalize()}Factory").__call__)
    return inspect.signature(getattr(protocols()[owner], name))


def _value(hint: Any, op: str, argument: str = "") -> Value:
    """The value for a type of the protocol."""
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        return _array(arguments[1], op, argument)
    if get_origin(hint) is tuple:
        parts = [part for part in arguments if part is not Ellipsis]
        return Value("tuple", parts=tuple(_value(part, op) for part in parts))
    if get_origin(hint) is Literal:
        return Value("text")
    if NoneType in arguments:
        (other,) = [part for part in arguments if part is not NoneType][:1]
        inner = _value(other, op, argument)
        return Value(inner.kind, inner.axes, True)
    plain = {int: "integer", float: "number", str: "text", bool: "boolean", NoneType: "nothing", type(None): "nothing"}
    if hint in plain:
        return Value(plain[hint])
    if made := result_protocol(hint):
        return Value(made.capitalize())
    described = describe_type(hint)
    if described in ("integers", "integers or array"):
        return Value("integers")
    return Value("numbers" if described == "numbers" else "json")


def _array(axes: str, op: str, argument: str) -> Value:
    """An array of this form: "[n, rank]", "int64 [n]" or "[n] or [n, groups]"."""
    family, _, operation = op.partition(".")
    if axes.startswith("int64") or axes == "[sequences + 1]":
        return Value("integers")
    if axes in _INTEGER_TABLES and not argument:
        return Value("table")
    stored = axes.startswith("uint8") or any(word in axes for word in ("bytes", "groups", "capacity", "..."))
    if stored or family == "kernels" or argument == "codes" or operation == "encode":
        return Value("raw", axes if axes.startswith("[") and " or " not in axes and "bytes" not in axes else "")
    return Value("array", axes)


def _declared_sizes(family: Family) -> Iterator[str]:
    factory = factory_operation(family.name)
    for name, hint in factory.arguments.items():
        if name not in factory.optional:
            yield f"{name}: format" if hint is str else f"{name} >= 0" if name in family.may_be_zero else name


def _formats(family: Family) -> list[str]:
    """The formats that the adapter begins with: those of the family's small sizes."""
    by_name = {"rows": "int8", "elements": "float8_e4m3fn"}
    small = [value for value in family.small.values() if isinstance(value, str)]
    return list(dict.fromkeys(small)) or [by_name.get(family.name, "float32")]


def _variable(name: str, language: str) -> str:
    return f"{name}_" if name in _RESERVED[language] else name
