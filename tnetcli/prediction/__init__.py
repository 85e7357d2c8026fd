"""Predict images and keep the records."""
