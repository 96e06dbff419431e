"""assemble: puts a pipeline's components together from a file, a folder and single components. Checkpoint calls it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kdit.errors import CheckpointError, CheckpointMissingError
from kdit.models.single_file import text_encoders
from kdit.models.single_file.component_table import (
    FOUND,
    INCOMPLETE,
    LEFT_OUT,
    MISSING,
    PUBLISHED,
    ComponentRow,
    missing_row,
    render,
)
from kdit.models.single_file.family import Config, PipelineForm, SingleFileFamily, families
from kdit.models.single_file.file_component import FileComponent, component_of
from kdit.models.single_file.lone_parts import lone_rows
from kdit.models.single_file.parts import NETWORK, VAE
from kdit.models.single_file.recognise import FilePart, FileParts, open_parts
from kdit.models.single_file.sources import ComponentSources
from kdit.models.weights.component_folder import ComponentFolder, ComponentKind
from kdit.models.weights.weight_files import samples

logger = logging.getLogger(__name__)

SCHEDULER = "scheduler"


@dataclass(frozen=True)
class Layout:
    """What model_index.json of a folder would say, its components, and what is told about each."""

    index: dict[str, object]
    components: dict[str, ComponentFolder]
    rows: tuple[ComponentRow, ...] = ()
    title: str = ""  # what the rows are about
    fault: CheckpointError | None = None


def assemble_file(path: Path, base: Layout | None, sources: ComponentSources) -> Layout:
    """The pipeline of a single file; what the file lacks comes from ``sources`` or ``base``.

    Missing components are a fault of the result. Raises CheckpointError for a file that cannot be used.
    """
    held = open_parts(path)
    network = next((part for part in held.parts if part.family is not None), None)
    if network is None:
        kinds = ", ".join(part.class_name for part in held.parts)
        raise CheckpointError(
            f"{path} holds no diffusion transformer, only {kinds}; give the file or folder of the transformer as the"
            " model, and this one as one of its components",
            table=render(lone_rows(held.parts)),
        )
    if NETWORK in sources.names:
        raise CheckpointError(
            f"components names {NETWORK!r}, but {path} is the transformer itself; give a folder as the model to"
            " replace its transformer"
        )
    if held.unknown:
        logger.warning("%s: %d tensors are not read: %s", path, len(held.unknown), samples(held.unknown))
    return _Assembly(network, held, base, sources).layout()


def assemble_folder(base: Layout, sources: ComponentSources, where: Path) -> Layout:
    """A folder's pipeline with some components from elsewhere."""
    if not sources.names:
        return base
    source = sources.given.get(NETWORK)
    if source is not None and source.is_file():
        held = open_parts(source)
        network = next((part for part in held.parts if part.family is not None), None)
        if network is None:
            raise CheckpointError(f"{source} holds no diffusion transformer for components[{NETWORK!r}]")
        return _Assembly(network, FileParts((network,), ()), base, sources).layout()
    stated = base.components.get(NETWORK)
    family = next((f for f in families() if stated is not None and f.network_class == stated.class_name), None)
    if family is None or stated is None:
        raise CheckpointError(f"{where}: components can be replaced in a pipeline that kdit has a network for")
    listed = {
        name: (str(value[0]), str(value[1]))
        for name, value in base.index.items()
        if isinstance(value, list) and len(value) == 2 and value[0] is not None
    }
    options = {k: v for k, v in base.index.items() if isinstance(v, bool | int | float | str) and not k.startswith("_")}
    form = PipelineForm(str(base.index["_class_name"]), listed, options)
    return _Assembly(None, None, base, sources, family=family, form=form).layout()


