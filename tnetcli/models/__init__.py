"""Families of models that look at views and conclude; torch loads with the files that need it."""
