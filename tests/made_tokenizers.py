"""Small tokenizers of DNA words."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors


def tokenizer(words: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """Byte pairs of a few DNA words, whose ids are their places; [CLS] is 1 and [SEP] 2."""
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), unk_token="[UNK]"))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def make_tokenizer(path: Path) -> None:
    """Byte pairs of a few DNA words, with the ids of the published special tokens."""
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "A", "C", "G", "T", "AC", "GT", "AA", "ACGT"]
    made = tokenizer(words, [("A", "C"), ("G", "T"), ("A", "A"), ("AC", "GT")])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path))
