"""Signature and docstring → parameters → validation → build. One reading serves errors, `plugins show` and the docs.

A factory is a class or a function. Its typed, spelled-out signature says what a recipe may set; its docstring
(Google style, `Args:`) says what each parameter means. Values are checked by pydantic, strictly: a number in
quotes is no number. What only the host knows (`GIVEN`) is passed to a factory that names it and cannot be set.
A parameter annotated `Annotated[T, Part("reducers")]` is itself something that a plugin makes.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import PydanticUndefined

from retrieval.errors import PluginError, RecipeError, did_you_mean

KINDS = {
    "backbones": "backbone",
    "datasets": "dataset",
    "losses": "loss",
    "miners": "miner",
    "generators": "generator",
    "combiners": "combiner",
    "learners": "learner",
    "metrics": "metric",
    "indexes": "index",
    "distances": "distance",
    "reducers": "reducer",
    "regularizers": "regularizer",
}
"""Every kind of thing that plugins make: the hook's ending, and the word for one."""

GIVEN = {
    "features": "width of the features (for a backbone of vectors: of the dataset's vectors)",
    "embedding_size": "width of the codes",
    "classes": "number of training classes",
    "distance": "the recipe's combiner, when it has one",
}
"""What the host gives to a factory that names it."""

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Marks a parameter that is made by another factory: `Annotated[nn.Module | None, Part("reducers")]`."""

    kind: str


def traits(**values: bool) -> Callable[[T], T]:
    """State what a factory's product can do where its signature does not show it.

    Args:
        values: `ref_emb=False` marks a loss or miner that refuses a reference set.
    """

    def mark(factory: T) -> T:
        factory.__retrieval_traits__ = values  # type: ignore[attr-defined]
        return factory

    return mark


@dataclass(frozen=True)
class Parameter:
    """One parameter of a factory: its name, type, default (`inspect.Parameter.empty` when required) and meaning."""

    name: str
    annotation: Any
    default: Any
    doc: str
    part: str | None = None
    many: bool = False
    given: bool = False

    @property
    def required(self) -> bool:
        """Whether a recipe must set it."""
        return self.default is inspect.Parameter.empty and not self.given

    @property
    def type_text(self) -> str:
        """The type as a recipe's author reads it."""
        if self.part:
            return f"a {KINDS[self.part]}" + (" list" if self.many else "")
        return type_text(self.annotation)

    @property
    def default_text(self) -> str:
        """The default as TOML, or "required", or "" for none."""
        if self.given:
            return "given by the host"
        if self.required:
            return "required"
        return "" if self.default is None else toml_value(self.default)


