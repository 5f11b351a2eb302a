"""The control plane as state machines without I/O: supervising, saving, rolling back."""
