"""How far the result moves when an argument, a weight's last bit or a parameter changes (``--check``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tests.reference.call import call_arguments
from tests.reference.inputs import Clip, Noise, Picture, Reference
from tests.reference.record import Record, flatten
from tests.reference.registry import Case, Family
from tests.reference.run import run_latents

OTHER_PROMPT = "an old lighthouse above green waves"
SCALES = {
    "guidance_scale",
    "guidance_scale_2",
    "true_cfg_scale",
    "conditioning_scale",
    "audio_guidance_scale",
    "stg_scale",
    "modality_scale",
    "guidance_rescale",
    "skip_layer_guidance_scale",
}


def _variations(case: Case) -> Iterator[tuple[str, Case]]:
    """The same call with one thing changed."""

    def moved(value: Any) -> Any:
        if isinstance(value, (Picture, Clip, Reference)):
            return type(value)(**{**vars(value), "seed": value.seed + 50})
        return [moved(v) for v in value] if isinstance(value, list) else value

    def with_call(**changes: Any) -> Case:
        return Case(case.name, {**case.call, **changes}, case.seed, case.note)

    def noise(value: Any) -> Any:
        if isinstance(value, Noise):
            return Noise(value.shape, value.seed + 50)
        return [noise(v) for v in value] if isinstance(value, list) else value

    given = {k: noise(v) for k, v in case.call.items() if noise(v) != v}
    yield "seed/noise", Case(case.name, {**case.call, **given}, case.seed + 100, case.note)
    for key, value in case.call.items():
        if key in ("prompt", "prompt_2", "negative_prompt"):
            yield key, with_call(**{key: [OTHER_PROMPT] * len(value) if isinstance(value, list) else OTHER_PROMPT})
        elif key in SCALES:
            yield key, with_call(**{key: [1.3 * v for v in value] if isinstance(value, list) else 1.3 * value + 0.1})
        elif isinstance(value, list) and any(moved(v) != v for v in value):
            for i in range(len(value)):
                if isinstance(value[i], list):
                    for j in range(len(value[i])):
                        inner = [moved(v) if n == j else v for n, v in enumerate(value[i])]
                        yield (
                            f"{key}.{i}.{j}",
                            with_call(**{key: [inner if n == i else v for n, v in enumerate(value)]}),
                        )
                else:
                    yield f"{key}.{i}", with_call(**{key: [moved(v) if n == i else v for n, v in enumerate(value)]})
        elif moved(value) != value:
            yield key, with_call(**{key: moved(value)})


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    top = sum(float((a[k].double() - b[k].double()).pow(2).sum()) for k in a)
    return math.sqrt(top / sum(float(a[k].double().pow(2).sum()) for k in a))


def call_sensitivity(pipe: Any, spec: Family, case: Case, skip: set[str]) -> dict[str, float]:
    """Relative change of the final latents when one argument changes; ``repeat`` must be 0."""

    def latents(variant: Case) -> dict[str, torch.Tensor]:
        return run_latents(pipe, spec, call_arguments(variant)[0])

    base = latents(case)
    changes = {"repeat": distance(base, latents(case))} if "repeat" not in skip else {}
    for label, variant in _variations(case):
        if label not in skip:
            changes[label] = distance(base, latents(variant))
    return changes


@torch.no_grad()
def rounding_sensitivity(pipe: Any, spec: Family, case: Case) -> float:
    """Relative change of the final latents when the weights move by about one unit in the last place.

    This is what a different order of summation may cost; an engine's deviation should be of this order.
    """
    base = run_latents(pipe, spec, call_arguments(case)[0])
    modules = {k: m for k, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
    kept = {k: {n: p.detach().clone() for n, p in m.named_parameters()} for k, m in modules.items()}
    generator = torch.Generator().manual_seed(11)
    for module in modules.values():
        for p in module.parameters():
            p.mul_(1 + 2.0**-23 * torch.randint(-1, 2, p.shape, generator=generator))
    moved = run_latents(pipe, spec, call_arguments(case)[0])
    for k, module in modules.items():
        for n, p in module.named_parameters():
            p.copy_(kept[k][n])
    return distance(base, moved)


def parameter_sensitivity(record: Record) -> dict[str, dict[str, Any]]:
    """Gradient of a random projection of each component's first output with respect to every parameter.

    A parameter counts as dead when changing it by its own size moves the output by less than 1e-6 of
    the output's norm, to first order.
    """
    report: dict[str, dict[str, Any]] = {}
    for component, (module, kwargs) in record.first_call.items():
        tensors: list[torch.Tensor] = []
        with torch.enable_grad():
            if component.endswith(".decode"):
                output = module.decode(kwargs["x"], return_dict=False)
            elif component.endswith(".encode"):
                output = module.encode(kwargs["x"], return_dict=False)[0].mean
            else:
                output = module(**kwargs)
            values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
            for value in values:
                tensors += [t for _, t in flatten("", getattr(value, "sample", value)) if t.requires_grad]
            if component.startswith("text_encoder") and getattr(output, "hidden_states", None):
                tensors = list(output.hidden_states)[1:]
                pooled = [getattr(output, name, None) for name in ("text_embeds", "pooler_output")]
                tensors += [t for t in pooled if t is not None]
            generator = torch.Generator().manual_seed(5)
            loss = sum((t * torch.randn(t.shape, generator=generator)).sum() for t in tensors)
            scale = math.sqrt(sum(float(t.detach().double().pow(2).sum()) for t in tensors))
            named = dict(module.named_parameters())
            half = ("encoder.", "quant_conv.", "pre_block.", "mean_proj.", "logs_proj.")  # of an autoencoder
            if component.endswith(".decode"):
                named = {k: p for k, p in named.items() if not k.startswith(half)}
            elif component.endswith(".encode"):
                named = {k: p for k, p in named.items() if k.startswith(half)}
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        dead = [
            name
            for (name, p), g in zip(named.items(), gradients, strict=False)
            if g is None or float((g * p.detach()).norm()) < 1e-6 * scale
        ]
        report[component] = {"parameters": len(named), "dead": dead}
        module.zero_grad(set_to_none=True)
    return report
