"""What a training needs beside its numbers: what surrounds the loop of a rank, where it runs, what it reports."""
