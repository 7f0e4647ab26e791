"""From picture files to tensors."""
