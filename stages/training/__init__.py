"""Decides the weights: order, sharding, precision, optimizer, schedule and the loop. Its code names the run."""
