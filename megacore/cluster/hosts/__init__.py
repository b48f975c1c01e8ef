"""Several machines: an agent on each, reached through ssh, and a head that starts and ends them together."""
