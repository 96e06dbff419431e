"""Captions for the emoji images and the two small tokenizers (T5-style unigram, CLIP-style BPE) trained on them."""

import io
import json
import random
from pathlib import Path

import sentencepiece
from tokenizers import pre_tokenizers, trainers
from transformers import CLIPTokenizer, T5TokenizerFast

T5_VOCAB, CLIP_VOCAB = 2400, 2400
CLIP_LENGTH = 77  # fixed by the format; only the tokens up to the first end token count (causal attention)
PREFIXES = (
    "a {}",
    "an emoji of {}",
    "a picture of {}",
    "{} emoji",
    "{} icon",
    "an icon of {}",
    "drawing of {}",
    "{} on a white background",
)
STYLES = ("{}, {} style", "{} in {} style", "{} style {}")
STOP = {"with", "and", "of", "the", "in", "on", "at", "a", "to", "for"}


def caption(record: dict, rng: random.Random, style: float = 0.5) -> str:
    """One random caption: usually the name, at times reordered, extended by keywords, or keywords alone.

    ``style`` is the chance that the image style is named."""
    name, keywords = record["name"], record["keywords"]
    kind = rng.random()
    if kind < 0.75 or not keywords:
        text = name
    elif kind < 0.82:
        words = [w for w in name.replace(",", " ").replace(":", " ").split() if w not in STOP]
        rng.shuffle(words)
        text = " ".join(words)
    elif kind < 0.93:
        text = ", ".join([name, *rng.sample(keywords, min(len(keywords), rng.randint(1, 2)))])
    else:
        text = " ".join(rng.sample(keywords, min(len(keywords), rng.randint(1, 3))))
    if rng.random() < 0.35:
        text = rng.choice(PREFIXES).format(text)
    if rng.random() < style:
        template = rng.choice(STYLES)
        text = template.format(
            *((record["style"], text) if template.startswith("{} style") else (text, record["style"]))
        )
    return text


def build_tokenizers(records: list[dict], folder: Path) -> None:
    """Train both tokenizers on captions and save them as ``tokenizer`` (CLIP) and ``tokenizer_2`` (T5)."""
    rng = random.Random(0)
    corpus = [caption(r, rng) for r in records for _ in range(12)]
    words = sorted({w for r in records for k in [r["name"], *r["keywords"]] for w in k.split()})
    corpus += words

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="unigram",
        vocab_size=T5_VOCAB,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        character_coverage=1.0,
        normalization_rule_name="nmt_nfkc_cf",
        num_threads=2,
        minloglevel=2,
        required_chars="abcdefghijklmnopqrstuvwxyz0123456789,.'-!?:",
    )
    target = folder / "tokenizer_2"
    target.mkdir(parents=True, exist_ok=True)
    (target / "spiece.model").write_bytes(model.getvalue())
    T5TokenizerFast.from_pretrained(str(target), extra_ids=0, model_max_length=512).save_pretrained(target)

    bos, eos = "<|startoftext|>", "<|endoftext|>"
    blank = CLIPTokenizer()  # CLIP's normalizer and pre-tokenizer around an empty BPE model
    trainer = trainers.BpeTrainer(
        vocab_size=CLIP_VOCAB - 2,
        end_of_word_suffix="</w>",
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend = blank.backend_tokenizer
    backend.train_from_iterator(corpus, trainer)
    trained = json.loads(backend.to_str())["model"]
    # CLIP's order: bytes, bytes that end a word, merges, start token, end token
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = alphabet + [a + "</w>" for a in alphabet]
    merges = [tuple(m) if not isinstance(m, str) else tuple(m.split(" ")) for m in trained["merges"]]
    known, kept = set(pieces), []
    for left, right in merges:
        if len(pieces) == CLIP_VOCAB - 2:
            break
        if left in known and right in known and left + right not in known:
            pieces.append(left + right)
            known.add(left + right)
            kept.append((left, right))
    vocab = {p: i for i, p in enumerate([*pieces, bos, eos])}
    CLIPTokenizer(vocab=vocab, merges=kept, model_max_length=CLIP_LENGTH).save_pretrained(folder / "tokenizer")
    # the classic two-file form as well
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n" + "\n".join(f"{a} {b}" for a, b in kept) + "\n")


if __name__ == "__main__":
    here = Path(__file__).parent
    rows = [json.loads(line) for line in (here / "data" / "meta.jsonl").read_text().splitlines()]
    build_tokenizers(rows, here / "checkpoints")
    t5 = T5TokenizerFast.from_pretrained(here / "checkpoints" / "tokenizer_2")
    clip = CLIPTokenizer.from_pretrained(here / "checkpoints" / "tokenizer")
    rng = random.Random(1)
    lengths = sorted(len(t5(caption(r, rng)).input_ids) for r in rows)
    print(
        "T5 vocabulary",
        len(t5),
        "CLIP vocabulary",
        len(clip),
        "T5 caption tokens: median",
        lengths[len(lengths) // 2],
        "95%",
        lengths[int(len(lengths) * 0.95)],
        "max",
        lengths[-1],
    )
    for text in ("a Smiling cat face", "Red heart", "pizza slice, flat style", "zyxo!", ""):
        print(
            repr(text), t5.convert_ids_to_tokens(t5(text).input_ids), clip.convert_ids_to_tokens(clip(text).input_ids)
        )
