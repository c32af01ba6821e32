"""The model of a training: from its config on the meta device to a sharded one with weights. Read sharded_model.py."""
