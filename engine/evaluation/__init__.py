"""Quality: questions, probes, metrics against a full prefill, the gate of a model."""
