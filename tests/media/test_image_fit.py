"""Pictures of another shape: scaled, padded or cropped, the scaling as diffusers does it."""

import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from kdit.media.image_fit import Fit, fit_image


def noise(width: int, height: int, channels: int = 3) -> Tensor:
    levels = torch.randint(0, 256, (height, width, channels), generator=torch.Generator().manual_seed(0))
    return levels / 255


@pytest.mark.parametrize("size", [(16, 24), (40, 8), (7, 5)])
def test_plain_scaling_equals_diffusers(size: tuple[int, int]) -> None:
    image = noise(24, 16)
    picture = Image.fromarray((image * 255).round().to(torch.uint8).numpy())
    processor = VaeImageProcessor(vae_scale_factor=1, do_normalize=False)
    expected = processor.preprocess(picture, height=size[1], width=size[0])
    assert torch.equal(fit_image(image, size, "reject"), expected[0].permute(1, 2, 0))


@pytest.mark.parametrize("fit", ["reject", "pad", "crop"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_of_the_right_size_stays_as_it_is(fit: Fit, channels: int) -> None:
    image = noise(24, 16, channels)
    assert torch.equal(fit_image(image, (24, 16), fit), image)


@pytest.mark.parametrize("channels", [1, 3])
def test_pad_shows_everything_and_continues_the_edges(channels: int) -> None:
    image = noise(20, 10, channels)
    wide = fit_image(image, (20, 16), "pad")
    assert wide.shape == (16, 20, channels)
    assert torch.equal(wide[3:13], image)
    assert torch.equal(wide[:3], image[:1].expand(3, -1, -1)) and torch.equal(wide[13:], image[-1:].expand(3, -1, -1))
    tall = fit_image(image, (25, 10), "pad")
    assert torch.equal(tall[:, 2:22], image)
    assert torch.equal(tall[:, :2], image[:, :1].expand(-1, 2, -1))
    assert torch.equal(tall[:, 22:], image[:, -1:].expand(-1, 3, -1))
    half = fit_image(image, (10, 9), "pad")
    assert torch.equal(half[2:7], fit_image(image, (10, 5), "reject"))


def test_crop_covers_the_size_and_keeps_the_middle() -> None:
    image = noise(20, 10)
    assert torch.equal(fit_image(image, (10, 10), "crop"), image[:, 5:15])
    assert torch.equal(fit_image(image, (20, 4), "crop"), image[3:7])
    ramp = torch.linspace(0, 1, 200).view(1, 200, 1).expand(100, 200, 3)
    quarter = fit_image(ramp, (50, 50), "crop")
    assert quarter.shape == (50, 50, 3)
    assert quarter[25, 0, 0] == pytest.approx(0.25, abs=0.01) and quarter[25, 49, 0] == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("fit", ["pad", "crop"])
@pytest.mark.parametrize("size", [(1, 64), (64, 1), (37, 3), (5, 7)])
def test_any_size_can_be_had_of_any_picture(fit: Fit, size: tuple[int, int]) -> None:
    for own in ((300, 2), (2, 300), (1, 1)):
        fitted = fit_image(noise(*own), size, fit)
        assert fitted.shape == (size[1], size[0], 3) and fitted.min() >= 0 and fitted.max() <= 1
