"""Pictures of a run: loss curves, samples with predictions. Reads logs, knows no model."""
