"""The conversion of GGUF files: a table for each architecture, and one for each kind of tokenizer."""
