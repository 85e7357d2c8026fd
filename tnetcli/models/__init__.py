"""Encoders, location modules, aggregators and heads; one file per family."""
