"""Turns the arguments of ``generate`` into checked, effective inputs. Called by Pipeline."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from kdit.config import CacheConfig, ExecuteConfig, RuntimeConfig, SampleConfig
from kdit.config.runtime_config import MAX_SEED
from kdit.errors import InputError, UnsupportedOptionError
from kdit.generators.registry import generator_def
from kdit.keys import ModelKey, TensorKey, family_of_model
from kdit.models.checkpoint import Checkpoint
from kdit.output_file import check_writable
from kdit.pipelines.context_builder import ContextBuilder
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


def with_checkpoint_defaults(defaults: PipelineDefaults, checkpoint: Checkpoint) -> PipelineDefaults:
    """The family's defaults with those that the checkpoint's kdit.json states."""
    stated = checkpoint.info.defaults
    given = {item.name: getattr(stated, item.name) for item in fields(stated)}
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
    cache_config: tuple[CacheConfig, ...] | None = None,
) -> tuple[PipelineGenerateInputs, list[str]]:
    """Effective inputs, and notices about settings that have no effect. Raises InputError."""
    prompts = prompt_list(prompt)
    sample, notices = _effective_sample(defaults, sample_config, network)
    negatives = _negatives(prompt_negative, len(prompts), sample, notices)
    size = runtime_config.size or defaults.size
    _check_size(size, defaults.size_multiple)
    if runtime_config.frame_num not in (None, 1):
        raise InputError(f"frame_num is {runtime_config.frame_num}, but this pipeline makes single pictures")
    seeds = _seeds(runtime_config.seed, len(prompts))
    _check_save_paths(runtime_config, len(prompts))
    settings: dict[str, object] = {
        "kdit_version": __version__,
        **model_settings,
        "prompt": _one_or_list(prompts),
        "negative_prompt": None if negatives is None else _one_or_list(negatives),
        "seeds": list(seeds),
        "size": list(size),
        "steps": sample.steps,
        "guidance_scale": sample.guidance_scale,
        "cfg_scale": sample.cfg_scale,
        "max_sequence_length": sample.max_sequence_length,
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
        runtime_config=replace(runtime_config, size=size, seed=seeds),
        execute_config=execute_config,
        cache_config=cache_config,
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
                f"guidance_scale: {title} has no embedded guidance; use cfg_scale for classifier-free guidance"
            )
        notices.append(
            f"guidance_scale {given.guidance_scale:g} has no effect: this {title} checkpoint has no embedded guidance"
        )
        guidance = None
    if given.cfg_scale_2 is not None:
        raise UnsupportedOptionError("cfg_scale_2 is for models with a second expert; this one has one network")
    max_length = given.max_sequence_length or defaults.max_sequence_length
    if max_length > defaults.max_sequence_limit:
        raise InputError(
            f"max_sequence_length is {max_length}, but this model takes at most {defaults.max_sequence_limit} tokens"
        )
    effective = replace(
        given,
        steps=given.steps or defaults.steps,
        guidance_scale=guidance,
        cfg_scale=defaults.cfg_scale if given.cfg_scale is None else given.cfg_scale,
        max_sequence_length=max_length,
    )
    return effective, notices


def _negatives(
    given: str | list[str] | None, num_samples: int, sample: SampleConfig, notices: list[str]
) -> tuple[str, ...] | None:
    assert sample.cfg_scale is not None
    texts = None if given is None else per_sample(given, num_samples, "prompt_negative")
    if sample.cfg_scale > 1:
        return ("",) * num_samples if texts is None else texts
    if texts is not None:
        notices.append(f"prompt_negative has no effect: cfg_scale is {sample.cfg_scale:g}; it counts above 1")
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
            f"seed {first} is too large for {num_samples} samples: the last would have a seed above {MAX_SEED}"
        )
    return tuple(first + i for i in range(num_samples))


def _check_size(size: tuple[int, int], multiple: int) -> None:
    if all(n % multiple == 0 for n in size):
        return
    width, height = (max(multiple, round(n / multiple) * multiple) for n in size)
    raise InputError(
        f"size {size[0]}x{size[1]}: width and height must be multiples of {multiple}; nearest: {width}x{height}"
    )


def _check_save_paths(config: RuntimeConfig, num_samples: int) -> None:
    if config.save_paths is None:
        return
    if config.output_type != "decoded":
        raise InputError('save_paths are for pictures; output_type="latents" makes none')
    if len(config.save_paths) != num_samples:
        raise InputError(f"{len(config.save_paths)} save_paths for {num_samples} samples; give one for each")
    places = [os.path.realpath(path) for path in config.save_paths]
    if len(set(places)) != len(places):
        raise InputError(f"save_paths must differ, got {', '.join(config.save_paths)}")
    for path in config.save_paths:
        check_writable(path)
