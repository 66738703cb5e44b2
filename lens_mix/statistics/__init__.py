"""What is read off patterns, vectors and maps: tables and plain tensors, and figures of them."""
