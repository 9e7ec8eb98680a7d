"""Read factories' signatures and docstrings, check a recipe's values against them, build the parts.

A factory is a class or a function. A recipe may set the parameters in its signature, including
those that `**kwargs` passes on to a base class. Its docstring (Google style, `Args:`) describes
them. pydantic checks the values of annotated parameters strictly: a number in quotes is not a
number. A parameter without an annotation accepts any TOML value, and the factory itself must check
it. A parameter annotated `Annotated[T, Part("reducers")]` is a part made by another factory. The
host sets the parameters named in `GIVEN`; a recipe can set them only if they are parts.

`calling` turns an error that a part raises into one sentence with the part and the line. Serving
uses it too, so this module does not import torch.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import os
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import pluggy

from retrieval.errors import (
    DataError,
    PluginError,
    RecipeError,
    RetrievalError,
    did_you_mean,
)
from retrieval.host import hookspecs
from retrieval.host.values import check_values, is_plain, toml_value, type_text

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
    "samplers": "sampler",
    "augmentations": "augmentation",
    "metrics": "metric",
    "indexes": "index",
    "stores": "store",
    "distances": "distance",
    "reducers": "reducer",
    "regularizers": "regularizer",
    "trackers": "tracker",
    "clusters": "cluster",
    "encoders": "encoder",
    "text_encoders": "text encoder",
}
"""Kinds of parts that plugins offer: the ending of the hook's name, and the singular."""

COMPONENTS = {
    "data": "datasets",
    "sampler": "samplers",
    "backbone": "backbones",
    "combiner": "combiners",
    "loss": "losses",
    "miner": "miners",
    "generator": "generators",
    "learner": "learners",
    "text": "text_encoders",
}
"""The recipe's tables that name a plugin's part, and the kind of that part."""

OBJECT_KINDS = {t: kind for t, kind in COMPONENTS.items() if t != "text"}
OBJECT_KINDS |= {"augmentation": "augmentations"}
"""The recipe's tables for which a Python object may stand, and the kind of that object."""

GIVEN = {
    "features": "width of the features (for a backbone of vectors: of the dataset's vectors)",
    "embedding_size": "width of the codes",
    "classes": "number of training classes",
    "distance": "the recipe's combiner, when it has one",
    "address": "address of the index, the cluster or the model, for a store, cluster or encoder",
    "plugins": "files and modules that the user named as plugins, for a store",
}
"""Values that the host passes to a factory with a parameter of that name."""

PML_PARAMETERS = {
    "distance": ("distances", "how two embeddings are compared"),
    "reducer": ("reducers", "how the losses become one number"),
    "embedding_regularizer": ("regularizers", "penalty on the embeddings, added to the loss"),
    "weight_regularizer": ("regularizers", "penalty on the loss's weights, added to the loss"),
    "embedding_reg_weight": (None, "factor of the embeddings' penalty"),
    "weight_reg_weight": (None, "factor of the weights' penalty"),
    "collect_stats": (None, "whether the module keeps metrics of each batch as attributes"),
}
"""Kind of part and description for the untyped parameters of pytorch-metric-learning's bases."""

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Marks a parameter as a part made by another factory: `Annotated[T, Part("reducers")]`.

    Attributes:
        kind: one of `KINDS`.
        per_width: name of a parameter that lists embedding widths. The factory then gets a list of
            parts: one per width, with that width as its `embedding_size`, and one for the whole
            embedding.
    """

    kind: str
    per_width: str | None = None


def traits(
    *,
    ref_emb: bool | None = None,
    miner: bool | None = None,
) -> Callable[[T], T]:
    """Decorator that states what a loss or miner can do if its signature does not show it.

    Args:
        ref_emb: whether it accepts a reference set (`ref_emb`, `ref_labels`).
        miner: whether it uses a miner's indices (`indices_tuple`).
    """
    stated = {"ref_emb": ref_emb, "miner": miner}

    def mark(factory: T) -> T:
        known = {trait: value for trait, value in stated.items() if value is not None}
        factory.__retrieval_traits__ = known  # type: ignore[attr-defined]
        return factory

    return mark


@dataclass(frozen=True)
class Parameter:
    """One parameter of a factory; `default` is `inspect.Parameter.empty` if it has none.

    `part` is the kind of a parameter that is a part, and `many` marks a list of parts. `by_host`
    marks a parameter that only the host sets.
    """

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
        """True if the host passes the value whenever it knows one."""
        return self.by_host or (self.part is not None and self.name in GIVEN)

    @property
    def required(self) -> bool:
        """True if a recipe must set it."""
        return self.default is inspect.Parameter.empty and not self.by_host

    @property
    def type_text(self) -> str:
        """The type as a recipe's author reads it."""
        if self.part:
            return f"a {KINDS[self.part]}" + (" list" if self.many else "")
        return type_text(self.annotation)

    @property
    def default_text(self) -> str:
        """The default as TOML, "given by the host", "required", or "" if TOML cannot express it."""
        if self.by_host:
            return "given by the host"
        if self.required:
            return "required"
        if self.default is not None and is_plain(self.default):
            return toml_value(self.default)
        return ""


