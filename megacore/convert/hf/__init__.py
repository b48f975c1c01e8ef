"""Models in the format of Hugging Face transformers."""
