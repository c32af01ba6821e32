"""What `stages.deduplicate` uses: signatures of documents, and finding those that are equal or similar."""
