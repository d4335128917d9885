"""Speculative decoding on Apple silicon."""
