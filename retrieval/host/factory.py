"""Signature and docstring → parameters → validation → build.

One reading serves errors, `plugins show` and the docs.

A factory is a class or a function. Its signature says what a recipe may set, `**kwargs` included as
far as a base class spells it out; its docstring (Google style, `Args:`) says what each parameter
means. Values of a parameter with a type are checked by pydantic, strictly: a number in quotes is
not a number. A parameter without one takes what a recipe can write, and the factory itself says
whether it fits. What only the host knows (`GIVEN`) is passed to a factory that names it and cannot
be set. A parameter annotated `Annotated[T, Part("reducers")]` is itself something that a plugin
makes.
"""

from __future__ import annotations

import ast
import enum
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pluggy

from retrieval.errors import PluginError, RecipeError, RetrievalError, did_you_mean
from retrieval.host import hookspecs
from retrieval.host.values import check_values, toml_value, type_text

if TYPE_CHECKING:
    from pydantic import BaseModel

KINDS = {
    "backbones": "backbone",
    "datasets": "dataset",
    "losses": "loss",
    "miners": "miner",
    "generators": "generator",
    "combiners": "combiner",
    "learners": "learner",
    "augmentations": "augmentation",
    "metrics": "metric",
    "indexes": "index",
    "stores": "store",
    "distances": "distance",
    "reducers": "reducer",
    "regularizers": "regularizer",
    "trackers": "tracker",
}
"""Every kind of thing that plugins make: the hook's ending, and the word for one."""

COMPONENTS = {
    "data": "datasets",
    "backbone": "backbones",
    "combiner": "combiners",
    "loss": "losses",
    "miner": "miners",
    "generator": "generators",
    "learner": "learners",
}
"""The recipe's tables that plugins make, and the kind that each holds."""

TRAITS = {
    "ref_emb": "takes a reference set (`ref_emb`, `ref_labels`)",
    "miner": "uses a miner's indices (`indices_tuple`)",
}
"""What `traits` may state of a loss or miner."""

GIVEN = {
    "features": "width of the features (for a backbone of vectors: of the dataset's vectors)",
    "embedding_size": "width of the codes",
    "classes": "number of training classes",
    "distance": "the recipe's combiner, when it has one",
    "address": "where an index is, for a store",
    "plugins": "files and modules that were named as plugins, for a store",
}
"""What the host gives to a factory that names it."""

UPSTREAM = {
    "distance": ("distances", "how two embeddings are compared"),
    "reducer": ("reducers", "how the losses become one number"),
    "embedding_regularizer": ("regularizers", "what is added for the embeddings' own sake"),
    "weight_regularizer": ("regularizers", "what is added for the weights' own sake"),
    "embedding_reg_weight": (None, "multiplies what `embedding_regularizer` adds"),
    "weight_reg_weight": (None, "multiplies what `weight_regularizer` adds"),
    "collect_stats": (None, "whether the module keeps metrics of each batch as attributes"),
}
"""What pytorch-metric-learning's base classes call their parameters, which have no types: the kind
of part, and the meaning.
"""

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Marks a parameter that another factory makes: `Annotated[T, Part("reducers")]`.

    Attributes:
        kind: one of `KINDS`.
        per_width: name of a parameter that lists widths of the embedding: the part is made once for
            each, with that as its `embedding_size`, and once for the whole embedding; the factory
            gets a list of them.
    """

    kind: str
    per_width: str | None = None


def traits(**values: bool) -> Callable[[T], T]:
    """State what a factory's product can do where its signature does not show it.

    Args:
        values: `ref_emb=False` marks a loss or miner that refuses a reference set, `miner=False` a
            loss that has no use for a miner's indices.

    Raises:
        PluginError: there is no such trait.
    """
    for name in values:
        if name not in TRAITS:
            raise PluginError(
                f"There is no trait '{name}' (known:"
                f" {', '.join(TRAITS)}).{did_you_mean(name, TRAITS)}"
            )

    def mark(factory: T) -> T:
        factory.__retrieval_traits__ = values  # type: ignore[attr-defined]
        return factory

    return mark


@dataclass(frozen=True)
class Parameter:
    """One parameter of a factory; its default is `inspect.Parameter.empty` when required."""

    name: str
    annotation: Any
    default: Any
    doc: str
    part: str | None = None
    many: bool = False
    by_host: bool = False
    per_width: str | None = None

    @property
    def from_host(self) -> bool:
        """Whether it is what the host gives, when it knows it."""
        return self.by_host or (self.part is not None and self.name in GIVEN)

    @property
    def required(self) -> bool:
        """Whether a recipe must set it."""
        return self.default is inspect.Parameter.empty and not self.by_host

    @property
    def type_text(self) -> str:
        """The type as a recipe's author reads it."""
        if self.part:
            return f"a {KINDS[self.part]}" + (" list" if self.many else "")
        return type_text(self.annotation)

    @property
    def default_text(self) -> str:
        """The default as TOML, or "required", or "" for none, and for what TOML cannot say."""
        if self.by_host:
            return "given by the host"
        if self.required:
            return "required"
        return toml_value(self.default) if _writable(self.default) else ""


