"""Models in the form of Hugging Face transformers."""
