"""Building blocks that are put into a model: placeholders and LoRA."""
