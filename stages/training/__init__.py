"""Decides the weights: order, precision, optimizer, schedule and the loop. Its code names the run."""
