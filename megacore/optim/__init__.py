"""AdamW and Muon over fp32 main weights, its schedule, gradient clipping and loss scaling."""
