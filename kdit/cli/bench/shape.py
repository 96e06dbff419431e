"""BenchShape: the sizes of a model whose weights are made up, from a file of `kdit/cli/bench/shapes` or one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path

from kdit.errors import CheckpointMissingError, ConfigError
from kdit.models.weights.json_file import read_json

SHAPES = Path(str(package_files("kdit"))) / "cli" / "bench" / "shapes"
TOKENIZERS = {"clip": "tokenizer", "t5": "tokenizer_2"}  # those of the built-in model


@dataclass(frozen=True)
class BenchShape:
    """One file: what model_index.json and the components' config.json will say, and how it is run."""

    name: str
    about: str
    pipeline: str
    configs: Mapping[str, Mapping[str, object]]  # component -> its config.json, with _class_name
    tokenizers: Mapping[str, str]  # component -> a key of TOKENIZERS
    options: Mapping[str, object]  # scalars of model_index.json
    run: Mapping[str, object]  # size, frames, steps, cfg, max_sequence_length: where the command line says nothing


def shape_names() -> tuple[str, ...]:
    """The shapes that come with kdit."""
    return tuple(sorted(path.stem for path in SHAPES.glob("*.json")))


def read_shape(name: str) -> BenchShape:
    """A shape by its name or from a file. Raises CheckpointMissingError, or ConfigError for a file of another form."""
    path = SHAPES / f"{name}.json" if name in shape_names() else Path(name).expanduser()
    if not path.is_file():
        raise CheckpointMissingError(
            f"--config {name}: no such file, and the named ones are {', '.join(shape_names())}"
        )
    return parse_shape(path.stem, read_json(path), str(path))


def parse_shape(name: str, data: Mapping[str, object], where: str) -> BenchShape:
    """Check the form of a shape file; the values are checked by whoever builds the models."""
    known = {"about", "pipeline", "components", "tokenizers", "options", "run"}
    if unknown := sorted(data.keys() - known):
        raise ConfigError(f"{where}: unknown entries {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    pipeline, components = data.get("pipeline"), data.get("components")
    if not isinstance(pipeline, str) or not isinstance(components, dict):
        raise ConfigError(f"{where}: expected 'pipeline', a class name, and 'components', a config for each")
    for component, config in components.items():
        if not isinstance(config, dict) or not isinstance(config.get("_class_name"), str):
            raise ConfigError(f"{where}: component {component!r} has no _class_name")
    tokenizers = _table(data, "tokenizers", where)
    for component, kind in tokenizers.items():
        if kind not in TOKENIZERS:
            raise ConfigError(f"{where}: tokenizer {component!r} is {kind!r}, expected {' or '.join(TOKENIZERS)}")
    return BenchShape(
        name=name,
        about=str(data.get("about", "")),
        pipeline=pipeline,
        configs=components,
        tokenizers={component: str(kind) for component, kind in tokenizers.items()},
        options=_table(data, "options", where),
        run=_table(data, "run", where),
    )


def _table(data: Mapping[str, object], name: str, where: str) -> Mapping[str, object]:
    value = data.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {name!r} must be an object, got {value!r}")
    return value
