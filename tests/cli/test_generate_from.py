"""`kdit generate --from FILE`: the same picture again, other settings beside it, and what is told."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from safetensors import safe_open
from typer.testing import CliRunner, Result

from kdit.cli.from_file import Recording, record_media
from kdit.cli.main import app
from kdit.errors import InputError
from kdit.keys import PipelineKey
from kdit.media.image_writer import write_image
from kdit.media.metadata import read_settings
from kdit.pipelines.extra_inputs import ExtraInputs, MediaInputs
from kdit.pipelines.request import file_hash
from kdit.version import __version__

RUN = CliRunner()
QUICK = ["--size", "64x64", "--steps", "2", "--device", "cpu"]
SETTINGS = [*QUICK, "--cfg", "2", "--negative", "blue 狐", "--max-sequence-length", "20", "--modulation", "inline"]


def generate(*arguments: object) -> Result:
    result = RUN.invoke(app, ["generate", *map(str, arguments), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    return result


def notes(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("kdit: note: ")]


def write_settings(path: Path, settings: Mapping[str, object]) -> Path:
    """A picture that states ``settings``."""
    import torch

    write_image(torch.zeros(4, 4, 3, dtype=torch.uint8), path, {"kdit": json.dumps(settings)})
    return path


@pytest.mark.parametrize("suffix", [".png", ".webp", ".jpg", ".safetensors"])
def test_a_file_is_made_again_bit_for_bit(suffix: str, tmp_path: Path) -> None:
    first, again = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    generate("かわいい heart 😄", "-o", first, "--seed", "0", *SETTINGS)
    result = generate("--from", first, "-o", again)
    assert notes(result) == []
    if suffix == ".safetensors":
        with safe_open(first, "pt") as a, safe_open(again, "pt") as b:
            assert a.get_tensor("latents").equal(b.get_tensor("latents"))
    else:
        assert first.read_bytes() == again.read_bytes()
    assert read_settings(first) == read_settings(again)
    assert read_settings(again)["prompt"] == "かわいい heart 😄"


def test_a_picture_can_be_made_again_from_its_latents(tmp_path: Path) -> None:
    generate("heart", "-o", tmp_path / "a.png", "--seed", "3", *QUICK)
    generate("--from", tmp_path / "a.png", "-o", tmp_path / "a.safetensors")
    generate("--from", tmp_path / "a.safetensors", "-o", tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_what_is_given_beside_it_replaces_its_settings(tmp_path: Path) -> None:
    first = tmp_path / "a.png"
    generate("heart", "-o", first, "--seed", "7", *SETTINGS)
    for arguments, changed in (
        (["--seed", "8"], {"seed": 8}),
        (["--steps", "3", "--cfg", "3"], {"steps": 3, "cfg_scale": 3.0}),
        (["--size", "32x64", "--modulation", "table"], {"size": [32, 64], "modulation": "table"}),
        (["red car", "--negative", "green"], {"prompt": "red car", "negative_prompt": "green"}),
        (["--batch-invariant"], {"batch_invariant": True}),
        (["--max-sequence-length", "16"], {"max_sequence_length": 16}),
    ):
        generate("--from", first, "-o", tmp_path / "b.png", *arguments)
        before, after = read_settings(first), read_settings(tmp_path / "b.png")
        assert {name: value for name, value in after.items() if before[name] != value} == changed


def test_one_of_a_batch_is_made_again_alone(tmp_path: Path) -> None:
    generate("heart", "car", "-o", tmp_path / "x.png", "--seed", "7", "--num", "2", "--batch-invariant", *QUICK)
    for i, (prompt, seed) in enumerate([("heart", 7), ("heart", 8), ("car", 9), ("car", 10)]):
        path = tmp_path / f"x-{i}.png"
        assert (read_settings(path)["prompt"], read_settings(path)["seed"]) == (prompt, seed)
        if i % 2:
            generate("--from", path, "-o", tmp_path / "again.png")
            assert path.read_bytes() == (tmp_path / "again.png").read_bytes()


def test_several_can_be_made_of_one(tmp_path: Path) -> None:
    generate("heart", "-o", tmp_path / "a.png", "--seed", "7", *QUICK)
    result = generate("--from", tmp_path / "a.png", "--num", "2", "-o", tmp_path / "b.png", "--json")
    assert json.loads(result.stdout)["seeds"] == [7, 8]


def test_another_model_and_version_are_told(tmp_path: Path) -> None:
    generate("heart", "-o", tmp_path / "a.png", "--seed", "7", *QUICK)
    settings = read_settings(tmp_path / "a.png")
    old = write_settings(tmp_path / "old.png", {**settings, "kdit_version": "0.0.1", "model_hash": "12ab"})
    result = generate("--from", old, "-o", tmp_path / "b.png", "--json")
    version, model = notes(result)
    assert "old.png' was made by kdit 0.0.1" in version and __version__ in version
    assert "hash was 12ab" in model and str(settings["model_hash"]) in model and "will differ" in model
    assert [f"kdit: note: {note}" for note in json.loads(result.stdout)["notices"]] == [version, model]
    assert read_settings(tmp_path / "b.png") == settings  # what it is now made with


def test_a_model_that_is_gone_is_told(tmp_path: Path) -> None:
    path = write_settings(tmp_path / "a.png", {"prompt": "a", "model": "gone/model", "kdit_version": __version__})
    result = RUN.invoke(app, ["generate", "--from", str(path), "-o", str(tmp_path / "b.png")])
    told = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and "a.png' was made with 'gone/model'" in told and "--model" in told
    generate("--from", path, "--model", "mini", "-o", tmp_path / "b.png", *QUICK)


def test_files_that_cannot_be_made_again_are_told(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "plain.png")
    for path, told in (
        (tmp_path / "no.png", "does not exist"),
        (tmp_path / "plain.png", "holds no settings of kdit"),
        (write_settings(tmp_path / "fed.png", {"prompt": "a", "fed": ["noise"]}), "fed from Python (['noise'])"),
        (write_settings(tmp_path / "b.png", {"prompt": ["a"]}), "recorded prompt must be str, got ['a']"),
        (write_settings(tmp_path / "c.png", {"prompt": "a", "steps": "2"}), "recorded steps must be int, got '2'"),
        (write_settings(tmp_path / "d.png", {"prompt": "a", "steps": True}), "recorded steps must be int, got True"),
        (write_settings(tmp_path / "e.png", {"prompt": "a", "size": [4]}), "--size must be (width, height)"),
        (write_settings(tmp_path / "f.png", {"prompt": "a", "cfg_scale": float("nan")}), "--cfg must be"),
        (write_settings(tmp_path / "g.png", {"prompt": "a", "fit": "stretch"}), "--fit must be one of"),
        (write_settings(tmp_path / "h.png", {"prompt": "a", "media": ["x"]}), "recorded media must be an object"),
        (write_settings(tmp_path / "i.png", {"seed": 1}), "nothing to draw"),
    ):
        result = RUN.invoke(app, ["generate", "--from", str(path), "-o", str(tmp_path / "out.png")])
        assert result.exit_code == 2 and told in result.stderr.splitlines()[-1], result.output
    assert not (tmp_path / "out.png").exists()


def test_settings_of_a_later_version_are_told(tmp_path: Path) -> None:
    path = write_settings(tmp_path / "a.png", {"prompt": "a", "sharpness": 3, "kdit_version": __version__})
    assert "does not know these settings" in Recording.read(path).notes[0]
    assert "['sharpness']" in Recording.read(path).notes[0]


# ---- input files ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PaintInputs(ExtraInputs):
    """A made-up family's own inputs."""

    image_path: str | None = None
    mask_path: str | None = None
    style: str = "plain"


