"""What the loop offers to families: two networks, skipped layers, given frames, images to begin at, fewer rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kdit.config import SampleConfig
from kdit.generators import generator_runner
from kdit.generators.defs.flux import FluxDenoiseHandler, FluxLatentHandler
from kdit.generators.denoise_state import DenoiseState, Guidance
from kdit.generators.draws import sample_generator
from kdit.generators.generator_context import BaseLatent, GeneratorInferContext, SkipLayers
from kdit.generators.generator_runner import GeneratorRunner
from kdit.generators.scheduler import first_step
from kdit.keys import ModelKey
from kdit.models.network import Network
from kdit.models.rows import Rows
from tests.generators.test_runner import RUNNER, context, distance, network
from tests.models.fill import randomise

LOW = ModelKey.FLUX1_FILL  # stands for a second expert


class TwoNetworks(FluxDenoiseHandler):
    def select_network(self, timestep: float, ctx: GeneratorInferContext) -> ModelKey:
        assert ctx.expert_boundary is not None
        return ModelKey.FLUX1 if timestep >= ctx.expert_boundary else LOW

    def cfg_scale(self, network: ModelKey, ctx: GeneratorInferContext) -> float:
        return 5.0 if network is LOW else 2.0


class KeepsLatents(FluxLatentHandler):
    """Latents stay a grid, of which the first column counts as the given frames."""

    def pack(self, latents: Tensor) -> Tensor:
        return latents

    def unpack(self, latents: Tensor, noise_shape: tuple[int, ...]) -> Tensor:
        return latents


class TakesImages(FluxLatentHandler):
    def preprocess_base_latent(self, base: BaseLatent, ctx: GeneratorInferContext) -> BaseLatent:
        return base


def two_networks() -> tuple[GeneratorRunner, GeneratorInferContext]:
    high, low = network(), network()
    randomise(low, 99)
    ctx = context(high, networks={ModelKey.FLUX1: high, LOW: low}, expert_boundary=600.0)
    return GeneratorRunner(replace(RUNNER.definition, denoise=TwoNetworks())), ctx


@torch.inference_mode()
def test_each_network_runs_the_steps_on_its_side_of_the_boundary() -> None:
    runner, ctx = two_networks()
    state = runner.prepare(ctx)
    networks, scales = [], []
    while state.steps_left:
        networks.append(state.phase.network)
        scales.append(state.guidance.scale)
        runner.step([state])
    above = [bool(t >= 600) for t in state.timesteps]
    assert True in above and False in above
    assert networks == [ctx.networks[ModelKey.FLUX1 if a else LOW] for a in above]
    assert scales == [2.0 if a else 5.0 for a in above]


@torch.inference_mode()
def test_a_phase_that_has_no_step_is_never_prepared() -> None:
    runner, ctx = two_networks()
    for boundary, key in ((-1.0, ModelKey.FLUX1), (2000.0, LOW)):
        state = runner.prepare(replace(ctx, expert_boundary=boundary))
        assert [phase.network for phase in state.phases] == [ctx.networks[key]]
        assert state.cond is None  # nothing is left to be prepared
        while state.steps_left:
            runner.step([state])


@torch.inference_mode()
def test_states_in_different_phases_share_a_step_and_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, ctx = two_networks()
    whole = runner.run(ctx)
    early, late = runner.prepare(ctx), runner.prepare(ctx)
    while late.phase is late.phases[0]:
        runner.step([late])
    assert early.batch_key() != late.batch_key() and early.step_key() == late.step_key()
    forwards: list[tuple[Network, int]] = []
    original = generator_runner.predict

    def spy(net: Network, rows: Rows, *, skip: Collection[int] = (), max_rows: int | None = None) -> torch.Tensor:
        forwards.append((net, len(rows.index)))
        return original(net, rows, skip=skip, max_rows=max_rows)

    monkeypatch.setattr(generator_runner, "predict", spy)
    runner.step([early, late])
    assert forwards == [(early.phases[0].network, early.num_rows), (late.phases[-1].network, late.num_rows)]
    while early.steps_left:
        runner.step([state for state in (late, early) if state.steps_left])
    for state in (early, late):
        assert distance(runner.finish(state), whole) < 1e-6


@torch.inference_mode()
def test_the_conditioning_of_a_later_phase_is_prepared_when_it_begins() -> None:
    runner, ctx = two_networks()
    whole = runner.run(ctx)
    state = runner.prepare(ctx)
    assert state.cond is not None and state.current.phase is state.phases[0]
    while state.steps_left:
        runner.step([state])
    assert state.cond is None and torch.equal(runner.finish(state), whole)


@torch.inference_mode()
def test_skipped_layers_make_a_third_branch_in_their_steps_only() -> None:
    net = network()
    skip = SkipLayers(layers=(1,), scale=1.5, start=0.1, stop=0.7)
    state, plain = RUNNER.prepare(context(net, skip_layers=skip)), RUNNER.prepare(context(net))
    branches = []
    while state.steps_left:
        RUNNER.step([state])
        assert state.prediction is not None
        branches.append(len(state.prediction))
    assert branches == [2, 3, 3, 2]  # 0.4 < i < 2.8 of four steps
    while plain.steps_left:
        RUNNER.step([plain])
    assert distance(state.latents, plain.latents) > 1e-3
    c, u, p = torch.randn(3, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    guided = RUNNER.definition.denoise.guide(torch.stack((c, u, p)), Guidance("cfg", 3.0, skip))
    torch.testing.assert_close(guided, u + 3.0 * (c - u) + 1.5 * (c - p))


@torch.inference_mode()
def test_skipping_is_each_requests_own_in_a_shared_step() -> None:
    net = network()
    skip = SkipLayers(layers=(0, 2), scale=2.0, start=0.0, stop=1.0)
    guided, plain = context(net, skip_layers=skip), context(net, seed=1)
    states = [RUNNER.prepare(guided), RUNNER.prepare(plain)]
    while states[0].steps_left:
        RUNNER.step(states)
    for state, ctx in zip(states, (guided, plain), strict=True):
        assert distance(RUNNER.finish(state), RUNNER.run(ctx)) < 1e-6


@torch.inference_mode()
def test_rows_may_be_computed_a_few_at_a_time() -> None:
    net = network()
    whole = RUNNER.run(context(net, num_samples=3))
    for most in (1, 2, 4):
        assert distance(RUNNER.run(context(net, num_samples=3, rows_per_forward=most)), whole) < 1e-6


@torch.inference_mode()
def test_given_frames_stand_in_every_forward_and_in_the_result() -> None:
    seen: list[Tensor] = []
    fed = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    given = torch.full((1, 4, 2, 8), 7.0)

    class Pinned(KeepsLatents):
        def pinned_frames(self, ctx: GeneratorInferContext) -> Tensor:
            return given

    class Watching(FluxDenoiseHandler):
        def before_step(self, state: DenoiseState) -> None:
            seen.append(state.latents.clone())
            state.latents = FluxLatentHandler().pack(state.latents)

        def after_step(self, state: DenoiseState) -> None:
            state.latents = FluxLatentHandler().unpack(state.latents, state.noise_shape)

    runner = GeneratorRunner(replace(RUNNER.definition, latent=Pinned(), denoise=Watching()))
    result = runner.run(context(network(), noise=fed.clone()))
    assert len(seen) == 4 and all(torch.equal(latents[:, :, :2], given) for latents in (*seen, result))
    assert not torch.equal(result[:, :, 2:], seen[0][:, :, 2:])


@pytest.mark.parametrize(
    ("num_steps", "strength", "first"),
    [(10, None, 0), (10, 1.0, 0), (10, 0.6, 4), (10, 0.3, 7), (10, 0.25, 7), (4, 0.01, 3), (4, 0.0, 4), (1, 0.5, 0)],
)
def test_strength_chooses_the_first_step(num_steps: int, strength: float | None, first: int) -> None:
    assert first_step(num_steps, strength) == first


@torch.inference_mode()
def test_a_request_begins_at_its_image_with_the_noise_of_its_first_step() -> None:
    runner = GeneratorRunner(replace(RUNNER.definition, latent=TakesImages()))
    image = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(3))

    def begun(strength: float) -> DenoiseState:
        sample = SampleConfig(steps=4, guidance_scale=3.0, cfg_scale=2.0, strength=strength)
        return runner.prepare(context(network(), base_latent=BaseLatent(image), sample_config=sample))

    none = begun(0.0)
    assert none.steps_left == 0 and torch.equal(runner.finish(none), image)
    half, whole = begun(0.5), begun(1.0)
    assert (half.num_steps, whole.num_steps) == (2, 4)
    sigma = float(half.timesteps[0]) / 1000
    noise = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        runner.definition.latent.unpack(half.latents, (4, 6, 8)), sigma * noise + (1 - sigma) * image
    )
    torch.testing.assert_close(runner.definition.latent.unpack(whole.latents, (4, 6, 8)), noise)
    while half.steps_left:
        runner.step([half])
    assert bool(torch.isfinite(runner.finish(half)).all())


def test_earlier_draws_advance_the_samples_generator() -> None:
    expected = torch.Generator().manual_seed(5)
    first, second = (torch.randn(1, 2, 3, generator=expected) for _ in range(2))
    assert torch.equal(torch.randn(1, 2, 3, generator=sample_generator(5, (1, 2, 3), ())), first)
    assert torch.equal(torch.randn(1, 2, 3, generator=sample_generator(5, (1, 2, 3), [torch.float32])), second)