@dataclass(frozen=True)
class Factory:
    """A plugin's factory with its parameters and documentation.

    Attributes:
        kind: one of `KINDS`.
        name: `PLUGIN.NAME`.
        make: the class or function itself.
        hints: advice for the plugin's author, such as to add a docstring.
    """

    kind: str
    name: str
    make: Callable[..., Any]
    parameters: tuple[Parameter, ...] = field(default=(), repr=False)
    summary: str = field(default="", repr=False)
    description: str = field(default="", repr=False)
    hints: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def read(
        cls,
        kind: str,
        name: str,
        make: Callable[..., Any],
    ) -> Factory:
        """Read a factory's signature and docstring."""
        if not (inspect.isclass(make) or inspect.isroutine(make)):
            raise PluginError(
                f"The {KINDS[kind]} '{name}' is made by an object of type {type(make).__name__}; a"
                " factory is a class or a function."
            )
        what = f"The {KINDS[kind]} '{name}' ({make.__module__}.{make.__qualname__})"
        try:
            reading = _read_signature(make)
        except Exception as error:  # resolving annotations runs the plugin's code
            raise PluginError(
                f"{what} has a signature that cannot be read at run time:"
                f" {type(error).__name__}: {error}."
            ) from error
        summary, description, docs = documentation(make, reading.homes)
        parameters = []
        faults = []
        hints = [] if summary else ["it has no docstring"]
        for p in reading.parameters.values():
            if p.kind is p.POSITIONAL_ONLY:
                faults.append(f"takes its parameter '{p.name}' by position only")
            typed = p.name in reading.hints
            annotation = reading.hints.get(p.name, Any)
            mark, many = _part(annotation)
            part = mark.kind if mark else None
            if part and part not in KINDS:
                faults.append(
                    f"marks '{p.name}' as Part({part!r}), and there is no such"
                    f" kind{did_you_mean(part, KINDS)}"
                )
                part = None
            usual_part, usual_doc = (None, "") if typed else PML_PARAMETERS.get(p.name, (None, ""))
            if kind in ("losses", "miners") and (p.default is None or p.default is p.empty):
                part = part or usual_part
            # A `distance` whose default is text or a number is the author's own setting, not the
            # recipe's combiner.
            setting = p.name == "distance" and isinstance(p.default, str | int | float)
            from_host = p.name in GIVEN and not part and not setting
            doc = docs.get(p.name) or (GIVEN[p.name] if from_host else usual_doc)
            if not doc:
                hints.append(f"it does not document '{p.name}' under 'Args:'")
            if not (typed or part or from_host or p.name in PML_PARAMETERS):
                hints.append(f"'{p.name}' has no type, so a recipe's value is passed on unchecked")
            widths = mark.per_width if mark else None
            parameters.append(
                Parameter(p.name, annotation, p.default, doc, part, many, from_host, widths)
            )
        if faults:
            raise PluginError(f"{what} {'; it '.join(faults)}.")
        return cls(kind, name, make, tuple(parameters), summary, description, tuple(hints))

    def takes(self, name: str) -> bool:
        """Return whether the host passes this value to the factory."""
        return any(p.name == name and p.from_host for p in self.parameters)

    @cached_property
    def supports_ref_emb(self) -> bool:
        """True if the loss or miner accepts a reference set, as synthetic negatives need."""
        return self._supports("ref_emb", "ref_emb")

    @cached_property
    def supports_miner(self) -> bool:
        """True if the loss uses a miner's indices."""
        return self._supports("miner", "indices_tuple")

    def _supports(self, trait: str, argument: str) -> bool:
        """Return the stated trait, or else whether the product's call takes the argument."""
        stated: dict[str, bool] = getattr(self.make, "__retrieval_traits__", {})
        if trait in stated:
            return stated[trait]
        product: Any = self.make
        if not inspect.isclass(product):
            product = get_type_hints(product).get("return")
        classes = getattr(product, "__mro__", ())
        # `forward` first, because the `__call__` of every nn.Module takes anything.
        calls = [vars(c)[x] for x in ("forward", "__call__") for c in classes if x in vars(c)]
        try:
            names = inspect.signature(calls[0]).parameters
        except (IndexError, TypeError, ValueError):
            return True
        # An nn.Module without `forward` takes *args, so it is assumed to take the argument.
        return argument in names or any(p.kind is p.VAR_POSITIONAL for p in names.values())

    def check(
        self,
        values: Mapping[str, Any],
        where: str,
        host_keys: Collection[str] = (),
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the checked values of a recipe, and all problems as sentences.

        `host_keys` are further keys of the table, which the host reads.
        """
        settable = {p.name: p for p in self.parameters if not p.by_host}
        by_host = {p.name for p in self.parameters if p.by_host}
        model, unwritable = self._types
        problems = []
        plain = {}  # values of parameters that are no parts
        for key, value in values.items():
            if key in by_host:
                problems.append(f"{where} {key}: is given by the host ({GIVEN[key]}); remove it.")
            elif key not in settable:
                known = [*sorted(host_keys), *settable]
                names = ", ".join(known) or "none"
                problems.append(
                    f"{where} {key}: {self.name} has no such parameter (it has: {names})."
                    f"{did_you_mean(key, known)}"
                )
            elif key in unwritable:
                problems.append(
                    f"{where} {key}: is of type {type_text(settable[key].annotation)}, which a"
                    " recipe cannot write; remove it."
                )
            elif not settable[key].part:
                plain[key] = value
        checked, faults = check_values(model, plain)
        problems += [f"{where} {fault}" for fault in faults.values()]
        for p in settable.values():
            if p.part and p.name in values:
                checked[p.name] = values[p.name]
            elif p.part and p.required and p.name not in GIVEN:
                problems.append(f"{where} {p.name}: is required ({p.type_text}).")
        return checked, problems

    @cached_property
    def _types(self) -> tuple[type[BaseModel], set[str]]:
        """A pydantic model of the values, and the names of parameters that no recipe can set."""
        from pydantic import ConfigDict, Field, TypeAdapter, create_model

        fields: dict[str, Any] = {}
        unwritable: set[str] = set()
        for p in self.parameters:
            if p.by_host or p.part:
                continue
            try:
                TypeAdapter(p.annotation)
            except Exception:  # a plugin's annotation may raise anything
                if p.required:
                    raise PluginError(
                        f"The {KINDS[self.kind]} '{self.name}' has a parameter '{p.name}' of type"
                        f" {type_text(p.annotation)}, which a recipe cannot write. Use numbers,"
                        " text, lists of them, a pathlib.Path, or Part(…)."
                    ) from None
                unwritable.add(p.name)
                continue
            # The alias avoids names that pydantic reserves (copy, json, model_fields, _x). Defaults
            # stay with the factory, which gets only the values that the recipe sets.
            annotation: Any = Annotated[p.annotation, Field(alias=p.name)]
            fields[f"p{len(fields)}"] = (annotation, ... if p.required else None)
        config = ConfigDict(extra="forbid", strict=True)
        return create_model(self.name, __config__=config, **fields), unwritable

    def build(self, values: Mapping[str, Any]) -> Any:
        """Call the factory with checked values and return the part."""
        try:
            return self.make(**values)
        except (RetrievalError, OSError, ImportError):
            raise  # the command line has a message for these
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            problem = f"cannot be made with these parameters: {type(error).__name__}: {reason}."
            # By these types, authors refuse a value; any other may be a fault of the factory.
            if isinstance(error, ValueError | AssertionError | TypeError):
                problem = f"refuses its parameters: {reason}."
            raise RecipeError(f"{self.name} {problem}") from error


def _part(annotation: Any) -> tuple[Part | None, bool]:
    """Return the `Part` in a parameter's annotation, and whether the parameter takes a list."""
    annotations = list(_inside(annotation))
    mark = next((inner for inner in annotations if isinstance(inner, Part)), None)
    return mark, any(get_origin(inner) in (list, tuple) for inner in annotations)


def _inside(annotation: Any) -> Iterator[Any]:
    """Yield an annotation, and everything that it contains."""
    yield annotation
    for inner in get_args(annotation):
        yield from _inside(inner)


@cache
def _learner(make: Any) -> Factory:
    return Factory.read("learners", make.__name__, make)


def check_parameters(estimator: Any) -> None:
    """Check a scikit-learn estimator's parameters by the types in its signature.

    Raises:
        ValueError: a parameter does not fit; the message lists every problem.
    """
    values = estimator.get_params(deep=False)
    for key, value in values.items():
        # Numbers of NumPy become Python's. A class, such as np.float32, is no number.
        if hasattr(value, "tolist") and not isinstance(value, type):
            values[key] = value.tolist()
    make: Any = type(estimator)
    _, problems = _learner(make).check(values, make.__name__)
    if problems:
        raise ValueError("\n".join(problems))


# --- built-in parts, found without loading any plugin

BUILT_IN = "core"
"""The plugin that offers the package's built-in parts."""
SHORT = ("augmentations", "indexes", "metrics", "stores")
"""Kinds whose built-in parts also have a short name: `flat` means `core.flat`."""


def new_manager() -> pluggy.PluginManager:
    """Return a plugin manager with all hooks and no plugins."""
    manager = pluggy.PluginManager("retrieval")
    manager.add_hookspecs(hookspecs)
    return manager


def own_factories(kind: str, module: types.ModuleType) -> dict[str, Factory]:
    """Return the built-in factories that a module's hook offers, by short name."""
    manager = new_manager()
    manager.register(module, BUILT_IN)
    return {
        short: Factory.read(kind, f"{BUILT_IN}.{short}", make)
        for offered in getattr(manager.hook, f"retrieval_{kind}")()
        for short, make in offered.items()
    }


# --- reading a signature
#
# Nothing is called. The source of a class's `__init__` shows which arguments it passes to its base
# class itself, and whether it passes on `**kwargs`.

# Modules whose classes' `__init__` takes no settings, whatever its signature says.
_TAKES_NOTHING = ("torch.nn.modules.module", "typing")


@dataclass
class Reading:
    """A factory's parameters.

    Attributes:
        parameters: the parameters by name: the factory's own, then those of base classes that get
            its `**kwargs`.
        hints: annotations of the parameters that have one.
        homes: the functions that define the parameters, the factory's own first.
    """

    parameters: dict[str, inspect.Parameter] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    homes: list[Callable[..., Any]] = field(default_factory=list)


def _read_signature(make: Callable[..., Any]) -> Reading:
    """Return the parameters that a class or function takes."""
    reading = Reading()
    # A dataclass has fields whose types its base class's module names.
    names: dict[str, Any] = {}
    for base in reversed(getattr(make, "__mro__", ())):
        names |= vars(sys.modules[base.__module__])
    for function, signature, supplied in _chain(make):
        module = getattr(function, "__globals__", {})
        hints = get_type_hints(function, names, module, include_extras=True)
        reading.homes.append(function)
        for name, p in signature.parameters.items():
            if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or name in supplied:
                continue
            # A subclass's own parameter hides its base class's.
            if name not in reading.parameters:
                reading.parameters[name] = p
                if name in hints:
                    reading.hints[name] = hints[name]
    return reading


def documentation(
    make: Callable[..., Any], homes: list[Callable[..., Any]]
) -> tuple[str, str, dict[str, str]]:
    """Return summary, full description, and the description of each parameter.

    A class may document its parameters in its own docstring, in that of `__init__`, or in those of
    the base classes that define them.
    """
    import docstring_parser

    sources: list[Any] = [make]
    if inspect.isclass(make):
        sources.append(make.__init__)
        for c in make.__mro__:
            if vars(c).get("__init__") in homes:
                sources += [vars(c)["__init__"], c]
    texts = [docstring_parser.parse(inspect.cleandoc(source.__doc__ or "")) for source in sources]
    docs: dict[str, str] = {}
    for text in texts:
        for p in text.params:
            if p.description:
                # The nearest description counts, so an earlier one is kept.
                docs.setdefault(p.arg_name.lstrip("*"), " ".join(p.description.split()))
    own_text = texts[0]
    lines = (own_text.short_description, own_text.long_description)
    description = "\n".join(line for line in lines if line)
    if own_text.blank_after_short_description:
        description = description.replace("\n", "\n\n", 1)
    return " ".join(description.partition("\n\n")[0].split()), description, docs


def _chain(
    make: Callable[..., Any],
) -> Iterator[tuple[Callable[..., Any], inspect.Signature, set[str]]]:
    """Yield each function with parameters, its signature, and what subclasses pass to it."""
    function: Any = make.__init__ if inspect.isclass(make) else make
    home = getattr(function, "__module__", "")
    if function is not make and home in _TAKES_NOTHING and "__new__" not in vars(make):
        # A class without its own __init__ takes no parameters, whatever the inherited one accepts.
        yield function, inspect.Signature(), set()
        return
    yield function, inspect.signature(make), set()
    supplied: set[str] = set()
    classes = [
        c for c in getattr(make, "__mro__", ()) if inspect.isfunction(vars(c).get("__init__"))
    ]
    for derived, base in itertools.pairwise(classes):
        keywords, positional, passes_kwargs = _passed_on(vars(derived)["__init__"])
        if not passes_kwargs or base.__module__ in _TAKES_NOTHING:
            return
        inherited = vars(base)["__init__"]
        signature = inspect.signature(inherited)
        after_self = list(signature.parameters.values())[1:]
        supplied |= keywords | {p.name for p in after_self[:positional]}
        yield inherited, signature.replace(parameters=after_self), set(supplied)


def _passed_on(function: Callable[..., Any]) -> tuple[set[str], int, bool]:
    """Return what an `__init__` passes to its base class.

    Returns:
        The keywords, the number of positional arguments, and whether `**kwargs` is passed on.
    """
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return set(), 0, False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # a class without source
        return set(), 0, True
    keywords: set[str | None] = set()
    positional = 0
    for call in ast.walk(tree):
        match call:
            case ast.Call(func=ast.Attribute(attr="__init__", value=owner)):
                keywords |= {argument.arg for argument in call.keywords}
                count = sum(not isinstance(argument, ast.Starred) for argument in call.args)
                # Base.__init__(self, …) instead of super().__init__(…)
                positional = max(positional, count - (not isinstance(owner, ast.Call)))
    return {name for name in keywords if name}, positional, None in keywords


# --- errors of a part

# Largest number of characters quoted from a plugin's error.
_LONGEST_REASON = 300
SMALLER_BATCH = (
    "Make it smaller, or shrink the batch: [sampler] classes × items, [evaluate] batch_size."
)
"""Advice after a sentence such as "The loss acme.margin ran out of memory."."""


@contextlib.contextmanager
def calling(
    what: str,
    smaller: str = SMALLER_BATCH,
    hint: Callable[[], str] = str,
) -> Iterator[None]:
    """Context manager that turns an error of a plugin's part into one sentence.

    A RetrievalError, OSError or ImportError passes unchanged.

    Args:
        what: the part, as the beginning of a sentence: "The loss acme.margin".
        smaller: advice if the part runs out of memory.
        hint: returns a further sentence of the message, with a space before it, or "".
    """
    try:
        yield
    except (RetrievalError, OSError, ImportError):
        raise  # the command line has a message for these
    except Exception as error:
        if _is_out_of_memory(error):
            raise DataError(f"{what} ran out of memory. {smaller}") from error
        raise PluginError(
            f"{failure(what, error)}.{hint()} For the traceback, run retrieval --debug … or, in"
            " Python, see __cause__."
        ) from error


def failure(what: str, error: Exception) -> str:
    """Return which part failed, why and where: "The loss acme.margin failed: …"."""
    reason = " ".join(str(error).split())[:_LONGEST_REASON].rstrip(".")
    if isinstance(error, NotImplementedError) and "forward" in reason:
        reason = "it defines no forward"
    text = f"{type(error).__name__}: {reason}".removesuffix(": ")
    return f"{what} failed: {text}{_place(error)}"


def _is_out_of_memory(error: Exception) -> bool:
    # torch raises OutOfMemoryError on a GPU, and a RuntimeError on a CPU.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _place(error: BaseException) -> str:
    """Return file and line of the last frame outside this package and installed libraries."""
    package = f"{Path(__file__).parents[1]}{os.sep}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        is_installed = "site-packages" in file or "/lib/python" in file
        if not is_installed and not file.startswith(("<", package)):
            return f" ({file}, line {frame.lineno})"
    return ""
