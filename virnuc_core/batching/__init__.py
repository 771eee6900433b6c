"""From sequences to packed batches of token ids: both tokenizers and the packing."""