@dataclass(frozen=True)
class Factory:
    """A plugin's factory, read.

    Attributes:
        kind: one of `KINDS`.
        name: `PLUGIN.name`.
        make: the class or function itself.
        hints: what would make it easier to use, such as a missing docstring.
    """

    kind: str
    name: str
    make: Callable[..., Any]
    parameters: tuple[Parameter, ...] = field(default=(), repr=False)
    summary: str = field(default="", repr=False)
    description: str = field(default="", repr=False)
    hints: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, kind: str, name: str, make: Callable[..., Any]) -> Factory:
        """Read a factory's signature and docstring."""
        if not (inspect.isclass(make) or inspect.isroutine(make)):
            raise PluginError(
                f"The {KINDS[kind]} '{name}' is made by an object of type {type(make).__name__}; a"
                " factory is a class or a function."
            )
        what = f"The {KINDS[kind]} '{name}' ({make.__module__}.{make.__qualname__})"
        try:
            reading = read_signature(make)
        except Exception as error:  # resolving a type runs the plugin's own text
            raise PluginError(
                f"{what} has a signature that cannot be read when it is loaded:"
                f" {type(error).__name__}: {error}."
            ) from error
        summary, description, docs = documentation(make, reading.homes)
        parameters, faults, hints = [], [], [] if summary else ["it has no docstring"]
        for p in reading.parameters.values():
            if p.kind is p.POSITIONAL_ONLY:
                faults.append(f"takes its parameter '{p.name}' by position only")
            typed = p.name in reading.hints
            annotation = reading.hints.get(p.name, Any)
            marked, many = _part(annotation)
            part, widths = (marked.kind, marked.per_width) if marked else (None, None)
            if part and part not in KINDS:
                faults.append(
                    f"marks '{p.name}' as Part({part!r}), and there is no such"
                    f" kind{did_you_mean(part, KINDS)}"
                )
                part = None
            upstream, meaning = (None, "") if typed else UPSTREAM.get(p.name, (None, ""))
            if kind in ("losses", "miners") and (p.default is None or p.default is p.empty):
                part = part or upstream
            # one that is a word or a number by default is the author's own affair, whatever its
            # name
            own = p.name == "distance" and isinstance(p.default, str | int | float)
            from_host = p.name in GIVEN and not part and not own
            doc = docs.get(p.name) or (GIVEN[p.name] if from_host else meaning)
            if not doc:
                hints.append(f"it does not document '{p.name}' under 'Args:'")
            if not (typed or part or from_host or p.name in UPSTREAM):
                hints.append(f"'{p.name}' has no type, so a recipe's value is handed on as it is")
            parameters.append(
                Parameter(p.name, annotation, p.default, doc, part, many, from_host, widths)
            )
        if reading.loose:
            hints.append(
                f"nothing spells '**{reading.loose}' out, so a recipe cannot set what it takes"
            )
        if faults:
            raise PluginError(f"{what} {'; it '.join(faults)}.")
        return cls(kind, name, make, tuple(parameters), summary, description, tuple(hints))

    def takes(self, name: str) -> bool:
        """Whether the factory takes this from the host."""
        return any(p.name == name and p.from_host for p in self.parameters)

    @cached_property
    def supports_ref_emb(self) -> bool:
        """Whether the loss or miner accepts a reference set, as for synthetic negatives."""
        return self._supports("ref_emb", "ref_emb")

    @cached_property
    def supports_miner(self) -> bool:
        """Whether the loss uses the indices that a miner gives."""
        return self._supports("miner", "indices_tuple")

    def _supports(self, trait: str, argument: str) -> bool:
        """Whether `traits`, or else the call of the class or returned type, names the argument."""
        stated = getattr(self.make, "__retrieval_traits__", {}).get(trait)
        if stated is not None:
            return bool(stated)
        product: Any = self.make
        if not inspect.isclass(product):
            product = get_type_hints(product).get("return")
        calls = (
            vars(c)[name]
            for name in ("forward", "__call__")
            for c in _classes(product)
            if name in vars(c)
        )
        try:
            names = inspect.signature(next(calls)).parameters
        except (StopIteration, TypeError, ValueError):
            return True
        # what says nothing about its call, such as a bare nn.Module, is taken at its word
        return argument in names or any(p.kind is p.VAR_POSITIONAL for p in names.values())

    def check(self, values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
        """Check a recipe's values against the signature, without building."""
        settable = {p.name: p for p in self.parameters if not p.by_host}
        problems = []
        for key in values:
            if key not in settable:
                if any(p.name == key and p.by_host for p in self.parameters):
                    problems.append(
                        f"{where} {key}: is given by the host ({GIVEN[key]}); remove it."
                    )
                else:
                    known = ", ".join(settable) or "none"
                    problems.append(
                        f"{where} {key}: {self.name} has no such parameter (it has: {known})."
                        f"{did_you_mean(key, settable)}"
                    )
        model, unwritable = self._types
        plain = {k: v for k, v in values.items() if k in settable and not settable[k].part}
        problems += [
            f"{where} {k}: is of type {type_text(settable[k].annotation)}, which a recipe cannot"
            " write; remove it."
            for k in plain
            if k in unwritable
        ]
        checked, faults = check_values(
            model, {k: v for k, v in plain.items() if k not in unwritable}
        )
        problems += [f"{where} {fault}" for fault in faults.values()]
        for p in settable.values():
            if p.part and p.name in values:
                checked[p.name] = values[p.name]
            elif p.part and p.required and p.name not in GIVEN:
                problems.append(f"{where} {p.name}: is required ({p.type_text}).")
        return checked, problems

    @cached_property
    def _types(self) -> tuple[type[BaseModel], set[str]]:
        """Return pydantic's model of the values, and the parameters that no recipe can write."""
        from pydantic import ConfigDict, Field, TypeAdapter, create_model

        fields: dict[str, Any] = {}
        unwritable: set[str] = set()
        for p in self.parameters:
            if p.by_host or p.part:
                continue
            try:
                TypeAdapter(p.annotation)
            except Exception:  # whatever reading a plugin's annotation raises
                if p.required:
                    raise PluginError(
                        f"The {KINDS[self.kind]} '{self.name}' has a parameter '{p.name}' of type"
                        f" {type_text(p.annotation)}, which a recipe cannot write. Use numbers,"
                        " text, lists of them, a pathlib.Path, or Part(…)."
                    ) from None
                unwritable.add(p.name)
                continue
            # An alias, because pydantic has names of its own (copy, json, model_fields, _x) that a
            # factory may use too. Defaults stay with the factory: only what a recipe sets is handed
            # on.
            annotation: Any = Annotated[p.annotation, Field(alias=p.name)]
            fields[f"p{len(fields)}"] = (annotation, ... if p.required else None)
        config = ConfigDict(extra="forbid", strict=True)
        return create_model(self.name, __config__=config, **fields), unwritable

    def build(self, values: Mapping[str, Any]) -> Any:
        """Make the thing from checked values."""
        try:
            return self.make(**values)
        except (RetrievalError, OSError, ImportError):
            raise  # sentences already, and what the command line has a sentence for
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            if isinstance(error, ValueError | AssertionError | TypeError):
                raise RecipeError([f"{self.name} refuses its parameters: {reason}."]) from error
            raise RecipeError(
                [
                    f"{self.name} cannot be made with these parameters: {type(error).__name__}:"
                    f" {reason}."
                ]
            ) from error


def _classes(product: Any) -> tuple[type, ...]:
    """The classes of a product's type, nearest first; nothing for a type that is not a class."""
    return product.__mro__ if inspect.isclass(product) else ()


def _writable(value: Any) -> bool:
    """Whether a default is something that TOML can say."""
    if isinstance(value, list | tuple):
        return all(map(_writable, value))
    if isinstance(value, Mapping):
        return all(map(_writable, value.values()))
    return isinstance(value, bool | int | float | str | enum.Enum | PurePath)


def _part(annotation: Any) -> tuple[Part | None, bool]:
    """Return the `Part` that marks a parameter's type, and whether it takes several."""
    origin, args = get_origin(annotation), get_args(annotation)
    branches = args if origin in (Union, types.UnionType) else (annotation,)
    if origin is Annotated:
        inner = args[0]
        branches = get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,)
        for extra in args[1:]:
            if isinstance(extra, Part):
                return extra, any(get_origin(branch) in (list, tuple) for branch in branches)
        return _part(inner)
    for branch in branches:
        if get_origin(branch) in (list, tuple):
            mark, _ = _part(get_args(branch)[0])
            if mark:
                return mark, True
        elif branch is not annotation:
            mark, many = _part(branch)
            if mark:
                return mark, many
    return None, False


