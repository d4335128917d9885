"""Distillation: a verifier writes its own training text, a student of a few layers learns it."""
