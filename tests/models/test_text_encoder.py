"""Text encoders and tokenizers: the same numbers as transformers gives, nothing missing, nothing said."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import logging as library_log

from kdit.errors import CheckpointError
from kdit.models.text_encoder import load_text_encoder, load_tokenizer
from kdit.models.weights.component_folder import ComponentFolder
from kdit.models.weights.exact_fill import load_exact
from tests.models.checkpoint_files import clone, edit_json, edit_tensors, overwrite, shard

CLASSES = {"text_encoder": "CLIPTextModel", "text_encoder_2": "T5EncoderModel"}


@pytest.fixture
def folder(reference_family: Callable[[str], Path], tmp_path: Path) -> Path:
    return clone(reference_family("flux_dev") / "model", tmp_path / "model")


def load(
    folder: Path, name: str = "text_encoder_2", dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    tokenizer = folder / name.replace("text_encoder", "tokenizer")
    model = load_text_encoder(folder / name, tokenizer, dtype=dtype, device="cpu").model
    assert isinstance(model, transformers.PreTrainedModel)
    return model


@pytest.mark.parametrize("name", CLASSES)
def test_equals_the_library(folder: Path, name: str) -> None:
    tokenizer_folder = folder / name.replace("text_encoder", "tokenizer")
    encoder = load_text_encoder(folder / name, tokenizer_folder, dtype=torch.float32, device="cpu")
    assert type(encoder.model).__name__ == CLASSES[name]
    expected = getattr(transformers, CLASSES[name]).from_pretrained(folder / name).eval()
    ids = encoder.tokenizer("a red fox", return_tensors="pt").input_ids
    assert torch.equal(
        ids, transformers.AutoTokenizer.from_pretrained(tokenizer_folder)("a red fox", return_tensors="pt").input_ids
    )
    with torch.no_grad():
        assert torch.equal(encoder.model(ids).last_hidden_state, expected(ids).last_hidden_state)
    assert not encoder.model.training and not any(p.requires_grad for p in encoder.model.parameters())


@pytest.mark.parametrize(
    ("family", "component", "class_name"),
    [
        ("sd35_medium", "text_encoder_2", "CLIPTextModelWithProjection"),
        ("wan22_t2v_a14b", "text_encoder", "UMT5EncoderModel"),
    ],
)
def test_encoders_of_other_families(
    reference_family: Callable[[str], Path], family: str, component: str, class_name: str
) -> None:
    assert type(load(reference_family(family) / "model", component)).__name__ == class_name


def test_what_the_class_keeps_in_float32_stays_so(folder: Path) -> None:
    half = {name: p.dtype for name, p in load(folder, dtype=torch.float16).named_parameters()}
    kept = {name for name, dtype in half.items() if dtype is torch.float32}
    assert kept == {name for name in half if ".wo." in name} != set()
    assert {p.dtype for p in load(folder, "text_encoder", torch.float16).parameters()} == {torch.float16}


def test_shards_equal_one_file(folder: Path) -> None:
    whole = load(folder).state_dict()
    shard(folder / "text_encoder_2", "model")
    sharded = load(folder).state_dict()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


@pytest.mark.parametrize("device", ["cpu", "meta"])  # the latter stands for a device to move to
def test_weights_are_plain_tensors_inside_inference_mode(folder: Path, device: str) -> None:
    with torch.inference_mode():
        encoder = load_text_encoder(folder / "text_encoder", folder / "tokenizer", dtype=torch.float32, device=device)
    held = (*encoder.model.parameters(), *encoder.model.buffers())
    assert {tensor.device.type for tensor in held} == {device}
    assert not any(tensor.is_inference() for tensor in held)


def rename_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")


def double_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()


@pytest.mark.parametrize("change", [rename_embedding, double_embedding])
def test_tied_embedding_under_either_name(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    expected = load(folder).get_input_embeddings().weight
    edit_tensors(folder / "text_encoder_2" / "model.safetensors", change)
    assert torch.equal(load(folder).get_input_embeddings().weight, expected)


@pytest.mark.parametrize("stored", ["shared.weight", "encoder.embed_tokens.weight", "both"])
def test_tied_embedding_of_umt5(reference_family: Callable[[str], Path], tmp_path: Path, stored: str) -> None:
    folder = clone(reference_family("wan22_t2v_a14b") / "model", tmp_path / "wan")
    expected = load(folder, "text_encoder").get_input_embeddings().weight
    names = ("shared.weight", "encoder.embed_tokens.weight")

    def change(tensors: dict[str, Tensor]) -> None:
        held = next(tensors.pop(name) for name in names if name in tensors)
        tensors.update({name: held.clone() for name in names if stored in (name, "both")})

    edit_tensors(folder / "text_encoder" / "model.safetensors", change)
    model = load(folder, "text_encoder")
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert model.encoder.embed_tokens.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "component"),
    [
        ("flux_dev", "text_encoder"),
        ("flux_dev", "text_encoder_2"),
        ("sd35_medium", "text_encoder_2"),
        ("wan22_t2v_a14b", "text_encoder"),
    ],
)
def test_what_is_read_directly_equals_what_the_library_loads(
    reference_family: Callable[[str], Path], family: str, component: str, dtype: torch.dtype
) -> None:
    folder = reference_family(family) / "model" / component
    opened = ComponentFolder.at(folder)
    cls = getattr(transformers, opened.class_name)
    expected = cls.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    before = torch.get_default_dtype()
    exact = load_exact(opened, cls, opened.open_weights(), dtype)
    assert torch.get_default_dtype() is before
    if exact is None:  # left to the library: T5 keeps some weights in float32 beside float16
        assert dtype is torch.float16 and "T5" in opened.class_name
        return
    exact.eval()
    for got, wanted in (
        (dict(exact.named_parameters(remove_duplicate=False)), dict(expected.named_parameters(remove_duplicate=False))),
        (dict(exact.named_buffers()), dict(expected.named_buffers())),
    ):
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert got[name].dtype is tensor.dtype and torch.equal(got[name], tensor), name
    assert exact.config._attn_implementation == expected.config._attn_implementation
    ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        for a, b in zip(exact(ids).to_tuple(), expected(ids).to_tuple(), strict=True):
            assert torch.equal(a, b)


def test_what_is_not_read_directly(folder: Path) -> None:
    """Whatever does not fit exactly is the library's to load or to refuse."""
    component = ComponentFolder.at(folder / "text_encoder")
    assert load_exact(component, transformers.CLIPTextModel, component.open_weights(), torch.float32) is not None
    path = folder / "text_encoder" / "model.safetensors"
    whole = load_file(path)
    bias = "final_layer_norm.bias"
    for changed in (
        {f"text_model.{name}": tensor for name, tensor in whole.items()},
        {**whole, "ghost": torch.ones(1)},
        {name: tensor for name, tensor in whole.items() if name != bias},
        {**whole, bias: torch.ones(3)},
        {**whole, bias: whole[bias].long()},
    ):
        edit_tensors(path, lambda tensors, changed=changed: (tensors.clear(), tensors.update(changed)))
        weights = ComponentFolder.at(folder / "text_encoder").open_weights()
        assert load_exact(component, transformers.CLIPTextModel, weights, torch.float32) is None


