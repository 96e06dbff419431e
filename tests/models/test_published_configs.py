"""Published config.json files leave keys out; diffusers takes its class's defaults for them, and so do the networks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import diffusers
import pytest

from kdit.errors import CheckpointError
from kdit.models.config_reader import ConfigReader
from kdit.models.flux import config as flux
from kdit.models.sd3 import config as sd3
from kdit.models.wan import config as wan


class Family(NamedTuple):
    reference: Any
    params: Any
    defaults: Mapping[str, object]
    unread: frozenset[str]  # parameters of the reference that do not shape the network
    published: Mapping[str, object]  # what a published checkpoint states
    rest: Mapping[str, object]  # what it leaves out


FLUX_DEV = {
    "attention_head_dim": 128,
    "guidance_embeds": True,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 19,
    "num_single_layers": 38,
    "patch_size": 1,
    "pooled_projection_dim": 768,
}
SD3_MEDIUM = {
    "attention_head_dim": 64,
    "caption_projection_dim": 1536,
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 24,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "sample_size": 128,
}
WAN_T2V_1_3B = {
    "added_kv_proj_dim": None,
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-06,
    "ffn_dim": 8960,
    "freq_dim": 256,
    "image_dim": None,
    "in_channels": 16,
    "num_attention_heads": 12,
    "num_layers": 30,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}
FAMILIES = {
    "flux": Family(
        diffusers.FluxTransformer2DModel,
        flux.FluxParams,
        flux.DEFAULTS,
        frozenset(),
        FLUX_DEV,
        {"out_channels": 64, "axes_dims_rope": [16, 56, 56]},
    ),
    "sd3": Family(
        diffusers.SD3Transformer2DModel,
        sd3.SD3Params,
        sd3.DEFAULTS,
        frozenset({"sample_size"}),
        SD3_MEDIUM,
        {"dual_attention_layers": [], "qk_norm": None},
    ),
    "wan": Family(
        diffusers.WanTransformer3DModel,
        wan.WanParams,
        wan.DEFAULTS,
        frozenset(),
        WAN_T2V_1_3B,
        {"pos_embed_seq_len": None},
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_defaults_are_those_of_the_reference(family: Family) -> None:
    stated = inspect.signature(family.reference.__init__).parameters
    expected = {name: stated[name].default for name in stated.keys() - {"self"} - family.unread}
    assert dict(family.defaults) == expected


def test_a_published_config_equals_the_one_with_all_keys(family: Family) -> None:
    assert family.published.keys() | family.rest.keys() == family.defaults.keys() | family.unread
    assert family.params.from_config(family.published) == family.params.from_config({**family.published, **family.rest})


def test_every_key_may_be_absent(family: Family) -> None:
    params = family.params.from_config({"_class_name": family.reference.__name__})
    assert params == family.params.from_config(dict(family.defaults))
    for key in family.defaults:
        rest = {name: value for name, value in family.defaults.items() if name != key}
        assert family.params.from_config(rest) == params


def test_a_null_is_not_an_absent_key() -> None:
    with pytest.raises(CheckpointError, match="num_layers is None, expected a whole number"):
        flux.FluxParams.from_config({**FLUX_DEV, "num_layers": None})
    with pytest.raises(CheckpointError, match="dual_attention_layers is None, expected a list"):
        sd3.SD3Params.from_config({**SD3_MEDIUM, "dual_attention_layers": None})
    rest = {key: value for key, value in WAN_T2V_1_3B.items() if key != "out_channels"}
    assert wan.WanParams.from_config({**rest, "in_channels": 36}).out_channels == 16
    assert wan.WanParams.from_config({**rest, "in_channels": 36, "out_channels": None}).out_channels == 36


def test_a_default_that_does_not_fit_the_other_keys_is_named() -> None:
    config = {key: value for key, value in SD3_MEDIUM.items() if key != "caption_projection_dim"}
    expected = r"caption_projection_dim is 1152 by default \(the config has no such key\), expected 1536"
    with pytest.raises(CheckpointError, match=expected):
        sd3.SD3Params.from_config(config)


def test_a_key_without_a_default_cannot_be_read() -> None:
    with pytest.raises(AssertionError, match="toy has no default for b"):
        ConfigReader({"b": 1}, "toy", defaults={"a": 1}).size("b")
