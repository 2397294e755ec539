"""Sockets: servers, certificates, interrupts, and wrong messages."""
