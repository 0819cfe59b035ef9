"""Model files: Hugging Face directories and GGUF."""
