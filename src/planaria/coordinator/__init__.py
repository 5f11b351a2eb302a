"""The coordinator: it owns the view."""
