"""Lists, labels and normalisation of images."""
