"""Messages, their encoding, and what all members of a view have in common."""
