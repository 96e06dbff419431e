"""Turns the arguments of ``generate`` into checked, effective inputs. Called by Pipeline."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction

from kdit.config import CacheConfig, ExecuteConfig, RuntimeConfig, SampleConfig
from kdit.config.runtime_config import MAX_SEED, Fit, frame_rate
from kdit.errors import InputError, UnsupportedOptionError
from kdit.generators.registry import generator_def, generator_keys
from kdit.keys import ModelKey, TensorKey, family_of_model
from kdit.media.formats import OutputKind, check_output, check_text
from kdit.media.image_reader import read_image
from kdit.models.checkpoint import Checkpoint
from kdit.pipelines.context_builder import ContextBuilder
from kdit.pipelines.extra_inputs import ExtraInputs
from kdit.pipelines.generate_inputs import PipelineGenerateInputs
from kdit.pipelines.pipeline_defaults import PipelineDefaults
from kdit.pipelines.prompts import per_sample, prompt_list
from kdit.tensor.tensor_value import TensorData
from kdit.version import __version__

DRAWN_SEED_BITS = 32


@dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """A checked request, ready to run. ``Pipeline.request`` makes it."""

    owner: object = field(repr=False)  # the Pipeline that made it, which alone can run it
    builder: ContextBuilder
    inputs: PipelineGenerateInputs
    feeds: Mapping[TensorKey, TensorData]
    notices: tuple[str, ...]  # what was asked for and has no effect

    def check_file_texts(self) -> None:
        """Raise OutputError if the settings have no room in one of the files."""
        paths = self.inputs.runtime_config.save_paths or ()
        for path, text in zip(paths, self.builder.file_texts(self.inputs), strict=False):
            check_text(path, text)


def with_checkpoint_defaults(defaults: PipelineDefaults, checkpoint: Checkpoint) -> PipelineDefaults:
    """The family's defaults with those that the checkpoint's kdit.json states."""
    stated = checkpoint.info.defaults
    given = {item.name: getattr(stated, item.name) for item in fields(stated)}
    if stated.cfg_scale is not None:  # it counts for a second expert too
        defaults = replace(defaults, cfg_scale_2=None)
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def make_inputs(
    defaults: PipelineDefaults,
    execute_config: ExecuteConfig,
    prompt: str | list[str],
    prompt_negative: str | list[str] | None,
    sample_config: SampleConfig,
    runtime_config: RuntimeConfig,
    model_settings: dict[str, object],
    *,
    network: ModelKey,
    output: OutputKind,
    extra_inputs: ExtraInputs | None = None,
    changes_image: bool = False,
    cache_config: tuple[CacheConfig, ...] | None = None,
) -> tuple[PipelineGenerateInputs, list[str]]:
    """Effective inputs, and notices about settings that have no effect. Raises InputError."""
    prompts = prompt_list(prompt)
    sample, notices = _effective_sample(defaults, sample_config, network)
    sample = replace(sample, strength=_strength(sample.strength, defaults, network, changes_image=changes_image))
    negatives = _negatives(prompt_negative, len(prompts), sample, notices)
    size = runtime_config.size or defaults.size
    made_size = size_to_make(size, defaults, runtime_config.fit)
    frames = runtime_config.frame_num or defaults.frame_num
    made_frames = _frames_to_make(frames, defaults, runtime_config.fit)
    fps = _frame_rate(runtime_config, defaults, notices)
    seeds = _seeds(runtime_config.seed, len(prompts))
    _check_save_paths(runtime_config, len(prompts), output, size=(size[0], size[1]), num_frames=frames, fps=fps)
    files = () if extra_inputs is None else extra_inputs.files()
    hashes = {path: file_hash(path) for path in files}
    for path in files:
        read_image(path)  # a damaged one is told before the weights are loaded
    settings: dict[str, object] = {
        "kdit_version": __version__,
        **model_settings,
        "prompt": _one_or_list(prompts),
        "negative_prompt": None if negatives is None else _one_or_list(negatives),
        "seeds": list(seeds),
        "size": list(size),
        "frame_num": frames,
        "fps": None if fps is None else str(fps),
        "fit": runtime_config.fit,
        "steps": sample.steps,
        "guidance_scale": sample.guidance_scale,
        "cfg_scale": sample.cfg_scale,
        "cfg_scale_2": sample.cfg_scale_2,
        "strength": sample.strength,
        "max_sequence_length": sample.max_sequence_length,
        "extra_inputs": {} if extra_inputs is None else extra_inputs.given(),
        "input_files": hashes,
        "file_options": runtime_config.file_options.given(),
        "variant": execute_config.variant,
        "dtype": execute_config.dtype,
        "component_dtypes": dict(execute_config.component_dtypes),
        "modulation": execute_config.modulation,
        "batch_invariant": execute_config.batch_invariant,
    }
    inputs = PipelineGenerateInputs(
        prompts=prompts,
        negative_prompts=negatives,
        seeds=seeds,
        sample_config=sample,
        runtime_config=replace(runtime_config, size=made_size, frame_num=made_frames, seed=seeds),
        output_size=(size[0], size[1]),
        output_frames=frames,
        fps=fps,
        execute_config=execute_config,
        cache_config=cache_config,
        extra_inputs=extra_inputs,
        settings=settings,
    )
    return inputs, notices


def _effective_sample(defaults: PipelineDefaults, given: SampleConfig, key: ModelKey) -> tuple[SampleConfig, list[str]]:
    notices = []
    guidance = defaults.guidance_scale if given.guidance_scale is None else given.guidance_scale
    if given.guidance_scale is not None and defaults.guidance_scale is None:
        title = family_of_model(key).title
        if not generator_def(key).capabilities.embedded_guidance:
            raise UnsupportedOptionError(
                f"`guidance_scale`: {title} has no embedded guidance; use `cfg_scale` for classifier-free guidance"
            )
        notices.append(
            f"`guidance_scale` {given.guidance_scale:g} has no effect: this {title} checkpoint has no embedded guidance"
        )
        guidance = None
    cfg_scale = defaults.cfg_scale if given.cfg_scale is None else given.cfg_scale
    if given.cfg_scale_2 is not None:
        if not defaults.has_second_expert:
            raise UnsupportedOptionError("`cfg_scale_2` is for models with a second expert; this one has one network")
        if cfg_scale <= 1:
            notices.append(
                f"`cfg_scale_2` {given.cfg_scale_2:g} has no effect: `cfg_scale` is {cfg_scale:g}; it counts above 1"
            )
    max_length = given.max_sequence_length or defaults.max_sequence_length
    low, high = defaults.min_sequence_length, defaults.max_sequence_limit
    if not low <= max_length <= high:
        expected = f"exactly {high}" if low == high else f"from {low} to {high}"
        raise InputError(f"`max_sequence_length` is {max_length}, but this model takes {expected} tokens")
    effective = replace(
        given,
        steps=given.steps or defaults.steps,
        guidance_scale=guidance,
        cfg_scale=cfg_scale,
        cfg_scale_2=_second_scale(defaults, given, cfg_scale),
        max_sequence_length=max_length,
    )
    return effective, notices


def _second_scale(defaults: PipelineDefaults, given: SampleConfig, cfg_scale: float) -> float | None:
    """A second expert's own default counts only together with the first's."""
    if given.cfg_scale_2 is not None or not defaults.has_second_expert:
        return given.cfg_scale_2
    own = defaults.cfg_scale_2 if given.cfg_scale is None else None
    return cfg_scale if own is None else own


def _strength(given: float | None, defaults: PipelineDefaults, key: ModelKey, *, changes_image: bool) -> float | None:
    """How much of an image is changed; None if none is."""
    if given is not None and defaults.strength is None:
        others = {family_of_model(k).title for k in generator_keys() if generator_def(k).capabilities.image_strength}
        raise UnsupportedOptionError(
            f"`strength`: this pipeline of {family_of_model(key).title} does not begin at an image; "
            f"families that do: {', '.join(sorted(others)) or 'none'}"
        )
    if given is not None and not changes_image:
        raise InputError(f"`strength` is {given:g}, but there is no image to change; give one, or leave `strength` out")
    return (defaults.strength if given is None else given) if changes_image else None


def _negatives(
    given: str | list[str] | None, num_samples: int, sample: SampleConfig, notices: list[str]
) -> tuple[str, ...] | None:
    assert sample.cfg_scale is not None
    texts = None if given is None else per_sample(given, num_samples, "prompt_negative")
    if sample.cfg_scale > 1:
        return ("",) * num_samples if texts is None else texts
    if texts is not None:
        notices.append(f"`prompt_negative` has no effect: `cfg_scale` is {sample.cfg_scale:g}; it counts above 1")
    return None


def _one_or_list(texts: tuple[str, ...]) -> str | list[str]:
    return texts[0] if len(set(texts)) == 1 else list(texts)


def _seeds(given: int | tuple[int, ...] | None, num_samples: int) -> tuple[int, ...]:
    if isinstance(given, tuple):
        if len(given) != num_samples:
            raise InputError(f"{len(given)} seeds for {num_samples} prompts; give one int, or one seed for each")
        return given
    first = secrets.randbits(DRAWN_SEED_BITS) if given is None else given
    if first + num_samples - 1 > MAX_SEED:
        raise InputError(
            f"`seed` {first} is too large for {num_samples} samples: the last would have a seed above {MAX_SEED}"
        )
    return tuple(first + i for i in range(num_samples))


def size_to_make(size: tuple[int, int], defaults: PipelineDefaults, fit: Fit) -> tuple[int, int]:
    """The size that the network makes for a requested (width, height). Raises InputError naming the nearest ones."""
    multiple, limit = defaults.size_multiple, defaults.max_side
    if limit is not None and max(size) > limit:
        raise InputError(f"`size` {size[0]}x{size[1]}: this model makes at most {limit} pixels along each side")
    larger = tuple(-(-n // multiple) * multiple for n in size)
    if larger == tuple(size) or (fit != "reject" and (limit is None or max(larger) <= limit)):
        return larger[0], larger[1]
    width, height = (max(multiple, round(n / multiple) * multiple) for n in size)
    raise InputError(
        f"`size` {size[0]}x{size[1]}: width and height must be multiples of {multiple}; nearest: {width}x{height} "
        '(or `fit` "pad" or "crop": the next larger size is made and cut)'
    )


def _frames_to_make(frames: int | None, defaults: PipelineDefaults, fit: Fit) -> int | None:
    """The number of frames that the network makes: a multiple of ``frame_step``, and one."""
    if defaults.frame_num is None:
        if frames not in (None, 1):
            raise InputError(f"`frame_num` is {frames}, but this pipeline makes single pictures")
        return None
    assert frames is not None
    step = defaults.frame_step
    over = (frames - 1) % step
    if over == 0:
        return frames
    lower, higher = frames - over, frames - over + step
    if fit != "reject":
        return higher
    raise InputError(
        f"`frame_num` is {frames}, but this model makes {step} n + 1 frames; nearest: {lower} or {higher} "
        '(or `fit` "pad" or "crop": the next larger number is made and cut)'
    )


def _frame_rate(config: RuntimeConfig, defaults: PipelineDefaults, notices: list[str]) -> Fraction | None:
    if defaults.fps is None:
        if config.fps is not None:
            notices.append(f"`fps` {config.fps} has no effect: this pipeline makes single pictures")
        return None
    return frame_rate(defaults.fps if config.fps is None else config.fps)


def file_hash(path: str) -> str:
    """SHA-256 of an input file, by which a remake notices that it changed. Raises InputError."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"input file {path!r} cannot be read: {error.strerror or error}") from error


def _check_save_paths(
    config: RuntimeConfig,
    num_samples: int,
    output: OutputKind,
    *,
    size: tuple[int, int],
    num_frames: int | None,
    fps: Fraction | None,
) -> None:
    if config.save_paths is None:
        if given := config.file_options.given():
            raise InputError(f"{', '.join(f'`{name}`' for name in given)}: no file is written; give `save_paths`")
        return
    if config.output_type != "decoded":
        raise InputError('`save_paths` are for decoded results; output_type="latents" makes none')
    if len(config.save_paths) != num_samples:
        raise InputError(f"{len(config.save_paths)} `save_paths` for {num_samples} samples; give one for each")
    places = [os.path.realpath(path) for path in config.save_paths]
    if len(set(places)) != len(places):
        raise InputError(f"`save_paths` must differ, got {', '.join(config.save_paths)}")
    for path in config.save_paths:
        check_output(path, output, size=size, num_frames=num_frames, fps=fps, options=config.file_options)
