"""What the data stages share: workers on one machine or several, shards of Arrow, results that are found again."""