def test_layout_and_buffers_of_old_checkpoints(folder: Path) -> None:
    expected = load(folder, "text_encoder").state_dict()

    def age(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"text_model.{name}"] = tensors.pop(name)
        tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]

    edit_tensors(folder / "text_encoder" / "model.safetensors", age)
    aged = load(folder, "text_encoder").state_dict()
    assert all(torch.equal(aged[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", CLASSES)
def test_missing_left_over_and_misshapen_tensors(folder: Path, name: str) -> None:
    path = folder / name / "model.safetensors"
    removed = {}

    def remove(tensors: dict[str, Tensor]) -> None:
        key = sorted(key for key in tensors if "norm" in key)[0]
        removed[key] = tensors.pop(key)

    edit_tensors(path, remove)
    (key,) = removed
    with pytest.raises(CheckpointError, match=rf"component {name}: .*1 tensors are missing: {key}"):
        load(folder, name)
    edit_tensors(path, lambda tensors: tensors.update({key: torch.ones(3)}))
    expected = rf"component {name}: .*{key} has \[3\], expected \[{len(removed[key])}\]"
    with pytest.raises(CheckpointError, match=expected):
        load(folder, name)
    edit_tensors(path, lambda tensors: tensors.update({**removed, "encoder.ghost": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=rf"1 tensors have no place in {CLASSES[name]}: encoder\.ghost"):
        load(folder, name)


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        (["SomeoneElsesModel"], "has no such PreTrainedModel"),
        (["AutoTokenizer"], "names the class AutoTokenizer, expected a model"),
        (["CLIPTextConfig"], "has no such PreTrainedModel"),
        (["A", "B"], "states no class"),
    ],
)
def test_classes_that_cannot_be_had(folder: Path, architectures: list[str], expected: str) -> None:
    edit_json(folder / "text_encoder_2" / "config.json", architectures=architectures)
    with pytest.raises(CheckpointError, match=expected) as error:
        load(folder)
    assert str(folder / "text_encoder_2" / "config.json") in str(error.value)


@pytest.mark.parametrize("change", [{"hidden_size": "wide"}, {"num_attention_heads": 7}, {"hidden_act": "nothing"}])
def test_config_that_the_library_refuses(folder: Path, change: dict[str, object]) -> None:
    edit_json(folder / "text_encoder" / "config.json", **change)
    with pytest.raises(CheckpointError, match=rf"CLIPTextModel cannot load {folder / 'text_encoder'}: .+"):
        load(folder, "text_encoder")


def test_no_code_from_the_folder_is_run(folder: Path) -> None:
    overwrite(folder / "text_encoder_2" / "modeling_evil.py", b"raise SystemExit('ran')")
    edit_json(folder / "text_encoder_2" / "config.json", auto_map={"AutoModel": "modeling_evil.T5EncoderModel"})
    assert type(load(folder)).__module__.startswith("transformers.")


def test_loading_is_quiet_and_changes_no_setting(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    edit_tensors(folder / "text_encoder" / "model.safetensors", lambda tensors: tensors.update(ghost=torch.ones(1)))
    library_log.set_verbosity_info()
    library_log.enable_progress_bar()
    filters = list(warnings.filters)
    try:
        load(folder)
        with pytest.raises(CheckpointError, match="ghost"):
            load(folder, "text_encoder")
        assert library_log.get_verbosity() == logging.INFO
        assert library_log.is_progress_bar_enabled()
        assert warnings.filters == filters
    finally:
        library_log.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_tokenizer_of_another_model(folder: Path) -> None:
    edit_json(folder / "text_encoder_2" / "config.json", vocab_size=100)
    edit_tensors(
        folder / "text_encoder_2" / "model.safetensors",
        lambda tensors: tensors.update({"shared.weight": tensors["shared.weight"][:100].clone()}),
    )
    with pytest.raises(CheckpointError, match=r"component tokenizer_2: .* tokens, text_encoder_2 embeds 100"):
        load(folder)


def test_tokenizer_class_that_cannot_be_had(folder: Path) -> None:
    edit_json(folder / "tokenizer_2" / "tokenizer_config.json", tokenizer_class="SomeoneElsesTokenizer")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json names the class 'SomeoneElsesTokenizer'"):
        load_tokenizer(folder / "tokenizer_2")


@pytest.mark.parametrize("content", [b'{"a": 1}', b"{", b"\x00\x01"])
def test_damaged_vocabulary(folder: Path, content: bytes) -> None:
    overwrite(folder / "tokenizer_2" / "tokenizer.json", content)
    with pytest.raises(CheckpointError, match=r"tokenizer_2"):
        load_tokenizer(folder / "tokenizer_2")


def test_vocabulary_and_merges_without_tokenizer_json(folder: Path) -> None:
    expected = load_tokenizer(folder / "tokenizer")("a red fox").input_ids
    model = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer" / "tokenizer.json").unlink()
    overwrite(folder / "tokenizer" / "vocab.json", json.dumps(model["vocab"]).encode())
    with pytest.raises(CheckpointError, match=r"vocab\.json and merges\.txt"):
        load_tokenizer(folder / "tokenizer")
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    overwrite(folder / "tokenizer" / "merges.txt", f"#version: 0.2\n{merges}\n".encode())
    assert load_tokenizer(folder / "tokenizer")("a red fox").input_ids == expected


def test_sentencepiece_model_alone(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SWIG, on import
        import sentencepiece
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a red fox in the snow", "a blue bird on a red house"] * 20),
        model_writer=trained,
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},  # as in every T5
    )
    for path in (folder / "tokenizer_2").iterdir():
        path.unlink()
    overwrite(folder / "tokenizer_2" / "spiece.model", trained.getvalue())
    if find_spec("google") is None or find_spec("google.protobuf") is None:
        with pytest.raises(CheckpointError, match=r"component tokenizer_2: .*reading spiece\.model needs protobuf"):
            load_tokenizer(folder / "tokenizer_2")
        return
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    assert load_tokenizer(folder / "tokenizer_2")("a red house").input_ids == [*processor.encode("a red house"), 1]
