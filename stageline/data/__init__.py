"""From samples to tensors: rendered text, token ids and labels, images, samplers, loaders."""
