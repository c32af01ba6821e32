"""The finished model: its weights as safetensors, its lineage, and the model card."""
