"""Fine-tuning of transformers models with transformers' Trainer.

Tasks are classification, multiple choice, seq2seq and causal LM.
"""
