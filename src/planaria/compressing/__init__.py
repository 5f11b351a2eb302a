"""What lossy lookups make of a model's rows: planaria compress."""
