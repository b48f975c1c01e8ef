"""GPT, BERT and T5 models, built from layers with an explicit tensor-parallel group."""
