"""AdamW over fp32 main weights, its schedule, gradient clipping and loss scaling."""
