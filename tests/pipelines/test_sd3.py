"""Stable Diffusion 3 from prompt to picture: texts, guidance, defaults, sizes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kdit import ExecuteConfig, InputError, Pipeline, RuntimeConfig, SampleConfig, TensorKey, UnsupportedOptionError
from kdit.errors import CheckpointError, NonFiniteError
from kdit.models.checkpoint import Checkpoint
from kdit.pipelines.context_builders.flux import FluxExtraInputs
from kdit.pipelines.context_builders.sd3 import SD3ExtraInputs
from kdit.pipelines.defs.sd3 import defaults, memory_floor
from tests.models.fill import distance
from tests.pipelines.small import CFG, SMALL, damaged, make, runtime, start

PLAIN = SampleConfig(steps=2, max_sequence_length=12, cfg_scale=1.0)
TEXT_KEYS = (TensorKey.POSITIVE, TensorKey.NEGATIVE)


@pytest.fixture(scope="module")
def folder(reference_family: Callable[[str], Path]) -> Path:
    return reference_family("sd35_medium") / "model"


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return Pipeline.from_models(folder)


def texts(pipe: Pipeline, prompt: str, **extra: object) -> list[torch.Tensor]:
    inputs = SD3ExtraInputs(**extra) if extra else None  # type: ignore[arg-type]
    config = SampleConfig(steps=1, cfg_scale=1.0, max_sequence_length=512)
    with start(pipe, prompt, sample_config=config, extra_inputs=inputs, hold=TEXT_KEYS[:1]) as run:
        return list(run.fetch(TensorKey.POSITIVE))


@pytest.mark.parametrize(("count", "cut"), [(75, False), (76, True), (300, True)])
def test_clip_cuts_a_long_prompt_and_keeps_its_end_where_t5_reads_on(pipe: Pipeline, count: int, cut: bool) -> None:
    config = SampleConfig(steps=1, cfg_scale=1.0, max_sequence_length=512, on_long_prompt="reject")
    result = make(pipe, "a " * count, sample_config=config)  # T5 can take it, so nothing is to be rejected
    told = [f"prompt has {count + 2} tokens for CLIPTextEncoder{n}, which takes 77" for n in ("", "2")]
    assert [notice.partition(";")[0] for notice in result.notices] == (told if cut else [])
    l_states, l_pooled, g_states, g_pooled, t5 = texts(pipe, "a " * count)
    longest = texts(pipe, "a " * 75)
    for got, expected in zip((l_states, l_pooled, g_states, g_pooled), longest, strict=False):
        assert torch.equal(got, expected)  # 75 words between start and end: the same whatever follows
    assert torch.equal(t5, longest[4]) != cut


def test_a_prompt_too_long_for_t5_is_told_or_refused(pipe: Pipeline) -> None:
    notices = make(pipe, "fox " * 513, sample_config=PLAIN).notices
    assert len(notices) == 3 and "T5TextEncoder, which takes 12" in notices[2]
    strict = SampleConfig(steps=2, max_sequence_length=512, cfg_scale=1.0, on_long_prompt="reject")
    with pytest.raises(InputError, match="T5TextEncoder, which takes 512"):
        make(pipe, "fox " * 513, sample_config=strict)


def test_each_prompt_of_a_batch_is_as_if_alone(pipe: Pipeline) -> None:
    prompts = ["a", "two small boats drift under a stone bridge " * 5]
    both = make(pipe, prompts, sample_config=CFG, prompt_negative=["blurry", "b"])
    assert both.seeds == (3, 4)
    for i, negative in enumerate(["blurry", "b"]):
        alone = make(pipe, prompts[i], sample_config=CFG, prompt_negative=negative, runtime_config=runtime(seed=3 + i))
        assert distance(both.latents[i : i + 1], alone.latents) < 1e-5
    assert distance(both.latents[:1], both.latents[1:]) > 0.1


def test_batches_can_be_bit_equal(folder: Path) -> None:
    exact = Pipeline.from_models(folder, execute_config=ExecuteConfig(batch_invariant=True))
    extra = SD3ExtraInputs(skip_layers=(1,), skip_layer_start=0.0, skip_layer_stop=1.0)
    both = make(exact, ["a red fox", "boats"], sample_config=CFG, extra_inputs=extra)
    alone = make(exact, "boats", sample_config=CFG, runtime_config=runtime(seed=4), extra_inputs=extra)
    assert torch.equal(both.latents[1:], alone.latents)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_without_guidance_a_negative_prompt_is_told_and_costs_nothing(pipe: Pipeline, scale: float) -> None:
    config = SampleConfig(steps=2, max_sequence_length=12, cfg_scale=scale)
    with start(pipe, "a", prompt_negative="blurry", sample_config=config) as run:
        pipe.step([run])
        assert run.peek()["prediction"].shape[0] == 1
        assert len(run.notices) == 1 and "prompt_negative` has no effect" in run.notices[0]


def test_no_negative_prompt_is_the_empty_one(pipe: Pipeline) -> None:
    assert torch.equal(make(pipe).latents, make(pipe, prompt_negative="").latents)
    assert distance(make(pipe, prompt_negative="blurry").latents, make(pipe).latents) > 1e-4
    with pytest.raises(InputError, match="prompt_negative` has 2 entries for 1 prompts"):
        make(pipe, prompt_negative=["a", "b"])


def test_seed_0_is_a_seed(pipe: Pipeline) -> None:
    zero = make(pipe, runtime_config=runtime(seed=0))
    assert zero.seeds == (0,) and torch.equal(zero.latents, make(pipe, runtime_config=runtime(seed=0)).latents)
    assert distance(zero.latents, make(pipe).latents) > 0.1


def test_every_encoder_can_read_a_text_of_its_own(pipe: Pipeline) -> None:
    plain, other = texts(pipe, "a red fox"), texts(pipe, "two boats")
    second, third = texts(pipe, "a red fox", prompt_2="two boats"), texts(pipe, "a red fox", prompt_3="two boats")
    for mixed, changed in ((second, {2, 3}), (third, {4})):
        for i, tensor in enumerate(mixed):
            assert torch.equal(tensor, (other if i in changed else plain)[i])
    negative = SD3ExtraInputs(negative_prompt_2="blurry", negative_prompt_3="dark")
    with start(pipe, "a", prompt_negative="low", extra_inputs=negative, hold=TEXT_KEYS) as run:
        held = list(run.fetch(TensorKey.NEGATIVE))
    with start(pipe, "low", extra_inputs=SD3ExtraInputs(prompt_2="blurry", prompt_3="dark"), hold=TEXT_KEYS) as run:
        for got, expected in zip(held, run.fetch(TensorKey.POSITIVE), strict=True):
            assert torch.equal(got, expected)


def test_texts_can_be_fed_joined_as_diffusers_has_them(pipe: Pipeline) -> None:
    l_states, l_pooled, g_states, g_pooled, t5 = texts(pipe, "a red fox")
    clip = torch.cat((l_states, g_states), -1)
    prompt_embeds = torch.cat((torch.nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5), 1)
    config = SampleConfig(steps=2, cfg_scale=1.0, max_sequence_length=512)
    pooled = torch.cat((l_pooled, g_pooled), -1)
    fed = make(pipe, "told, not read", sample_config=config, feeds={TensorKey.POSITIVE: [prompt_embeds, pooled]})
    assert torch.equal(fed.latents, make(pipe, sample_config=config).latents)
    with pytest.raises(InputError, match=r"pooled \[B, 96\]"):
        make(pipe, sample_config=PLAIN, feeds={TensorKey.POSITIVE: [prompt_embeds]})


def test_noise_and_latents_have_the_form_of_the_grid(pipe: Pipeline) -> None:
    noise = torch.randn(1, 4, 6, 4, generator=torch.Generator().manual_seed(3))
    fed = make(pipe, feeds={TensorKey.NOISE: noise}, runtime_config=runtime(seed=9))
    assert fed.latents.shape == (1, 4, 6, 4) and torch.equal(fed.latents, make(pipe).latents)
    decoded = make(pipe, feeds={TensorKey.LATENTS: fed.latents})
    assert fed.pixels is not None and decoded.pixels is not None and torch.equal(fed.pixels, decoded.pixels)
    with pytest.raises(InputError, match=r"\(1, 6, 16\), expected \[B, 4, 6, 4\]"):
        make(pipe, feeds={TensorKey.NOISE: torch.zeros(1, 6, 16)})
    with pytest.raises(InputError, match="BASE_LATENT holds an image"):
        make(pipe, feeds={TensorKey.BASE_LATENT: torch.ones(1, 4, 6, 4)})


def test_skipping_layers_leads_away_from_what_the_network_gives_without_them(pipe: Pipeline) -> None:
    def made(**extra: object) -> torch.Tensor:
        config = SampleConfig(steps=4, max_sequence_length=12, cfg_scale=2.0)
        return make(pipe, sample_config=config, extra_inputs=SD3ExtraInputs(**extra)).latents  # type: ignore[arg-type]

    plain, skipped = made(), made(skip_layers=(1,), skip_layer_stop=0.6)
    assert distance(skipped, plain) > 1e-3
    assert torch.equal(made(skip_layers=(1,), skip_layer_stop=0.6, skip_layer_scale=0.0), plain)
    assert distance(made(skip_layers=(0, 1), skip_layer_stop=0.6), skipped) > 1e-3
    assert distance(made(skip_layers=[1], skip_layer_stop=1.0), skipped) > 1e-3


def test_skip_layers_that_no_step_uses_are_told(pipe: Pipeline) -> None:
    result = make(pipe, sample_config=CFG, extra_inputs=SD3ExtraInputs(skip_layers=(1,)))
    assert "skip_layers` has no effect: none of the 2 steps" in result.notices[0]
    assert torch.equal(result.latents, make(pipe, sample_config=CFG).latents)


@pytest.mark.parametrize(
    ("extra", "config", "told"),
    [
        (dict(skip_layers=(3,)), CFG, r"skip_layers` must be whole numbers from 0 to 2, got \(3,\)"),
        (dict(skip_layers=(-1,)), CFG, "from 0 to 2"),
        (dict(skip_layers=1), CFG, "got 1"),
        (dict(skip_layers=(True,)), CFG, "from 0 to 2"),
        (dict(skip_layers=(1,)), PLAIN, "skip_layers` needs classifier-free guidance: set `cfg_scale` above 1"),
        (dict(skip_layer_scale=2.0), CFG, "skip_layer_scale` has no effect without `extra_inputs.skip_layers`"),
        (dict(skip_layers=(1,), skip_layer_scale=float("nan")), CFG, "skip_layer_scale` must be a finite number"),
        (dict(skip_layers=(1,), skip_layer_start=0.5), CFG, "0 <= start < stop <= 1, got 0.5 and 0.2"),
        (dict(skip_layers=(1,), skip_layer_stop=2), CFG, "0 <= start < stop <= 1, got 0.01 and 2"),
        (dict(negative_prompt_2="x"), PLAIN, "negative_prompt_2` needs classifier-free guidance"),
        (dict(negative_prompt_3="x"), PLAIN, "negative_prompt_3` needs classifier-free guidance"),
        (dict(prompt_2=["a", "b"]), CFG, "prompt_2` has 2 entries for 1 prompts"),
        (dict(prompt_3=3), CFG, "prompt_3` must be a string or a list"),
        (dict(negative_prompt_3=["a", "b"]), CFG, "negative_prompt_3` has 2 entries for 1 prompts"),
    ],
)
def test_extra_inputs_that_cannot_be_used_are_refused(
    pipe: Pipeline, extra: dict[str, object], config: SampleConfig, told: str
) -> None:
    with pytest.raises(InputError, match=told):
        pipe.request("a", sample_config=config, extra_inputs=SD3ExtraInputs(**extra))  # type: ignore[arg-type]


def test_what_other_families_take_is_refused_with_a_way_out(pipe: Pipeline) -> None:
    with pytest.raises(UnsupportedOptionError, match="has no embedded guidance; use `cfg_scale`"):
        make(pipe, sample_config=SampleConfig(guidance_scale=3.5))
    with pytest.raises(InputError, match="takes SD3ExtraInputs, got FluxExtraInputs"):
        make(pipe, extra_inputs=FluxExtraInputs())
    with pytest.raises(InputError, match="513, but this model takes from 1 to 512"):
        make(pipe, sample_config=SampleConfig(max_sequence_length=513))


def test_sizes_end_where_the_position_table_does(pipe: Pipeline) -> None:
    assert (pipe.defaults.size, pipe.defaults.max_side, pipe.defaults.size_multiple) == ((256, 256), 384, 16)
    assert make(pipe, sample_config=PLAIN, runtime_config=runtime(size=(384, 16))).images[0].size == (384, 16)
    for size in ((400, 16), (16, 400)):
        with pytest.raises(InputError, match=f"`size` {size[0]}x{size[1]}: this model makes at most 384 pixels"):
            make(pipe, runtime_config=runtime(size=size))
    with pytest.raises(InputError, match="multiples of 16; nearest: 32x48"):
        make(pipe, runtime_config=runtime(size=(36, 44)))
    cut = make(pipe, sample_config=PLAIN, runtime_config=runtime(size=(36, 44), fit="crop"))
    assert cut.images[0].size == (36, 44) and cut.latents.shape == (1, 4, 6, 6)


@pytest.mark.parametrize(
    ("changes", "steps", "cfg_scale", "size"),
    [
        (dict(qk_norm=None, dual_attention_layers=[], sample_size=128, pos_embed_max_size=192), 28, 7.0, 1024),
        (dict(dual_attention_layers=[], sample_size=128, pos_embed_max_size=192), 28, 3.5, 1024),
        (dict(sample_size=128, pos_embed_max_size=384), 40, 4.5, 1024),
        (dict(sample_size=128, pos_embed_max_size=24), 40, 4.5, 384),
    ],
    ids=["3 medium", "3.5 large", "3.5 medium", "a table smaller than the sample"],
)
def test_defaults_are_the_published_ones_of_each_model(
    folder: Path, tmp_path: Path, changes: dict[str, object], steps: int, cfg_scale: float, size: int
) -> None:
    found = defaults(Checkpoint.open(damaged(folder, tmp_path, "transformer/config.json", **changes)))
    assert (found.steps, found.cfg_scale, found.size) == (steps, cfg_scale, (size, size))


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        ("transformer/config.json", dict(sample_size="128"), "sample_size must be a positive number, got '128'"),
        ("transformer/config.json", dict(patch_size=4), "patch_size is 4, expected 2"),
        ("vae/config.json", dict(latent_channels=5), r"vae .* has latent_channels 5; the transformer needs 4"),
        ("text_encoder_3/config.json", dict(d_model=8), r"text_encoder_3 .* has d_model 8; .*joint_attention_dim"),
        (
            "text_encoder_2/config.json",
            dict(projection_dim=8),
            r"text_encoder .* projection_dim \d+, text_encoder_2 .* projection_dim 8; .* needs together \d+ \(pooled",
        ),
        ("vae/config.json", dict(shift_factor="x"), "shift_factor must be a number"),
        ("vae/config.json", dict(block_out_channels=[]), "block_out_channels must be a list of whole numbers"),
    ],
)
def test_settings_that_cannot_be_used_are_found_before_loading(
    folder: Path, tmp_path: Path, file: str, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        Pipeline.open(damaged(folder, tmp_path, file, **changes))


def test_memory_floor_grows_with_rows_and_size(pipe: Pipeline) -> None:
    def floor(rows: int, size: tuple[int, int], output: str = "latents") -> int:
        config = RuntimeConfig(size=size, output_type=output)  # type: ignore[arg-type]
        return memory_floor(pipe.checkpoint, pipe.request("a", runtime_config=config).inputs, rows)

    assert floor(1, (160, 96)) == 60 * 80 * 6 * 4  # tokens, width, six times, float32
    assert floor(4, (160, 96)) == 4 * floor(1, (160, 96)) == 2 * floor(4, (80, 96))
    assert floor(1, (160, 96), "decoded") == 2 * 160 * 96 * 16 * 4  # the autoencoder's last level has 16 channels


def test_an_overflow_in_float16_is_an_error_that_names_its_step(folder: Path, tmp_path: Path) -> None:
    broken = damaged(folder, tmp_path, "transformer/config.json")
    file = broken / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["transformer_blocks.0.ff.net.2.weight"] *= 1e5
    file.unlink()
    save_file(tensors, file)
    half = Pipeline.from_models(broken, execute_config=ExecuteConfig(dtype="float16"))
    target = tmp_path / "black.png"
    with pytest.raises(NonFiniteError, match="denoise, step 1 of 2"):
        make(half, sample_config=SMALL, runtime_config=runtime(save_paths=(str(target),)))
    assert not target.exists()


def test_bfloat16_is_near_float32(folder: Path, pipe: Pipeline) -> None:
    half = Pipeline.from_models(folder, execute_config=ExecuteConfig(dtype="bfloat16"))
    assert 0 < distance(make(half).latents.float(), make(pipe).latents) < 0.05


def test_t5_may_be_missing(folder: Path, tmp_path: Path) -> None:
    absent = {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    pipe = Pipeline.from_models(damaged(folder, tmp_path, "model_index.json", **absent))
    with start(pipe, "a red fox", sample_config=PLAIN, hold=TEXT_KEYS) as run:
        assert len(run.fetch(TensorKey.POSITIVE)) == 4
    short, long = (make(pipe, "fox " * n, sample_config=PLAIN) for n in (75, 300))
    assert torch.equal(short.latents, long.latents) and len(long.notices) == 2
    with pytest.raises(InputError, match="CLIPTextEncoder, which takes 77"):  # nobody reads the rest
        make(pipe, "fox " * 300, sample_config=SampleConfig(on_long_prompt="reject"))
    for name in ("prompt_3", "negative_prompt_3"):
        with pytest.raises(InputError, match=f"{name}` is for T5, and this checkpoint has none"):
            make(pipe, sample_config=CFG, extra_inputs=SD3ExtraInputs(**{name: "x"}))  # type: ignore[arg-type]


def test_settings_can_be_written_down(pipe: Pipeline) -> None:
    extra = SD3ExtraInputs(prompt_2="b", skip_layers=(1,), skip_layer_stop=0.9)
    settings = make(pipe, sample_config=CFG, extra_inputs=extra).settings
    told = json.loads(json.dumps(settings))["extra_inputs"]
    assert told == {"prompt_2": "b", "skip_layers": [1], "skip_layer_stop": 0.9}
    again = make(pipe, sample_config=CFG, extra_inputs=SD3ExtraInputs(**told))
    assert torch.equal(again.latents, make(pipe, sample_config=CFG, extra_inputs=extra).latents)