# --- what the package itself offers, found without loading any plugin

BUILT_IN = "core"
"""The plugin that passes on what the package itself offers."""
SHORT = ("augmentations", "indexes", "metrics", "stores")
"""The kinds whose parts in that plugin need no more than their short names: `flat` is `core.flat`.
"""


def new_manager() -> pluggy.PluginManager:
    """Return a plugin manager that knows every hook and no plugin."""
    manager = pluggy.PluginManager("retrieval")
    manager.add_hookspecs(hookspecs)
    return manager


def own_factories(kind: str, module: types.ModuleType) -> dict[str, Factory]:
    """Return what a module of the package itself offers through its hook, by short name."""
    manager = new_manager()
    manager.register(module, BUILT_IN)
    return {
        short: Factory.read(kind, f"{BUILT_IN}.{short}", make)
        for offered in getattr(manager.hook, f"retrieval_{kind}")()
        for short, make in offered.items()
    }


# --- reading a signature
#
# Nothing is called. Which arguments a class gives its base itself, and whether it passes `**kwargs`
# on at all, is read in the source of its `__init__`.

_MODULES_THAT_TAKE_NOTHING = ("torch.nn.modules.module", "typing")
"""Whose `__init__` is inherited by classes that have none of their own."""


@dataclass
class Reading:
    """A factory's parameters.

    Attributes:
        parameters: by name, in order: the factory's own, then those that its `**kwargs` passes on.
        hints: their types, as far as they have any.
        homes: the functions that spell them out, the factory's own first.
        loose: the name of a `**kwargs` that no base class spells out, or None.
    """

    parameters: dict[str, inspect.Parameter] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    homes: list[Callable[..., Any]] = field(default_factory=list)
    loose: str | None = None


