"""The page that shows a training, and its pictures."""
