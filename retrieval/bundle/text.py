"""Turn texts into the token ids that a bundle's text encoder takes."""

from __future__ import annotations

import json
import math
import os
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import BundleError, DataError

MAX_CHARACTERS = 10_000
"""Longest text, in characters. An encoder reads the first few hundred tokens at most."""
_MAX_GROWTH = 1000
"""Largest factor by which a tokenizer may lengthen a text, which bounds its memory."""
_TRIAL_SECONDS = 1.0
"""CPU time within which a tokenizer must cut a text of the trial; common ones take milliseconds."""
_TRIAL_SIZES = tuple(MAX_CHARACTERS >> halvings for halvings in range(8, -1, -1))
"""Lengths of the trial's texts. If time grows with the cube, the next takes 8 times as long."""
_TRIAL_CHARACTERS = "aé字0"
"""Letters of three alphabets and a digit."""
_PATTERN_CHARACTERS = 20
"""Characters of a tokenizer's own patterns that are tried."""


def checked_texts(texts: Sequence[str], name: str = "texts") -> list[str]:
    """Return texts as a list; a single text is a list of one.

    Raises:
        DataError: one is not a text, is blank or too long, or has a character that no text has. The
            message gives its place in the list `name`.
    """
    is_single = isinstance(texts, str)
    listed = [texts] if isinstance(texts, str) else list(texts)
    for number, text in enumerate(listed):
        if not isinstance(text, str):
            problem = f"A text is needed, not {type(text).__name__}"
        elif not text.strip():
            problem = "The text is empty"
        elif len(text) > MAX_CHARACTERS:
            problem = f"The text has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}"
        elif "\0" in text:
            problem = "The text has a NUL character"
        elif any("\ud800" <= character <= "\udfff" for character in text):
            problem = "The text has half of a surrogate pair, which is no character"
        else:
            continue
        if is_single:
            raise DataError(f"{problem}.")
        raise DataError(f"{name}[{number}]: {problem}.")
    return listed


class Tokenizer:
    """A `tokenizer.json` of the package `tokenizers`, which cuts and pads texts as it says.

    Args:
        path: the file, for messages.
        content: the file's content.
        length: largest number of tokens of a text that the encoder takes.

    Raises:
        BundleError: the file is not a tokenizer, does not cut texts to `length` tokens, does
            not pad them, could lengthen them a thousandfold, or is very slow.
    """

    def __init__(self, path: Path, content: bytes, length: int) -> None:
        # A batch is tokenized in about a millisecond. The package's own threads would hardly help,
        # and it warns of them in processes that are forked later.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Bundles without texts need no such package.
        import tokenizers

        load = tokenizers.Tokenizer.from_buffer
        self._loaded: Any = _called(f"{path} is not a tokenizer", load, content)
        self.path = path
        self.length = length
        normalizer = self._loaded.normalizer
        if normalizer is not None and _growth(json.loads(normalizer.__getstate__())) > _MAX_GROWTH:
            raise BundleError(f"{path} is refused: it could lengthen a text a thousandfold.")
        truncation = self._loaded.truncation
        if truncation is None or truncation["max_length"] > length:
            raise BundleError(
                f"{path} must cut texts to at most {length} tokens, the 'length' in the"
                " manifest. Set its 'truncation' and export the bundle again."
            )
        padding = self._loaded.padding
        if padding is None or (padding["length"] or 0) > length:
            raise BundleError(
                f"{path} must say how texts of a batch are padded, to at most {length}"
                " tokens. Set its 'padding' and export the bundle again."
            )
        self._try()

    def _try(self) -> None:
        """Cut texts of growing lengths, so that a hopelessly slow tokenizer is noticed early.

        A regular expression may go back and forth for hours, mostly over repeats of a character
        that it names itself. Nothing can interrupt it.

        Raises:
            BundleError: the tokenizer fails, or takes too long for a text.
        """
        steps = (self._loaded.normalizer, self._loaded.pre_tokenizer)
        patterns = "".join(
            _patterns([json.loads(step.__getstate__()) for step in steps if step is not None])
        )
        named = [character for character in dict.fromkeys(patterns) if character.isalnum()]
        for character in [*_TRIAL_CHARACTERS, *named[:_PATTERN_CHARACTERS]]:
            for size in _TRIAL_SIZES:
                start = time.thread_time()
                # One run, and runs after which a match fails.
                for text in (character * (size - 1) + "!", (character * 24 + "! ") * (size // 26)):
                    _called(f"{self.path} fails", self._loaded.encode, text)
                seconds = time.thread_time() - start
                if seconds > _TRIAL_SECONDS:
                    raise BundleError(
                        f"{self.path} is refused: it takes more than {_TRIAL_SECONDS:.0f} second"
                        f" for a text of {size:,} characters."
                    )
                # Even if time grows with the cube, the longest text is no problem.
                if seconds * (MAX_CHARACTERS / size) ** 3 < _TRIAL_SECONDS:
                    break

    def __call__(self, texts: Sequence[str]) -> dict[str, NDArray[np.int64]]:
        """Return "ids" (N, L) of texts and their "mask" (N, L): 1 for a token, 0 for padding.

        Raises:
            DataError: a text has no token.
            BundleError: the tokenizer fails, or pads texts to more than `length` tokens.
        """
        encode = self._loaded.encode_batch_fast
        encodings = _called(f"{self.path} fails", encode, list(texts))
        ids = np.array([encoding.ids for encoding in encodings], np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
        if ids.shape[1] > self.length:
            raise BundleError(
                f"{self.path} pads texts to {ids.shape[1]:,} tokens; the manifest's 'length' is"
                f" {self.length:,}. Export the bundle again."
            )
        for text, tokens in zip(texts, mask.sum(axis=1), strict=True):
            if not tokens:
                raise DataError(f"The model knows no word or sign of the text {text[:80]!r}.")
        return {"ids": ids, "mask": mask}


def _called(sentence: str, call: Callable[[Any], Any], argument: Any) -> Any:
    """Call a function of `tokenizers`; raise its error as a `BundleError`."""
    try:
        return call(argument)
    except KeyboardInterrupt:
        raise
    # Panics of Rust, as of a regular expression that goes back too often, are no `Exception`.
    except BaseException as fault:
        raise BundleError(f"{sentence}: {str(fault)[:200]}.") from None


def _patterns(state: Any) -> Iterator[str]:
    """Yield the regular expressions in parts of a `tokenizer.json`."""
    if isinstance(state, dict):
        if isinstance(pattern := state.get("Regex"), str):
            yield pattern
        state = list(state.values())
    if isinstance(state, list):
        for part in state:
            yield from _patterns(part)


def _growth(normalizer: Any) -> int:
    """Return how many times longer a normalizer of a `tokenizer.json` can make a text.

    Unicode's normal forms, which make a character 18 at most, are not counted.
    """
    match normalizer["type"]:
        case "Sequence":
            return math.prod(map(_growth, normalizer["normalizers"]))
        case "Replace":
            # A pattern may also match between two characters.
            return 1 + len(normalizer["content"])
        case "Prepend":
            return 1 + len(normalizer["prepend"])
        case "Precompiled":
            # After the size of a trie and the trie itself: what replaces characters, each with NUL.
            table = b64decode(normalizer["precompiled_charsmap"])
            start = 4 + int.from_bytes(table[:4], "little")
            return max(map(len, table[start:].split(b"\0")))
    return 1
