"""Contracts that a reader, family, policy, task or exporter must pass, as pytest classes."""
