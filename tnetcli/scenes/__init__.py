"""Images that are made up: landscapes of labelled tiles, digits among clutter; each is a reader."""
