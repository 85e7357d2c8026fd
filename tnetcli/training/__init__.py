"""How a model learns: examples, views, losses, metrics, and the loop that reads top to bottom."""
