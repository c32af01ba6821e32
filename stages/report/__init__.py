"""What a training has learned: the losses of the finished model, samples of text, and the page that shows them."""
