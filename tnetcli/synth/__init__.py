"""Synthetic scenes with known labels."""