def read_signature(make: Callable[..., Any]) -> Reading:
    """Return what a class or function takes."""
    reading = Reading()
    for function, signature, supplied in _chain(make):
        hints = get_type_hints(function, include_extras=True)
        reading.homes.append(function)
        reading.loose = None
        for p in signature.parameters.values():
            if p.kind is p.VAR_KEYWORD:
                reading.loose = p.name
            elif (
                p.kind is not p.VAR_POSITIONAL
                and p.name not in supplied
                and p.name not in reading.parameters
            ):
                reading.parameters[p.name] = p
                if p.name in hints:
                    reading.hints[p.name] = hints[p.name]
    return reading


def documentation(
    make: Callable[..., Any], homes: list[Callable[..., Any]]
) -> tuple[str, str, dict[str, str]]:
    """Return summary, whole description, and each parameter's meaning.

    A class's parameters may be documented in its docstring, in its `__init__`'s, or in those of the
    classes that it has its `__init__` or some of its parameters from.
    """
    import docstring_parser

    own = docstring_parser.parse(inspect.cleandoc(make.__doc__ or ""))
    texts = [own]
    if inspect.isclass(make):
        sources = [
            owner
            for c in make.__mro__
            for owner in (vars(c).get("__init__"), c)
            if _spells(c, homes)
        ]
        texts += [
            docstring_parser.parse(inspect.cleandoc(x.__doc__ or ""))
            for x in (make.__init__, *sources)
        ]
    docs: dict[str, str] = {}
    for text in texts:
        for p in text.params:
            if p.description:
                docs.setdefault(p.arg_name.lstrip("*"), " ".join(p.description.split()))
    description = "\n".join(line for line in (own.short_description, own.long_description) if line)
    if own.blank_after_short_description:
        description = description.replace("\n", "\n\n", 1)
    return " ".join(description.partition("\n\n")[0].split()), description, docs


