"""ComponentFolder: one sub-folder of a checkpoint, what it must hold, and what is wrong with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kdit.errors import CheckpointError, CheckpointMissingError
from kdit.models.weights.json_file import read_json
from kdit.models.weights.sniff import HEAD_BYTES, foreign_content
from kdit.models.weights.weight_files import WeightFiles, raise_first, scan_weights

logger = logging.getLogger(__name__)

NETWORK_STEM, TRANSFORMERS_STEM = "diffusion_pytorch_model", "model"
TOKENIZER_CONFIG = "tokenizer_config.json"
SENTENCEPIECE_FILE = "spiece.model"
# each set is a complete vocabulary
_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), (SENTENCEPIECE_FILE,), ("tokenizer.model",))
_SENTENCEPIECE_READERS = ("sentencepiece", "google.protobuf")  # import names
_PACKAGE_NAMES = {"google.protobuf": "protobuf"}


class ComponentKind(Enum):
    """What files a component consists of."""

    MODEL = "model"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    PROCESSOR = "processor"


class ComponentScan(NamedTuple):
    """The weights (of a MODEL) and everything that is wrong."""

    weights: WeightFiles | None
    faults: tuple[CheckpointError, ...]
    notices: tuple[str, ...] = ()  # what is odd and harms nothing


_CONFIG_FILES = {
    ComponentKind.MODEL: ("config.json",),
    ComponentKind.TOKENIZER: (TOKENIZER_CONFIG,),
    ComponentKind.SCHEDULER: ("scheduler_config.json",),
    ComponentKind.PROCESSOR: ("preprocessor_config.json", "processor_config.json"),
}


@dataclass(frozen=True)
class ComponentFolder:
    """A component as model_index.json states it. Nothing is read before it is asked for."""

    path: Path
    class_name: str
    library: str = ""
    variant: str | None = None  # of the weight files, such as "fp16"; counts where the folder has it

    @classmethod
    def at(cls, path: str | Path, *, variant: str | None = None) -> ComponentFolder:
        """The model in a folder, by the class that its own config.json states."""
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointMissingError(f"component {folder.name}: there is no folder {folder}")
        config = folder / "config.json"
        component = cls(folder, config_class(read_json(config), config), variant=variant)
        if component.kind is not ComponentKind.MODEL:
            raise CheckpointError(f"{config} names the class {component.class_name}, expected a model")
        return component

    @property
    def name(self) -> str:
        """Name of the sub-folder."""
        return self.path.name

    @property
    def kind(self) -> ComponentKind:
        """Derived from the name of the class."""
        if "Tokenizer" in self.class_name:
            return ComponentKind.TOKENIZER
        if "Scheduler" in self.class_name:
            return ComponentKind.SCHEDULER
        if "Processor" in self.class_name or self.class_name.endswith("FeatureExtractor"):  # ...ProcessorFast, ...Pil
            return ComponentKind.PROCESSOR
        return ComponentKind.MODEL

    @property
    def config_path(self) -> Path:
        """The component's config file, whether it is there or not."""
        candidates = [self.path / name for name in _CONFIG_FILES[self.kind]]
        return next((path for path in candidates if path.is_file()), candidates[0])

    @cached_property
    def config(self) -> dict[str, object]:
        """The config file; raises CheckpointError if it is missing or damaged."""
        self._require_folder()
        return read_json(self.config_path)

    def scan(self) -> ComponentScan:
        """Check every file by its size and header. Raises nothing; the faults are in the result."""
        if absent := _faults_of(self._require_folder):
            return ComponentScan(None, tuple(absent))
        if self.kind is ComponentKind.MODEL:
            return self._scan_model()
        if self.kind is ComponentKind.TOKENIZER:
            return ComponentScan(None, tuple(tokenizer_faults(self.path)))
        return ComponentScan(None, tuple(_faults_of(lambda: self.config)))

    def check(self) -> None:
        """Raise the first fault, if there is one."""
        raise_first(self.scan().faults)

    def open_weights(self) -> WeightFiles:
        """The weights of a MODEL, all files checked; raises CheckpointError."""
        scan = self.scan()
        raise_first(scan.faults)
        if scan.weights is None:
            raise CheckpointError(f"component {self.name} is a {self.kind.value} ({self.class_name}), expected a model")
        return scan.weights

    def log_notices(self) -> None:
        """Log what is odd about the files and harms nothing. Each loader calls it once."""
        for notice in self.scan().notices:
            logger.warning("component %s: %s", self.name, notice)

    def _require_folder(self) -> None:
        if not self.path.is_dir():
            raise CheckpointMissingError(f"component {self.name} ({self.class_name}): there is no folder {self.path}")

    def _scan_model(self) -> ComponentScan:
        faults = _faults_of(lambda: config_class(self.config, self.config_path))
        of_diffusers = self.library == "diffusers" if faults else "_class_name" in self.config
        if not faults and self.config.get("quantization_config") is not None:
            faults.append(
                CheckpointError(f"{self.config_path}: quantised weights are not supported (quantization_config)")
            )
        scan = scan_weights(self.path, NETWORK_STEM if of_diffusers else TRANSFORMERS_STEM, self.variant)
        return ComponentScan(scan.weights, (*faults, *scan.faults), scan.notices)


def config_class(config: dict[str, object], where: Path) -> str:
    """The class that a model's config.json states: diffusers' ``_class_name`` or transformers' ``architectures``."""
    stated = config.get("_class_name")
    if stated is None:
        architectures = config.get("architectures")
        stated = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    if not isinstance(stated, str):
        raise CheckpointError(f"{where} states no class: expected _class_name, or architectures with one name")
    return stated


def tokenizer_faults(folder: Path) -> list[CheckpointError]:
    """What keeps the tokenizer in ``folder`` from loading: absent files, pointers, absent packages."""
    where = f"component {folder.name}"
    if not folder.is_dir():
        return [CheckpointMissingError(f"{where}: there is no tokenizer folder {folder}")]
    complete = next((names for names in _VOCABULARIES if all((folder / name).is_file() for name in names)), None)
    if complete is None:
        expected = "; or ".join(" and ".join(names) for names in _VOCABULARIES)
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        return [CheckpointMissingError(f"{where}: no vocabulary in {folder}, expected {expected}; found {found}")]
    faults = []
    for name in complete:
        with (folder / name).open("rb") as file:
            head = file.read(HEAD_BYTES)
        if not head:
            faults.append(CheckpointError(f"{where}: {folder / name} is empty (0 bytes)"))
        elif foreign := foreign_content(head):
            faults.append(CheckpointError(f"{where}: {folder / name} is {foreign}"))
    absent = [name for name in _SENTENCEPIECE_READERS if complete[0].endswith(".model") and not _importable(name)]
    if absent:
        packages = " and ".join(_PACKAGE_NAMES.get(name, name) for name in absent)
        faults.append(
            CheckpointError(
                f"{where}: {folder} has no tokenizer.json, and reading {complete[0]} needs {packages}:"
                " install it, or add the tokenizer.json"
            )
        )
    # A SentencePiece model knows its special tokens; any other vocabulary would get padding by guess.
    if (folder / TOKENIZER_CONFIG).is_file() or complete != (SENTENCEPIECE_FILE,):
        faults += _faults_of(lambda: read_json(folder / TOKENIZER_CONFIG))
    return faults


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _faults_of(read: Callable[[], object]) -> list[CheckpointError]:
    try:
        read()
    except CheckpointError as fault:
        return [fault]
    return []
