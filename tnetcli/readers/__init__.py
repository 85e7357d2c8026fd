"""Lazy readers: any window of any image at any scale, decoding almost nothing."""
