"""Fine-tuning of transformers models with Hugging Face Accelerate.

Tasks are classification, seq2seq and causal LM.
"""
