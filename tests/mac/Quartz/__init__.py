"""Stand-in for the umbrella of the graphics frameworks."""
