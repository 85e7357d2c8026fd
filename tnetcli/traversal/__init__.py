"""The traversal: configuration, policies, the tree of regions, views, runners and the rollout."""
