"""Sockets: servers, certificates, interrupts, and messages that nobody should send."""
