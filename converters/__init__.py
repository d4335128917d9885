"""Checkpoint to artifact: read, build, write, prove."""
