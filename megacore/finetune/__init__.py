"""Fine-tuning of transformers models with Hugging Face Accelerate.

Tasks are classification, multiple choice, seq2seq and causal LM.
"""
