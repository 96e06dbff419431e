"""GeneratorRunner over a tiny FLUX.1: mixed steps, modulation modes, noise, failures."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kdit.config import ExecuteConfig, SampleConfig
from kdit.errors import CheckpointError, InputError, NonFiniteError
from kdit.generators.capabilities import Capabilities
from kdit.generators.defs.flux import FluxLatentHandler, FluxTextHandler
from kdit.generators.denoise_state import DenoiseState
from kdit.generators.generator_context import AuxLatent, BaseLatent, GeneratorInferContext
from kdit.generators.generator_runner import GeneratorRunner
from kdit.generators.registry import generator_def
from kdit.keys import ModelKey, RunId, TensorKey
from kdit.models.flux.network import FluxNetwork
from kdit.models.rows import Cond
from kdit.nodes.core.step_report import StepReport
from kdit.ops.opset import OpSet
from tests.models.fill import distance, randomise

CONFIG: dict[str, Any] = dict(
    patch_size=1,
    in_channels=16,
    num_layers=1,
    num_single_layers=2,
    attention_head_dim=12,
    num_attention_heads=2,
    joint_attention_dim=10,
    pooled_projection_dim=14,
    guidance_embeds=True,
    axes_dims_rope=(4, 4, 4),
)
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
RUNNER = GeneratorRunner(generator_def(ModelKey.FLUX1))


def network(batch_invariant: bool = False) -> FluxNetwork:
    net = FluxNetwork.from_config(CONFIG, ops=OpSet(batch_invariant=batch_invariant))
    randomise(net, 1)
    return net


def context(net: FluxNetwork, *, seed: int = 0, num_samples: int = 1, **changes: Any) -> GeneratorInferContext:
    g = torch.Generator().manual_seed(1000 + seed)

    def text() -> list[Tensor]:
        return [torch.randn(num_samples, 5, 10, generator=g), torch.randn(num_samples, 14, generator=g)]

    fields: dict[str, Any] = dict(
        run=RunId(f"run-{seed}"),
        networks={ModelKey.FLUX1: net},
        positive=text(),
        negative=text(),
        base_latent=BaseLatent(torch.zeros(num_samples, 4, 6, 8)),
        aux_latent=None,
        vace_context=None,
        noise=None,
        seeds=tuple(range(seed, seed + num_samples)),
        sample_config=SampleConfig(steps=4, guidance_scale=3.0 + seed, cfg_scale=2.0 + seed),
        execute_config=ExecuteConfig(),
        scheduler_config=SCHEDULER,
        device=torch.device("cpu"),
    )
    return GeneratorInferContext(**{**fields, **changes})


def finish(state: DenoiseState) -> Tensor:
    while state.steps_left:
        RUNNER.step([state])
    return RUNNER.finish(state)


def staggered(contexts: list[GeneratorInferContext]) -> list[Tensor]:
    """Every request joins one step after the one before it; all that are there share each step."""
    states: list[DenoiseState] = []
    waiting = list(contexts)
    while waiting or any(s.steps_left for s in states):
        if waiting:
            states.append(RUNNER.prepare(waiting.pop(0)))
        RUNNER.step([s for s in states if s.steps_left])
    return [RUNNER.finish(s) for s in states]


@torch.inference_mode()
def test_run_is_its_three_parts_composed() -> None:
    net, seen = network(), list[StepReport]()
    whole = RUNNER.run(context(net), seen.append)
    assert torch.equal(whole, finish(RUNNER.prepare(context(net))))
    assert whole.shape == (1, 4, 6, 8)
    assert [(r.run, r.step_index, r.num_steps) for r in seen] == [("run-0", i, 4) for i in range(4)]
    assert seen[0].timestep == 1000 and all(a.timestep > b.timestep for a, b in pairwise(seen))


@pytest.mark.parametrize("modulation", ["table", "inline"])
@torch.inference_mode()
def test_requests_at_different_steps_equal_themselves_alone(modulation: str) -> None:
    net, config = network(), ExecuteConfig(modulation=modulation)  # type: ignore[arg-type]
    contexts = [
        context(
            net,
            seed=i,
            num_samples=1 + i % 2,
            execute_config=config,
            sample_config=SampleConfig(steps=3 + i, guidance_scale=1.5 + i, cfg_scale=2.0 + i),
        )
        for i in range(3)
    ]
    for together, ctx in zip(staggered(contexts), contexts, strict=True):
        assert distance(together, RUNNER.run(ctx)) < 1e-6


@pytest.mark.parametrize("modulation", ["table", "inline"])
@torch.inference_mode()
def test_batch_invariant_requests_are_bit_equal_in_any_company(modulation: str) -> None:
    net = network(batch_invariant=True)
    config = ExecuteConfig(batch_invariant=True, modulation=modulation)  # type: ignore[arg-type]
    contexts = [context(net, seed=i, execute_config=config) for i in range(3)]
    for together, ctx in zip(staggered(contexts), contexts, strict=True):
        assert torch.equal(together, RUNNER.run(ctx))


@torch.inference_mode()
def test_table_and_inline_modulation_agree() -> None:
    results = {}
    for invariant in (True, False):
        net = network(batch_invariant=invariant)
        for mode in ("table", "inline"):
            config = ExecuteConfig(batch_invariant=invariant, modulation=mode)  # type: ignore[arg-type]
            results[invariant, mode] = RUNNER.run(context(net, num_samples=2, execute_config=config))
    assert torch.equal(results[True, "table"], results[True, "inline"])
    assert distance(results[False, "table"], results[False, "inline"]) < 1e-6


@torch.inference_mode()
def test_sample_i_of_a_batch_is_the_picture_of_its_own_seed() -> None:
    net, both = network(), context(network(), seed=5, num_samples=2)
    together = RUNNER.run(both)
    for i in range(2):
        alone = context(
            net,
            seed=5 + i,
            positive=[t[i : i + 1] for t in both.positive],
            negative=[t[i : i + 1] for t in both.negative or []],
            sample_config=both.sample_config,
        )
        assert distance(together[i : i + 1], RUNNER.run(alone)) < 1e-6


@torch.inference_mode()
def test_noise_is_drawn_on_the_cpu_in_the_dtype_of_the_network() -> None:
    for net in (network(), network().to(torch.bfloat16)):
        state = RUNNER.prepare(context(net, seed=7))
        drawn = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(7), dtype=net.dtype)
        assert torch.equal(RUNNER.definition.latent.unpack(state.latents, (4, 6, 8)), drawn)


@torch.inference_mode()
def test_fed_noise_replaces_the_draw_and_must_fit() -> None:
    net, noise = network(), torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(RUNNER.run(context(net, noise=noise)), RUNNER.run(context(net)))
    with pytest.raises(InputError, match=r"\(1, 4, 6, 6\).*expected \(1, 4, 6, 8\)"):
        RUNNER.prepare(context(net, noise=noise[..., :6]))


@torch.inference_mode()
def test_guidance_combines_the_branches() -> None:
    net = network()
    unguided = context(net, negative=None)
    plain = RUNNER.prepare(unguided)
    RUNNER.step([plain])
    guided = RUNNER.prepare(context(net, sample_config=SampleConfig(steps=4, guidance_scale=3.0, cfg_scale=1.0)))
    RUNNER.step([guided])
    assert plain.prediction is not None and plain.prediction.shape == (1, 1, 12, 16)
    assert guided.prediction is not None and guided.prediction.shape == (2, 1, 12, 16)
    # a scale of 1 is the positive branch alone
    torch.testing.assert_close(plain.latents, guided.latents)
    c, u = guided.prediction
    combined = RUNNER.definition.denoise.guide(guided.prediction, RUNNER.prepare(context(net)).guidance)
    torch.testing.assert_close(combined, u + 2.0 * (c - u))


@torch.inference_mode()
def test_branches_are_views_of_the_joined_rows() -> None:
    state = RUNNER.prepare(context(network(), num_samples=2))
    names = [branch.name for branch in state.branches]
    assert names == ["positive", "negative"] and state.num_rows == 4
    for i, branch in enumerate(state.branches):
        part = branch.static.rows["txt"]
        assert part.data_ptr() == state.current.static.rows["txt"][2 * i].data_ptr()
        assert branch.mod is not None and state.current.mod is not None
        assert torch.equal(branch.mod.at(1)[0], state.current.mod.at(1)[0][2 * i : 2 * i + 2])


@torch.inference_mode()
def test_requests_that_cannot_share_a_step_are_refused_and_stay_where_they_were() -> None:
    net = network()
    a, b = RUNNER.prepare(context(net)), RUNNER.prepare(context(net, seed=1, negative=None))
    with pytest.raises(InputError, match="cannot share a step"):
        RUNNER.step([a, b])
    other = RUNNER.prepare(context(net, seed=1, base_latent=BaseLatent(torch.zeros(1, 4, 6, 10))))
    with pytest.raises(InputError, match="cannot share a step"):
        RUNNER.step([a, other])
    assert a.step_index == b.step_index == other.step_index == 0
    assert torch.equal(finish(a), RUNNER.run(context(net)))


@torch.inference_mode()
def test_a_non_finite_prediction_names_step_and_seed_and_moves_nobody() -> None:
    net = network()
    good, bad = RUNNER.prepare(context(net)), RUNNER.prepare(context(net, seed=1))
    RUNNER.step([good, bad])
    before = [copy.deepcopy(s.latents) for s in (good, bad)]
    bad.latents[0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"denoise, step 2 of 4: .* output for the sample with seed 1 holds"):
        RUNNER.step([good, bad])
    assert good.step_index == bad.step_index == 1
    assert torch.equal(good.latents, before[0])
    assert torch.equal(finish(good), RUNNER.run(context(net)))


@torch.inference_mode()
def test_text_of_the_wrong_form_is_refused() -> None:
    with pytest.raises(InputError, match=r"T5 states .* got shapes \(1, 5, 10\)$"):
        RUNNER.prepare(context(network(), positive=[torch.zeros(1, 5, 10)], negative=None))


@torch.inference_mode()
def test_an_unknown_scheduler_is_named() -> None:
    with pytest.raises(CheckpointError, match="'NoSuchScheduler' is no scheduler"):
        RUNNER.prepare(context(network(), scheduler_config={"_class_name": "NoSuchScheduler"}))


@torch.inference_mode()
def test_the_last_latents_are_checked_too() -> None:
    state = RUNNER.prepare(context(network()))
    while state.steps_left:
        RUNNER.step([state])
    state.latents[0, 0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"denoise, end: the latents of the samples? with seeds? [\d, ]+ hold"):
        RUNNER.finish(state)


@torch.inference_mode()
def test_what_the_latent_handler_makes_of_its_inputs_is_used() -> None:
    """The hooks may change what they are given; what they return is what the other handlers see."""

    class Doubling(FluxLatentHandler):
        def preprocess_base_latent(self, base: BaseLatent, ctx: GeneratorInferContext) -> BaseLatent:
            return BaseLatent(torch.cat((base.latent, base.latent), dim=-1))

        def preprocess_aux_latent(self, aux: AuxLatent | None, ctx: GeneratorInferContext) -> AuxLatent | None:
            assert aux is not None and isinstance(aux.latent, Tensor)
            return AuxLatent(2 * aux.latent)

    class Listening(FluxTextHandler):
        def conditioning(self, encoded: list[Tensor], ctx: GeneratorInferContext) -> Cond:
            assert ctx.aux_latent is not None and isinstance(ctx.aux_latent.latent, Tensor)
            heard.append(ctx.aux_latent.latent.item())
            return super().conditioning(encoded, ctx)

    heard: list[float] = []
    capabilities = Capabilities(inputs=(*Capabilities().inputs, TensorKey.AUX_LATENT))
    definition = replace(RUNNER.definition, latent=Doubling(), text=Listening(), capabilities=capabilities)
    state = GeneratorRunner(definition).prepare(context(network(), aux_latent=AuxLatent(torch.ones(1))))
    assert heard == [2.0, 2.0]  # for both branches
    assert state.noise_shape == (4, 6, 16)
