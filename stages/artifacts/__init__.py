"""What all stages share: parameters, the command line, and files that appear whole or not at all."""