def take(media: MediaInputs) -> PaintInputs | None:
    if media == MediaInputs():
        return None
    if not media.images:
        raise InputError("the family wants an image")
    return PaintInputs(image_path=media.images[0], mask_path=media.mask)


FAMILY = SimpleNamespace(key=PipelineKey.FLUX1_FILL, extra_inputs=PaintInputs, take_media=take)


def painted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that was made from ``in.png`` and ``mask.png`` beside it."""
    monkeypatch.chdir(folder)
    for name, colour in (("in.png", "red"), ("mask.png", "white"), ("other.png", "blue")):
        Image.new("RGB", (4, 4), colour).save(name)
    media = MediaInputs(images=("in.png",), mask="mask.png")
    extra = take(media)
    assert extra is not None
    settings: dict[str, object] = {
        "prompt": "a",
        "kdit_version": __version__,
        "extra_inputs": {**extra.given(), "style": "oil"},
        "input_files": {path: file_hash(path) for path in extra.files()},
    }
    record_media(settings, media)
    return write_settings(folder / "made.png", settings)


def remade(recording: Recording, given: MediaInputs | None = None) -> tuple[MediaInputs, ExtraInputs | None]:
    return recording.extra_inputs(FAMILY, given or MediaInputs())  # type: ignore[arg-type]


def test_input_files_and_texts_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording.read(painted(tmp_path, monkeypatch))
    media, extra = remade(recording)
    assert media == MediaInputs(images=("in.png",), mask="mask.png")
    assert extra == PaintInputs(image_path="in.png", mask_path="mask.png", style="oil")
    assert recording.notes == []


def test_one_input_file_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording.read(painted(tmp_path, monkeypatch))
    for given, expected in (
        (MediaInputs(images=("other.png",)), ("other.png", "mask.png")),
        (MediaInputs(mask="other.png"), ("in.png", "other.png")),
    ):
        _, extra = remade(recording, given)
        assert extra == PaintInputs(image_path=expected[0], mask_path=expected[1], style="oil")


def test_input_files_that_are_gone_or_changed_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = painted(tmp_path, monkeypatch)
    Image.new("RGB", (4, 4), "lime").save("in.png")
    recording = Recording.read(made)
    remade(recording)
    assert len(recording.notes) == 1 and "'in.png' has changed since" in recording.notes[0]
    (tmp_path / "in.png").unlink()
    with pytest.raises(InputError, match=r"'in\.png', from which .* was made, is gone; give it with --image"):
        remade(Recording.read(made))
    _, extra = remade(Recording.read(made), MediaInputs(images=("other.png",)))
    assert extra == PaintInputs(image_path="other.png", mask_path="mask.png", style="oil")


def test_input_files_are_found_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = painted(tmp_path, monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recording = Recording.read(made)
    _, extra = remade(recording)
    assert isinstance(extra, PaintInputs) and extra.image_path == str(tmp_path / "in.png")
    assert recording.notes == []


def test_a_changed_picture_is_made_again_from_its_input(
    tmp_path: Path, reference_family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = reference_family("sd3_medium") / "model"
    Image.effect_noise((40, 24), 60).convert("RGB").save("in.png")
    size = ["--size", "32x32", "--fit", "crop", "--steps", "2"]
    generate("fox", "--model", model, "--image", "in.png", "--strength", "0.5", "-o", "a.png", "--seed", "1", *size)
    assert notes(generate("--from", "a.png", "-o", "b.png")) == []
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    Image.effect_noise((40, 24), 60).convert("RGB").save("in.png")
    (told,) = notes(generate("--from", "a.png", "-o", "b.png"))
    assert "'in.png' has changed since 'a.png' was made from it" in told
    assert Path("a.png").read_bytes() != Path("b.png").read_bytes()
    Path("in.png").rename("moved.png")
    result = RUN.invoke(app, ["generate", "--from", "a.png", "-o", "c.png"])
    assert result.exit_code == 2 and "'in.png', from which 'a.png' was made, is gone" in result.stderr
    generate("--from", "a.png", "--image", "moved.png", "-o", "c.png")
    assert Path("b.png").read_bytes() != Path("c.png").read_bytes()  # it states another name
    with Image.open("b.png") as b, Image.open("c.png") as c:
        assert b.tobytes() == c.tobytes()


def test_inputs_of_another_family_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording.read(painted(tmp_path, monkeypatch))
    other = SimpleNamespace(key=PipelineKey.FLUX1_T2I, extra_inputs=None, take_media=lambda media: None)
    with pytest.raises(InputError, match=r"made with .*image_path`, .*mask_path`, .*style`, which flux1-t2i"):
        recording.extra_inputs(other, MediaInputs())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ({"frame_num": 5, "pipeline": "wan2.1-t2v"}, "was made by Wan (wan2.1-t2v), this model is FLUX.1 (flux1-t2i)"),
        ({"frame_num": 5, "pipeline": "new-t2i"}, "was made by new-t2i, this model is FLUX.1 (flux1-t2i)"),
        ({"extra_inputs": {"image_paths": ["x.png"]}, "pipeline": "flux1-kontext"}, "made by FLUX.1 (flux1-kontext)"),
    ],
)
def test_another_pipeline_is_blamed_before_its_settings(recorded: dict[str, object], told: str, tmp_path: Path) -> None:
    path = write_settings(tmp_path / "a.png", {"prompt": "a", "kdit_version": __version__, **recorded})
    result = RUN.invoke(app, ["generate", "--from", str(path), "-o", str(tmp_path / "b.png"), *QUICK])
    error = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and told in error and "recorded settings do not fit it: " in error
    same = write_settings(tmp_path / "c.png", {"prompt": "a", "frame_num": 5, "pipeline": "flux1-t2i"})
    result = RUN.invoke(app, ["generate", "--from", str(same), "-o", str(tmp_path / "b.png"), *QUICK])
    error = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and "makes single pictures" in error and "recorded settings" not in error


def test_components_and_variant_belong_to_the_recorded_model(tmp_path: Path) -> None:
    settings = {"prompt": "a", "model": "one", "components": {"base": "gone"}, "variant": "fp16"}
    recording = Recording.read(write_settings(tmp_path / "a.png", settings))
    assert recording.options(without={})["components"] == {"base": "gone"}
    assert recording.options(without={"model": "one"})["variant"] == "fp16"
    assert not {"components", "variant"} & recording.options(without={"model": "two"}).keys()


def test_a_second_scale_follows_the_first_where_it_did(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for second, given, expected in (
        (4.0, {}, {"cfg": 4.0, "cfg2": 4.0}),
        (4.0, {"cfg": 6.0}, {}),
        (3.0, {"cfg": 6.0}, {"cfg2": 3.0}),
    ):
        settings = {"kdit_version": __version__, "cfg_scale": 4.0, "cfg_scale_2": second}
        assert Recording.read(write_settings(path, settings)).options(without=given) == expected


def test_a_member_of_a_batch_with_a_picture_per_prompt_is_made_again_alone(
    tmp_path: Path, reference_family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = reference_family("flux_dev") / "model"
    for name, colour in (("a.png", "teal"), ("b.png", "red"), ("c.png", "blue")):
        Image.new("RGB", (32, 32), colour).save(name)
    options = ["--steps", "2", "--seed", "1", "--strength", "0.5", "--batch-invariant"]
    generate("fox", "boat", "--model", model, "--image", "a.png", "--image", "b.png", "-o", "p.png", *options)
    told = read_settings(Path("p-1.png"))
    assert told["extra_inputs"] == {"image_path": "b.png"} and list(told["input_files"]) == ["b.png"]
    Path("a.png").unlink()  # the other member's
    assert notes(generate("--from", "p-1.png", "-o", "again.png")) == []
    assert Path("p-1.png").read_bytes() == Path("again.png").read_bytes()
    generate("--from", "p-1.png", "--image", "c.png", "-o", "other.png")
    assert read_settings(Path("other.png"))["extra_inputs"] == {"image_path": "c.png"}
    Path("elsewhere").mkdir()
    Path("b.png").rename("elsewhere/b.png")
    Path("p-1.png").rename("elsewhere/p-1.png")
    generate("--from", "elsewhere/p-1.png", "-o", "moved.png")  # its picture lies beside it now