@dataclass(frozen=True)
class Factory:
    """A plugin's factory, read.

    Attributes:
        kind: one of `KINDS`.
        name: `PLUGIN.name`.
        make: the class or function itself.
    """

    kind: str
    name: str
    make: Callable[..., Any]
    parameters: tuple[Parameter, ...] = field(default=(), repr=False)
    summary: str = field(default="", repr=False)
    description: str = field(default="", repr=False)

    @classmethod
    def read(cls, kind: str, name: str, make: Callable[..., Any]) -> Factory:
        """Read a factory's signature and docstring.

        Raises:
            PluginError: it takes `*args` or `**kwargs`, a parameter has no type, or one has no line in the docstring.
        """
        what = f"The {KINDS[kind]} '{name}' ({make.__module__}.{make.__qualname__})"
        hinted = make.__init__ if inspect.isclass(make) else make
        try:
            hints = get_type_hints(hinted, include_extras=True)
        except NameError as error:
            raise PluginError(
                f"{what} has a type that cannot be resolved when it is loaded: {error}."
            ) from error
        doc = docstring_parser.parse(_docstring(make))
        docs = {p.arg_name.lstrip("*"): " ".join((p.description or "").split()) for p in doc.params}
        parameters, faults = [], []
        for p in inspect.signature(make).parameters.values():
            if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                faults.append(f"takes '{p}': spell its parameters out, so that a recipe can be checked")
                continue
            if p.name not in hints:
                faults.append(f"gives its parameter '{p.name}' no type")
                continue
            annotation = hints[p.name]
            part, many = _part(annotation)
            given = p.name in GIVEN and not part
            if not docs.get(p.name) and not given:
                faults.append(f"does not document its parameter '{p.name}' under 'Args:'")
            parameters.append(
                Parameter(
                    p.name,
                    annotation,
                    p.default,
                    docs.get(p.name) or GIVEN.get(p.name, ""),
                    part,
                    many,
                    given,
                )
            )
        if not doc.short_description:
            faults.append("has no docstring")
        if faults:
            raise PluginError(f"{what} {'; it '.join(faults)}.")
        text = [part for part in (doc.short_description, doc.long_description) if part]
        return cls(kind, name, make, tuple(parameters), text[0] if text else "", "\n\n".join(text))

    def takes(self, name: str) -> bool:
        """Whether the factory names this parameter."""
        return any(p.name == name for p in self.parameters)

    @cached_property
    def supports_ref_emb(self) -> bool:
        """Whether the loss or miner accepts a reference set (synthetic negatives, cross-batch memory)."""
        stated = getattr(self.make, "__retrieval_traits__", {}).get("ref_emb")
        if stated is not None:
            return bool(stated)
        product: Any = self.make
        if not inspect.isclass(product):
            product = get_type_hints(product).get("return")
        forward = getattr(product, "forward", None) or getattr(product, "__call__", None)
        if forward is None:
            return False
        try:
            names = inspect.signature(forward).parameters
        except (TypeError, ValueError):
            return False
        # a bare nn.Module says nothing about its call: it is taken at its word
        return "ref_emb" in names or any(p.kind is p.VAR_POSITIONAL for p in names.values())

    def check(self, values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
        """Check a recipe's values against the signature, without building.

        Args:
            values: what the recipe sets.
            where: what to call this place in a problem, such as `[loss]`.

        Returns:
            The values in the types that the factory asks for (parts left as they are), and every problem found.
        """
        settable = {p.name: p for p in self.parameters if not p.given}
        problems = []
        for key in values:
            if key not in settable:
                if any(p.name == key for p in self.parameters):
                    problems.append(f"{where} {key}: is given by the host ({GIVEN[key]}); remove it.")
                else:
                    known = ", ".join(settable) or "none"
                    problems.append(
                        f"{where} {key}: {self.name} has no such parameter (it has: {known})."
                        f"{did_you_mean(key, settable)}"
                    )
        checked: dict[str, Any] = {}
        plain = {k: v for k, v in values.items() if k in settable and not settable[k].part}
        try:
            checked = dict(check_model(self._model, plain))
        except RecipeError as error:
            problems += [f"{where} {problem}" for problem in error.problems]
        for p in settable.values():
            if p.part and p.name in values:
                checked[p.name] = values[p.name]
            elif p.part and p.required and p.name not in GIVEN:
                problems.append(f"{where} {p.name}: is required ({p.type_text}).")
        return checked, problems

    @cached_property
    def _model(self) -> type[BaseModel]:
        fields: dict[str, Any] = {}
        for p in self.parameters:
            if p.given or p.part:
                continue
            try:
                TypeAdapter(p.annotation)
            except (PydanticSchemaGenerationError, PydanticUserError):
                raise PluginError(
                    f"The {KINDS[self.kind]} '{self.name}' has a parameter '{p.name}' of type {type_text(p.annotation)}, "
                    f"which a recipe cannot write. Use numbers, text, lists of them, a pathlib.Path, or Part(…)."
                ) from None
            fields[p.name] = (p.annotation, ... if p.required else p.default)
        return create_model(
            self.name, __config__=ConfigDict(extra="forbid", strict=True, protected_namespaces=()), **fields
        )

    def build(self, values: Mapping[str, Any]) -> Any:
        """Make the thing from checked values.

        Raises:
            RecipeError: the factory refused them (ValueError, AssertionError or TypeError).
        """
        try:
            return self.make(**values)
        except (ValueError, AssertionError, TypeError) as error:
            raise RecipeError(
                [f"{self.name} refuses its parameters: {error or type(error).__name__}."]
            ) from error


def check_model(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Check values strictly against a pydantic model, with TOML's types: arrays serve as tuples, text as paths.

    Returns:
        The values that were set, in the model's types.

    Raises:
        RecipeError: with every problem, each beginning with the key.
    """
    try:
        text = json.dumps(values, default=str)
        made = model.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise RecipeError([_problem(e, model) for e in error.errors()]) from None
    return {name: getattr(made, name) for name in made.model_fields_set}


def _problem(error: Any, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in error["loc"] if not _is_branch(part)) or "value"
    kind, value = error["type"], error.get("input")
    if kind == "extra_forbidden":
        keys = _known_keys(model, error["loc"][:-1])
        return f"{where}: unknown key (known: {', '.join(keys)}).{did_you_mean(str(error['loc'][-1]), keys)}"
    if kind == "missing":
        return f"{where}: is required."
    if kind == "value_error":
        return f"{where}: {error['ctx']['error']}."
    message = error["msg"][0].lower() + error["msg"][1:]
    hint = did_you_mean(value, _choices(error)) if isinstance(value, str) else ""
    return f"{where}: {message.replace('input ', '')}, not {toml_value(value)}.{hint}"


def _is_branch(part: Any) -> bool:
    # pydantic puts the tried branch of a union into the path: `constrained-int`, `list[str]`
    return isinstance(part, str) and any(c in part for c in "[]-")


def _known_keys(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    for step in path:
        found = model.model_fields.get(str(step))
        if found is None:
            continue
        nested = [
            a
            for a in (found.annotation, *get_args(found.annotation))
            if inspect.isclass(a) and issubclass(a, BaseModel)
        ]
        if nested:
            model = nested[0]
    return list(model.model_fields)


def _choices(error: Any) -> list[str]:
    expected = error.get("ctx", {}).get("expected", "") if error["type"] == "literal_error" else ""
    return [word.strip(" '") for word in str(expected).replace(" or ", ", ").split(",") if word.strip()]


def _docstring(make: Callable[..., Any]) -> str:
    own = inspect.getdoc(make) or ""
    if inspect.isclass(make) and "Args:" not in own:
        init = make.__dict__.get("__init__")
        own += "\n\n" + (inspect.getdoc(init) or "") if init is not None and init.__doc__ else ""
    return own


def _part(annotation: Any) -> tuple[str | None, bool]:
    if get_origin(annotation) is Annotated:
        for extra in get_args(annotation)[1:]:
            if isinstance(extra, Part):
                inner = get_args(annotation)[0]
                branches = get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,)
                return extra.kind, any(get_origin(branch) in (list, tuple) for branch in branches)
    if get_origin(annotation) in (Union, types.UnionType):
        for branch in get_args(annotation):
            kind, many = _part(branch)
            if kind:
                return kind, many
    return None, False


def type_text(annotation: Any) -> str:
    """Return a type as a recipe's author reads it: `integer`, `"a" or "b"`, `list of number`."""
    names = {
        int: "integer",
        float: "number",
        bool: "true or false",
        str: "text",
        type(None): "none",
        Any: "any",
    }
    if annotation in names:
        return names[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = ", ".join(text for text in map(_limit_text, args[1:]) if text)
        return type_text(args[0]) + (f" ({limits})" if limits else "")
    if origin is Literal:
        return " or ".join(toml_value(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(a) for a in args if a is not type(None))
    if origin is list:
        return f"list of {type_text(args[0])}"
    if origin is tuple:
        return "[" + ", ".join("…" if a is ... else type_text(a) for a in args) + "]"
    if origin is dict:
        return f"table of {type_text(args[1])}"
    return (
        "path"
        if getattr(annotation, "__name__", "") == "Path"
        else getattr(annotation, "__name__", str(annotation))
    )


def _limit_text(constraint: Any) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [constraint, *getattr(constraint, "metadata", [])]
    return ", ".join(
        f"{sign} {getattr(c, name):g}"
        for c in found
        for name, sign in signs.items()
        if getattr(c, name, None) is not None
    )


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items()) + " }" if value else "{}"
    if value is None or value is PydanticUndefined:
        return "none"
    return repr(value) if isinstance(value, int | float) else json.dumps(str(value))