class _Assembly:
    """One pipeline on its way: resolves each component once, in the order of the form."""

    def __init__(
        self,
        network: FilePart | None,
        held: FileParts | None,
        base: Layout | None,
        sources: ComponentSources,
        *,
        family: SingleFileFamily | None = None,
        form: PipelineForm | None = None,
    ) -> None:
        found = network.family if network is not None else family
        assert found is not None
        self.network, self.held, self.base, self.sources, self.family = network, held, base, sources, found
        self._check_base()
        self.config: Config = {}
        if network is not None:
            self.config = self.family.config(network.shapes, self._like(NETWORK, network.class_name))
            form = self._choose_form()
        assert form is not None
        self.form = form
        self.rows: list[ComponentRow] = []
        self.components: dict[str, ComponentFolder] = {}

    def layout(self) -> Layout:
        """All components; raises CheckpointError for names that the pipeline does not have."""
        self._check_names()
        index: dict[str, object] = {"_class_name": self.form.class_name}
        if self.network is not None:
            index[NETWORK] = ["diffusers", self.network.class_name]
            self._take(NETWORK, component_of(self.network, NETWORK, self.network.class_name, self.config))
        dropped = self.sources.left_out | {n for o in self.sources.left_out for n in self.family.optional.get(o, ())}
        for name, (library, class_name) in self.form.components.items():
            if name in dropped:
                index[name] = [None, None]
                self.rows.append(ComponentRow(name, LEFT_OUT, "as asked"))
                continue
            index[name] = [library, class_name]
            if component := self._resolve(name, library, class_name):
                index[name] = [component.library or library, component.class_name]
                self._take(name, component)
            elif name not in self.components:
                self.rows.append(missing_row(name, name in self.family.optional))
        index |= self._options()
        title = f"{self.family.title}, {self.form.class_name}"
        rows = tuple(self.rows)
        logger.info("%s:\n%s", title, render(rows))
        return Layout(index, self.components, rows, title, self._fault(title))

    def _fault(self, title: str) -> CheckpointError | None:
        missing = [row.name for row in self.rows if row.state == MISSING]
        if not missing:
            return None
        assert self.network is not None, "a folder lists what it has"
        return CheckpointMissingError(
            f"{self.network.path} ({title}) lacks {', '.join(missing)}. A folder of a {self.family.title} pipeline"
            " supplies them all, components=FOLDER (--components FOLDER), or give them one by one,"
            f' components={{"{missing[0]}": PATH}}{self._may_be_left_out(missing)}',
            table=render(self.rows),
        )

    def _may_be_left_out(self, missing: Sequence[str]) -> str:
        optional = [name for name in missing if name in self.family.optional]
        return f"; None leaves {' or '.join(optional)} out" if optional else ""

    def _take(self, name: str, component: ComponentFolder) -> None:
        self.components[name] = component
        source = f"{component.path} ({component.class_name})"
        if isinstance(component, FileComponent) and component.fault is not None:
            unknown = ", ".join(self.family.unknown(component.config))
            self.rows.append(ComponentRow(name, INCOMPLETE, f"{source}; --components FOLDER supplies {unknown}"))
        else:
            self.rows.append(ComponentRow(name, FOUND, source))

    def _resolve(self, name: str, library: str, class_name: str) -> ComponentFolder | None:
        """From what was given, from the file, from the folder; None if it is in neither or settled already."""
        if name in self.sources.given:
            return self._given(name, library, class_name, self.sources.given[name])
        if (part := self._part_of_file(name)) is not None:
            return self._from_part(part, name, class_name)
        if self.base is not None and name in self.base.components and self._base_fits(name):
            return self.base.components[name]
        if name == SCHEDULER and self.network is not None:
            config = self.family.scheduler(self.config)
            class_name = str(config["_class_name"])
            path = self.network.path
            self.components[name] = FileComponent(path, class_name, library, component=name, stated=config)
            self.rows.append(ComponentRow(name, PUBLISHED, f"the settings published with {self.family.title}"))
        return None

    def _part_of_file(self, name: str) -> FilePart | None:
        """The part of the main file that is this component."""
        if self.held is None:
            return None
        wanted = {VAE: VAE} | {component: part for part, component in self.family.text_parts.items()}
        return next((p for p in self.held.parts if p.family is None and p.part == wanted.get(name)), None)

    def _base_fits(self, name: str) -> bool:
        """A folder's scheduler is for its own network; of a like pipeline others may be published."""
        assert self.base is not None
        stated = self.base.components.get(NETWORK)
        if name != SCHEDULER or self.network is None or stated is None:
            return True
        return self.family.scheduler(stated.config) == self.family.scheduler(self.config)

    def _given(self, name: str, library: str, class_name: str, path: Path) -> ComponentFolder:
        if path.is_file():
            return self._from_file(name, class_name, path)
        folder = path / name if (path / "model_index.json").is_file() else path
        if not folder.is_dir():
            raise CheckpointMissingError(f"components[{name!r}]: there is no folder or file {folder}")
        stated = ComponentFolder(folder, class_name, library)
        if stated.kind is ComponentKind.MODEL:
            model = ComponentFolder.at(folder)
            if model.class_name != class_name:
                raise CheckpointError(
                    f"components[{name!r}]: {folder} is a {model.class_name}, expected a {class_name}"
                )
            return replace(model, library=library)
        if stated.kind is ComponentKind.SCHEDULER:
            found = stated.config.get("_class_name")
            if not isinstance(found, str):
                raise CheckpointError(f"components[{name!r}]: {stated.config_path} states no _class_name")
            return replace(stated, class_name=found)
        return stated

    def _from_file(self, name: str, class_name: str, path: Path) -> ComponentFolder:
        parts = open_parts(path).parts
        if name.startswith(NETWORK):
            fitting = [part for part in parts if part.family is self.family]
        elif name == VAE:
            fitting = [part for part in parts if part.class_name == self.family.vae.class_name]
        else:
            fitting = [part for part in parts if part.class_name in text_encoders.SAME_TENSORS.get(class_name, ())]
            wanted = [part for part, component in self.family.text_parts.items() if component == name]
            fitting = [part for part in fitting if part.part in wanted] or fitting
        if len(fitting) != 1:
            kinds = ", ".join(part.class_name for part in parts)
            raise CheckpointError(
                f"components[{name!r}]: {path} holds {kinds}, expected one {class_name}; a folder in the layout of"
                f" diffusers can be given too"
            )
        return self._from_part(fitting[0], name, class_name)

    def _from_part(self, part: FilePart, name: str, class_name: str) -> ComponentFolder:
        if part.family is not None:
            config = self.family.config(part.shapes, self._like(name, part.class_name) or self.config)
            return component_of(part, name, part.class_name, config)
        like = self._like(name, class_name)
        if name == VAE:
            return component_of(part, name, part.class_name, self.family.vae.config(part.shapes, like))
        text_encoders.check_class(part.path, class_name, part.tensors)
        return component_of(part, name, class_name, text_encoders.config_from_shapes(class_name, part.shapes, like))

    def _like(self, name: str, class_name: str) -> Mapping[str, object]:
        """The config that the folder has for a component of that class; empty if it has none."""
        stated = None if self.base is None else self.base.components.get(name)
        if stated is None or stated.class_name != class_name:
            return {}
        return {
            key: value for key, value in stated.config.items() if not key.startswith("_") and key != "architectures"
        }

    def _choose_form(self) -> PipelineForm:
        """The folder's pipeline, where the network fits it; else the likeliest for the shape of the network."""
        given = set(self.sources.given) | set(() if self.base is None else self.base.components)
        candidates = self.family.forms(self.config, given)
        of_base = None if self.base is None else self.base.index["_class_name"]
        return next((form for form in candidates if form.class_name == of_base), candidates[0])

    def _options(self) -> dict[str, object]:
        """The form's options; the folder's own values count where it is of the same pipeline."""
        options: dict[str, object] = dict(self.form.options)
        if self.base is not None and self.base.index["_class_name"] == self.form.class_name:
            options |= {key: self.base.index[key] for key in options if self.base.index.get(key) is not None}
        return options

    def _check_base(self) -> None:
        if self.base is None:
            return
        stated = self.base.components.get(NETWORK)
        if stated is None or stated.class_name != self.family.network_class:
            has = "no transformer" if stated is None else stated.class_name
            raise CheckpointError(
                f"the folder that is to supply components has {has}, expected one of a {self.family.title} pipeline"
                f" ({self.family.network_class})"
            )

    def _check_names(self) -> None:
        known = (NETWORK, *self.form.components)
        if unknown := sorted(self.sources.names.difference(known)):
            raise CheckpointError(
                f"components names {', '.join(map(repr, unknown))}; {self.form.class_name} has {', '.join(known)}"
            )
        fixed = [name for name in sorted(self.sources.left_out) if name not in self.family.optional]
        if fixed:
            can = ", ".join(self.family.optional) or "nothing"
            raise CheckpointError(f"{', '.join(fixed)} cannot be left out of {self.form.class_name}; {can} can")
