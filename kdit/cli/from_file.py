"""`kdit generate --from FILE`: the settings of a file that kdit made, as options of a new request."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kdit.config import FileOptions
from kdit.errors import ConfigError, InputError
from kdit.keys import PipelineKey, family_of_pipeline
from kdit.media.formats import DEFAULT_SUFFIX
from kdit.media.metadata import read_settings
from kdit.pipelines.extra_inputs import ExtraInputs, MediaInputs
from kdit.version import __version__

if TYPE_CHECKING:
    from kdit.pipelines.family_pipeline import FamilyPipeline

logger = logging.getLogger(__name__)

_NUMBER = (int, float)
# recorded name -> option, and the kinds of value that it can have
_OPTIONS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "prompt": ("prompts", (str,)),
    "negative_prompt": ("negative", (str,)),
    "model": ("model", (str,)),
    "components": ("components", (dict,)),
    "variant": ("variant", (str,)),
    "seed": ("seed", (int,)),
    "size": ("size", (list,)),
    "frame_num": ("frames", (int,)),
    "fps": ("fps", (str,)),
    "fit": ("fit", (str,)),
    "steps": ("steps", (int,)),
    "guidance_scale": ("guidance", _NUMBER),
    "cfg_scale": ("cfg", _NUMBER),
    "cfg_scale_2": ("cfg2", _NUMBER),
    "strength": ("strength", _NUMBER),
    "max_sequence_length": ("max_sequence_length", (int,)),
    "dtype": ("dtype", (str,)),
    "component_dtypes": ("component_dtypes", (dict,)),
    "modulation": ("modulation", (str,)),
    "batch_invariant": ("batch_invariant", (bool,)),
}
_FILE_OPTIONS = tuple(item.name for item in dataclasses.fields(FileOptions))
_ABOUT = {
    "kdit_version",
    "model_version",
    "model_hash",
    "pipeline",
    "fed",
    "media",
    "extra_inputs",
    "input_files",
    "file_options",
    "rows_per_forward",
}


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What one file says about how it was made. ``notes`` collects why a remake may differ."""

    path: Path
    settings: Mapping[str, object]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Raises InputError for a file without settings, and for one that needs tensors which no file holds."""
        path = path.expanduser()
        recording = cls(path=path, settings=read_settings(path))
        if fed := recording.settings.get("fed"):
            raise InputError(
                f"{recording.name} was made with tensors fed from Python ({fed}); they are not in it, "
                "so it cannot be made again"
            )
        if unknown := sorted(recording.settings.keys() - _OPTIONS.keys() - _ABOUT):
            recording._note(f"this version of kdit does not know these settings of {recording.name}: {unknown}")
        made_by = recording.settings.get("kdit_version")
        if made_by != __version__:
            recording._note(
                f"{recording.name} was made by kdit {made_by}, this is {__version__}; it may come out other"
            )
        return recording

    @property
    def name(self) -> str:
        """The file in messages."""
        return repr(str(self.path))

    @property
    def model(self) -> str | None:
        """The model that the file was made with, as it was named then."""
        model = self.settings.get("model")
        return model if isinstance(model, str) else None

    def options(self, *, without: Mapping[str, object]) -> dict[str, object]:
        """Recorded values by option, but for the options that have a value in ``without``. Raises InputError."""
        found: dict[str, object] = {}
        for recorded, (option, kinds) in _OPTIONS.items():
            value = self.settings.get(recorded)
            if value is None or without.get(option) not in (None, (), {}):
                continue
            if type(value) not in kinds:
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise InputError(f"{self.name}: recorded {recorded} must be {expected}, got {value!r:.80}")
            found[option] = value
        if "prompts" in found:
            found["prompts"] = (found["prompts"],)
        if "size" in found:
            found["size"] = tuple(cast(list[object], found["size"]))
        if without.get("model") not in (None, self.model):  # these were of the recorded one
            found.pop("components", None)
            found.pop("variant", None)
        if found.get("negative") == "":  # what guidance without a negative prompt records
            del found["negative"]
        if without.get("cfg") is not None and self.settings.get("cfg_scale_2") == self.settings.get("cfg_scale"):
            found.pop("cfg2", None)  # it followed the first, which was replaced
        return found

    def file_options(self, output: Path | None, *, without: Mapping[str, object]) -> dict[str, object]:
        """How the file was encoded, for another of its format. Raises InputError."""
        by_default = DEFAULT_SUFFIX["video"] if without.get("model") in (None, self.model) else None
        if self.path.suffix.lower() != (by_default if output is None else output.suffix.lower()):
            return {}
        recorded = self._mapping("file_options")
        return {name: recorded[name] for name in _FILE_OPTIONS if name in recorded and without.get(name) is None}

    def compare_model(self, model_hash: str) -> None:
        """Note a model with other weights than the recorded one's."""
        recorded = self.settings.get("model_hash")
        if recorded != model_hash:
            self._note(
                f"the model is not the one that made {self.name}: its hash was {recorded}, is {model_hash}; "
                "the result will differ"
            )

    @contextmanager
    def settings_for(self, family: FamilyPipeline) -> Iterator[None]:
        """Inside, an error says first that the file was made by another pipeline, if it was: that is why its recorded
        settings do not fit.
        """
        recorded = self.settings.get("pipeline")
        try:
            yield
        except (InputError, ConfigError) as error:
            if recorded not in (None, family.key.value):
                error.args = (
                    f"{self.name} was made by {_titled(recorded)}, this model is {_titled(family.key.value)}, and the "
                    f"recorded settings do not fit it: {error}",
                )
            raise

    def extra_inputs(self, family: FamilyPipeline, given: MediaInputs) -> tuple[MediaInputs, ExtraInputs | None]:
        """The recorded input files and texts, with ``given`` ones in their place.

        Raises InputError for recorded files that are gone, and for inputs that the family does not take.
        """
        recorded = self._mapping("extra_inputs")
        if given == MediaInputs() and recorded:  # what is recorded for this very sample, not for its whole batch
            media, taken = self._recorded_media(), None
        else:
            media = self._merged_media(given)
            taken = family.take_media(media)
        if not recorded:
            return media, taken
        takes = family.extra_inputs
        known = () if takes is None else {item.name for item in dataclasses.fields(takes)}
        if takes is None or not recorded.keys() <= set(known):
            names = ", ".join(f"`extra_inputs.{name}`" for name in recorded)
            raise InputError(f"{self.name} was made with {names}, which {family.key.value} does not take")
        replaced = {} if taken is None else taken.given()
        tuples = {item.name for item in dataclasses.fields(takes) if isinstance(item.default, tuple)}
        values = {name: self._input(name, value) for name, value in recorded.items() if name not in replaced}
        values = {name: tuple(cast(list[object], v)) if name in tuples else v for name, v in values.items()}
        make = cast(Callable[..., ExtraInputs], takes)
        return media, make(**{**values, **replaced})

    def _recorded_media(self) -> MediaInputs:
        recorded = self._mapping("media")
        known = {item.name for item in dataclasses.fields(MediaInputs)}
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in recorded.items() if name in known}
        return cast(Callable[..., MediaInputs], MediaInputs)(**values)

    def _merged_media(self, given: MediaInputs) -> MediaInputs:
        recorded = self._mapping("media")
        names = [item.name for item in dataclasses.fields(MediaInputs)]
        values: dict[str, object] = {name: getattr(given, name) for name in names}
        for name in names:
            if not values[name] and name in recorded:
                value = self._located(recorded[name])
                values[name] = tuple(value) if isinstance(value, list) else value
        return cast(Callable[..., MediaInputs], MediaInputs)(**values)

    def _input(self, name: str, value: object) -> object:
        return self._located(value) if name.endswith(("_path", "_paths")) else value

    def _located(self, value: object) -> object:
        """A recorded path, or lists of such, where the files are now: as recorded, or beside the file read."""
        if isinstance(value, list):
            return [self._located(item) for item in value]
        if not isinstance(value, str):
            raise InputError(f"{self.name}: a recorded input file must be a path, got {value!r:.80}")
        places = [Path(value), self.path.parent / value, self.path.parent / Path(value).name]
        found = next((str(place) for place in places if place.is_file()), None)
        if found is None:
            raise InputError(f"{value!r}, from which {self.name} was made, is gone; give it with --image, --mask, ...")
        self._compare_file(value, found)
        return found

    def _compare_file(self, recorded: str, found: str) -> None:
        from kdit.pipelines.request import file_hash

        if self._mapping("input_files").get(recorded, "") not in ("", file_hash(found)):
            self._note(f"{found!r} has changed since {self.name} was made from it; the result will differ")

    def _mapping(self, name: str) -> Mapping[str, object]:
        value = self.settings.get(name) or {}
        if not isinstance(value, dict):
            raise InputError(f"{self.name}: recorded {name} must be an object, got {value!r:.80}")
        return value

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            logger.warning("%s", note)


def _titled(pipeline: object) -> str:
    """A pipeline by its recorded name, with its family's title if this version knows it."""
    key = next((key for key in PipelineKey if key.value == pipeline), None)
    return str(pipeline) if key is None else f"{family_of_pipeline(key).title} ({key.value})"


def record_media(settings: dict[str, object], media: MediaInputs) -> None:
    """Add the files of a command line, in its own words, to what a result's files state."""
    named = {item.name: getattr(media, item.name) for item in dataclasses.fields(media)}
    settings["media"] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in named.items() if value
    }
