"""Imports a fairseq checkpoint as a transformers model."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from t2r.architectures.fairseq.checkpoint import Checkpoint, read_checkpoint
from t2r.architectures.fairseq.dictionary import SPECIAL, check_size, read_dictionary
from t2r.architectures.fairseq.language_model import language_model
from t2r.architectures.fairseq.translation import languages, save_tokenizer, translation_model
from t2r.data.vocabulary import word_tokenizer
from t2r.errors import T2RError
from t2r.storage import refuse_deleting, whole_folder

logger = logging.getLogger(__name__)


@dataclass
class Imported:
    """A summary of the imported model."""

    model_type: str
    layers: int
    parameters: int
    vocabulary: int
    tokenizer: bool


def import_fairseq(
    checkpoint: str,
    out: str,
    *,
    dictionary: str,
    target_dictionary: str | None = None,
    bpe_codes: str | None = None,
    overwrite: bool = False,
) -> Imported:
    """Import a language or translation model trained with fairseq, and save it in a folder.

    No code in the checkpoint is executed. Raises T2RError if any tensor is not used.

    Args:
        dictionary: the dict.txt of the checkpoint; for translation, of the source language.
        target_dictionary: the dict.txt of the target language. None: the same as `dictionary`.
        bpe_codes: BPE codes, which a translation model requires to read raw text."""
    refuse_deleting([checkpoint, dictionary, target_dictionary, bpe_codes], out)
    with whole_folder(out, overwrite=overwrite) as folder:
        read = read_checkpoint(checkpoint)
        if any(name.startswith("encoder.") for name in read.tensors.left):
            target = target_dictionary or dictionary
            model, tokenizer = import_translation(read, folder, dictionary, target, bpe_codes)
        else:
            if target_dictionary or bpe_codes:
                raise T2RError(f"{checkpoint} is a language model: give one dictionary and no BPE codes")
            model, tokenizer = import_language_model(read, folder, dictionary), True
        model.save_pretrained(folder)
    return Imported(
        model_type=model.config.model_type,
        layers=getattr(model.config, "decoder_layers", model.config.num_hidden_layers),
        parameters=model.num_parameters(),
        vocabulary=model.config.vocab_size,
        tokenizer=tokenizer,
    )


def import_language_model(read: Checkpoint, folder: Path, dictionary: str) -> PreTrainedModel:
    words = read_dictionary(dictionary)
    model = language_model(read)
    check_size(dictionary, words, model.config.vocab_size)
    word_tokenizer(words[len(SPECIAL) :]).save_pretrained(folder)
    return model


def import_translation(
    read: Checkpoint, folder: Path, dictionary: str, target_dictionary: str, bpe_codes: str | None
) -> tuple[PreTrainedModel, bool]:
    source, target = read_dictionary(dictionary), read_dictionary(target_dictionary)
    model = translation_model(read)
    check_size(dictionary, source, model.config.src_vocab_size)
    check_size(target_dictionary, target, model.config.tgt_vocab_size)
    if model.config.tie_word_embeddings and source != target:
        raise T2RError(f"{read.path} shares all embeddings, so {dictionary} and {target_dictionary} must be the same")
    if bpe_codes is not None:
        save_tokenizer(folder, languages(read), source, target, bpe_codes)
        return model, True
    for name, path in (("dict.source.txt", dictionary), ("dict.target.txt", target_dictionary)):
        shutil.copyfile(path, folder / name)
    logger.warning("no BPE codes were given: the dictionaries were saved with the model, but no tokenizer for raw text")
    return model, False
