"""How a transformers model is split at the borders of its layers, by what is called when."""
