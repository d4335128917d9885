"""Core ML packages on any machine: reading, linting and executing them."""