def _spells(owner: type, homes: list[Callable[..., Any]]) -> bool:
    return "__init__" in vars(owner) and vars(owner)["__init__"] in homes


def _chain(
    make: Callable[..., Any],
) -> Iterator[tuple[Callable[..., Any], inspect.Signature, set[str]]]:
    """Yield each function that spells parameters out, its signature, and what is supplied."""
    if not inspect.isclass(make):
        yield make, inspect.signature(make), set()
        return
    home = getattr(make.__init__, "__module__", "")
    if home in _MODULES_THAT_TAKE_NOTHING and "__new__" not in vars(make):
        # a class without an __init__ of its own takes nothing, whatever these say
        yield make.__init__, inspect.Signature(), set()
        return
    yield make.__init__, inspect.signature(make), set()
    inits = [
        (c, vars(c)["__init__"])
        for c in make.__mro__
        if inspect.isfunction(vars(c).get("__init__"))
    ]
    supplied: set[str] = set()
    for (_, function), (base, inherited) in itertools.pairwise(inits):
        if not _takes_more(function) or base.__module__ in _MODULES_THAT_TAKE_NOTHING:
            return
        signature = inspect.signature(inherited)
        names = list(signature.parameters)[1:]
        passed = _passed_on(function)
        if passed is None:
            # without source: what has no default there is given here, or the class could not be
            # made without a recipe's help
            supplied |= {
                n for n in names if signature.parameters[n].default is inspect.Parameter.empty
            }
        else:
            keywords, positional, whole = passed
            if not whole:
                return
            supplied |= keywords | set(names[:positional])
        yield (
            inherited,
            signature.replace(parameters=list(signature.parameters.values())[1:]),
            set(supplied),
        )


def _takes_more(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def _passed_on(function: Callable[..., Any]) -> tuple[set[str], int, bool] | None:
    """Return what an `__init__` gives the next: keywords, positional ones, `**kwargs` or not.

    None where its source cannot be had.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    keywords: set[str] = set()
    positional, whole = 0, False
    for call in ast.walk(tree):
        if not (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "__init__"
        ):
            continue
        arguments = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
        if not isinstance(
            call.func.value, ast.Call
        ):  # Base.__init__(self, …) instead of super().__init__(…)
            arguments = arguments[1:]
        keywords |= {argument.arg for argument in call.keywords if argument.arg}
        positional = max(positional, len(arguments))
        whole |= any(argument.arg is None for argument in call.keywords)
    return keywords, positional, whole
