"""Every cell of the capability matrix: a "yes" runs and does what it says, a "no" is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from kdit import (
    ExecuteConfig,
    FuseKernelConfig,
    InputError,
    ParallelConfig,
    Pipeline,
    QuantizeConfig,
    RuntimeConfig,
    SampleConfig,
    TensorKey,
    UnsupportedOptionError,
)
from kdit.config import DTYPES
from kdit.pipelines.capability_matrix import FED, MEDIA_OPTIONS, PIPELINE_OPTIONS, PipelineRow, capability_matrix
from kdit.pipelines.context_builders.flux import FluxKontextExtraInputs
from kdit.pipelines.context_builders.sd3 import SD3ExtraInputs
from kdit.pipelines.extra_inputs import ExtraInputs, MediaInputs
from kdit.pipelines.options import CACHES
from tests.models.fill import distance

REFERENCE = {  # a tiny checkpoint of each pipeline
    "flux1-t2i": "flux_dev",
    "flux1-fill": "flux_fill",
    "flux1-control": "flux_control",
    "flux1-kontext": "flux_kontext",
    "sd3-t2i": "sd35_medium",
    "wan2.1-t2v": "wan21_t2v",
    "wan2.1-i2v": "wan21_i2v",
    "wan2.2-t2v-14b": "wan22_t2v_a14b",
    "wan2.2-i2v-14b": "wan22_i2v_a14b",
    "wan2.2-ti2v-5b": "wan22_ti2v_5b",
}
SPECIAL = {("wan2.1-i2v", "--last-image"): "wan21_flf2v"}  # options that not every checkpoint of a pipeline has
NEEDED = {  # files without which a pipeline makes nothing
    "flux1-fill": ("images", "mask"),
    "flux1-control": ("control",),
    "flux1-kontext": ("images",),
    "wan2.1-i2v": ("images",),
    "wan2.2-i2v-14b": ("images",),
    "wan21_flf2v": ("images", "last_image"),  # that checkpoint
}
ROWS = {row.pipeline: row for row in capability_matrix()}
CELLS = [(row.pipeline, option.name) for row in ROWS.values() for option in PIPELINE_OPTIONS]
YES = [cell for cell in CELLS if ROWS[cell[0]].options[cell[1]]]
NO = [cell for cell in CELLS if not ROWS[cell[0]].options[cell[1]]]
SAME = 1e-5


class Model:
    """One tiny checkpoint, its pipelines and the smallest request that it can make."""

    def __init__(self, row: PipelineRow, folder: Path, needed: tuple[str, ...], pictures: dict[str, str]) -> None:
        self.row, self.folder, self.needed, self.pictures = row, folder, needed, pictures
        self.pipe = cache(self._load)

    def _load(self, config: ExecuteConfig | None = None) -> Pipeline:
        return Pipeline.from_models(self.folder, execute_config=config)

    def media(self, *more: str) -> ExtraInputs | None:
        """The files that the pipeline needs, and those of the fields named."""
        names = dict.fromkeys((*self.needed, *more))
        given: dict[str, Any] = {name: self.pictures[name] for name in names}
        if "images" in given:
            given["images"] = (given["images"],)
        extra = self.pipe().family.take_media(MediaInputs(**given))
        # A reference would be encoded at a megapixel.
        return replace(extra, auto_resize=False) if isinstance(extra, FluxKontextExtraInputs) else extra

    def request(self, pipe: Pipeline | None = None, **changes: Any) -> dict[str, Any]:
        """Arguments of ``Pipeline.request``; fields of the configs may be given by name."""
        defaults = (pipe or self.pipe()).defaults
        low, high = defaults.min_sequence_length, defaults.max_sequence_limit
        sample = {"steps": 2, "cfg_scale": 1.0, "max_sequence_length": max(low, min(high, 16))}
        side = 2 * defaults.size_multiple
        runtime = {"seed": 3, "size": (side, side), "frame_num": None if defaults.frame_num is None else 5}
        for given, kind in ((sample, SampleConfig), (runtime, RuntimeConfig)):
            given.update({item.name: changes.pop(item.name) for item in fields(kind) if item.name in changes})
        arguments: dict[str, Any] = {
            "prompt": "a red fox",
            "sample_config": SampleConfig(**sample),  # type: ignore[arg-type]
            "runtime_config": RuntimeConfig(output_type="latents", **runtime),  # type: ignore[arg-type]
            "extra_inputs": None if "extra_inputs" in changes else self.media(),
        }
        return {**arguments, **changes}

    def make(self, pipe: Pipeline | None = None, **changes: Any) -> Tensor:
        pipe = pipe or self.pipe()
        made = pipe.generate(**self.request(pipe, **changes)).latents
        assert torch.isfinite(made).all()
        return made

    def held(self, key: TensorKey, **changes: Any) -> Tensor | list[Tensor]:
        """What lies on that pin of the graph in this request."""
        with self.pipe().begin(self.pipe().request(**self.request(**changes)), hold=(key,)) as run:
            return run.fetch(key)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A file for each field of MediaInputs."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = torch.Generator().manual_seed(0)
    made = {}
    for item in fields(MediaInputs):
        made[item.name] = str(folder / f"{item.name}.png")
        pixels = torch.randint(256, (32, 32, 3), generator=generator, dtype=torch.uint8)
        picture = Image.fromarray(pixels.numpy())
        picture = picture.convert("L").point(lambda level: 255 * (level > 127)) if item.name == "mask" else picture
        picture.save(made[item.name])
    return made


@pytest.fixture(scope="session")
def models(reference_family: Callable[[str], Path], pictures: dict[str, str]) -> Callable[[str, str], Model]:
    @cache
    def model(pipeline: str, option: str) -> Model:
        family = SPECIAL.get((pipeline, option), REFERENCE[pipeline])
        return of_family(pipeline, family)

    @cache
    def of_family(pipeline: str, family: str) -> Model:
        needed = NEEDED.get(family, NEEDED.get(pipeline, ()))
        return Model(ROWS[pipeline], reference_family(family) / "model", needed, pictures)

    return model


def test_every_pipeline_has_a_checkpoint_and_every_option_a_way_to_ask() -> None:
    assert set(REFERENCE) == set(ROWS)
    assert {option.name for option in PIPELINE_OPTIONS} == set(ASKING)


# ---- how each option is asked for: gives back what it must do, as (got, expected, whether they are equal) -----------

Outcome = tuple[Tensor, Tensor, bool]


def media(field: str) -> Callable[[Model], Outcome]:
    def ask(model: Model) -> Outcome:
        if field in model.needed:  # another file makes another result
            other = model.pictures["images" if field == "control" else "control"]
            changed = Model(model.row, model.folder, model.needed, {**model.pictures, field: other})
            changed.pipe = model.pipe
            return model.make(), changed.make(), False
        return model.make(extra_inputs=model.media(field)), model.make(), False

    return ask


def strength(model: Model) -> Outcome:
    extra = model.media("images") if model.row.options["--image"] else model.media()
    weak, strong = (model.make(extra_inputs=extra, strength=value) for value in (0.5, 1.0))
    return weak, strong, False


def fed(key: TensorKey) -> Callable[[Model], Outcome]:
    """Text that is fed in place of the same text makes the same; noise of zeros does not."""

    def ask(model: Model) -> Outcome:
        cfg = 2.0 if key is TensorKey.NEGATIVE else 1.0
        if key is TensorKey.NOISE:
            shape = model.pipe().family.latents.shape(model.pipe().checkpoint, *size_of(model))
            return model.make(feeds={key: torch.zeros(1, *shape)}), model.make(), False
        held = model.held(key, cfg_scale=cfg)
        return model.make(feeds={key: held}, cfg_scale=cfg), model.make(cfg_scale=cfg), True

    return ask


def size_of(model: Model) -> tuple[tuple[int, int], int | None]:
    config = model.request()["runtime_config"]
    return config.size, config.frame_num


def scale(**changes: float) -> Callable[[Model], Outcome]:
    def ask(model: Model) -> Outcome:
        lower = {name: value / 2 for name, value in changes.items()}
        return (
            model.make(steps=4, **{"cfg_scale": 2.0, **changes}),
            model.make(steps=4, **{"cfg_scale": 2.0, **lower}),
            False,
        )

    return ask


def skip_layers(model: Model) -> Outcome:
    changes = {"steps": 4, "cfg_scale": 2.0}
    extra = SD3ExtraInputs(skip_layers=(0,), skip_layer_start=0.0, skip_layer_stop=1.0)
    return model.make(extra_inputs=extra, **changes), model.make(**changes), False


def execute(**changes: Any) -> Callable[[Model], Outcome]:
    def ask(model: Model) -> Outcome:
        config = ExecuteConfig(**changes)
        with Pipeline.open(model.folder, execute_config=config) as pipe:
            if any(
                name in ("quant_config", "compile", "offload", "fuse_kernel_config", "cache_config") for name in changes
            ):
                pytest.fail(f"{changes} is supported now: check here what it does")
            pipe.load_models()
            made = model.make(pipe)
        wanted = getattr(torch, config.dtype)
        assert made.dtype in (wanted, torch.float32)  # some families keep their latents in float32
        return made.float(), model.make(), wanted is torch.float32

    return ask


def axis(name: str) -> Callable[[Model], Outcome]:
    def ask(model: Model) -> Outcome:
        # vae and text_encoder_tp are parts of the world; the world of a part is asked for through dp
        parts = {"dp": 2, name: 2} if name in ("vae", "text_encoder_tp") else {name: 2}
        Pipeline.open(model.folder, parallel_config=ParallelConfig(**parts))
        pytest.fail(f"{name} is supported now: check here what it does")

    return ask


def step_batch(model: Model) -> Outcome:
    pipe = model.pipe()
    ahead = pipe.begin(pipe.request(**model.request(seed=5, steps=3)))
    run = pipe.begin(pipe.request(**model.request()))
    with ahead, run:
        pipe.step([ahead])
        for _ in range(2):
            pipe.step([ahead, run])
        return (
            torch.cat([run.finish().latents, ahead.finish().latents]),
            torch.cat([model.make(), model.make(seed=5, steps=3)]),
            True,
        )


ASKING: dict[str, Callable[[Model], Outcome]] = {
    **{flag: media(field) for field, flag in MEDIA_OPTIONS.items()},
    "strength": strength,
    **{f"fed {key.name}": fed(key) for key in FED},
    "cfg_scale": scale(cfg_scale=4.0),
    "cfg_scale_2": scale(cfg_scale_2=6.0),
    "embedded guidance": scale(guidance_scale=6.0),
    "skip-layer guidance": skip_layers,
    **{f"dtype {name}": execute(dtype=name) for name in DTYPES},
    "batch_invariant": execute(batch_invariant=True),
    "modulation table": execute(modulation="table"),
    "modulation inline": execute(modulation="inline"),
    "step batches": step_batch,
    "attention sdpa": execute(attention="sdpa"),
    "quant_config.sage_attn_type": execute(quant_config=QuantizeConfig(sage_attn_type="auto")),
    "compile": execute(compile=True),
    "offload": execute(offload=True),
    **{
        f"fuse_kernel_config.{item.name}": execute(fuse_kernel_config=FuseKernelConfig(**{item.name: True}))
        for item in fields(FuseKernelConfig)
    },
    **{f"cache {kind.__name__}": execute(cache_config=(kind(),)) for kind in CACHES},
    **{f"parallel axis {item.name}": axis(item.name) for item in fields(ParallelConfig)},
}
# The words by which a refusal names what is asked for, where these are not the option's own.
NAMED = {
    **{flag: field for field, flag in MEDIA_OPTIONS.items()},
    **{f"fed {key.name}": key.name for key in TensorKey},
    "embedded guidance": "guidance_scale",
    "skip-layer guidance": "SD3ExtraInputs",
    "parallel axis vae": "parallel axis",
    "parallel axis text_encoder_tp": "parallel axis",
}


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "option"), YES)
def test_what_is_declared_works(models: Callable[[str, str], Model], pipeline: str, option: str) -> None:
    got, expected, equal = ASKING[option](models(pipeline, option))
    assert got.shape == expected.shape
    apart = distance(got, expected)
    assert (apart < SAME) if equal else (apart > SAME), f"{option} of {pipeline}: {apart:.2g} apart"


@pytest.mark.parametrize(("pipeline", "option"), NO)
def test_what_is_not_declared_is_refused_by_name(
    models: Callable[[str, str], Model], pipeline: str, option: str
) -> None:
    with pytest.raises((UnsupportedOptionError, InputError)) as refusal:
        ASKING[option](models(pipeline, option))
    assert NAMED.get(option, option) in str(refusal.value)
