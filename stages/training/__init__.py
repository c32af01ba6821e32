"""The parts of the train stage: its parameters, its run, the sharded model, the steps and what is reported of them."""
