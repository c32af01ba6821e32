"""What all stages share: parameters, the command line, and files that appear complete or not at all."""
