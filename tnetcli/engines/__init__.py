"""Engines run work on batches of images: in threads, in worker processes, on a Dask cluster."""
