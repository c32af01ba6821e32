"""The finished model: its weights as safetensors, its lineage, the model card, and a report on its training."""
