"""What a network looks like: configuration, rotary embedding, graphs, known pairs."""
