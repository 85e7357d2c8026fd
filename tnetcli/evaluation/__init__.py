"""Evaluate models on labelled images."""
