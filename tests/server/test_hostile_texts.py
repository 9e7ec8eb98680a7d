"""10,002 hostile texts and real servers: each text is answered or refused, in bounded time."""

import json
import random
import time
from collections import Counter

import numpy as np
import pytest
from retrieval.index.index import create_index, open_index

COUNT = 3_334
"""Texts for each of three kinds of tokenizers."""
SECONDS = 20.0
"""Longest time of one answer; on an idle machine it is about 0.1 s."""

WORDS = [
    *("a", "red", "mug", "two", "mugs", "on", "the", "table", "size", "42", "blue", "café"),
    *("шкаф", "赤いマグ", "كوب", "أحمر", "ถ้วยสีแดง", "naïve"),
]
CONTROLS = [chr(code) for code in (*range(1, 32), *range(127, 160), 0x200E, 0x200F, 0xFEFF, 0xFFFD)]
MARKS = [chr(code) for code in range(0x300, 0x370)]
BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
EMOJI = [
    *("👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "👍🏿", "🇺🇦", "1️⃣", "\u200d", "\ufe0f"),
    "🧑\u200d🦽\u200d➡️",
]
LIGATURES = "\ufdfa\ufb03\u1e9b\u0323ßİǅΐ½㌀"
"""Characters that grow when they are normalised or lowered; the first becomes 18."""


def hostile_text(number: int) -> str:
    """Return the text with this number; every tenth is as long as a text may be."""
    draw = random.Random(number)
    kinds = [
        lambda: " ".join(draw.choices(WORDS, k=size)),
        lambda: "".join(chr(draw.randrange(0x110000)) for _ in range(size)),
        lambda: "".join(chr(draw.randrange(0x3000)) for _ in range(size)),
        lambda: draw.choice("ae1 \u0939") + "".join(draw.choices(MARKS, k=size)),
        lambda: "".join(draw.choices(CONTROLS, k=size)),
        lambda: "".join(draw.choices(BIDI + "אבגدهو abc", k=size)),
        lambda: "".join(draw.choices(EMOJI, k=size)),
        lambda: "".join(draw.choices(LIGATURES, k=size)),
        lambda: draw.choice([" ", "\t", "\u3000", "\u200b", "\n", ""]) * size,
        lambda: draw.choice(["a", "é", "字", "🏿", "'", "\u0301", "-", "##a"]) * size,
        lambda: "".join(draw.choices("\"\\'/{}[]:,<>&;#%$`\b\f\n\r\t", k=size)),
        lambda: '{"text": "' + "\\ud83d\\u0000" * size,
        lambda: "".join(draw.choices(["\ud83d", "\udc4d", "a", "\0", "b c"], k=size)),
        lambda: "a" * 9_990 + "b" * draw.randrange(20),
    ]
    size = 10_000 if number % 10 == 0 else int(draw.expovariate(1 / 40)) + 1
    text = draw.choice(kinds)()
    return text[: 10_000 if draw.random() < 0.99 else 11_000]


def trained(kind: str):
    """Return a tokenizer of a kind that models use, trained on a few words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    if kind == "wordpiece":  # BERT, MiniLM
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials)
    elif kind == "bpe":  # CLIP
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    else:  # SigLIP
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=specials, unk_token="[UNK]", show_progress=False
        )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    if kind == "wordpiece":
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding()
    return tokenizer


KINDS = ["wordpiece", "bpe", "unigram"]


@pytest.fixture(scope="module", params=KINDS)
def server(request, shared, makers, tmp_path_factory):
    """A server of digits that keeps words; its text encoder sums random vectors of tokens."""
    home = tmp_path_factory.mktemp(request.param)
    tokenizer = trained(request.param)
    size = (tokenizer.get_vocab_size(), makers.WIDTH)
    words = np.random.default_rng(0).normal(size=size).astype(np.float32)
    bundle = makers.put_text(makers.make_bundle(home / "bundle"), tokenizer, words)
    images = makers.write_digits(home / "photos", 50)
    create_index(home / "digits", bundle, images, progress=False)
    # So that each text is also a query of words.
    with open_index(home / "digits", threads=1) as index:
        index.keep_words(progress=False)
    served = shared(home / "digits")
    served.first = COUNT * KINDS.index(request.param)
    return served


def test_every_hostile_text_is_answered_or_refused(server):
    counts = Counter()
    longest = 0.0
    json_type = {"Content-Type": "application/json"}
    for number in range(server.first, server.first + COUNT):
        text = hostile_text(number)
        # Escapes, or UTF-8 where the text has any; surrogates can only be escaped.
        content = json.dumps({"text": text, "k": 3}).encode()
        if number % 2:
            content = json.dumps({"text": text, "k": 3}, ensure_ascii=False).encode(
                "utf-8", "surrogatepass"
            )
        began = time.perf_counter()
        answer = server.client.post("/v1/search", content=content, headers=json_type)
        longest = max(longest, time.perf_counter() - began)
        counts[answer.status_code] += 1
        assert answer.status_code in (200, 400, 422), (number, answer.text[:500])
        if answer.status_code == 200:
            distances = [hit["distance"] for hit in answer.json()["results"]]
            assert len(distances) == 3 and np.isfinite(distances).all()
        else:
            assert answer.json()["detail"].endswith(".")
    assert longest < SECONDS
    assert counts[200] > 0.6 * COUNT and counts[400] > 100, counts
    assert server.client.get("/livez").status_code == 200
    ready = server.client.post("/v1/search", json={"text": "a red mug"})
    assert ready.status_code == 200
