"""Train models: recipe, data, stages, losses, validation, and the loop in `trainer`."""
