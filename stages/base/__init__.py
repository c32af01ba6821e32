"""What all stages share: parameters, commands, errors, and files that appear complete or not at all."""
