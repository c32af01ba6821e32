"""What a training needs beside its numbers: where it runs, whether its ranks agree, and what it reports."""
