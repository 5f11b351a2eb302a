"""Real processes over real sockets: transport, nodes and the local supervisor."""
