"""The conversion of GGUF files: a table for each architecture, and a table for each kind of tokenizer."""
