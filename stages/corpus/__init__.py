"""The nouns of the data stages: folders of raw files, splits, formats, shards of text, rows of tokens."""
