"""Form of a flow on Prefect's page: typed, titled parameters for the usual values.

A parameter takes type, limits and description from the field of the configuration for which it
stands; only its title is here. Its value becomes an override.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, TypeVar, cast

from prefect import Flow
from pydantic import BaseModel, Field, TypeAdapter, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import MISSING

from megacore.config import RunConfig
from megacore.config.finetune import FinetuneConfig
from megacore.errors import ConfigError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
PrefectFlow = TypeVar("PrefectFlow", bound=Flow[..., Any])


@dataclass(frozen=True)
class Form:
    """Usual values of one kind of configuration."""

    schema: type[BaseModel]
    """Class of the configuration."""
    directory: str
    """Directory of its files."""
    titles: Mapping[str, str]
    """Titles by dotted name of the field, with the unit, in the order of the page."""

    def fields(self) -> dict[str, FieldInfo]:
        """Return the field for each dotted name. Raises KeyError for a name without a field."""
        return {name: self._field(name) for name in self.titles}

    def _field(self, name: str) -> FieldInfo:
        *sections, leaf = name.split(".")
        schema = self.schema
        for section in sections:
            schema = cast(type[BaseModel], schema.model_fields[section].annotation)
        return schema.model_fields[leaf]


PRETRAINING = Form(
    RunConfig,
    "conf/",
    {
        "train.train_iters": "Iterations",
        "optim.lr": "Learning rate",
        "optim.min_lr": "Final learning rate",
        "train.micro_batch_size": "Micro batch (samples)",
        "train.global_batch_size": "Global batch (samples)",
        "data.seq_length": "Sequence length (tokens)",
        "launch.nproc_per_node": "Processes per host",
        "parallel.tensor_model_parallel_size": "Tensor parallel size (ranks)",
        "parallel.pipeline_model_parallel_size": "Pipeline parallel size (stages)",
        "train.precision": "Precision",
        "seed": "Random seed",
    },
)
"""Form of the flows that read a RunConfig."""
FINE_TUNING = Form(
    FinetuneConfig,
    "conf/finetune/",
    {
        "train.num_epochs": "Epochs",
        "train.max_steps": "Maximum length (steps)",
        "optim.lr": "Learning rate",
        "optim.warmup_steps": "Warm-up (steps)",
        "train.micro_batch_size": "Micro batch (samples)",
        "train.gradient_accumulation_steps": "Gradient accumulation (micro batches)",
        "launch.nproc_per_node": "Processes per host",
        "launch.distributed": "Distribution",
        "train.precision": "Precision",
        "seed": "Random seed",
    },
)
"""Form of the flow finetune."""
OTHERS = {
    "conf": ("Configuration", "name of a file in {directory}, or a path"),
    "dry_run": ("Dry run", "show keys, cache, memory and days; run nothing"),
    "find_batch_size": (
        "Find batch size",
        "find the largest micro batch of each distribution that fits, print the table, train "
        "nothing",
    ),
    "overrides": ("Overrides", 'other values by dotted name, such as {{"train.log_interval": 20}}'),
}
"""Titles and descriptions of the other parameters of flows. The form follows the first."""


def with_form(form: Form) -> Callable[[Callable[Parameters, Result]], Callable[..., Result]]:
    """Add a form's parameters to a function that takes `overrides`, which gets their values there.

    The function raises ConfigError if `overrides` has another value for one of them.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[..., Result]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Result:
            values = {name: kwargs.pop(parameter_of(name), None) for name in form.titles}
            bound = signature.bind(*args, **kwargs)
            bound.arguments["overrides"] = merged(bound.arguments.get("overrides"), values)
            return function(*bound.args, **bound.kwargs)

        added = [
            inspect.Parameter(
                parameter_of(name),
                inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[Any, WithJsonSchema(_json_schema(field))],
                default=None,
            )
            for name, field in form.fields().items()
        ]
        parameters = [*signature.parameters.values(), *added]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def on_page(form: Form) -> Callable[[PrefectFlow], PrefectFlow]:
    """Give the parameters of a flow with a form titles, descriptions and an order on the page.

    Prefect builds the page from the flow's signature but calls the function with the function's
    own.
    """
    texts = {
        name: (title, f"{text[:1].upper()}{text[1:]}.".format(directory=form.directory))
        for name, (title, text) in OTHERS.items()
    }
    texts["conf"] = (texts["conf"][0], f"{texts['conf'][1]} Empty fields keep its values.")
    for name, field in form.fields().items():
        text = " ".join(str(field.description).split())
        texts[parameter_of(name)] = (form.titles[name], f"{name}: {text}")
    names = [parameter_of(name) for name in form.titles]
    order = ["conf", *names, *(name for name in OTHERS if name != "conf")]

    def decorate(flow: PrefectFlow) -> PrefectFlow:
        parameters = []
        for name, parameter in inspect.signature(flow.fn).parameters.items():
            title, description = texts[name]
            # The page submits the default of an empty input, and null is not of the field's type.
            default = MISSING if name in names else parameter.default
            # Prefect titles a parameter with its name, unless the extra of its schema has a title.
            extra: dict[str, Any] = {"title": title, "position": order.index(name)}
            shown = Field(default, description=description, json_schema_extra=extra)
            parameters.append(parameter.replace(default=shown))
        flow.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return flow

    return decorate


def parameter_of(name: str) -> str:
    """Return the parameter for a dotted name: its last part."""
    return name.rpartition(".")[2]


def merged(overrides: Any, values: Mapping[str, Any]) -> Any:
    """Return `overrides` with the values of a form, by dotted name; None means no value.

    Raises ConfigError if `overrides` has another value for the same name.
    """
    if not isinstance(overrides or {}, Mapping):
        return overrides  # refused when the configuration is loaded
    result = dict(overrides or {})
    for name, value in values.items():
        if value is None:
            continue
        for other in _values_in(overrides or {}, name):
            if other != value:
                raise ConfigError(
                    f"{name} is {value!r} in the form (parameter {parameter_of(name)}) and "
                    f"{other!r} in overrides: give it in one of them"
                )
        result.pop(name, None)  # the last override of a section or its value takes effect
        result[name] = value
    return result


def all_overrides(parameters: Mapping[str, Any]) -> Any:
    """Return a flow run's overrides with the values of its form."""
    names = {**PRETRAINING.titles, **FINE_TUNING.titles}
    values = {name: parameters.get(parameter_of(name)) for name in names}
    return merged(parameters.get("overrides"), values)


def _values_in(overrides: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield what overrides hold for a dotted name, directly or in the mapping of a section."""
    for key, value in overrides.items():
        if key == name:
            yield value
        elif name.startswith(f"{key}.") and isinstance(value, Mapping):
            yield from _values_in(value, name.removeprefix(f"{key}."))


def _json_schema(field: FieldInfo) -> dict[str, Any]:
    """Return type and limits of a field without null, for which Prefect's page has no input."""
    annotated: Any = Annotated[(field.annotation, Field(), *field.metadata)]
    schema = TypeAdapter(annotated).json_schema()
    kinds = [kind for kind in schema.pop("anyOf", []) if kind.get("type") != "null"]
    return (
        {**schema, **kinds[0]} if len(kinds) == 1 else schema | ({"anyOf": kinds} if kinds else {})
    )
