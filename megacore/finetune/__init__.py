"""Fine-tuning of transformers models with Hugging Face Accelerate: classification, seq2seq and causal LM."""
